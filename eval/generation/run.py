"""The work behind the generation command: prompts and models in, comparisons and files out."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hf_linattn import describe, is_patched, unpatch_model
from hf_linattn.errors import DataError, OptionError

from ..common.model_specs import ModelLoader, error_prefix, specs_of
from ..common.models import ModelSpec, load_texts, load_tokenizer, name_of
from ..common.results import ResumableRun, recorded
from ..common.windows import encode, side_by_side
from .comparison import ORIGINAL, Comparison
from .measure import Comparer, Side, side_of
from .outputs import FORMAT, PICTURE, continuations_of, save_plot, summary, write


def run(args: argparse.Namespace, command: str) -> str:
    """Compare what is not compared yet and write all files; the table comes back, with what explains it.

    results.json is renewed after every model.

    Raises:
        DataError: prompts are missing or too short, tokenizers differ, or the folder holds another run.
        OptionError: there is no original to compare with, or nothing to compare.
        LinattnError: a model or a patch does not suit.
    """
    session = ResumableRun(args.output_dir, recorded(args), FORMAT, command)
    earlier = continuations_of(session.earlier.get("continuations", []))
    if session.complete:
        comparison = Comparison(session.results["prompts"], earlier)
        if session.lacks(PICTURE):
            save_plot(args.output_dir, comparison)
        return summary(session.results["original"]["note"], comparison, args)
    others = _model_specs(args)
    source = args.original or args.model[0]
    tokenizer = load_tokenizer(args.tokenizer or source)
    prompts = _prompts_of(args, tokenizer)
    _check_tokenizers(args, tokenizer, prompts, others)
    compared = [spec for spec in others if spec.patch is not None]
    models = ModelLoader(compared, dtype=args.dtype, device=session.device, seed=args.seed)
    original, note = _original(args, others, models)
    comparison = Comparison(prompts, earlier)
    comparer = Comparer(original, comparison, args.new_tokens, args.batch_size, progress=True)
    facts = {"original": {"source": source, "note": note}, "models": [asdict(spec) for spec in others]}
    session.begin({**facts, "prompts": prompts})
    del session.results["rows"]  # they are called continuations here
    for spec in [None, *others]:
        label = ORIGINAL if spec is None else spec.label
        if label in comparison.labels:
            continue
        with session.timed(label):
            if spec is None:
                comparer.add_original()
            else:
                with error_prefix(label), models.use(spec) as model:
                    comparer.add(label, side_of(model))
        _fill(session, comparison)
        session.save()
    write(args, comparison, tokenizer.decode)
    _fill(session, comparison)
    session.finish()
    return summary(note, comparison, args)


def _fill(session: ResumableRun, comparison: Comparison) -> None:
    session.results["summaries"] = [asdict(one) for one in comparison.summaries()]
    session.results["continuations"] = [asdict(one) for one in comparison.continuations]


def _model_specs(args: argparse.Namespace) -> list[ModelSpec]:
    """Name the models to compare with the original: folders, then entries."""
    folders = list(dict.fromkeys(args.model or []))
    if args.compare and args.original is None:
        if len(folders) != 1:
            raise OptionError("entries of --compare are patches of one model: name it with --original")
        return specs_of(args.compare, folders[0])
    if len(folders) > 1 and args.original is None:
        raise OptionError("several folders of --model need the model that they came from: --original")
    if args.original in folders:
        raise OptionError(f"{args.original} is the original itself; leave it out of --model")
    names = [name_of(folder) for folder in folders]
    unique = [name if names.count(name) == 1 else folder for name, folder in zip(names, folders, strict=True)]
    specs = [*map(ModelSpec, unique, folders), *specs_of(args.compare or [], args.original or "")]
    if not specs:
        raise OptionError("nothing to compare: name folders with --model, or patches with --compare")
    labels = [ORIGINAL, *(spec.label for spec in specs)]
    if twice := {label for label in labels if labels.count(label) > 1}:
        raise OptionError(f"two models would be called {', '.join(sorted(twice))}; rename a folder")
    return specs


def _prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Cut the texts into prompts, or read a prompt per line, as token ids."""
    if args.prompts is None:
        _, texts = load_texts(args, tokenizer)
        prompts: list[list[int]] = side_by_side(texts, args.prompt_tokens, args.count).tolist()
        return prompts
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
    args: argparse.Namespace, tokenizer: Any, prompts: Sequence[Sequence[int]], others: Sequence[ModelSpec]
) -> None:
    """Refuse a folder whose tokenizer cuts the prompts otherwise; one that has none takes the original's."""
    text = "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in prompts)
    tokens = encode(tokenizer, [text], bos="no").documents[0].ids
    for source in dict.fromkeys(spec.source for spec in others):
        if args.tokenizer is not None or source == (args.original or args.model[0]):
            continue
        try:
            theirs = load_tokenizer(source)
        except DataError:
            continue
        if not torch.equal(encode(theirs, [text], bos="no").documents[0].ids, tokens):
            raise DataError(
                f"{source} cuts the prompts into other tokens than {args.original}: predictions can be "
                "compared over one vocabulary only; or name one tokenizer for both with --tokenizer"
            )


def _original(args: argparse.Namespace, others: Sequence[ModelSpec], models: ModelLoader) -> tuple[Side, str]:
    """Find the model that all are compared with, and say where it comes from."""
    if args.original is None and not args.compare:
        folder, model = others[0].source, models.load(others[0])
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
        return side_of(model, own=True), "the same weights with their own attention"
    source = args.original or args.model[0]
    model = models.load(ModelSpec(ORIGINAL, source))
    if is_patched(model):
        if args.original is not None:
            patches = ", ".join(dict.fromkeys(row.patch for row in describe(model)))
            raise OptionError(f"{source} is patched ({patches}): name the model that it came from")
        unpatch_model(model)  # its patch has no weights: `ModelLoader` has looked
    return side_of(model), f"{name_of(source)}, unpatched"
