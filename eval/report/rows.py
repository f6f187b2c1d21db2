"""One row per model: everything that was measured of it, wherever it lies, and which row is the original."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_linattn.errors import DataError

from ..common.models import UNPATCHED
from .discover import KINDS, Found, Stage, Walk, reading
from .groups import Groups, settings_of, training_of
from .identity import Models, Subject, names, subjects
from .roles import give_roles, own_attention, training_notes
from .summary import Point, Role

MEASURED = ("perplexity", "recall", "generation", "cost")
"""Kinds whose results may differ in what was asked."""
SAME = 1e-6
"""Relative difference up to which two measurements of one model are one."""


@dataclass
class Row:
    """One model.

    Attributes:
        name: on the page.
        key, variant: which model, see `report_models`.
        found: kind -> results with this model in them.
        groups: kind -> group of `Groups` that its numbers belong to.
        points: the length curve.
        recall: rows of `eval.recall`.
        generation: summary of `eval.generation`.
        cost, beside: rows of `eval.cost`; those of the unpatched model in the same run.
        branches: rows and sentences of `eval.branches`.
        stages: training runs, first to last.
        validation: nats per token of the validation text, by stage; "before" and "after" of a fine-tuning.
        base, training: key of the model that training began with; what training was given.
        role: the original, the control, or a model that is compared with them.
        own: it has its own attention; None where that cannot be known.
    """

    name: str
    key: str
    variant: str
    found: dict[str, Found] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    recall: list[dict[str, Any]] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)
    cost: list[dict[str, Any]] = field(default_factory=list)
    beside: list[dict[str, Any]] = field(default_factory=list)
    branches: list[dict[str, Any]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    base: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    role: Role = "patch"
    own: bool | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens of training, all stages together; None for a model that was not trained here."""
        return sum(stage.results["tokens"] for stage in self.stages) if self.stages else None

    @property
    def perplexities(self) -> dict[int, float]:
        """Length -> perplexity."""
        return {point.length: point.perplexity for point in self.points}

    @property
    def kind(self) -> str:
        """What sets it apart, in words."""
        if self.role == "original":
            return "the original"
        trained = "fine-tuned" if self.stages else "not trained here"
        trained = "converted" if "convert" in self.found else trained
        attention = {True: "own attention, ", False: "", None: "attention not known, "}[self.own]
        return ("the control: " if self.role == "control" else "") + attention + trained


@dataclass
class Compared:
    """All rows, the original and the control first; what was asked of them; what a reader must be told."""

    rows: list[Row]
    groups: dict[str, Groups]
    notes: list[str]
    verdicts: dict[str, dict[str, Any]]
    train_length: int | None
    versions: dict[str, str]
    commands: dict[str, list[str]]
    diagnoses: list[Found]

    def role(self, role: Role) -> Row | None:
        """The row with this role."""
        return next((row for row in self.rows if row.role == role), None)

    def ratio(self, row: Row, role: Role, length: int) -> float | None:
        """Perplexity over that of the original or the control; None where they were not asked the same."""
        other = self.role(role)
        if other is None or other is row or other.groups.get("perplexity") != row.groups.get("perplexity"):
            return None
        mine, its = row.perplexities.get(length), other.perplexities.get(length)
        return None if mine is None or its is None else mine / its


def compare(walked: Walk, *, original: str | None = None, control: str | None = None) -> Compared:
    """Put results together.

    Args:
        walked: what `walk` has found.
        original: name of its row; None: derived where just one row can be it.
        control: likewise.

    Raises:
        DataError: two folders of one kind for a row, results that contradict each other, or an unknown name.
    """
    results = [found for found in walked.found if found.kind != "diagnose"]
    models = Models(results)
    everyone: list[Subject] = []
    for found in results:
        with reading(found):
            everyone += subjects(found, models)
    pairs = list(dict.fromkeys((subject.key, subject.variant) for subject in everyone))
    called = names(pairs, models)
    rows = {pair: Row(called[pair], *pair) for pair in pairs}
    groups = {kind: Groups() for kind in MEASURED}
    verdicts: dict[str, dict[str, Any]] = {}
    for subject in everyone:
        with reading(subject.found):
            _add(rows[subject.key, subject.variant], subject, groups, models)
        for verdict in subject.found.content.get("verdicts", []):
            verdicts.setdefault(verdict["task"], verdict)
    # an original that a generation was compared with has no number of its own there
    kept = [row for row in rows.values() if row.found]
    for row in kept:
        row.own = own_attention(row, models)
    notes = [*models.notes, *walked.left_out, *give_roles(kept, original, control)]
    kept.sort(key=lambda row: (("original", "control", "patch").index(row.role), row.name))
    notes += training_notes(kept, models)
    lengths = {f.content["train_length"] for f in results if f.content.get("train_length")}
    commands: dict[str, list[str]] = {}
    for row in kept:
        commands[row.name] = list(dict.fromkeys(found.content["command"] for found in row.found.values()))
    return Compared(
        rows=kept,
        groups=groups,
        notes=notes,
        verdicts=verdicts,
        train_length=lengths.pop() if len(lengths) == 1 else None,
        versions=_versions(walked.found),
        commands=commands,
        diagnoses=[found for found in walked.found if found.kind == "diagnose"],
    )


def _add(row: Row, subject: Subject, groups: dict[str, Groups], models: Models) -> None:
    """What one results file says of one model."""
    found, kind = subject.found, subject.found.kind
    content = found.content
    if kind == "generation" and not subject.main:
        return
    group = None
    if kind in MEASURED:
        beside = None
        if kind == "generation":
            beside = models.folder(models.key(content["original"]["source"], found.folder)).name
        group = groups[kind].index(settings_of(found, beside))
    rows = [line for line in content.get("rows", []) if line.get("model") == subject.label]
    if kind in ("recall", "perplexity") and not rows:
        raise DataError(f"{found.folder}: results.json has no row of {subject.label!r}, which it lists")
    if kind in row.found:
        _check_again(row, subject, group, rows)
        return
    row.found[kind] = found
    if group is not None:
        row.groups[kind] = group
    if kind in ("finetune", "convert"):
        _add_training(row, found, models)
    elif kind == "perplexity":
        row.points = points(rows)
    elif kind == "recall":
        row.recall = rows
    elif kind == "generation":
        row.generation = next(one for one in content["summaries"] if one["model"] == subject.label)
    elif kind == "branches":
        row.branches, row.sentences = content["rows"], content["sentences"]
    else:
        # a model without a patch is itself the unpatched one
        lines = _per_sequence(content["rows"], content["arguments"]["batch_size"])
        row.cost = [line for line in lines if line["model"] == subject.label] or lines
        row.beside = [line for line in lines if line["model"] == UNPATCHED] if rows else []


def _check_again(row: Row, subject: Subject, group: int | None, rows: Sequence[dict[str, Any]]) -> None:
    """A model that stands in several files of a kind: the same numbers, or an error."""
    first, second, kind = row.found[subject.found.kind], subject.found, subject.found.kind
    if first is second:
        return
    text = f"{first.folder} and {second.folder} both hold results of {KINDS[kind]} for {row.name}"
    values = {"perplexity": [p.perplexity for p in row.points], "recall": [r["accuracy"] for r in row.recall]}
    again = [line["perplexity" if kind == "perplexity" else "accuracy"] for line in rows]
    if kind in values and not subject.main and group == row.groups[kind]:
        pairs = list(zip(sorted(values[kind]), sorted(again), strict=False))
        if len(values[kind]) == len(again) and all(math.isclose(a, b, rel_tol=SAME) for a, b in pairs):
            return
        text += ", and their numbers differ"
    elif group is not None and group != row.groups[kind]:
        text += ", asked differently"
    raise DataError(f"{text}: give one of them")


def _add_training(row: Row, found: Found, models: Models) -> None:
    if row.stages:
        raise DataError(f"{row.name} is the result of two trainings: {found.folder} and another folder")
    row.stages = found.stages
    row.base = models.key(str(found.content["arguments"]["model"]), found.folder)
    row.training = training_of(found, models.folder(row.base).name)
    if found.kind == "convert":
        row.validation = found.validation
        return
    values = {"before": found.content.get("eval_loss_before"), "after": found.content.get("eval_loss")}
    row.validation = {name: value for name, value in values.items() if value is not None}


def points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """The curve, shortest length first."""
    wanted = ("length", "perplexity", "stderr", "byte_perplexity", "tokens", "buckets")
    found = [Point(**{name: row[name] for name in wanted if name in row}) for row in rows]
    return sorted(found, key=lambda point: point.length)


def _versions(found: Sequence[Found]) -> dict[str, str]:
    """Package -> version, or all versions where results differ."""
    seen: dict[str, list[str]] = {}
    for item in found:
        contents = [stage.results for stage in item.stages] or [item.content]
        for content in contents:
            for name, version in content.get("versions", {}).items():
                if version not in seen.setdefault(name, []):
                    seen[name].append(version)
    return {name: ", ".join(versions) for name, versions in seen.items()}


def _per_sequence(lines: Sequence[Mapping[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Rows of `eval.cost` with the bytes of one sequence."""
    divided = []
    for line in lines:
        sizes = {name: line[name] for name in ("cache_bytes", "peak_bytes") if line[name] is not None}
        divided.append({**line, **{name: size // batch for name, size in sizes.items()}})
    return divided
