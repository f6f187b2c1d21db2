"""The work behind `eval.layers`: a folder and a text in, a ranking, a plan, tables and pictures out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from transformers.utils import logging

from hf_linattn.cli.files import filling, writing
from hf_linattn.data import load_documents
from hf_linattn.errors import DataError, OptionError

from ..common.models import Curve, load_config, load_model, load_tokenizer, train_length
from ..common.results import check_writable, save_csv, versions
from ..common.results import save as save_results
from ..common.windows import encode, plan_windows
from . import outputs as files
from .measure import Bench, Measured, Recall
from .model import OWN, Spec, check_original, fingerprint, layers_of, put, sliding_of
from .plot import save_layers, save_tradeoff
from .ranking import EVEN, Ranking, plan_for
from .schedule import Study

MEASURED_BY = (
    *("model", "tokenizer", "data", "column", "split", "join", "bos", "length", "max_tokens", "batch_size"),
    *("tasks", "recall_lengths", "samples", "dtype", "seed", "train_length"),
)
"""Arguments that a measurement depends on; the others can change from start to start."""


@dataclass(frozen=True)
class Outcome:
    """What a run found: its ranking, points of the trade-off, a plan per kept attention, and their frame."""

    ranking: Ranking
    points: list[files.Point]
    plans: dict[str, dict[str, Any]]
    keep: int
    sliding: str
    original: Measured
    linear: Measured


class Work:
    """The model with what it is measured on: loaded when something is missing, and then once."""

    def __init__(self, args: argparse.Namespace, results: dict[str, Any]) -> None:
        self.args, self.results = args, results
        self._bench: Bench | None = None

    def bench(self) -> Bench:
        """Load and check everything.

        Raises:
            LinattnError: the model, the original or the text do not suit.
        """
        if self._bench is None:
            self._bench = self._load()
        return self._bench

    def _load(self) -> Bench:
        args = self.args
        for source in filter(None, (args.model, args.original)):
            load_config(source)  # first: a wrong folder should not wait for the text
        documents = list(load_documents(args.data, column=args.column, split=args.split)["text"])
        tokenizer = load_tokenizer(args.tokenizer or args.model)
        texts = encode(tokenizer, documents, bos=args.bos, join=args.join)
        budget = None if args.max_tokens == "all" else args.max_tokens
        plan = plan_windows(texts, [args.length], stride="full", max_tokens=budget)
        set_seed(args.seed)
        on_device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        model = load_model(Curve("", args.model), dtype=args.dtype, device=on_device or "cpu")
        layers = layers_of(model)
        if args.original is not None:
            check_original(model, args.original, args.dtype)
        facts = {
            "layers": [asdict(layer) for layer in layers],
            "sliding": sliding_of(model),
            "weights": fingerprint(model),
        }
        for name, value in json.loads(json.dumps(facts)).items():
            if self.results.setdefault(name, value) != value:
                raise DataError(
                    f"{args.output_dir} holds measurements of another model at {args.model} (its {name} "
                    "differ); choose another --output-dir"
                )
        return Bench(model, tokenizer, layers, plan, recall_of(args), args.batch_size)


def recall_of(args: argparse.Namespace) -> Recall | None:
    """What is asked."""
    if not args.tasks:
        return None
    lengths = tuple(args.recall_lengths or [args.length])
    return Recall(tuple(args.tasks), lengths, args.samples, args.seed)


def kept_of(args: argparse.Namespace) -> list[Spec]:
    """The attentions that `--nope` tries in the softmax layers."""
    if not args.nope:
        return []
    length = args.train_length or train_length(args.model)
    if not length:
        raise OptionError("--nope: the configuration names no training length for log-n; give --train-length")
    return [("nope", {}), ("nope+logn", {"logn": {"train_length": length}})]


def run(args: argparse.Namespace, command: str) -> Outcome:
    """Measure what is missing, rank, and write all files.

    Raises:
        DataError: the text is missing or too short; the folder holds other measurements.
        OptionError: a rank, a number of layers or an attention that cannot be had.
        LinattnError: the model does not suit.
    """
    import datasets

    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    recorded = {name: getattr(args, name) for name in MEASURED_BY}
    results, rows = files.load(args.output_dir, recorded)
    complete = results.pop("complete", False)
    check_writable(args.output_dir)
    results |= {"arguments": recorded, "versions": results.get("versions") or versions()}
    work = Work(args, results)
    if args.original is not None or args.save is not None or "layers" not in results or not rows:
        work.bench()
    layers = [files.layer(row) for row in results["layers"]]
    keep = max(1, round(len(layers) / 4)) if args.keep is None else args.keep
    counts = range(len(layers) + 1) if args.counts is None else args.counts
    kept = kept_of(args)
    if max(keep, *counts) > len(layers):
        raise OptionError(f"{max(keep, *counts)} softmax layers, and {args.model} has {len(layers)}")

    def save(row: Measured | None, outcome: dict[str, Any] | None = None) -> None:
        done = {"complete": outcome is not None or complete, "command": command}
        head = {"format": files.FORMAT, **done, **results, **(outcome or {})}
        save_results(args.output_dir, {**head, "rows": files.rows_of(rows)})

    study = Study(layers, work.bench, rows, save, progress=True)
    ranking = study.ranking(args.rank, args.sense, recall=bool(args.tasks), force=args.force_recall)
    plans = {spec[0]: plan_for(ranking, keep, spec) for spec in [(OWN, {}), *kept]}
    curves = list(ranking.scores) if args.curves == "all" else [ranking.rank]
    # the chosen rank first: tables and pictures go by it
    points = study.tradeoff(ranking, [*sorted(curves, key=lambda c: c != ranking.rank), EVEN], counts, kept)
    save(None, {**files.content(ranking, points), "keep": keep, "plans": plans})
    save_csv(args.output_dir / "layers.csv", files.layer_rows(ranking))
    save_csv(args.output_dir / "tradeoff.csv", files.tradeoff_rows(ranking, points, args.context))
    save_layers(args.output_dir / "layers.png", ranking)
    save_tradeoff(args.output_dir / "tradeoff.png", ranking, points, args.context)
    if args.save is not None:
        save_hybrid(work.bench(), ranking.kept(keep), args.save)
    return Outcome(
        ranking, points, plans, keep, results["sliding"], study.original(recall=False), rows[(), OWN]
    )


def save_hybrid(bench: Bench, own: Collection[int], folder: Path) -> None:
    """Write the model with softmax in the layers `own`; the maps of the others stay.

    Raises:
        TrainingError: the folder cannot be written.
    """
    put(bench.model, {layer.module: None for layer in bench.layers if layer.number in own})
    model: Any = bench.model
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with filling(folder) as partial:
        model.save_pretrained(partial)
        bench.tokenizer.save_pretrained(partial)
