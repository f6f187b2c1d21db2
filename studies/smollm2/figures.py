"""The figures of the study: what the page shows of the results in the work folder, beside this file.

A measurement goes by measure and row, `novels/control`; rows carry the tokens that they were trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies import figures

Json = dict[str, Any]
STORED = Path(__file__).with_name("results.json")
TASKS = {
    "arc_easy": "acc_norm",
    "piqa": "acc_norm",
    "winogrande": "acc",
    "openbook_qa": "acc_norm",
    "lambada": "acc",
}
"""Task -> the metric that others report."""


def load() -> dict[str, Json]:
    """Read the stored figures."""
    return figures.load(STORED)


def collect(work: Path) -> dict[str, Json]:
    """Add what lies complete in a work folder to the stored figures, store and return them."""
    found = load()
    for measure, read in READERS.items():
        for path in sorted(work.glob(f"{measure}/*/results.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.get("complete", True):
                found[f"{measure}/{path.parent.name}"] = figures.rounded(read(content))
    figures.write(STORED, found)
    return found


def _perplexity(content: Json) -> Json:
    return {str(row["length"]): row["perplexity"] for row in content["rows"]}


def _compared(content: Json) -> Json:
    curves: Json = {}
    for row in content["rows"]:
        curves.setdefault(row["model"], {})[str(row["length"])] = row["perplexity"]
    return curves


def _tasks(content: Json) -> Json:
    """By task: accuracy, its standard error, items."""
    found = {}
    for row in content["rows"]:
        name = row["task"].removeprefix("local_")
        if row["metric"] == TASKS[name]:
            found[name] = {"value": row["value"], "stderr": row["stderr"], "samples": row["samples"]}
    return found


def _recall(content: Json) -> Json:
    """By task and length: the share of right answers over all depths."""
    found: Json = {}
    for task, length in sorted({(row["task"], row["length"]) for row in content["rows"]}):
        rows = [row for row in content["rows"] if (row["task"], row["length"]) == (task, length)]
        right = sum(row["accuracy"] * row["answers"] for row in rows)
        found.setdefault(task, {})[str(length)] = right / sum(row["answers"] for row in rows)
    return found


def _cost(content: Json) -> Json:
    names = ("cache_bytes", "prefill_tokens_per_second", "decode_tokens_per_second")
    names += ("prefill_ratio", "decode_ratio", "bytes_ratio")
    rows = [row for row in content["rows"] if row["measured"]]
    row = next((row for row in rows if row["model"] != "unpatched"), rows[-1])
    return {name: row[name] for name in names}


def _agreement(content: Json) -> Json:
    return {name: content["summaries"][-1][name] for name in ("agreement", "top1", "kl", "repetition")}


def _answer(content: Json) -> Json:
    return {"text": content["samples"][-1]["text"]}


def _outliers(content: Json) -> Json:
    return {name: value for name, value in content.items() if name != "complete"}


READERS: dict[str, Callable[[Json], Json]] = {
    "novels": _perplexity,
    "peps": _perplexity,
    "swapped": _compared,
    "logn": _compared,
    "logn_far": _compared,
    "tasks": _tasks,
    "all_tasks": _tasks,
    "recall": _recall,
    "outliers": _outliers,
    "cost": _cost,
    "agreement": _agreement,
    "answer": _answer,
}
"""By measure: what is kept of its results.json."""
