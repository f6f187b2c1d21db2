"""Measure what a sequence costs by length: bytes of cache or state, tokens per second of prefill and decode.

python -m hf_linattn.bench --model DIR --cost --lengths 512,2048,8192 --output-dir out
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import set_seed

from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patching.cache_layers import cache_argument
from hf_linattn.patching.causality import require_causal

from ..common.formatting import size as size_text
from ..common.formatting import text_table
from ..common.models import UNPATCHED, ModelSpec, load_config, load_model
from ..common.nll import forward, scoring
from ..common.results import ResumableRun, machine
from . import caches
from .caches import PATCHED
from .plots import save_cost_plot
from .timing import Clock, spread

FORMAT = "hf_linattn.cost/1"
PICTURE = "cost.png"
SPEEDS = ("prefill", "decode")
SPEED, RATIO = ("tokens_per_second", "low", "high"), ("ratio", "ratio_low", "ratio_high")
"""Columns of each of them: median and range."""
COLUMNS = (
    *("model", "length", "measured", "cache_bytes", "bytes_ratio", "peak_bytes"),
    *(f"{kind}_{name}" for names in (SPEED, RATIO) for kind in SPEEDS for name in names),
)


def measure_cost(
    model: nn.Module,
    ids: Tensor,
    *,
    new_tokens: int = 16,
    repeats: int = 5,
    after: Callable[[], Any] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Measure both sides at one length, their repeats in turn, so that a busy machine slows down both.

    Args:
        model: a causal language model; left as it was.
        ids: [B, N + new_tokens] tokens: the first N are read in one pass, the others one by one.
        new_tokens: tokens "written" behind them. They are given, not sampled: only the model is timed.
        repeats: of each side; one more of each comes first and is not counted.
        after: called after every repeat of a side.

    Returns:
        `PATCHED` and `UNPATCHED`, or the latter alone -> columns of its row. `cache_bytes`: elements of the
        cache's tensors behind the N tokens, all rows together; `peak_bytes`: the most memory that they kept
        alive behind any pass; tokens per second: median and range of the repeats; ratios of them to the
        unpatched model's in the same repeat, None for the unpatched model.

    Raises:
        UnsupportedModelError: the model gives no cache, or has no positions for so many tokens.
    """
    contexts = caches.sides(model)
    batch, length = ids.shape[0], ids.shape[1] - new_tokens
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in contexts}
    sizes = dict.fromkeys(contexts, (0, 0))
    with scoring(model):
        for repeat in range(repeats + 1):
            # who goes first takes turns: the second finds the machine warm
            for name in list(contexts)[:: 1 if repeat % 2 else -1]:
                with contexts[name]():
                    prefill, decode, small, large = _once(model, ids, length)
                sizes[name] = (small, max(large, sizes[name][1]))
                if repeat:
                    speeds[name].append((batch * length / prefill, batch * new_tokens / decode))
                after()
    costs = {}
    for name, (small, large) in sizes.items():
        ratio = None if name == UNPATCHED else small / sizes[UNPATCHED][0]
        row = {"length": length, "measured": True, "cache_bytes": small, "bytes_ratio": ratio}
        row["peak_bytes"] = large
        for place, kind in enumerate(SPEEDS):
            own, unpatched = ([pair[place] for pair in speeds[side]] for side in (name, UNPATCHED))
            ratios = [] if name == UNPATCHED else [a / b for a, b in zip(own, unpatched, strict=True)]
            row |= zip([f"{kind}_{end}" for end in SPEED], spread(own), strict=True)
            row |= zip([f"{kind}_{end}" for end in RATIO], spread(ratios), strict=True)
        costs[name] = row
    return costs


def _once(model: nn.Module, ids: Tensor, length: int) -> tuple[float, float, int, int]:
    """Return seconds of prefill and of decode, bytes of the cache after the prefill, and the most held."""
    clock = Clock(str(ids.device))
    clock.wait()
    start = time.perf_counter()
    _, cache = caches.read(model, ids[:, :length])
    clock.wait()
    prefill = time.perf_counter() - start
    given = {cache_argument(model): cache}
    size, held, decode = caches.cache_bytes(cache), caches.held_bytes(cache), 0.0
    for place in range(length, ids.shape[1]):
        start = time.perf_counter()
        forward(model, ids[:, place : place + 1], 1, **given, use_cache=True)
        clock.wait()
        decode += time.perf_counter() - start
        held = max(held, caches.held_bytes(cache))
    return prefill, decode, size, held


def run(options: argparse.Namespace, command: str, device: str) -> dict[str, Any]:
    """Measure what is missing and write all files; the content of results.json comes back.

    Raises:
        UnsupportedModelError: an encoder, an encoder-decoder, or too few positions for a length.
        DataError: the folder holds another run.
        LinattnError: the model or the patch does not suit.
    """
    args = argparse.Namespace(
        model=options.model,
        patch=options.patches[0] if options.patches else None,
        options=options.options,
        lengths=sorted(set(options.lengths or (512, 2048, 8192))),
        also=options.also or [32768, 131072],
        new_tokens=options.new_tokens or 16,
        batch_size=options.batch_size or 1,
        repeats=options.rounds,
        dtype=options.dtypes[0] if options.dtypes else "auto",
        cpp=options.cpp,
        seed=options.seed,
    )
    session = ResumableRun(options.output_dir, vars(args), FORMAT, command, device=torch.device(device))
    if session.complete:
        if session.lacks(PICTURE):
            save_cost_plot(options.output_dir / PICTURE, session.rows)
        return session.results
    if load_config(args.model).is_encoder_decoder:
        raise UnsupportedModelError(
            f"{args.model} is an encoder-decoder: the cost of reading and writing is measured for decoders"
        )
    set_seed(args.seed)
    label = " ".join(filter(None, [Path(args.model).name or args.model, args.patch]))
    curve = ModelSpec(label, args.model, args.patch, args.options or {})
    model: Any = load_model(curve, dtype=args.dtype, device=session.device)
    require_causal(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    session.begin({"models": [asdict(curve)]}, {"machine": machine(), "dtype": dtype})
    _measure(args, model, label, session)
    session.results["notes"] = _compute(args, model, label, session.rows)
    session.rows.sort(key=lambda row: (row["model"] == UNPATCHED, row["length"]))
    save_cost_plot(options.output_dir / PICTURE, session.rows)
    session.finish("cost.csv", COLUMNS)
    return session.results


def _measure(args: argparse.Namespace, model: Any, label: str, session: ResumableRun) -> None:
    done = {row["length"] for row in session.rows}
    missing = [length for length in args.lengths if length not in done]
    rounds = len(caches.sides(model)) * (args.repeats + 1)
    with tqdm(total=sum(missing) * rounds, desc=label, unit="tok", unit_scale=True) as bar:
        for length in missing:
            bar.set_postfix_str(f"{length} tokens")
            with session.timed(str(length)):
                ids = caches.random_tokens(model, args.batch_size, length + args.new_tokens, args.seed)
                repeats = {"new_tokens": args.new_tokens, "repeats": args.repeats}
                costs = measure_cost(model, ids, **repeats, after=partial(bar.update, length))
            session.rows += [{"model": _name(side, label), **row} for side, row in costs.items()]
            session.save()


def _name(side: str, label: str) -> str:
    return label if side == PATCHED else UNPATCHED


def _compute(args: argparse.Namespace, model: Any, label: str, rows: list[dict[str, Any]]) -> list[str]:
    """Add rows of the lengths that were not run, bytes alone; return why some are missing."""
    ids = caches.random_tokens(model, args.batch_size, caches.PROBE, args.seed)
    growths = caches.growth_by_side(model, ids)
    notes, done = [], {row["length"] for row in rows}
    sizes: dict[tuple[str, int], int] = {}
    for side, layers in growths.items():
        own = {row["length"]: row["cache_bytes"] for row in rows if row["model"] == _name(side, label)}
        if layers is None or any(caches.bytes_at(layers, length) != size for length, size in own.items()):
            notes.append(f"{_name(side, label)}: how its cache grows is not known, so no other lengths")
            continue
        sizes |= {(side, length): caches.bytes_at(layers, length) for length in set(args.also) - done}
    for (side, length), size in sorted(sizes.items()):
        unpatched = None if side == UNPATCHED else sizes.get((UNPATCHED, length))
        row = {"model": _name(side, label), "length": length, "measured": False, "cache_bytes": size}
        ratio = None if unpatched is None else size / unpatched
        rows.append(dict.fromkeys(COLUMNS) | row | {"bytes_ratio": ratio})
    return notes


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as aligned text; bytes alone where a length was computed."""
    head = ["model", "tokens", "cache", "peak", "prefill tok/s", "ratio", "decode tok/s", "ratio"]
    lines = []
    for row in rows:
        cells = [row["model"], f"{row['length']:,}", size_text(row["cache_bytes"])]
        cells += [size_text(row["peak_bytes"]) if row["measured"] else "(computed)"]
        for kind in SPEEDS:
            cells += [_spread_text(row, kind, SPEED, ",.0f"), _spread_text(row, kind, RATIO, ".2f")]
        lines.append(cells)
    return text_table(head, lines)


def _spread_text(row: Mapping[str, Any], kind: str, names: Sequence[str], form: str) -> str:
    value, low, high = (row[f"{kind}_{name}"] for name in names)
    if value is None:
        return "-" if row["measured"] else ""
    return f"{value:{form}} ({low:{form}}-{high:{form}})"


def summary(results: Mapping[str, Any], folder: Path) -> str:
    """Return what the command prints: the table, how it was measured, notes."""
    run_, args = results["run"], results["arguments"]
    lines = [
        _table(results["rows"]),
        f"batch {args['batch_size']}, {run_['dtype']}, {run_['device']}, {run_['threads']} threads; median "
        f"and range of {args['repeats']} rounds; ratio: over unpatched in the same round",
        *(f"note: {note}" for note in results["notes"]),
        f"numbers and plot in {folder}",
    ]
    return "\n".join(lines)
