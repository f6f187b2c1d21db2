"""What fine-tuning and perplexity runs have left, brought together: one entry per run."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hf_linattn.errors import DataError

Role = Literal["original", "control", "patch"]


@dataclass(frozen=True)
class Point:
    """Perplexity at a length, with its standard error (None if it cannot be told)."""

    length: int
    perplexity: float
    stderr: float | None
    byte_perplexity: float
    tokens: int
    buckets: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """One model of the comparison.

    Attributes:
        name: name of its folders.
        role: the original, the control (fine-tuned with the attention it had), or a patch.
        patch: the patch put on for fine-tuning, or at measuring; None for the model's own attention.
        points: the length curve, by length; may be empty.
        tuning: results.json of the fine-tuning, or None.
        losses: rows of train.csv.
        state: `state_of` the model, may be empty.
        samples: (prompt index, text) of the model's continuations.
        commands: what made the numbers.
        shown: how tables and plots call it; None: by its role, or its name.
        place: index of its colour; None: its place among the patches.
    """

    name: str
    role: Role
    patch: str | None
    points: list[Point]
    tuning: dict[str, Any] | None
    losses: list[dict[str, str]]
    state: dict[str, Any]
    samples: list[tuple[int, str]]
    commands: list[str]
    shown: str | None = None
    place: int | None = None

    @property
    def label(self) -> str:
        """How tables and plots call it."""
        if self.shown is not None:
            return self.shown
        return {"original": "unpatched", "control": "control"}.get(self.role, self.name)

    @property
    def kind(self) -> str:
        """What sets it apart from the others."""
        return {"original": "as it came, not fine-tuned", "control": "own attention, fine-tuned"}.get(
            self.role, "fine-tuned" if self.tuning else "not fine-tuned"
        )

    @property
    def perplexities(self) -> dict[int, float]:
        """Length -> perplexity."""
        return {point.length: point.perplexity for point in self.points}

    @property
    def flatness(self) -> float | None:
        """Perplexity at the longest length over that at the shortest."""
        values = self.perplexities
        return values[max(values)] / values[min(values)] if len(values) > 1 else None


@dataclass(frozen=True)
class Summary:
    """All runs, the original and the control first, and what they have in common.

    Attributes:
        alike: every fine-tuned run saw the same batches, at the same learning rate.
    """

    runs: list[Run]
    train_length: int | None
    data: dict[str, Any]
    measuring: dict[str, Any]
    versions: dict[str, str]
    prompts: list[str]
    alike: bool = True

    @property
    def lengths(self) -> list[int]:
        """Every length that was measured."""
        return sorted({point.length for run in self.runs for point in run.points})

    @property
    def control(self) -> Run | None:
        """The run that patches are compared with."""
        return next((run for run in self.runs if run.role == "control"), None)

    @property
    def original(self) -> Run | None:
        """The model before any fine-tuning."""
        return next((run for run in self.runs if run.role == "original"), None)

    @property
    def patched(self) -> list[Run]:
        """The runs with a patch."""
        return [run for run in self.runs if run.role == "patch"]

    def ratio(self, run: Run, length: int) -> float | None:
        """Perplexity of the run over that of the control."""
        control = self.control
        if control is None or length not in control.perplexities or length not in run.perplexities:
            return None
        return run.perplexities[length] / control.perplexities[length]


def collect(
    runs: Path | None,
    perplexity: Path | None,
    samples: Path | None = None,
    commands: Path | None = None,
) -> Summary:
    """Read the folders.

    Args:
        runs: folder of fine-tuning runs, each a folder with results.json.
        perplexity: folder of perplexity runs, likewise; equal names belong together.
        samples: file of the sample command.
        commands: JSON object, name -> commands; by default those that the results name.

    Raises:
        DataError: a file is missing or damaged, or there is nothing to report.
    """
    tuned, measured = _results(runs), _results(perplexity)
    if not tuned and not measured:
        raise DataError(f"no results to report: no folder with results.json in {runs} or {perplexity}")
    spoken = _read(samples) if samples is not None else {}
    given = _read(commands) if commands is not None else {}
    found = [
        _run(name, runs, tuned.get(name), measured.get(name), spoken, given.get(name))
        for name in sorted(tuned.keys() | measured.keys())
    ]
    found.sort(key=lambda run: ("original", "control", "patch").index(run.role))
    first = next(iter(measured.values()), {})
    _check_same_question(measured)
    return Summary(
        runs=found,
        train_length=first.get("train_length"),
        data=first.get("data", {}),
        measuring=first.get("arguments", {}),
        versions=first.get("versions") or next(iter(tuned.values()))["versions"],
        prompts=list(spoken.get("prompts", [])),
    )


def _run(
    name: str,
    runs: Path | None,
    tuning: dict[str, Any] | None,
    measured: dict[str, Any] | None,
    spoken: Mapping[str, Any],
    commands: Sequence[str] | None,
) -> Run:
    losses: list[dict[str, str]] = []
    if tuning is not None and runs is not None and (runs / name / "train.csv").exists():
        with (runs / name / "train.csv").open(encoding="utf-8", newline="") as file:
            losses = list(csv.DictReader(file))
    sources = {measured["arguments"]["model"]} if measured else set()
    if tuning is not None:
        sources.add(str(tuning["arguments"]["output_dir"]))
    patch = _patch_name((tuning or {}).get("arguments", {}).get("patch"))
    if patch is None and measured is not None:
        patch = _patch_name(measured["arguments"].get("patch"))
    role: Role = "patch" if patch else "control" if tuning is not None else "original"
    states = [dict(model) for model in spoken.get("models", []) if model["model"] in sources]
    made = [results["command"] for results in (tuning, measured) if results]
    return Run(
        name=name,
        role=role,
        patch=patch,
        points=_points(measured) if measured else [],
        tuning=tuning,
        losses=losses,
        state=states[0] if states else {},
        samples=[(s["prompt"], s["text"]) for s in spoken.get("samples", []) if s["model"] in sources],
        commands=list(commands) if commands else made,
    )


def _patch_name(patch: Any) -> str | None:
    return json.dumps(patch) if isinstance(patch, dict) else patch


def _points(measured: dict[str, Any]) -> list[Point]:
    """The curve of the measured model itself; its baselines have folders of their own, or none."""
    label = measured["models"][0]["label"]
    names = ("length", "perplexity", "stderr", "byte_perplexity", "tokens", "buckets")
    points = [
        Point(**{name: row[name] for name in names if name in row})
        for row in measured["rows"]
        if row["model"] == label
    ]
    return sorted(points, key=lambda point: point.length)


def _results(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Name -> results.json of every run in a folder."""
    if folder is None or not folder.is_dir():
        return {}
    return {path.parent.name: _read(path) for path in sorted(folder.glob("*/results.json"))}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path} holds no JSON object")
    if found.get("complete") is False:
        raise DataError(f"{path} is not finished: start its command again")
    return found


def _check_same_question(measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Numbers on one page must answer the same question."""
    names = ("data", "lengths", "stride", "max_tokens", "bos", "join")
    questions = {run: [found["arguments"].get(n) for n in names] for run, found in measured.items()}
    for run, question in questions.items():
        first = next(iter(questions))
        different = [n for n, a, b in zip(names, questions[first], question, strict=True) if a != b]
        if different:
            raise DataError(
                f"{first} and {run} were measured with different {', '.join('--' + n for n in different)}: "
                "their perplexities cannot stand on one page"
            )


def as_rows(summary: Summary) -> list[dict[str, Any]]:
    """One flat row per run, for results.csv and results.json."""
    rows = []
    for run in summary.runs:
        tuning = run.tuning or {}
        row: dict[str, Any] = {"run": run.name, "role": run.role, "patch": run.patch or ""}
        points = {point.length: point for point in run.points}
        for length in summary.lengths:
            point = points.get(length)
            row[f"perplexity_{length}"] = point.perplexity if point else None
            row[f"stderr_{length}"] = point.stderr if point else None
            row[f"ratio_to_control_{length}"] = summary.ratio(run, length)
        row["longest_over_shortest"] = run.flatness
        row["validation_loss_before"] = tuning.get("eval_loss_before")
        row["validation_loss_after"] = tuning.get("eval_loss")
        row["fine_tuning_tokens"] = tuning.get("tokens", 0)
        row["fine_tuning_seconds"] = tuning.get("seconds", 0)
        row["state_bytes"] = run.state.get("state_bytes")
        row["bytes_per_token"] = run.state.get("bytes_per_token")
        rows.append(row)
    return rows
