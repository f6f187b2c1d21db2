"""The rows of the harness command, and their table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = "hf_linattn.harness/1"
COLUMNS = (
    "model",
    "task",
    "metric",
    "filter",
    "value",
    "stderr",
    "higher_is_better",
    "num_fewshot",
    "samples",
    "version",
    "requested",
)


def task_rows(found: Mapping[str, Any], label: str, requested: str) -> list[dict[str, Any]]:
    """A row per task, metric and filter of what lm_eval returned; of a group, the group's and all parts'."""
    rows = []
    for task, metrics in (found["results"] | found.get("groups", {})).items():
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            rows.append(
                {
                    "model": label,
                    "requested": requested,
                    "task": task,
                    "metric": metric,
                    "filter": chosen,
                    "value": _number(value),
                    "stderr": _error(metrics.get(f"{metric}_stderr,{chosen}")),
                    "higher_is_better": found["higher_is_better"].get(task, {}).get(metric),
                    "num_fewshot": found["n-shot"].get(task),
                    "samples": found["n-samples"].get(task, {}).get("effective"),
                    "version": found["versions"].get(task),
                }
            )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per task, metric and filter, one column per model, as aligned text."""
    labels = list(dict.fromkeys(row["model"] for row in rows))
    lines = [["task", "n-shot", "metric", "", *labels]]
    keys = list(dict.fromkeys((row["task"], row["metric"], row["filter"]) for row in rows))
    for task, metric, chosen in keys:
        found = {
            row["model"]: row
            for row in rows
            if (row["task"], row["metric"], row["filter"]) == (task, metric, chosen)
        }
        some = next(iter(found.values()))
        better = {True: "higher is better", False: "lower is better"}.get(some["higher_is_better"], "")
        name = metric if chosen == "none" else f"{metric} ({chosen})"
        shots = "" if some["num_fewshot"] is None else str(some["num_fewshot"])
        lines.append([task, shots, name, better, *(_cell(found.get(label)) for label in labels)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    value = row["value"] if isinstance(row["value"], str) else f"{row['value']:.4f}"
    return value if row["stderr"] is None else f"{value} +- {row['stderr']:.4f}"


def _number(value: Any) -> float | str:
    """A finite number, or its text: JSON knows no infinity."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else str(number)


def _error(value: Any) -> float | None:
    """A standard error; lm_eval writes N/A where there is none."""
    number = _number(value)
    return number if isinstance(number, float) else None
