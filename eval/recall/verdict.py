"""Whether the unpatched model can do a task at all: else recall of its patched versions means nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

NO, HARDLY = 0.1, 0.5
"""Of the way from chance to 1: below the first a model cannot do a task, below the second hardly."""
ERRORS = 3
"""Standard errors by which accuracy must lie above chance."""


def assess_baseline(rows: Sequence[Mapping[str, Any]], model: str) -> list[dict[str, Any]]:
    """Give a verdict on each task that the unpatched model was asked.

    "able" is "no", "hardly" or "yes", "length" the tokens at which its mean "accuracy" over depths lies
    farthest above "chance", and "text" a sentence about it.
    """
    own = [row for row in rows if row["model"] == model]
    return [_assess(own, task, model) for task in dict.fromkeys(row["task"] for row in own)]


def _assess(rows: Sequence[Mapping[str, Any]], task: str, model: str) -> dict[str, Any]:
    points = over_depths([row for row in rows if row["task"] == task])
    best = max(points, key=lambda point: point["accuracy"] - point["chance"])
    accuracy, stderr, chance = best["accuracy"], best["stderr"], best["chance"]
    above = (accuracy - chance) / (1 - chance) if chance < 1 else 0.0
    able = "no" if above < NO else "hardly" if above < HARDLY else "yes"
    if stderr is not None and accuracy - ERRORS * stderr <= chance:
        able = "no"
    shown = f"{percent(accuracy)} at {best['length']}, chance {percent(chance)}"
    if able != "yes" and _knows(best):
        shown += f"; {percent(best['choice'])} among the candidates, chance {percent(best['choice_chance'])}"
    endings = {
        "no": f"{model} cannot do {task}: {shown}; recall of its patched versions means nothing",
        "hardly": f"{model} can hardly do {task}: {shown}; what its patched versions lose is hard to see",
        "yes": f"{model} can do {task}: {shown}",
    }
    verdict = {"task": task, "model": model, "able": able, "length": best["length"]}
    return {**verdict, "accuracy": accuracy, "stderr": stderr, "chance": chance, "text": endings[able]}


def _knows(point: Mapping[str, Any]) -> bool:
    """Tell whether it chooses well where it does not say the answer by itself."""
    choice, chance = point["choice"], point["choice_chance"]
    if choice is None or chance == 1:
        return False
    return bool(choice > point["accuracy"] and (choice - chance) / (1 - chance) >= NO)


def over_depths(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average one model's rows of one task over depths: a point per length, shortest first."""
    points = []
    for length in sorted({row["length"] for row in rows}):
        group = [row for row in rows if row["length"] == length]
        point: dict[str, Any] = {"length": length, "stderr": None}
        for name in ("accuracy", "chance", "logprob", "choice", "choice_chance"):
            values = [row[name] for row in group]
            point[name] = None if None in values else math.fsum(values) / len(values)
        if None not in (errors := [row["stderr"] for row in group]):
            point["stderr"] = math.sqrt(math.fsum(error**2 for error in errors)) / len(errors)
        points.append(point)
    return points


def percent(share: float) -> str:
    """Write a share as `0.4 %`, `98.7 %`, `0.0011 %`."""
    number = 100 * share
    if number == 0 or number >= 99.95:
        return f"{number:.0f} %"
    return f"{number:.1f} %" if number >= 1 else f"{number:.2g} %"
