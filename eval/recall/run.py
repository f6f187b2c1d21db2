"""The measurement behind the recall command: models and questions in, rows, verdicts and files out."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from tqdm import tqdm

from hf_linattn.errors import DataError, OptionError
from hf_linattn.patching.causality import require_causal
from hf_linattn.patching.interface import NAME

from ..common.model_specs import ModelLoader, error_prefix, is_reference, specs_of
from ..common.models import (
    UNPATCHED,
    ModelSpec,
    load_config,
    load_tokenizer,
    name_of,
    train_length,
)
from ..common.nll import embedding_rows
from ..common.results import ResumableRun, recorded
from .custom import grouped, load_cases
from .measure import check_fit, make_row, score
from .plot import COLUMNS, pictures_of, save_pictures
from .tasks import build
from .verdict import assess_baseline
from .vocabulary import Sample, Vocabulary

FORMAT = "hf_linattn.recall/1"


@dataclass(frozen=True)
class _Question:
    """What becomes one row per model."""

    task: str
    length: int
    depth: float | None
    count: int
    samples: Callable[[], list[Sample]]


def _model_specs(args: argparse.Namespace) -> list[ModelSpec]:
    """Name the unpatched original first, then the entries of --compare, then the other models."""
    source = args.model[0]
    name = name_of(source)
    patched = hasattr(load_config(source), NAME)
    specs = [ModelSpec(f"{name} {UNPATCHED}" if patched else name, source, UNPATCHED)]
    if patched:
        specs.append(ModelSpec(name, source))
    for entry in specs_of(args.patch or [], source):
        if is_reference(entry):
            raise OptionError(
                f"--compare {entry.label}: the model's own attention is measured first anyway; leave it out"
            )
        specs.append(entry)
    for other in args.model[1:]:
        load_config(other)  # a wrong folder should not wait for the measurements of the others
        label = name_of(other)
        specs.append(ModelSpec(other if label in [spec.label for spec in specs] else label, other))
    if len({spec.label for spec in specs}) < len(specs):
        raise OptionError("--model names a model twice")
    return specs


def run(args: argparse.Namespace, command: str) -> dict[str, Any]:
    """Measure all that is missing; the content of results.json comes back.

    Raises:
        LinattnError: nothing was measured, or what was is in results.json.
    """
    arguments = recorded(args)
    if args.cases is not None:
        cases = load_cases(args.cases)
        arguments["cases"] = f"{args.cases} sha256:{hashlib.sha256(args.cases.read_bytes()).hexdigest()}"
    session = ResumableRun(args.output_dir, arguments, FORMAT, command)
    if session.complete:
        if session.lacks(*pictures_of(session.rows)):
            of_run = (session.results["verdicts"], session.results["train_length"])
            save_pictures(args.output_dir, session.rows, *of_run)
        return session.results
    specs = _model_specs(args)
    tokenizer = load_tokenizer(args.tokenizer or args.model[0])
    size = load_config(args.model[0]).get_text_config().vocab_size
    vocabulary = Vocabulary(tokenizer, size, args.bos)
    check_fit(vocabulary, args.tasks, args.lengths)
    _check_tokenizers(args, tokenizer)
    asked = _questions(args, vocabulary)
    if args.cases is not None:
        for name, length, depth, samples in grouped(cases, vocabulary, args.lengths):
            asked.append(_Question(name, length, depth, len(samples), partial(list, samples)))
    compared = [spec for spec in specs if spec.label in (args.patch or [])]
    models = ModelLoader(compared, dtype=args.dtype, device=session.device, seed=args.seed)
    length_trained = args.train_length or train_length(args.model[0])
    models_measured = [asdict(spec) for spec in specs]
    session.begin({"train_length": length_trained, "models": models_measured, "verdicts": []})
    for index, spec in enumerate(specs):
        with error_prefix(spec.label):
            _measure(args, models, spec, vocabulary, asked, session)
        if index == 0:
            verdicts = session.results["verdicts"] = assess_baseline(session.rows, spec.label)
            if len(specs) > 1:
                print("\n".join(verdict["text"] for verdict in verdicts), file=sys.stderr)
    save_pictures(args.output_dir, session.rows, session.results["verdicts"], length_trained)
    session.finish("results.csv", COLUMNS)
    return session.results


def _check_tokenizers(args: argparse.Namespace, tokenizer: Any) -> None:
    """Refuse models that know other tokens: the questions would be others."""
    if args.tokenizer is not None:
        return
    for source in args.model[1:]:
        if load_tokenizer(source).get_vocab() != tokenizer.get_vocab():
            raise DataError(
                f"{source} has another tokenizer than {args.model[0]}: measure it in a run of its own, or "
                "name one tokenizer for all with --tokenizer"
            )


def _questions(args: argparse.Namespace, vocabulary: Vocabulary) -> list[_Question]:
    """List what the built-in tasks ask of a model."""

    def samples(task: str, length: int, depth: float) -> list[Sample]:
        return [build(task, vocabulary, length, depth, args.seed, index) for index in range(args.samples)]

    places = product(args.tasks, sorted(set(args.lengths)), sorted(set(args.depths)))
    return [_Question(*place, args.samples, partial(samples, *place)) for place in places]


def _measure(
    args: argparse.Namespace,
    models: ModelLoader,
    spec: ModelSpec,
    vocabulary: Vocabulary,
    asked: Sequence[_Question],
    session: ResumableRun,
) -> None:
    """Add the missing rows of one model to the results, which are saved after each."""
    done = {(row["task"], row["length"], row["depth"]) for row in session.rows if row["model"] == spec.label}
    missing = [one for one in asked if (one.task, one.length, one.depth) not in done]
    if not missing:
        return
    with models.use(spec) as model:
        require_causal(model)
        if embedding_rows(model) < vocabulary.size:
            raise DataError(
                f"{spec.source} has {embedding_rows(model)} tokens, and the first model {vocabulary.size}"
            )
        tokens = sum(one.length * one.count for one in missing)
        with tqdm(total=tokens, desc=spec.label, unit="tok", unit_scale=True) as bar:
            for one in missing:
                bar.set_postfix_str(f"{one.task} {one.length}")
                depth = "" if one.depth is None else f" {one.depth:g}"
                with session.timed(f"{spec.label} {one.task} {one.length}{depth}"):
                    samples = one.samples()
                    outcomes = score(model, samples, args.batch_size, bar.update)
                row = make_row(one.task, one.length, one.depth, samples, outcomes)
                session.rows.append({"task": row.task, "model": spec.label, **asdict(row)})
                session.save()
