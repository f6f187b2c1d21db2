"""The work behind the generation command: prompts and models in, comparisons and files out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging

from hf_linattn import describe, is_patched, unpatch_model
from hf_linattn.data import load_documents
from hf_linattn.errors import DataError, OptionError

from ..common import results as files
from ..common.model_specs import SharedWeights, error_prefix, specs_of
from ..common.models import Curve, load_model, load_tokenizer
from ..common.windows import encode, plan_windows
from .comparison import ORIGINAL, Comparison
from .measure import Side, compare_with, continue_all, inside, itself
from .outputs import FORMAT, continuations_of, rows_of, write


def run(args: argparse.Namespace, command: str) -> tuple[dict[str, Any], Comparison]:
    """Compare what is not compared yet and write all files; results.json is renewed after every model.

    Raises:
        DataError: prompts are missing or too short, tokenizers differ, or the folder holds another run.
        OptionError: there is no original to compare with, or nothing to compare.
        LinattnError: a model or a patch does not suit.
    """
    import datasets

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    recorded = {key: value for key, value in vars(args).items() if key != "output_dir"}
    earlier = files.load(args.output_dir, recorded, FORMAT)
    if earlier is not None and earlier["complete"]:
        return earlier, Comparison(earlier["prompts"], continuations_of(earlier["continuations"]))
    files.check_writable(args.output_dir)
    others = curves(args)
    source = args.original or args.model[0]
    tokenizer = load_tokenizer(args.tokenizer or source)
    prompts = prompts_of(args, tokenizer)
    _check_tokenizers(args, tokenizer, prompts, others)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = str(accelerator or "cpu")
    if args.compare:
        SharedWeights(source, dtype=args.dtype, device=device).check(
            [curve for curve in others if curve.patch is not None]
        )
    own, note = _original(args, others, device)
    found = Comparison(prompts, continuations_of(earlier["continuations"]) if earlier else [])
    seconds: dict[str, float] = earlier["run"]["seconds"] if earlier else {}
    results = {
        "format": FORMAT,
        "complete": False,
        "command": command,
        "arguments": recorded,
        "seed": args.seed,
        "versions": files.versions(),
        "original": {"source": source, "note": note},
        "models": [asdict(curve) for curve in others],
        "prompts": prompts,
        "run": {"device": device, "threads": torch.get_num_threads(), "seconds": seconds},
    }
    for curve in [None, *others]:
        label = ORIGINAL if curve is None else curve.label
        if label not in found.labels:
            start = time.perf_counter()
            _measure(args, own, curve, found, device)
            seconds[label] = round(time.perf_counter() - start, 3)
            _save(args.output_dir, results, found)
    write(
        args.output_dir, found, args.new_tokens, tokenizer.decode, f"Generation beside {source_name(source)}"
    )
    results["complete"] = True
    _save(args.output_dir, results, found)
    return results, found


def _save(folder: Path, results: dict[str, Any], found: Comparison) -> None:
    results["summaries"] = [asdict(one) for one in found.summaries()]
    results["continuations"] = rows_of(found)
    files.save(folder, results)


def source_name(source: str) -> str:
    """A folder without the way to it."""
    return Path(source).name or source


def curves(args: argparse.Namespace) -> list[Curve]:
    """The models to compare with the original: folders, then entries.

    Raises:
        OptionError: nothing to compare, no original, or two of one name.
    """
    folders = list(dict.fromkeys(args.model or []))
    if args.compare and args.original is None:
        if len(folders) != 1:
            raise OptionError("entries of --compare are patches of one model: name it with --original")
        return specs_of(args.compare, folders[0])
    if len(folders) > 1 and args.original is None:
        raise OptionError("several folders of --model need the model that they came from: --original")
    if args.original in folders:
        raise OptionError(f"{args.original} is the original itself; leave it out of --model")
    names = [source_name(folder) for folder in folders]
    labels = [name if names.count(name) == 1 else folder for name, folder in zip(names, folders, strict=True)]
    found = [Curve(label, folder) for label, folder in zip(labels, folders, strict=True)]
    found += specs_of(args.compare or [], args.original or "")
    labels = [curve.label for curve in found]
    if not found:
        raise OptionError("nothing to compare: name folders with --model, or patches with --compare")
    if twice := {label for label in [*labels, ORIGINAL] if [*labels, ORIGINAL].count(label) > 1}:
        raise OptionError(f"two models would be called {', '.join(sorted(twice))}; rename a folder")
    return found


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of every prompt.

    Raises:
        DataError: there is no text, or too little.
    """
    if args.prompts is None:
        documents = list(load_documents(args.data, column=args.column, split=args.split)["text"])
        texts = encode(tokenizer, documents, bos=args.bos, join=args.join)
        length = args.prompt_tokens
        plan = plan_windows(texts, [length], stride="full", max_tokens=length * args.count)
        return [texts.documents[w.document].ids[w.start : w.end].tolist() for w in plan.windows(length)]
    try:
        lines = Path(args.prompts).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise DataError(f"cannot read {args.prompts}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{args.prompts} is not UTF-8 text: byte {error.start} does not decode") from error
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise DataError(f"{args.prompts} holds no prompt: one per line")
    return [document.ids.tolist() for document in encode(tokenizer, lines, bos=args.bos).documents]


def _check_tokenizers(
    args: argparse.Namespace, tokenizer: Any, prompts: Sequence[Sequence[int]], others: Sequence[Curve]
) -> None:
    """Refuse a folder whose tokenizer cuts the prompts otherwise; one that has none takes the original's."""
    text = "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts)
    wanted = encode(tokenizer, [text], bos="no").documents[0].ids
    for source in dict.fromkeys(curve.source for curve in others):
        if args.tokenizer is not None or source == (args.original or args.model[0]):
            continue
        try:
            theirs = load_tokenizer(source)
        except DataError:
            continue
        found = encode(theirs, [text], bos="no").documents[0].ids
        if not torch.equal(found, wanted):
            raise DataError(
                f"{source} cuts the prompts into other tokens than {args.original}: predictions can be "
                "compared over one vocabulary only; or name one tokenizer for both with --tokenizer"
            )


def _original(args: argparse.Namespace, others: Sequence[Curve], device: str) -> tuple[Side, str]:
    """The model that all are compared with, and a sentence on where it comes from.

    Raises:
        OptionError: it is patched, or the only folder is not, or was trained after it was patched.
    """
    if args.original is None and not args.compare:
        return _original_inside(others[0].source, _load(args, others[0], device))
    source = args.original or args.model[0]
    model = _load(args, Curve(ORIGINAL, source), device)
    if is_patched(model) and args.original is not None:
        patches = ", ".join(dict.fromkeys(row.patch for row in describe(model)))
        raise OptionError(f"{source} is patched ({patches}): name the model that it came from")
    if is_patched(model):  # `SharedWeights` has seen that its patch has no weights
        unpatch_model(model)
    return itself(model), f"{source_name(source)}, unpatched"


def _original_inside(folder: str, model: torch.nn.Module) -> tuple[Side, str]:
    if not is_patched(model):
        raise OptionError(
            f"{folder} is not patched: name patches to compare with --compare, or the model that it came "
            "from with --original"
        )
    if Path(folder, "run.json").is_file():
        raise OptionError(
            f"{folder} was trained after it was patched (it has a run.json): name the model that it came "
            "from with --original"
        )
    return inside(model), "the same weights with their own attention"


def _load(args: argparse.Namespace, curve: Curve, device: str) -> torch.nn.Module:
    set_seed(args.seed)
    return load_model(curve, dtype=args.dtype, device=device)


def _measure(
    args: argparse.Namespace, own: Side, curve: Curve | None, found: Comparison, device: str
) -> None:
    """Add the continuations of one model."""
    settings: dict[str, Any] = {"batch_size": args.batch_size, "progress": True}
    if curve is None:
        found.continuations.extend(continue_all(own, ORIGINAL, found.prompts, args.new_tokens, **settings))
        return
    with error_prefix(curve.label):
        other = itself(_load(args, curve, device))
        first = found.of(ORIGINAL)
        parts = compare_with(own, other, curve.label, found.prompts, first, args.new_tokens, **settings)
        found.continuations.extend(parts)
