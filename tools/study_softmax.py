"""The parts of docs/results.md about softmax itself: softmax1, log-n, and 1 / sqrt(d)."""

from __future__ import annotations

from study_place import Place
from study_plan import rows_of
from study_row import Json, Row
from study_tables import spread, table, told

COLUMNS = {
    "kurtosis, greatest layer": "kurtosis_max",
    "kurtosis, mean": "kurtosis_mean",
    "infinity norm, greatest layer": "inf_norm_max",
    "mass on the first token": "sink",
    "mass in all": "mass",
    "entropy over log n": "relative_entropy",
}


def diagnosed_rows(place: Place) -> list[Row]:
    """Rows of a base whose attention was looked at."""
    return [row for row in rows_of(place.base, place.base.tables) if place.found("diagnose", row)]


def activations(place: Place) -> str:
    """Activations and attention mass, for softmax1."""
    body = []
    for row in diagnosed_rows(place):
        found = place.found("diagnose", row)
        body.append([told(row), *(spread([one[name] for one in found]) for name in COLUMNS.values())])
    return table(["", *COLUMNS], body)


def entropies(place: Place) -> str:
    """Entropy by number of visible keys, for log-n."""
    body, heads = [], [""]
    for row in diagnosed_rows(place):
        curves = [one["entropy"] for one in place.found("diagnose", row)]
        shown = [n for n in curves[0] if int(n) >= 16]
        heads = ["", *(f"up to {int(n):,}" for n in shown)]
        body.append([told(row), *(spread([curve[n] for curve in curves]) for n in shown)])
    return table(heads, body)


def scale(found: Json) -> str:
    """Variance of scores and softmax's Jacobian by head dimension."""
    names = ("variance", "entropy", "jacobian", "saturated")
    body = [[row["kind"], str(row["d"]), *(spread(row[name]) for name in names)] for row in found["rows"]]
    heads = [
        "scores",
        "d",
        "variance",
        "entropy, nats",
        "norm of the Jacobian",
        "share of queries below 0.01",
    ]
    return table(heads, body)
