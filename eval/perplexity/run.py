"""The measurement behind the perplexity command: texts and curves in, rows and files out."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, set_seed

from hf_linattn.cli.files import replacing
from hf_linattn.data import load_documents
from hf_linattn.errors import DataError, OptionError

from ..common import results as files
from ..common.entries import check_entries, entry_curves, is_reference, named, refuse_growing_cache
from ..common.models import UNPATCHED, Curve, load_model, load_tokenizer, train_length
from ..common.statistics import Row
from ..common.windows import Plan, Texts, encode, plan_windows
from .measure import score_length, score_stream
from .plot import save_plot
from .tables import COLUMNS

FORMAT = "hf_linattn.perplexity/1"


def curves(args: argparse.Namespace) -> list[Curve]:
    """The model, or all entries of --compare, and the baselines, with labels that differ."""
    name = Path(args.model).name or args.model
    main_label = " ".join(filter(None, [name, args.patch, args.rope_scaling]))
    found = entry_curves(args.compare or [], args.model)
    found = found or [Curve(main_label, args.model, args.patch, args.options, args.rope_scaling)]
    for baseline in dict.fromkeys(args.baseline):
        if baseline == UNPATCHED:
            found.append(Curve(f"{name} unpatched", args.model, UNPATCHED))
            continue
        label = Path(baseline).name or baseline
        found.append(Curve(baseline if label in [curve.label for curve in found] else label, baseline))
    if len({curve.label for curve in found}) < len(found):
        raise OptionError("a baseline is the measured model itself; leave out --baseline")
    return found


def check_tokenizers(args: argparse.Namespace, documents: list[str], texts: Texts) -> None:
    """Refuse a baseline with other tokens: its numbers would answer another question."""
    for curve in curves(args)[1:]:
        if curve.source == args.model or args.tokenizer is not None:
            continue
        other = encode(load_tokenizer(curve.source), documents, bos=args.bos, join=args.join)
        pairs = zip(other.documents, texts.documents, strict=True)
        if not all(torch.equal(theirs.ids, ours.ids) for theirs, ours in pairs):
            raise DataError(
                f"baseline {curve.source} cuts the text into other tokens than {args.model}: measure it in a "
                "run of its own and compare byte_perplexity, or name one tokenizer for both with --tokenizer"
            )


def missing_rows(
    args: argparse.Namespace, curve: Curve, plan: Texts | Plan, done: set[int], device: torch.device
) -> Iterator[Row]:
    """Measure what is not done yet; the model is loaded only if something is missing."""
    lengths = [] if isinstance(plan, Texts) else [length for length in plan.lengths if length not in done]
    if (isinstance(plan, Texts) and done) or (isinstance(plan, Plan) and not lengths):
        return
    set_seed(args.seed)
    model = load_model(curve, dtype=args.dtype, device=device)
    if isinstance(plan, Texts):
        refuse_growing_cache(model)
        budget = None if args.max_tokens == "all" else args.max_tokens
        yield from score_stream(model, plan, max_tokens=budget, segment=args.segment, progress=True)
        return
    for length in lengths:
        yield score_length(model, plan, length, batch_size=args.batch_size, progress=True)


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure all curves; the first process writes the files. The content of results.json comes back."""
    # torchrun on a machine without accelerator: only cpu=True makes its processes one group
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=on_cpu)
    results = _run(args, command, state)
    # a process that ended while the first still draws the plot would sometimes abort on its way out
    state.wait_for_everyone()
    state.destroy_process_group()
    return results


def _run(args: argparse.Namespace, command: str, state: PartialState) -> dict[str, Any]:
    recorded = {key: value for key, value in vars(args).items() if key != "output_dir"}
    earlier = files.load(args.output_dir, recorded, FORMAT)
    state.wait_for_everyone()  # before anyone writes
    if earlier is not None and earlier["complete"]:
        return earlier
    files.check_writable(args.output_dir)
    rows: list[dict[str, Any]] = earlier["rows"] if earlier else []
    seconds: dict[str, float] = earlier["run"]["seconds"] if earlier else {}
    length = args.train_length or train_length(args.model)
    documents = list(load_documents(args.data, column=args.column, split=args.split)["text"])
    texts = encode(load_tokenizer(args.tokenizer or args.model), documents, bos=args.bos, join=args.join)
    budget = None if args.max_tokens == "all" else args.max_tokens
    plan: Texts | Plan = texts
    if not args.stream:
        plan = plan_windows(texts, args.lengths, stride=args.stride, max_tokens=budget)
    check_tokenizers(args, documents, texts)
    results = {
        "format": FORMAT,
        "complete": False,
        "command": command,
        "arguments": recorded,
        "seed": args.seed,
        "versions": files.versions(),
        "data": describe_data(texts, plan),
        "train_length": length,
        "models": [asdict(curve) for curve in curves(args)],
        "rows": rows,
        "run": {
            "processes": state.num_processes,
            "device": str(state.device),
            "threads": torch.get_num_threads(),
            "seconds": seconds,
        },
    }
    measured = curves(args)
    if args.compare:
        entries = measured[: len(args.compare)]
        check_entries(entries, dtype=args.dtype, device=state.device, stream=args.stream)
    _measure(args, measured, plan, results, state)
    results["complete"] = True
    if state.is_main_process:
        files.save_csv(args.output_dir / "results.csv", rows, COLUMNS)
        reference = {curve.label for curve in measured if is_reference(curve)}
        with replacing(args.output_dir / "perplexity.png") as partial:
            save_plot(partial, rows, length, stream=args.stream, reference=reference)
        files.save(args.output_dir, results)  # last: it says that the others are there
    return results


def _measure(
    args: argparse.Namespace,
    measured: list[Curve],
    plan: Texts | Plan,
    results: dict[str, Any],
    state: PartialState,
) -> None:
    """Add the missing rows to the results, which are saved after each."""
    rows, seconds = results["rows"], results["run"]["seconds"]
    for index, curve in enumerate(measured, 1):
        done = {row["length"] for row in rows if row["model"] == curve.label}
        if state.is_main_process and len(measured) > 1:
            print(f"{curve.label} ({index} of {len(measured)})", file=sys.stderr)
        start = time.perf_counter()
        with named(curve.label) if args.compare else nullcontext():
            for row in missing_rows(args, curve, plan, done, state.device):
                rows.append({"model": curve.label, **asdict(row)})
                seconds[f"{curve.label} {row.length}"] = round(time.perf_counter() - start, 3)
                start = time.perf_counter()
                # a stream gives all its rows at once: one that is half written would pass for a whole one
                if state.is_main_process and not args.stream:
                    files.save(args.output_dir, results)
        if state.is_main_process:
            files.save(args.output_dir, results)


def describe_data(texts: Texts, plan: Texts | Plan) -> dict[str, Any]:
    """What the results say about the data."""
    facts: dict[str, Any] = {
        "documents": len(texts.documents),
        "tokens": sum(map(len, texts.documents)),
        "bytes": sum(int(document.byte_ends[-1]) for document in texts.documents),
    }
    if isinstance(plan, Plan):
        facts["documents_long_enough"] = sum(
            len(document) >= plan.lengths[-1] for document in texts.documents
        )
    return facts
