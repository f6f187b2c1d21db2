"""The tables of the recall command: what they hold, and how they look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from .measure import Row
from .verdict import over_depths, percent

FORMAT = "hf_linattn.recall/1"
COLUMNS = ("task", "model", *(field.name for field in fields(Row) if field.name != "task"))


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table per task: models downwards, lengths to the right, accuracies (means over depths) in percent."""
    return "\n\n".join(_table(rows, task) for task in dict.fromkeys(row["task"] for row in rows))


def _table(rows: Sequence[Mapping[str, Any]], task: str) -> str:
    own = [row for row in rows if row["task"] == task]
    lengths = sorted({row["length"] for row in own})
    lines: dict[str, list[str]] = {task: [str(length) for length in lengths]}
    chances: dict[int, float] = {}
    for model in dict.fromkeys(row["model"] for row in own):
        points = {p["length"]: p for p in over_depths([row for row in own if row["model"] == model])}
        chances |= {length: point["chance"] for length, point in points.items()}
        lines[model] = [_cell(points.get(length)) for length in lengths]
    lines["chance"] = [percent(chances[length]) for length in lengths]
    width = max(map(len, lines))
    columns = max(len(cell) for cells in lines.values() for cell in cells)
    return "\n".join(
        " ".join([f"{name:<{width}}", *(f"{cell:>{columns}}" for cell in cells)])
        for name, cells in lines.items()
    )


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    error = "" if point["stderr"] is None else f" +- {100 * point['stderr']:.1f}"
    return f"{100 * point['accuracy']:.1f}{error} %"
