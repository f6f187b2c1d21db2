"""The parts of docs/results.md about softmax itself: softmax1, log-n, and 1 / sqrt(d)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from study_plan import DIAGNOSED, Place, Row, rows_of
from study_tables import Json, spread, table, told


def diagnosed_rows(place: Place) -> list[Row]:
    """Rows of a base whose attention was looked at."""
    return [row for row in rows_of(place.base, place.base.tables) if diagnosed(place, row)]


def diagnosed(place: Place, row: Row) -> list[Json]:
    """What was found of a row, one per seed."""
    if row.name not in DIAGNOSED:
        return []
    paths = [place.measured("diagnose", row, seed) / "diagnose.json" for seed in row.seeds(place.base)]
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]


def _layers(name: str, reduce: Callable[[Sequence[float]], float]) -> Callable[[Json], float]:
    return lambda found: float(reduce([layer[name] for layer in found["layers"]]))


def _heads(name: str) -> Callable[[Json], float]:
    return lambda found: mean(head[name] for head in found["heads"])


COLUMNS: dict[str, Callable[[Json], float]] = {
    "kurtosis, greatest layer": _layers("kurtosis", max),
    "kurtosis, mean": _layers("kurtosis", mean),
    "infinity norm, greatest layer": _layers("inf_norm", max),
    "mass on the first token": _heads("sink"),
    "mass in all": _heads("mass"),
    "entropy over log n": _heads("relative_entropy"),
}


def activations(place: Place) -> str:
    """Activations and attention mass, for softmax1."""
    body = []
    for row in diagnosed_rows(place):
        found = diagnosed(place, row)
        body.append([told(row), *(spread([read(one) for one in found]) for read in COLUMNS.values())])
    return table(["", *COLUMNS], body)


def entropies(place: Place) -> str:
    """Entropy by number of visible keys, for log-n."""
    body, heads = [], [""]
    for row in diagnosed_rows(place):
        curves = [_curve(one) for one in diagnosed(place, row)]
        shown = [n for n in curves[0] if n >= 16]
        heads = ["", *(f"up to {n:,}" for n in shown)]
        body.append([told(row), *(spread([curve[n] for curve in curves]) for n in shown)])
    return table(heads, body)


def _curve(found: Json) -> dict[int, float]:
    """Visible keys -> nats of entropy, mean over heads."""
    points: dict[int, list[float]] = {}
    for head in found["heads"]:
        for point in head["curve"]:
            points.setdefault(point["up_to"], []).append(point["entropy"])
    return {n: mean(values) for n, values in sorted(points.items())}


def scale(work: Path) -> str | None:
    """Variance of scores and softmax's Jacobian by head dimension; None where it is not measured."""
    path = work / "scale" / "results.json"
    if not path.exists():
        return None
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    body = [
        [
            row["kind"],
            str(row["d"]),
            *(spread(row[n]) for n in ("variance", "entropy", "jacobian", "saturated")),
        ]
        for row in rows
    ]
    heads = [
        "scores",
        "d",
        "variance",
        "entropy, nats",
        "norm of the Jacobian",
        "share of queries below 0.01",
    ]
    return table(heads, body)
