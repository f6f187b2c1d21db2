"""The work behind the cost command: a model and lengths in, rows and files out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import set_seed
from transformers.utils import logging

from hf_linattn.cli.files import replacing
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patching.causality import require_causal

from ..common import results as files
from ..common.models import Curve, load_config, load_model
from ..common.results import machine
from .measure import PATCHED, UNPATCHED, Cost, Growth, computed, measure, sides

FORMAT = "hf_linattn.cost/1"
PROBE = 8
"""Tokens of the text from whose cache the bytes at other lengths are computed."""
SPEEDS = ("prefill", "decode")
COLUMNS = (
    *("model", "length", "measured", "cache_bytes", "bytes_ratio", "peak_bytes"),
    *(f"{kind}_{name}" for kind in SPEEDS for name in ("tokens_per_second", "low", "high")),
    *(f"{kind}_{name}" for kind in SPEEDS for name in ("ratio", "ratio_low", "ratio_high")),
)


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure what is missing and write all files; the content of results.json comes back.

    Raises:
        UnsupportedModelError: an encoder, an encoder-decoder, or too few positions for a length.
        DataError: the folder holds another run.
        LinattnError: the model or the patch does not suit.
    """
    logging.disable_progress_bar()
    recorded = {key: value for key, value in vars(args).items() if key != "output_dir"}
    earlier = files.load(args.output_dir, recorded, FORMAT)
    if earlier is not None and earlier["complete"]:
        return earlier
    files.check_writable(args.output_dir)
    config = load_config(args.model)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{args.model} is an encoder-decoder: the cost of reading and writing is measured for decoders"
        )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    set_seed(args.seed)
    curve = Curve(" ".join(filter(None, [Path(args.model).name or args.model, args.patch])), args.model)
    curve = Curve(curve.label, args.model, args.patch, args.options or {})
    model: Any = load_model(curve, dtype=args.dtype, device=device)
    require_causal(model)
    rows: list[dict[str, Any]] = earlier["rows"] if earlier else []
    results: dict[str, Any] = {
        "format": FORMAT,
        "complete": False,
        "command": command,
        "arguments": recorded,
        "seed": args.seed,
        "versions": files.versions(),
        "models": [asdict(curve)],
        "rows": rows,
        "run": {
            "device": str(device),
            "machine": machine(),
            "threads": torch.get_num_threads(),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "seconds": earlier["run"]["seconds"] if earlier else {},
        },
    }
    _measure(args, model, curve.label, results)
    results["notes"] = _compute(args, model, curve.label, rows)
    rows.sort(key=lambda row: (row["model"] == UNPATCHED, row["length"]))
    results["complete"] = True
    _write(args.output_dir, results)
    return results


def _ids(args: argparse.Namespace, model: Any, length: int) -> torch.Tensor:
    """Random tokens [B, length], the same on every machine."""
    size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(size, (args.batch_size, length), generator=generator)
    return ids.to(next(model.parameters()).device)


def _measure(args: argparse.Namespace, model: Any, label: str, results: dict[str, Any]) -> None:
    rows, seconds = results["rows"], results["run"]["seconds"]
    done = {row["length"] for row in rows}
    missing = [length for length in sorted(set(args.lengths)) if length not in done]
    rounds = len(sides(model)) * (args.repeats + 1)
    with tqdm(total=sum(missing) * rounds, desc=label, unit="tok", unit_scale=True) as bar:
        for length in missing:
            start = time.perf_counter()
            bar.set_postfix_str(f"{length} tokens")
            ids = _ids(args, model, length + args.new_tokens)
            after = partial(bar.update, length)
            found = measure(model, ids, new_tokens=args.new_tokens, repeats=args.repeats, after=after)
            rows += _rows(found, label)
            seconds[str(length)] = round(time.perf_counter() - start, 3)
            files.save(args.output_dir, results)


def _name(side: str, label: str) -> str:
    return label if side == PATCHED else UNPATCHED


def _rows(found: Mapping[str, Cost], label: str) -> Iterator[dict[str, Any]]:
    for side, cost in found.items():
        row: dict[str, Any] = {
            "model": _name(side, label),
            "length": cost.length,
            "measured": True,
            "cache_bytes": cost.cache_bytes,
            "bytes_ratio": _ratio(cost.cache_bytes, side, found[UNPATCHED].cache_bytes),
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


def _compute(args: argparse.Namespace, model: Any, label: str, rows: list[dict[str, Any]]) -> list[str]:
    """Add rows of the lengths that were not run, bytes alone; comes back: why some are missing."""
    found, notes = computed(model, _ids(args, model, PROBE)), []
    done = {row["length"] for row in rows}
    sizes: dict[tuple[str, int], int] = {}
    for side, layers in found.items():
        own = {row["length"]: row["cache_bytes"] for row in rows if row["model"] == _name(side, label)}
        if layers is None or any(_total(layers, length) != size for length, size in own.items()):
            notes.append(f"{_name(side, label)}: how its cache grows is not known, so no other lengths")
            continue
        sizes |= {(side, length): _total(layers, length) for length in set(args.also) - done}
    for (side, length), size in sorted(sizes.items()):
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        beside = sizes.get((UNPATCHED, length))
        ratio = None if beside is None else _ratio(size, side, beside)
        row |= {"model": _name(side, label), "length": length, "measured": False}
        rows.append({**row, "cache_bytes": size, "bytes_ratio": ratio})
    return notes


def _total(layers: Sequence[Growth], tokens: int) -> int:
    return sum(layer.at(tokens) for layer in layers)


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    """All files, results.json last: it says that the others are there."""
    from .plot import save_plot

    files.save_csv(folder / "cost.csv", results["rows"], COLUMNS)
    with replacing(folder / "cost.png") as partial:
        save_plot(partial, results["rows"])
    files.save(folder, results)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text; bytes alone where a length was computed."""
    from ..common.formatting import size

    width = max(len("model"), *(len(row["model"]) for row in rows))
    titles = ("tokens", "cache", "peak", "prefill tok/s", "ratio", "decode tok/s", "ratio")
    widths = (9, 11, 11, 24, 18, 22, 18)
    head = " ".join(f"{title:>{w}}" for title, w in zip(titles, widths, strict=True))
    lines = [f"{'model':<{width}} {head}"]
    for row in rows:
        cells = [f"{row['length']:,}", size(row["cache_bytes"])]
        cells += [size(row["peak_bytes"]) if row["measured"] else "(computed)"]
        for kind in SPEEDS if row["measured"] else ():
            cells.append(_spread(row, kind, "tokens_per_second", "low", "high", ",.0f"))
            cells.append(_spread(row, kind, "ratio", "ratio_low", "ratio_high", ".2f"))
        line = " ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=False))
        lines.append(f"{row['model']:<{width}} {line}")
    return "\n".join(lines)


def _spread(row: Mapping[str, Any], kind: str, middle: str, low: str, high: str, form: str) -> str:
    value = row[f"{kind}_{middle}"]
    if value is None:
        return "-"
    return f"{value:{form}} ({row[f'{kind}_{low}']:{form}}-{row[f'{kind}_{high}']:{form}})"
