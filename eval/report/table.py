"""The table of the report, as cells of the page and as flat rows for json and csv."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.formatting import number, size
from .rows import Compared, Row

NONE = "-"
"""What was not measured."""
TIMES = "\u00d7"


@dataclass(frozen=True)
class Cell:
    """One cell: what is in it, small lines below, and the letter of what was asked."""

    text: str = NONE
    small: list[str] = field(default_factory=list)
    mark: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """A title, its second line, and a cell per row."""

    title: str
    small: str
    cells: list[Cell]


def lengths_of(compared: Compared) -> list[int]:
    """Every length with a perplexity."""
    return sorted({length for row in compared.rows for length in row.perplexities})


def tasks_of(compared: Compared) -> list[str]:
    """Every task of recall, in the order of the results."""
    return list(dict.fromkeys(line["task"] for row in compared.rows for line in row.recall))


def cost_lengths(compared: Compared, *, measured: bool) -> list[int]:
    """Every length with bytes, or just those that were run."""
    lines = [line for row in compared.rows for line in row.cost]
    return sorted({line["length"] for line in lines if line["measured"] or not measured})


def mean_recall(row: Row, task: str) -> tuple[float, float] | None:
    """Accuracy and chance, means over all lengths and depths; None if the task was not asked."""
    lines = [line for line in row.recall if line["task"] == task]
    if not lines:
        return None
    return tuple(math.fsum(line[name] for line in lines) / len(lines) for name in ("accuracy", "chance"))  # type: ignore[return-value]


def cost_at(row: Row, length: int) -> dict[str, Any] | None:
    """The row of `eval.cost` at a length."""
    return next((line for line in row.cost if line["length"] == length), None)


def columns(compared: Compared) -> list[Column]:
    """What there is, from left to right."""
    found = [_perplexity(compared, length) for length in lengths_of(compared)]
    found += [_recall(compared, task) for task in tasks_of(compared)]
    if any(row.generation for row in compared.rows):
        found += [_generation(compared, "agreement"), _generation(compared, "kl")]
    if any(row.stages for row in compared.rows):
        found.append(Column("training", "tokens", [_training(row) for row in compared.rows]))
    every, run = cost_lengths(compared, measured=False), cost_lengths(compared, measured=True)
    found += [_bytes(compared, length) for length in dict.fromkeys(every[:1] + every[-1:])]
    for length in run[-1:]:
        found += [_speed(compared, kind, length) for kind in ("prefill", "decode")]
    return found


def _perplexity(compared: Compared, length: int) -> Column:
    groups = compared.groups["perplexity"]
    best: dict[int, float] = {}
    for row in compared.rows:
        if length in row.perplexities:
            group = row.groups["perplexity"]
            best[group] = min(best.get(group, math.inf), row.perplexities[length])
    cells = []
    for row in compared.rows:
        point = next((point for point in row.points if point.length == length), None)
        if point is None:
            cells.append(Cell())
            continue
        small = [] if point.stderr is None else [f"± {number(point.stderr)}"]
        for role, word in (("original", "original"), ("control", "control")):
            ratio = compared.ratio(row, role, length)  # type: ignore[arg-type]
            small += [] if ratio is None else [f"{ratio:.3g} {TIMES} {word}"]
        group = row.groups["perplexity"]
        alone = sum(other.groups.get("perplexity") == group for other in compared.rows) == 1
        lowest = point.perplexity == best[group] and not alone
        cells.append(Cell(number(point.perplexity), small, groups.mark(group), lowest))
    return Column("perplexity", f"at {length:,}", cells)


def _recall(compared: Compared, task: str) -> Column:
    cells = []
    for row in compared.rows:
        found = mean_recall(row, task)
        if found is None:
            cells.append(Cell())
            continue
        mark = compared.groups["recall"].mark(row.groups["recall"])
        cells.append(Cell(f"{100 * found[0]:.1f} %", [f"chance {100 * found[1]:.2g} %"], mark))
    return Column("recall", task, cells)


def _generation(compared: Compared, name: str) -> Column:
    cells = []
    for row in compared.rows:
        one = row.generation
        if one.get(name) is None:
            cells.append(Cell())
            continue
        mark = compared.groups["generation"].mark(row.groups["generation"])
        if name == "agreement":
            cells.append(Cell(f"{one[name]:.1f}", [f"identical {one['identical']}/{one['prompts']}"], mark))
        else:
            error = [] if one["kl_stderr"] is None else [f"± {one['kl_stderr']:.2g}"]
            cells.append(Cell(f"{one[name]:.3g}", [*error, f"same token {one['top1']:.0%}"], mark))
    titles = {"agreement": ("agreement", "tokens"), "kl": ("KL", "nats per token")}
    return Column(*titles[name], cells)


def _training(row: Row) -> Cell:
    if row.tokens is None:
        return Cell()
    if "convert" in row.found:
        return Cell(f"{row.tokens:,}", [f"{s.name} {s.results['tokens']:,}" for s in row.stages])
    return Cell(f"{row.tokens:,}", [f"{row.stages[0].results['seconds']:,.0f} s"])


def _bytes(compared: Compared, length: int) -> Column:
    cells = []
    for row in compared.rows:
        line = cost_at(row, length)
        if line is None:
            cells.append(Cell())
            continue
        small = [] if line["bytes_ratio"] is None else [f"{line['bytes_ratio']:.3g} {TIMES} unpatched"]
        mark = compared.groups["cost"].mark(row.groups["cost"])
        cells.append(Cell(size(line["cache_bytes"]), small + ["computed"] * (not line["measured"]), mark))
    return Column("state", f"at {length:,}", cells)


def _speed(compared: Compared, kind: str, length: int) -> Column:
    cells = []
    for row in compared.rows:
        line = cost_at(row, length)
        if line is None or not line["measured"]:
            cells.append(Cell())
            continue
        ratio = line[f"{kind}_ratio"]
        small = [] if ratio is None else [f"{ratio:.3g} {TIMES} unpatched"]
        mark = compared.groups["cost"].mark(row.groups["cost"])
        cells.append(Cell(f"{line[f'{kind}_tokens_per_second']:,.0f}", small, mark))
    return Column(f"{kind}, tokens/s", f"at {length:,}", cells)


def flat(compared: Compared) -> list[dict[str, Any]]:
    """One dictionary per row with the same names in all; None for what is missing."""
    return [
        {
            "row": row.name,
            "role": row.role if row.role != "patch" else None,
            "own_attention": row.own,
            "training_tokens": row.tokens,
            "stages": " ".join(f"{stage.name}:{stage.results['tokens']}" for stage in row.stages) or None,
            **_flat_perplexity(compared, row),
            **_flat_recall(compared, row),
            **{name: row.generation.get(name) for name in _GENERATION if _any(compared, "generation")},
            **_flat_cost(compared, row),
            **{f"{kind}_asked": _asked(compared, row, kind) for kind in compared.groups},
        }
        for row in compared.rows
    ]


_GENERATION = ("agreement", "identical", "prompts", "kl", "kl_stderr", "top1", "repetition")


def _any(compared: Compared, kind: str) -> bool:
    return any(kind in row.groups for row in compared.rows)


def _asked(compared: Compared, row: Row, kind: str) -> str | None:
    """The letter of what a row was asked; `a` where all were asked the same."""
    return None if kind not in row.groups else compared.groups[kind].mark(row.groups[kind]) or "a"


def _by(lengths: Sequence[int], value: Callable[[int], Any], name: str) -> dict[str, Any]:
    return {f"{name}_{length}": value(length) for length in lengths}


def _flat_perplexity(compared: Compared, row: Row) -> dict[str, Any]:
    lengths = lengths_of(compared)
    errors = {point.length: point.stderr for point in row.points}
    return {
        **_by(lengths, row.perplexities.get, "perplexity"),
        **_by(lengths, errors.get, "stderr"),
        **_by(lengths, lambda n: compared.ratio(row, "original", n), "ratio_to_original"),
        **_by(lengths, lambda n: compared.ratio(row, "control", n), "ratio_to_control"),
    }


def _flat_recall(compared: Compared, row: Row) -> dict[str, Any]:
    found: dict[str, float | None] = {}
    for task in tasks_of(compared):
        mean = mean_recall(row, task)
        found[f"recall_{task}"], found[f"chance_{task}"] = mean or (None, None)
    return found


def _flat_cost(compared: Compared, row: Row) -> dict[str, Any]:
    every, run = cost_lengths(compared, measured=False), cost_lengths(compared, measured=True)
    lines = {line["length"]: line for line in row.cost}

    def value(name: str) -> Callable[[int], Any]:
        return lambda length: lines.get(length, {}).get(name)

    found = {**_by(every, value("cache_bytes"), "cache_bytes"), **_by(run, value("peak_bytes"), "peak_bytes")}
    for kind in ("prefill", "decode"):
        found |= _by(run, value(f"{kind}_tokens_per_second"), f"{kind}_tokens_per_second")
        found |= _by(run, value(f"{kind}_ratio"), f"{kind}_ratio")
    return found
