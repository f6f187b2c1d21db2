"""What a recall run leaves behind: results.json, from which it resumes, a csv; and its tables."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hf_linattn.checkpointing import replacing, write_json, writing
from hf_linattn.errors import DataError

from .recall_scoring import Row
from .recall_verdict import over_depths, percent

FORMAT = "hf_linattn.recall/1"
COLUMNS = ("task", "model", *(field.name for field in fields(Row) if field.name != "task"))


def load(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run of the same command left in this folder, whole or not; None if there is nothing.

    Raises:
        DataError: the folder holds results of other arguments, or a file that is none of ours.
    """
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']!r}")
        earlier = dict(found["arguments"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no file of this command; choose another --output-dir") from error
    wanted = json.loads(json.dumps(arguments))
    changed = sorted(key for key in earlier.keys() | wanted.keys() if earlier.get(key) != wanted.get(key))
    if changed:
        names = ", ".join("--" + key.replace("_", "-") for key in changed)
        raise DataError(f"{folder} holds a run with other arguments ({names}); choose another --output-dir")
    return found


def save(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json whole or not at all."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "results.json", results)


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per task, model, length and depth; whole or not at all."""
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


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
