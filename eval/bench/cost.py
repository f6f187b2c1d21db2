"""Measure what a sequence costs by length: bytes of cache or state, tokens per second of prefill and decode.

python -m hf_linattn.bench --model DIR --cost --lengths 512,2048,8192 --output-dir out
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import set_seed

from hf_linattn.cli.files import replacing
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patching.causality import require_causal

from ..common.formatting import size as size_text
from ..common.formatting import text_table
from ..common.models import Curve, load_config, load_model
from ..common.nll import forward, scoring
from ..common.results import ResumableRun, machine, recorded
from .caches import PATCHED, UNPATCHED, Growth, cache_bytes, growth_by_side, held_bytes, read, sides

FORMAT = "hf_linattn.cost/1"
PROBE = 8
"""Tokens of the text from whose cache the bytes at other lengths are computed."""
SPEEDS = ("prefill", "decode")
COLUMNS = (
    *("model", "length", "measured", "cache_bytes", "bytes_ratio", "peak_bytes"),
    *(f"{kind}_{name}" for kind in SPEEDS for name in ("tokens_per_second", "low", "high")),
    *(f"{kind}_{name}" for kind in SPEEDS for name in ("ratio", "ratio_low", "ratio_high")),
)


@dataclass(frozen=True)
class CostArguments:
    """What is measured.

    Attributes:
        model: folder or name of a causal language model, patched or not.
        output_dir: folder for the results; the same arguments resume there.
        patch, options: put on after loading.
        lengths: tokens to read.
        also: lengths whose bytes are computed, not run.
        new_tokens: tokens of decode behind each length.
        batch_size: sequences side by side.
        repeats: counted rounds per length.
        dtype: of the weights; "auto" as saved.
        seed: of the random tokens.
    """

    model: str
    output_dir: Path
    patch: str | None = None
    options: dict[str, Any] | None = None
    lengths: list[int] = field(default_factory=lambda: [512, 2048, 8192])
    also: list[int] = field(default_factory=lambda: [32768, 131072])
    new_tokens: int = 16
    batch_size: int = 1
    repeats: int = 5
    dtype: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Speed:
    """Tokens per second over the repeats.

    Attributes:
        median, low, high: of the repeats.
        ratio: median over repeats of this model's speed over that of the unpatched one, measured in turn
            with it; None for the unpatched one, and where there is none. ratio_low, ratio_high: its range.
    """

    median: float
    low: float
    high: float
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True)
class SequenceCost:
    """One model at one length.

    Attributes:
        length: tokens read in one forward pass.
        cache_bytes: elements of the cache's tensors behind that pass, all rows together.
        peak_bytes: the most memory that these tensors kept alive behind any pass, reading or writing. More
            than `cache_bytes` where a layer keeps a part of a larger tensor.
        prefill, decode: tokens per second of reading `length` tokens, and of writing behind them.
    """

    length: int
    cache_bytes: int
    peak_bytes: int
    prefill: Speed
    decode: Speed


def measure_cost(
    model: nn.Module,
    ids: Tensor,
    *,
    new_tokens: int = 16,
    repeats: int = 5,
    after: Callable[[], Any] = lambda: None,
) -> dict[str, SequenceCost]:
    """Measure both sides at one length, their repeats in turn, so that a busy machine slows down both.

    Args:
        model: a causal language model; left as it is found.
        ids: [B, N + new_tokens] tokens: the first N are read in one pass, the others one by one.
        new_tokens: tokens "written" behind them. They are given, not sampled: only the model is timed.
        repeats: of each side; one more of each comes first and is not counted.
        after: called after every repeat of a side.

    Raises:
        UnsupportedModelError: the model gives no cache, or has no positions for so many tokens.
    """
    chosen = sides(model)
    length = ids.shape[1] - new_tokens
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    sizes = dict.fromkeys(chosen, (0, 0))
    with scoring(model):
        for repeat in range(repeats + 1):
            # who goes first takes turns: the second finds the machine warm
            for name in list(chosen)[:: 1 if repeat % 2 else -1]:
                with chosen[name]():
                    reading, writing, small, large = _once(model, ids, length)
                sizes[name] = (small, max(large, sizes[name][1]))
                if repeat:
                    times[name].append((reading, writing))
                after()
    batch = ids.shape[0]
    costs = {}
    for name, pairs in times.items():
        own = [(batch * length / a, batch * new_tokens / b) for a, b in pairs]
        others = [(batch * length / a, batch * new_tokens / b) for a, b in times[UNPATCHED]]
        alone = name == UNPATCHED
        speeds = [_speed([p[k] for p in own], None if alone else [p[k] for p in others]) for k in (0, 1)]
        costs[name] = SequenceCost(length, *sizes[name], *speeds)
    return costs


def _once(model: nn.Module, ids: Tensor, length: int) -> tuple[float, float, int, int]:
    """Return seconds of reading and of writing, bytes of the cache after reading, and the most held."""
    _wait(ids)
    start = time.perf_counter()
    first, cache = read(model, ids[:, :length])
    _wait(first)
    reading = time.perf_counter() - start
    size, held, writing = cache_bytes(cache), held_bytes(cache), 0.0
    for place in range(length, ids.shape[1]):
        start = time.perf_counter()
        out = forward(model, ids[:, place : place + 1], 1, past_key_values=cache, use_cache=True)
        _wait(out.logits)
        writing += time.perf_counter() - start
        held = max(held, held_bytes(cache))
    return reading, writing, size, held


def _wait(on: Tensor) -> None:
    """Wait until the accelerator is done."""
    if on.device.type != "cpu":
        torch.accelerator.synchronize()


def _speed(own: list[float], unpatched: list[float] | None) -> Speed:
    if unpatched is None:
        return Speed(statistics.median(own), min(own), max(own))
    ratios = [a / b for a, b in zip(own, unpatched, strict=True)]
    spread = (statistics.median(ratios), min(ratios), max(ratios))
    return Speed(statistics.median(own), min(own), max(own), *spread)


def run(args: CostArguments, command: str, device: str = "cpu") -> dict[str, Any]:
    """Measure what is missing and write all files; the content of results.json comes back.

    Args:
        args: what is measured.
        command: as it was typed.
        device: where the model is.

    Raises:
        UnsupportedModelError: an encoder, an encoder-decoder, or too few positions for a length.
        DataError: the folder holds another run.
        LinattnError: the model or the patch does not suit.
    """
    session = ResumableRun(args.output_dir, recorded(args), FORMAT, command, device=torch.device(device))
    if session.complete:
        return session.results
    if load_config(args.model).is_encoder_decoder:
        raise UnsupportedModelError(
            f"{args.model} is an encoder-decoder: the cost of reading and writing is measured for decoders"
        )
    set_seed(args.seed)
    label = " ".join(filter(None, [Path(args.model).name or args.model, args.patch]))
    curve = Curve(label, args.model, args.patch, args.options or {})
    model: Any = load_model(curve, dtype=args.dtype, device=session.device)
    require_causal(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    session.begin({"models": [asdict(curve)]}, {"machine": machine(), "dtype": dtype})
    _measure(args, model, label, session)
    session.results["notes"] = _compute(args, model, label, session.rows)
    session.rows.sort(key=lambda row: (row["model"] == UNPATCHED, row["length"]))
    _save_plot(args.output_dir, session.rows)
    session.finish("cost.csv", COLUMNS)
    return session.results


def _save_plot(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from .plots import save_cost_plot

    with replacing(folder / "cost.png") as partial_path:
        save_cost_plot(partial_path, rows)


def _ids(args: CostArguments, model: Any, length: int) -> torch.Tensor:
    """Draw random tokens [B, length], the same on every machine."""
    size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(size, (args.batch_size, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def _measure(args: CostArguments, model: Any, label: str, session: ResumableRun) -> None:
    done = {row["length"] for row in session.rows}
    missing = [length for length in sorted(set(args.lengths)) if length not in done]
    rounds = len(sides(model)) * (args.repeats + 1)
    with tqdm(total=sum(missing) * rounds, desc=label, unit="tok", unit_scale=True) as bar:
        for length in missing:
            bar.set_postfix_str(f"{length} tokens")
            with session.timed(str(length)):
                ids = _ids(args, model, length + args.new_tokens)
                after = partial(bar.update, length)
                costs = measure_cost(
                    model, ids, new_tokens=args.new_tokens, repeats=args.repeats, after=after
                )
            session.rows += _rows(costs, label)
            session.save()


def _name(side: str, label: str) -> str:
    return label if side == PATCHED else UNPATCHED


def _rows(costs: Mapping[str, SequenceCost], label: str) -> Iterator[dict[str, Any]]:
    for side, cost in costs.items():
        row: dict[str, Any] = {
            "model": _name(side, label),
            "length": cost.length,
            "measured": True,
            "cache_bytes": cost.cache_bytes,
            "bytes_ratio": _ratio(cost.cache_bytes, side, costs[UNPATCHED].cache_bytes),
            "peak_bytes": cost.peak_bytes,
        }
        for kind in SPEEDS:
            speed = getattr(cost, kind)
            row |= {f"{kind}_tokens_per_second": speed.median}
            row |= {f"{kind}_{name}": getattr(speed, name) for name in ("low", "high")}
            row |= {f"{kind}_{name}": getattr(speed, name) for name in ("ratio", "ratio_low", "ratio_high")}
        yield row


def _ratio(size: int, side: str, unpatched: int) -> float | None:
    return None if side == UNPATCHED else size / unpatched


def _compute(args: CostArguments, model: Any, label: str, rows: list[dict[str, Any]]) -> list[str]:
    """Add rows of the lengths that were not run, bytes alone; return why some are missing."""
    growths, notes = growth_by_side(model, _ids(args, model, PROBE)), []
    done = {row["length"] for row in rows}
    sizes: dict[tuple[str, int], int] = {}
    for side, layers in growths.items():
        own = {row["length"]: row["cache_bytes"] for row in rows if row["model"] == _name(side, label)}
        if layers is None or any(_total(layers, length) != size for length, size in own.items()):
            notes.append(f"{_name(side, label)}: how its cache grows is not known, so no other lengths")
            continue
        sizes |= {(side, length): _total(layers, length) for length in set(args.also) - done}
    for (side, length), size in sorted(sizes.items()):
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        unpatched = sizes.get((UNPATCHED, length))
        ratio = None if unpatched is None else _ratio(size, side, unpatched)
        row |= {"model": _name(side, label), "length": length, "measured": False}
        rows.append({**row, "cache_bytes": size, "bytes_ratio": ratio})
    return notes


def _total(layers: Sequence[Growth], tokens: int) -> int:
    return sum(layer.at(tokens) for layer in layers)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as aligned text; bytes alone where a length was computed."""
    head = ["model", "tokens", "cache", "peak", "prefill tok/s", "ratio", "decode tok/s", "ratio"]
    lines = []
    for row in rows:
        cells = [row["model"], f"{row['length']:,}", size_text(row["cache_bytes"])]
        cells += [size_text(row["peak_bytes"]) if row["measured"] else "(computed)"]
        for kind in SPEEDS:
            cells.append(_spread(row, kind, "tokens_per_second", "low", "high", ",.0f"))
            cells.append(_spread(row, kind, "ratio", "ratio_low", "ratio_high", ".2f"))
        lines.append(cells)
    return text_table(head, lines)


def _spread(row: Mapping[str, Any], kind: str, middle: str, low: str, high: str, form: str) -> str:
    value = row[f"{kind}_{middle}"]
    if value is None:
        return "-" if row["measured"] else ""
    return f"{value:{form}} ({row[f'{kind}_{low}']:{form}}-{row[f'{kind}_{high}']:{form}})"


def summary(results: Mapping[str, Any], folder: Path) -> str:
    """Return what the command prints: the table, how it was measured, notes."""
    run_, args = results["run"], results["arguments"]
    lines = [
        table(results["rows"]),
        f"batch {args['batch_size']}, {run_['dtype']}, {run_['device']}, {run_['threads']} threads; median "
        f"and range of {args['repeats']} rounds; ratio: over unpatched in the same round",
        *(f"note: {note}" for note in results["notes"]),
        f"numbers and plot in {folder}",
    ]
    return "\n".join(lines)
