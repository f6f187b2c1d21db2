"""The work behind the branches command: a hybrid and text in, perplexities with each branch out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging

from hf_linattn.cli.files import replacing
from hf_linattn.data import load_documents
from hf_linattn.patching.contexts import hybrids, use_branches

from ..common import results as files
from ..common.models import Curve, load_model, load_tokenizer, train_length
from ..common.windows import encode, plan_windows
from .measure import score_length
from .plot import save_plot
from .tables import COLUMNS

FORMAT = "hf_linattn.branches/1"
SMALL = 0.01
"""Nats per token, 1 % of perplexity, below which a branch is said to add nothing."""


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure what is missing and write all files; the content of results.json comes back.

    Raises:
        UnsupportedModelError: no attention of the model is a hybrid, or it is an encoder.
        DataError: the text is missing or too short, or the folder holds another run.
        LinattnError: the model or the patch does not suit.
    """
    import datasets

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    recorded = {key: value for key, value in vars(args).items() if key != "output_dir"}
    earlier = files.load(args.output_dir, recorded, FORMAT)
    if earlier is not None and earlier["complete"]:
        return earlier
    files.check_writable(args.output_dir)
    length = train_length(args.model)  # first: a wrong folder should not wait for the text
    set_seed(args.seed)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = str(accelerator or "cpu")
    curve = Curve(args.model, args.model, args.patch, args.options or {})
    model = load_model(curve, dtype=args.dtype, device=device)
    with use_branches(model, "both"):  # refuses a model without hybrids before the text is read
        found: list[Any] = list(hybrids(model).values())
        sizes = sorted({module.size for module in found if hasattr(module, "size")})
    documents = list(load_documents(args.data, column=args.column, split=args.split)["text"])
    texts = encode(load_tokenizer(args.tokenizer or args.model), documents, bos=args.bos, join=args.join)
    plan = plan_windows(texts, args.lengths, stride=args.stride, max_tokens=args.max_tokens)
    rows: list[dict[str, Any]] = earlier["rows"] if earlier else []
    seconds: dict[str, float] = earlier["run"]["seconds"] if earlier else {}
    results = {
        "format": FORMAT,
        "complete": False,
        "command": command,
        "arguments": recorded,
        "seed": args.seed,
        "versions": files.versions(),
        "train_length": length,
        "windows": sizes,
        "sentences": [],
        "rows": rows,
        "run": {"device": device, "threads": torch.get_num_threads(), "seconds": seconds},
    }
    for index, name in enumerate(args.branches, 1):
        print(f"{name} ({index} of {len(args.branches)})", file=sys.stderr)
        done = {row["length"] for row in rows if row["model"] == name}
        for size in [size for size in plan.lengths if size not in done]:
            start = time.perf_counter()
            with use_branches(model, name):
                row = score_length(model, plan, size, batch_size=args.batch_size, progress=True)
            rows.append({"model": name, **asdict(row)})
            seconds[f"{name} {size}"] = round(time.perf_counter() - start, 3)
            files.save(args.output_dir, results)
    results["sentences"] = sentences(rows, sizes)
    results["complete"] = True
    _write(args.output_dir, results)
    return results


def _write(folder: Path, results: Mapping[str, Any]) -> None:
    """All files, results.json last: it says that the others are there."""
    files.save_csv(folder / "results.csv", results["rows"], COLUMNS)
    with replacing(folder / "branches.png") as partial:
        save_plot(partial, results["rows"], results["train_length"], reference={"none"})
    files.save(folder, results)


def sentences(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[str]:
    """What the perplexities mean, a sentence per length; nothing where one of the four is not measured.

    Args:
        rows: with "model" (the branches), "length" and "nats".
        sizes: tokens in the hybrids' windows.
    """
    nats = {(row["model"], row["length"]): row["nats"] for row in rows}
    lengths = sorted({row["length"] for row in rows})
    said = []
    for length in lengths:
        four = [nats.get((name, length)) for name in ("both", "window", "rest", "none")]
        if None not in four:
            outside = not sizes or length > sizes[0]
            said.append(f"at {length} tokens {_meaning(*four, outside=outside)}")  # type: ignore[arg-type]
    return said


def _meaning(both: float, window: float, rest: float, none: float, *, outside: bool) -> str:
    if not outside:
        return "nothing lies outside the window: the linear attention has nothing to do"
    alone = {"window": window - both, "linear attention": rest - both}
    best = min(alone, key=lambda name: alone[name])
    if alone[best] < -SMALL:
        other = "linear attention" if best == "window" else "window"
        return (
            f"the {best} alone is better than both, by {-alone[best]:.3f} nats per token: the {other} harms"
        )
    worth = none - both
    if worth <= SMALL:
        return f"attention is worth nothing: without it there are {worth:+.3f} nats per token"
    shares = [f"{(none - nats) / worth:.0%}" for nats in (window, rest)]
    start = f"attention is worth {worth:.3f} nats per token; the window alone keeps {shares[0]} of that, the "
    start += f"linear attention alone {shares[1]}: "
    if alone["window"] <= SMALL:
        return start + "beside the window the linear attention adds nothing"
    if alone["linear attention"] <= SMALL:
        return start + "beside the linear attention the window adds nothing"
    return start + f"beside the window the linear attention is worth {alone['window']:.3f} nats"
