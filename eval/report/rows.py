"""Build one row per model of everything that was measured of it, and tell the original and the control."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from hf_linattn.cli.files import read_json
from hf_linattn.errors import DataError

from ..common.models import UNPATCHED
from .discover import KINDS, Discovery, ResultFolder, Stage, reading
from .groups import Groups, settings_of, training_of
from .identity import AS_IT_IS, ModelResult, Models, model_results, names

Role = Literal["original", "control", "patch"]
ROLES: tuple[Role, ...] = ("original", "control", "patch")
MEASURED = ("perplexity", "recall", "generation", "cost")
"""Kinds whose results may have been measured with different settings."""
SAME = 1e-6
"""Relative difference up to which two measurements of one model are one."""


@dataclass(frozen=True)
class Point:
    """Perplexity at a length, with its standard error (None if it is not known)."""

    length: int
    perplexity: float
    stderr: float | None
    byte_perplexity: float
    tokens: int
    buckets: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class ModelRow:
    """One model of the comparison.

    Attributes:
        name: on the page.
        key, variant: which model, see `identity.Models` and `identity.ModelResult`.
        results: kind -> results with this model in them.
        folders: names of the folders whose results are about this model.
        groups: kind -> group of `Groups` that its numbers belong to.
        points: the length curve, shortest length first.
        recall: rows of `eval.recall`.
        generation: summary of `eval.generation`.
        cost, unpatched_cost: rows of `bench --cost`; those of the unpatched model in the same run.
        branches, sentences: rows and sentences of `eval.branches`.
        stages: training runs, first to last.
        validation: nats per token of the validation text, by stage; "before" and "after" of a fine-tuning.
        base, training: key of the model that training began with; how it was trained.
        role: the original, the control, or a model that is compared with them.
        own_attention: it has the attention that its model came with; None where that cannot be known.
        state: `generation.samples.state_of` the model, may be empty.
        commands: those that made the numbers.
    """

    name: str
    key: str
    variant: str
    results: dict[str, ResultFolder] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    recall: list[dict[str, Any]] = field(default_factory=list)
    generation: dict[str, Any] = field(default_factory=dict)
    cost: list[dict[str, Any]] = field(default_factory=list)
    unpatched_cost: list[dict[str, Any]] = field(default_factory=list)
    branches: list[dict[str, Any]] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)
    base: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    role: Role = "patch"
    own_attention: bool | None = None
    state: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int | None:
        """Tokens of training, all stages together; None for a model that was not trained here."""
        return sum(stage.results["tokens"] for stage in self.stages) if self.stages else None

    @property
    def perplexities(self) -> dict[int, float]:
        """Length -> perplexity."""
        return {point.length: point.perplexity for point in self.points}

    @property
    def longest_over_shortest(self) -> float | None:
        """Perplexity at the longest length over that at the shortest."""
        values = self.perplexities
        return values[max(values)] / values[min(values)] if len(values) > 1 else None

    @property
    def patch(self) -> str:
        """The patch that was trained or put on at measuring; empty where there is none or it is not known."""
        for folder in self.trainings:
            if patch := folder.content["arguments"].get("patch"):
                return json.dumps(patch) if isinstance(patch, dict) else str(patch)
        return "" if self.variant in (AS_IT_IS, UNPATCHED) else self.variant

    @property
    def trainings(self) -> list[ResultFolder]:
        """Results of the training that made this model."""
        return [self.results[kind] for kind in ("finetune", "convert") if kind in self.results]

    @property
    def validation_change(self) -> tuple[float, float] | None:
        """Nats per token with the attention just swapped, and after the last stage."""
        last = self.stages[-1].name if self.stages else ""
        before = self.validation.get("before", self.validation.get("swapped"))
        after = self.validation.get("after", self.validation.get(last))
        return None if before is None or after is None else (before, after)

    @property
    def kind(self) -> str:
        """What sets it apart, in words."""
        if self.role == "original":
            return "the original"
        trained = "fine-tuned" if self.stages else "not trained here"
        trained = "converted" if "convert" in self.results else trained
        attention = {True: "own attention, ", False: "", None: "attention not known, "}[self.own_attention]
        return ("the control: " if self.role == "control" else "") + attention + trained


@dataclass(frozen=True)
class Curves:
    """The rows whose length curves may stand in one figure, and how they were measured.

    Attributes:
        letter: of the group, where there are several.
        arguments, data: of the perplexity command, and facts of its text.
    """

    rows: list[ModelRow]
    letter: str
    train_length: int | None
    arguments: dict[str, Any]
    data: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        """Every length that was measured."""
        return sorted({length for row in self.rows for length in row.perplexities})


@dataclass(frozen=True)
class Prompt:
    """A text that models continued, and (row, name, text) of each; None for a model without a row."""

    text: str
    samples: list[tuple[ModelRow | None, str, str]]


@dataclass
class Comparison:
    """All rows, the original and the control first.

    Attributes:
        groups: kind -> the different settings it was measured with.
        notes: sentences to read before comparing.
        verdicts: task -> whether the original is able to do it, of `eval.recall`.
        alike: every trained model was trained in the same way.
        diagnoses: results of `eval.diagnose`.
    """

    rows: list[ModelRow]
    groups: dict[str, Groups]
    notes: list[str]
    verdicts: dict[str, dict[str, Any]]
    train_length: int | None
    versions: dict[str, str]
    alike: bool
    prompts: list[Prompt]
    diagnoses: list[ResultFolder]

    def role(self, role: Role) -> ModelRow | None:
        """Return the row with this role."""
        return next((row for row in self.rows if row.role == role), None)

    def ratio(self, row: ModelRow, role: Role, length: int) -> float | None:
        """Return perplexity over that of a role's row; None where they were not measured alike."""
        other = self.role(role)
        if other is None or other is row or other.groups.get("perplexity") != row.groups.get("perplexity"):
            return None
        own, others = row.perplexities.get(length), other.perplexities.get(length)
        return None if own is None or others is None else own / others

    def grouped(self, kind: str) -> list[tuple[str, list[ModelRow]]]:
        """Return (letter, rows) of those whose results of a kind were measured alike."""
        groups = self.groups[kind]
        return [
            (groups.letter(group), [row for row in self.rows if row.groups.get(kind) == group])
            for group in range(len(groups.settings))
        ]

    @property
    def curves(self) -> list[Curves]:
        """The length curves, one group a figure."""
        curves = []
        for letter, rows in self.grouped("perplexity"):
            content = rows[0].results["perplexity"].content
            facts = (content.get("train_length"), content["arguments"], content.get("data", {}))
            curves.append(Curves(rows, letter, *facts))
        return curves


def compare(
    discovery: Discovery,
    *,
    original: str | None = None,
    control: str | None = None,
    samples: Path | None = None,
    commands: Path | None = None,
) -> Comparison:
    """Put the results of each model together.

    Args:
        discovery: the result folders.
        original: name of its row; None: derived where just one row can be it.
        control: likewise.
        samples: file of `eval.generation --prompt`.
        commands: JSON object, name -> commands. A name is that of a row or of a folder of its results, and
            the row then goes by it.

    Raises:
        DataError: two folders of one kind for a row, results that contradict each other, an unknown name, or
            a file that cannot be read.
    """
    results = [folder for folder in discovery.folders if folder.kind != "diagnose"]
    models = Models(results)
    entries: list[ModelResult] = []
    for folder in results:
        with reading(folder):
            entries += model_results(folder, models)
    pairs = list(dict.fromkeys((entry.key, entry.variant) for entry in entries))
    row_names = names(pairs, models)
    by_model = {pair: ModelRow(row_names[pair], *pair) for pair in pairs}
    groups = {kind: Groups() for kind in MEASURED}
    verdicts: dict[str, dict[str, Any]] = {}
    for entry in entries:
        with reading(entry.folder):
            _add(by_model[entry.key, entry.variant], entry, groups, models)
        for verdict in entry.folder.content.get("verdicts", []):
            verdicts.setdefault(verdict["task"], verdict)
    # an original that a generation was compared with has no number of its own there
    rows = [row for row in by_model.values() if row.results]
    for row in rows:
        row.own_attention = _has_own_attention(row, models)
    _set_commands(rows, read_json(commands) if commands is not None else {})
    notes = [*models.notes, *discovery.not_shown, *_set_roles(rows, original, control)]
    rows.sort(key=lambda row: (ROLES.index(row.role), row.name))
    training_notes = _training_notes(rows, models)
    lengths = {f.content["train_length"] for f in results if f.content.get("train_length")}
    return Comparison(
        rows=rows,
        groups=groups,
        notes=notes + training_notes,
        verdicts=verdicts,
        train_length=lengths.pop() if len(lengths) == 1 else None,
        versions=_versions(discovery.folders),
        alike=not training_notes,
        prompts=_prompts(samples, rows, models) if samples is not None else [],
        diagnoses=[folder for folder in discovery.folders if folder.kind == "diagnose"],
    )


def _add(row: ModelRow, entry: ModelResult, groups: dict[str, Groups], models: Models) -> None:
    """Add what one results file says of one model."""
    folder, kind = entry.folder, entry.folder.kind
    content = folder.content
    if kind == "generation" and not entry.main:
        return
    group = None
    if kind in MEASURED:
        compared_with = None
        if kind == "generation":
            compared_with = models.folder(models.key(content["original"]["source"], folder.folder)).name
        group = groups[kind].index(settings_of(folder, compared_with))
    rows = [line for line in content.get("rows", []) if line.get("model") == entry.label]
    if kind in ("recall", "perplexity") and not rows:
        raise DataError(f"{folder.folder}: results.json has no row of {entry.label!r}, which it lists")
    if entry.main:
        row.folders.append(folder.folder.name)
    if kind in row.results:
        _check_again(row, entry, group, rows)
        return
    row.results[kind] = folder
    if group is not None:
        row.groups[kind] = group
    if kind in ("finetune", "convert"):
        _add_training(row, folder, models)
    elif kind == "perplexity":
        row.points = _points(rows)
    elif kind == "recall":
        row.recall = rows
    elif kind == "generation":
        row.generation = next(one for one in content["summaries"] if one["model"] == entry.label)
    elif kind == "branches":
        row.branches, row.sentences = content["rows"], content["sentences"]
    else:
        # a model without a patch is itself the unpatched one
        lines = _per_sequence(content["rows"], content["arguments"]["batch_size"])
        row.cost = [line for line in lines if line["model"] == entry.label] or lines
        row.unpatched_cost = [line for line in lines if line["model"] == UNPATCHED] if rows else []


def _check_again(
    row: ModelRow, entry: ModelResult, group: int | None, rows: Sequence[dict[str, Any]]
) -> None:
    """Refuse a model that stands in several files of a kind, unless the numbers are the same."""
    first, second, kind = row.results[entry.folder.kind], entry.folder, entry.folder.kind
    if first is second:
        return
    text = f"{first.folder} and {second.folder} both hold results of {KINDS[kind]} for {row.name}"
    values = {"perplexity": [p.perplexity for p in row.points], "recall": [r["accuracy"] for r in row.recall]}
    again = [line["perplexity" if kind == "perplexity" else "accuracy"] for line in rows]
    if kind in values and not entry.main and group == row.groups[kind]:
        pairs = list(zip(sorted(values[kind]), sorted(again), strict=False))
        if len(values[kind]) == len(again) and all(math.isclose(a, b, rel_tol=SAME) for a, b in pairs):
            return
        text += ", and their numbers differ"
    elif group is not None and group != row.groups[kind]:
        text += ", asked differently"
    raise DataError(f"{text}: give one of them")


def _add_training(row: ModelRow, folder: ResultFolder, models: Models) -> None:
    if row.stages:
        raise DataError(f"{row.name} is the result of two trainings: {folder.folder} and another folder")
    row.stages = folder.stages
    row.base = models.key(str(folder.content["arguments"]["model"]), folder.folder)
    row.training = training_of(folder, models.folder(row.base).name)
    if folder.kind == "convert":
        row.validation = folder.validation
        return
    values = {"before": folder.content.get("eval_loss_before"), "after": folder.content.get("eval_loss")}
    row.validation = {name: value for name, value in values.items() if value is not None}


def _points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """Return the curve, shortest length first."""
    wanted = ("length", "perplexity", "stderr", "byte_perplexity", "tokens", "buckets")
    points = [Point(**{name: row[name] for name in wanted if name in row}) for row in rows]
    return sorted(points, key=lambda point: point.length)


def _per_sequence(lines: Sequence[Mapping[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Return rows of `bench --cost` with the bytes of one sequence."""
    sizes = ("cache_bytes", "peak_bytes")
    return [
        {**line, **{name: line[name] // batch for name in sizes if line[name] is not None}} for line in lines
    ]


def _versions(folders: Sequence[ResultFolder]) -> dict[str, str]:
    """Return package -> version, or all versions where results differ."""
    seen: dict[str, list[str]] = {}
    for folder in folders:
        for content in [stage.results for stage in folder.stages] or [folder.content]:
            for name, version in content.get("versions", {}).items():
                if version not in seen.setdefault(name, []):
                    seen[name].append(version)
    return {name: ", ".join(versions) for name, versions in seen.items()}


def _set_commands(rows: Sequence[ModelRow], commands: Mapping[str, Any]) -> None:
    """Give each row the commands of its results, or the user's, with the name that these have."""
    for row in rows:
        row.commands = list(dict.fromkeys(folder.content["command"] for folder in row.results.values()))
        name = next((name for name in (row.name, *row.folders) if commands.get(name)), None)
        if name is not None:
            row.commands = list(commands[name])
            if name not in [other.name for other in rows]:
                row.name = name


def _prompts(path: Path, rows: Sequence[ModelRow], models: Models) -> list[Prompt]:
    """Read what models wrote, and give each row its state."""
    content = read_json(path)
    by_key = {row.key: row for row in rows if row.variant == AS_IT_IS}
    try:
        for entry in content.get("models", []):
            row = by_key.get(models.key(entry["model"], path.parent))
            if row is not None and "state_bytes" in entry:
                row.state = dict(entry)
        prompts = [Prompt(text, []) for text in content.get("prompts", [])]
        for sample in content.get("samples", []):
            row = by_key.get(models.key(sample["model"], path.parent))
            name = sample["model"] if row is None else row.name
            prompts[sample["prompt"]].samples.append((row, name, sample["text"]))
    except (KeyError, IndexError, TypeError) as error:
        raise DataError(
            f"{path} holds no samples of hf_linattn.eval.generation: {type(error).__name__}"
        ) from error
    return prompts


def _has_own_attention(row: ModelRow, models: Models) -> bool | None:
    """Tell whether a row has the attention that its model came with."""
    if row.variant != AS_IT_IS:
        return row.variant == UNPATCHED
    if any(folder.content["arguments"].get("patch") for folder in row.trainings):
        return False
    patched = models.patched(row.key)
    return None if patched is None else not patched


def _set_roles(rows: Sequence[ModelRow], original: str | None, control: str | None) -> list[str]:
    """Set the roles of the original and the control; return why one of them has no row."""
    notes = []
    bases = {row.base for row in rows if row.stages}
    untrained = [row for row in rows if row.own_attention and not row.stages]
    candidates = {
        "original": [row for row in untrained if row.key in bases] or untrained,
        "control": [row for row in rows if row.own_attention and row.stages],
    }
    wanted: list[tuple[Role, str | None]] = [("original", original), ("control", control)]
    if original is not None and original == control:
        raise DataError(f"--original and --control both name {original}")
    for role, name in wanted:
        if name is not None:
            _row_named(rows, name, role).role = role
            continue
        possible = [row for row in candidates[role] if row.name not in (original, control)]
        if len(possible) == 1:
            possible[0].role = role
        elif possible and len(rows) > 1:
            listed = ", ".join(row.name for row in possible)
            notes.append(f"Several rows could be the {role} ({listed}): name one with --{role}.")
    return notes


def _row_named(rows: Sequence[ModelRow], name: str, role: str) -> ModelRow:
    known = {row.name: row for row in rows}
    if name in known:
        return known[name]
    near = get_close_matches(name, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"--{role}: no row is called {name!r}.{hint} There are {', '.join(known)}.")


def _training_notes(rows: Sequence[ModelRow], models: Models) -> list[str]:
    """Say where models were not trained alike, so that a difference need not be the attention's."""
    trained = [row for row in rows if row.training]
    first = next((row for row in trained if row.role == "control"), trained[0] if trained else None)
    original = next((row for row in rows if row.role == "original"), None)
    known = {row.key for row in trained}
    notes = [
        f"{row.name} was trained from {models.folder(str(row.base))}, and the original is {original.name}."
        for row in trained
        if original is not None and row.base not in (original.key, *known)
    ]
    for row in trained:
        if first is None or row is first:
            continue
        names = [*(first.training | row.training)]
        if row.training["command"] != first.training["command"]:
            names = ["command", "model", "data"]
        pairs = [(name, row.training.get(name), first.training.get(name)) for name in names]
        different = [f"{name} {own} where {first.name} has {its}" for name, own, its in pairs if own != its]
        if row.tokens != first.tokens and not any(text.startswith("tokens") for text in different):
            different.append(f"{row.tokens:,} tokens where {first.name} has {first.tokens:,}")
        if different:
            notes.append(f"{row.name} was trained otherwise than {first.name}: {'; '.join(different)}.")
    return notes
