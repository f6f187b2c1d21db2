"""The work behind `eval.layers`: a folder and a text in, a ranking, a plan, tables and pictures out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from transformers import set_seed

from hf_linattn.cli.files import filling, writing
from hf_linattn.errors import DataError, OptionError

from ..common.models import ModelSpec, load_config, load_model, load_texts, load_tokenizer, train_length
from ..common.results import ResumableRun, check_writable, default_device, save_csv, versions
from ..common.windows import plan_windows
from . import outputs as files
from .measure import Evaluator, Measured, Recall
from .model import OWN, Layer, Spec, check_original, fingerprint, layers_of, put, sliding_of
from .plot import save_layers, save_tradeoff
from .ranking import EVEN, Ranking, plan_for
from .schedule import Schedule

MEASURED_BY = (
    *("model", "tokenizer", "data", "column", "split", "join", "bos", "length", "max_tokens", "batch_size"),
    *("tasks", "recall_lengths", "samples", "dtype", "seed", "train_length"),
)
"""Arguments that a measurement depends on; the others can change from start to start."""


SINKS = 4
"""First tokens that stay visible behind `--window`: pretrained models give them much of their attention."""

FACTS = ("layers", "sliding", "weights")
"""Facts of the model in results.json, without which its rows mean nothing."""


def _load_evaluator(args: argparse.Namespace, known: dict[str, Any]) -> Evaluator:
    """Load the model and what it is measured on, and note its facts, which must be those that are known."""
    for source in filter(None, (args.model, args.original)):
        load_config(source)  # first: a wrong folder should not wait for the text
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    _, texts = load_texts(args, tokenizer)
    budget = None if args.max_tokens == "all" else args.max_tokens
    plan = plan_windows(texts, [args.length], stride="full", max_tokens=budget)
    set_seed(args.seed)
    model = load_model(ModelSpec("", args.model), dtype=args.dtype, device=default_device())
    layers = layers_of(model)
    if args.original is not None:
        check_original(model, args.original, args.dtype)
    facts = ([asdict(layer) for layer in layers], sliding_of(model), fingerprint(model))
    for name, value in zip(FACTS, json.loads(json.dumps(facts)), strict=True):
        if known.setdefault(name, value) != value:
            raise DataError(
                f"{args.output_dir} holds measurements of another model at {args.model} (its {name} "
                "differ); choose another --output-dir"
            )
    lengths = tuple(args.recall_lengths or [args.length])
    recall = Recall(tuple(args.tasks), lengths, args.samples, args.seed) if args.tasks else None
    return Evaluator(model, tokenizer, layers, plan, recall, args.batch_size)


def _kept_spec(args: argparse.Namespace) -> Spec:
    """Return the attention of the kept layers in the plan: their own, or over what `--window` shows."""
    return (OWN, {}) if args.window is None else ("window", {"size": args.window, "sinks": SINKS})


def _kept_of(args: argparse.Namespace) -> list[Spec]:
    """List the attentions that `--nope` tries in the softmax layers."""
    if not args.nope:
        return []
    length = args.train_length or train_length(args.model)
    if not length:
        raise OptionError("--nope: the configuration names no training length for log-n; give --train-length")
    return [("nope", {}), ("nope+logn", {"logn": {"train_length": length}})]


def run(args: argparse.Namespace, command: str) -> str:
    """Measure what is missing, rank, and write all files; the tables and the plan come back as text.

    Raises:
        DataError: the text is missing or too short; the folder holds other measurements.
        OptionError: a rank, a number of layers or an attention that cannot be had.
        LinattnError: the model does not suit.
    """
    if args.save is not None:
        check_writable(args.save)
    recorded = {name: getattr(args, name) for name in MEASURED_BY}
    session = ResumableRun(args.output_dir, recorded, files.FORMAT, command)
    rows = files.rows_from(args.output_dir, session.rows)
    facts = {name: session.earlier[name] for name in FACTS if name in session.earlier}
    evaluator = cache(lambda: _load_evaluator(args, facts))
    if args.original is not None or args.save is not None or len(facts) < len(FACTS) or not rows:
        evaluator()
    layers = [Layer(**row) for row in facts["layers"]]
    keep = max(1, round(len(layers) / 4)) if args.keep is None else args.keep
    counts = range(len(layers) + 1) if args.counts is None else args.counts or [keep]
    kept = _kept_of(args)
    if max(keep, *counts) > len(layers):
        raise OptionError(f"{max(keep, *counts)} softmax layers, and {args.model} has {len(layers)}")
    session.begin({"versions": session.earlier.get("versions") or versions(), **facts})

    def save() -> None:
        session.rows[:] = [asdict(row) for row in rows.values()]
        session.save()

    schedule = Schedule(layers, evaluator, rows, save, progress=True)
    ranking = schedule.ranking(args.rank, args.sense, recall=bool(args.tasks), force=args.force_recall)
    ranking = replace(ranking, most=None if args.window is None else args.window + SINKS)
    plans = {spec[0]: plan_for(ranking, keep, spec) for spec in [_kept_spec(args), *kept]}
    curves = list(ranking.scores) if args.curves == "all" else [ranking.rank]
    curves.sort(key=lambda curve: curve != ranking.rank)  # tables and pictures go by the first
    points = schedule.tradeoff(ranking, [*curves, EVEN], counts, kept)
    session.results |= {**files.content(ranking, points), "keep": keep, "plans": plans}
    save_csv(args.output_dir / "layers.csv", files.layer_rows(ranking))
    save_csv(args.output_dir / "tradeoff.csv", files.tradeoff_rows(ranking, points, args.context))
    save_layers(args.output_dir / "layers.png", ranking)
    save_tradeoff(args.output_dir / "tradeoff.png", ranking, points, args.context)
    session.finish()
    if args.save is not None:
        _save_hybrid(args, evaluator(), ranking.kept(keep))
    ends = {"original": schedule.original(recall=False), "all linear": rows[(), OWN]}
    lines = [f"{name}: {_line(row)}" for name, row in ends.items()]
    lines += _summary(args, ranking, points)
    lines += [f"plan for patch_model, softmax layers {keep} of {len(layers)}:"]
    lines += [json.dumps(plan) for plan in plans.values()]
    if facts["sliding"] != "keep":
        lines.append(f"(with sliding={facts['sliding']!r}, as the folder was patched)")
    lines += [f"nothing was trained; numbers and pictures in {args.output_dir}"]
    return "\n".join(lines + (_saved(args) if args.save else []))


def _saved(args: argparse.Namespace) -> list[str]:
    """Say where the model is, and how it stays flat behind its context."""
    lines = [f"the model with this plan in {args.save}"]
    context = getattr(load_config(args.model).get_text_config(), "max_position_embeddings", None)
    if args.window is None and context and context > SINKS:
        lines.append(f"for texts of more than {context} tokens add --window {context - SINKS} (see --help)")
    return lines


def _save_hybrid(args: argparse.Namespace, evaluator: Evaluator, own: Collection[int]) -> None:
    """Write the model with softmax in the layers `own`; the maps of the others stay, in their own dtype."""
    model: Any = load_model(ModelSpec("", args.model))  # not the one measured, which --dtype may have rounded
    spec = None if args.window is None else _kept_spec(args)
    put(model, {layer.module: spec for layer in evaluator.layers if layer.number in own})
    with writing(args.save):
        args.save.mkdir(parents=True, exist_ok=True)
    with filling(args.save) as partial:
        model.save_pretrained(partial)
        evaluator.tokenizer.save_pretrained(partial)


def _summary(args: argparse.Namespace, ranking: Ranking, points: Sequence[files.Point]) -> list[str]:
    """Give the tables, and the sentences one needs to read them."""
    what = {
        "replace": "each layer alone linear, all others the original's",
        "restore": "each layer alone softmax, all others linear",
    }
    return [
        *([f"note: {ranking.note}"] if ranking.note else []),
        f"{what[ranking.sense]}; first to stay softmax first, by {ranking.rank}:",
        files.layer_table(ranking),
        "state of one sequence in these layers, those that stay, and perplexity by each way to choose them:",
        files.tradeoff_table(ranking, points, args.context),
    ]


def _line(row: Measured) -> str:
    text = f"perplexity {row.perplexity:.5g}, KL {row.kl:.4g}"
    if row.accuracy is None:
        return text
    return f"{text}, recall {row.accuracy:.3f} in {row.samples} samples (chance {row.chance:.2g})"
