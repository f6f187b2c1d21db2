"""The measurement behind the recall command: models and questions in, rows, verdicts and files out."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import set_seed
from transformers.utils import logging

from hf_linattn.errors import DataError, OptionError
from hf_linattn.patching.interface import NAME

from ..common import results as files
from ..common.model_specs import SharedWeights, error_prefix, is_reference, specs_of
from ..common.models import UNPATCHED, Curve, load_config, load_model, load_tokenizer, train_length
from .custom import grouped, load_cases
from .measure import check_fit, embedding_rows, make_row, require_decoder, score
from .plot import save_pictures
from .sample import Sample
from .tables import COLUMNS, FORMAT
from .tasks import build
from .verdict import judge
from .vocabulary import Vocabulary


@dataclass(frozen=True)
class Part:
    """What becomes one row per model."""

    task: str
    length: int
    depth: float | None
    count: int
    samples: Callable[[], list[Sample]]


def curves(args: argparse.Namespace) -> list[Curve]:
    """The unpatched original first, then the entries of --patch, then the other models.

    Raises:
        OptionError: two of them are the same.
    """
    source = args.model[0]
    name = Path(source).name or source
    patched = hasattr(load_config(source), NAME)
    found = [Curve(f"{name} {UNPATCHED}" if patched else name, source, UNPATCHED)]
    if patched:
        found.append(Curve(name, source))
    with _as_patch():
        entries = specs_of(args.patch or [], source)
    for entry in entries:
        if is_reference(entry):
            raise OptionError(
                f"--patch {entry.label}: the model's own attention is measured first anyway; leave it out"
            )
    found += entries
    for other in args.model[1:]:
        load_config(other)  # a wrong folder should not wait for the measurements of the others
        label = Path(other).name or other
        found.append(Curve(other if label in [curve.label for curve in found] else label, other))
    if len({curve.label for curve in found}) < len(found):
        raise OptionError("--model names a model twice")
    return found


@contextmanager
def _as_patch() -> Iterator[None]:
    """Entries are called --compare in perplexity's command, and --patch here."""
    try:
        yield
    except OptionError as error:
        raise OptionError(str(error).replace("--compare", "--patch")) from error


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure all that is missing; the content of results.json comes back.

    Raises:
        LinattnError: nothing was measured, or what was is in results.json.
    """
    logging.disable_progress_bar()
    recorded = {key: value for key, value in vars(args).items() if key != "output_dir"}
    if args.cases is not None:
        cases = load_cases(args.cases)
        recorded["cases"] = f"{args.cases} sha256:{hashlib.sha256(args.cases.read_bytes()).hexdigest()}"
    earlier = files.load(args.output_dir, recorded, FORMAT)
    if earlier is not None and earlier["complete"]:
        return earlier
    files.check_writable(args.output_dir)
    measured = curves(args)
    tokenizer = load_tokenizer(args.tokenizer or args.model[0])
    size = load_config(args.model[0]).get_text_config().vocab_size
    vocabulary = Vocabulary(tokenizer, size, args.bos)
    check_fit(vocabulary, args.tasks, args.lengths)
    check_tokenizers(args, tokenizer)
    found = parts(args, vocabulary)
    if args.cases is not None:
        for name, length, depth, samples in grouped(cases, vocabulary, args.lengths):
            found.append(Part(name, length, depth, len(samples), partial(list, samples)))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = accelerator or torch.device("cpu")
    if entries := [curve for curve in measured if curve.label in (args.patch or [])]:
        with _as_patch():
            SharedWeights(args.model[0], dtype=args.dtype, device=device).check(entries)
    results = {
        "format": FORMAT,
        "complete": False,
        "command": command,
        "arguments": recorded,
        "seed": args.seed,
        "versions": files.versions(),
        "train_length": args.train_length or train_length(args.model[0]),
        "models": [asdict(curve) for curve in measured],
        "verdicts": [],
        "rows": earlier["rows"] if earlier else [],
        "run": {
            "device": str(device),
            "threads": torch.get_num_threads(),
            "seconds": earlier["run"]["seconds"] if earlier else {},
        },
    }
    for index, curve in enumerate(measured):
        with error_prefix(curve.label):
            _measure(args, curve, vocabulary, found, results, device)
        if index == 0:
            results["verdicts"] = [asdict(verdict) for verdict in judge(results["rows"], curve.label)]
            if len(measured) > 1:
                print("\n".join(verdict["text"] for verdict in results["verdicts"]), file=sys.stderr)
    results["complete"] = True
    files.save_csv(args.output_dir / "results.csv", results["rows"], COLUMNS)
    save_pictures(args.output_dir, results["rows"], results["verdicts"], results["train_length"])
    files.save(args.output_dir, results)
    return results


def check_tokenizers(args: argparse.Namespace, tokenizer: Any) -> None:
    """Refuse models that know other tokens: the questions would be others.

    Raises:
        DataError: naming the model.
    """
    if args.tokenizer is not None:
        return
    for source in args.model[1:]:
        if load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
            raise DataError(
                f"{source} has another tokenizer than {args.model[0]}: measure it in a run of its own, or "
                "name one tokenizer for all with --tokenizer"
            )


def parts(args: argparse.Namespace, vocabulary: Vocabulary) -> list[Part]:
    """All rows that the built-in tasks give for a model."""

    def samples(task: str, length: int, depth: float) -> list[Sample]:
        return [build(task, vocabulary, length, depth, args.seed, index) for index in range(args.samples)]

    return [
        Part(task, length, depth, args.samples, partial(samples, task, length, depth))
        for task in args.tasks
        for length in sorted(set(args.lengths))
        for depth in sorted(set(args.depths))
    ]


def _measure(
    args: argparse.Namespace,
    curve: Curve,
    vocabulary: Vocabulary,
    found: Sequence[Part],
    results: dict[str, Any],
    device: torch.device,
) -> None:
    """Add the missing rows of one model to the results, which are saved after each."""
    rows, seconds = results["rows"], results["run"]["seconds"]
    done = {(row["task"], row["length"], row["depth"]) for row in rows if row["model"] == curve.label}
    missing = [part for part in found if (part.task, part.length, part.depth) not in done]
    if not missing:
        return
    set_seed(args.seed)
    model = load_model(curve, dtype=args.dtype, device=device)
    require_decoder(model)
    if embedding_rows(model) < vocabulary.size:
        raise DataError(
            f"{curve.source} has {embedding_rows(model)} tokens, and the first model {vocabulary.size}"
        )
    tokens = sum(part.length * part.count for part in missing)
    with tqdm(total=tokens, desc=curve.label, unit="tok", unit_scale=True) as bar:
        for part in missing:
            start = time.perf_counter()
            bar.set_postfix_str(f"{part.task} {part.length}")
            samples = part.samples()
            outcomes = score(model, samples, args.batch_size, bar.update)
            row = make_row(part.task, part.length, part.depth, samples, outcomes)
            rows.append({"task": row.task, "model": curve.label, **asdict(row)})
            depth = "" if part.depth is None else f" {part.depth:g}"
            label = f"{curve.label} {part.task} {part.length}{depth}"
            seconds[label] = round(time.perf_counter() - start, 3)
            files.save(args.output_dir, results)
