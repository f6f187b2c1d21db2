"""Make the table of the report, as cells of the page and as flat rows for json and csv."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..common.formatting import exponential, number, size
from .rows import Comparison, ModelRow, Role

NONE = "-"
"""What was not measured."""
TIMES = "\u00d7"
COMPARED: tuple[Role, ...] = ("original", "control")
_GENERATION = ("agreement", "identical", "prompts", "kl", "kl_stderr", "top1", "repetition")


@dataclass(frozen=True)
class Cell:
    """One cell: what is in it, small lines below, and the letter of its group."""

    text: str = NONE
    small: list[str] = field(default_factory=list)
    letter: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """A title, its second line, and a cell per row."""

    title: str
    small: str
    cells: list[Cell]


def lengths_of(comparison: Comparison) -> list[int]:
    """Return every length with a perplexity."""
    return sorted({length for row in comparison.rows for length in row.perplexities})


def _tasks(comparison: Comparison) -> list[str]:
    return list(dict.fromkeys(line["task"] for row in comparison.rows for line in row.recall))


def _cost_lengths(comparison: Comparison, *, measured: bool) -> list[int]:
    """Return every length with bytes, or just those that were run."""
    lines = [line for row in comparison.rows for line in row.cost]
    return sorted({line["length"] for line in lines if line["measured"] or not measured})


def _mean_recall(row: ModelRow, task: str, name: str) -> float | None:
    """Return the mean of a number over all lengths and depths; None if the task was not asked."""
    values = [line[name] for line in row.recall if line["task"] == task]
    return math.fsum(values) / len(values) if values else None


def _cost_at(row: ModelRow, length: int) -> dict[str, Any]:
    """Return the row of `bench --cost` at a length; an empty one where there is none."""
    return next((line for line in row.cost if line["length"] == length), {})


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns for which there is any number, from left to right."""

    def column(
        title: str, small: str, cell: Callable[[ModelRow], Cell | None], kind: str | None = None
    ) -> None:
        """Add a column of cells, with the letters of a kind's groups, unless all are empty."""
        cells = [cell(row) or Cell() for row in comparison.rows]
        if all(each.text == NONE for each in cells):
            return
        for place, row in enumerate(comparison.rows):
            if kind in row.groups and cells[place].text != NONE:
                letter = comparison.groups[kind].letter(row.groups[kind])
                cells[place] = replace(cells[place], letter=letter)
        shown.append(Column(title, small, cells))

    shown: list[Column] = []
    lengths = lengths_of(comparison)
    for length in lengths:
        column("perplexity", f"at {length:,}", partial(_perplexity, comparison, length), "perplexity")
    if len(lengths) > 1:
        first, last = lengths[0], lengths[-1]
        column(f"{last:,}", f"over {first:,}", partial(_last_over_first, first, last))
    for task in _tasks(comparison):
        column("recall", task, partial(_recall, task), "recall")
    column("agreement", "tokens", _agreement, "generation")
    column("KL", "nats per token", _kl, "generation")
    column("training", "tokens", _training)
    column("validation", "swapped to trained", _validation)
    column("memory", "of a sequence", partial(_state, lengths[-1] if lengths else None))
    every = _cost_lengths(comparison, measured=False)
    for length in dict.fromkeys(every[:1] + every[-1:]):
        column("state", f"at {length:,}", partial(_bytes, length), "cost")
    for length in _cost_lengths(comparison, measured=True)[-1:]:
        for kind in ("prefill", "decode"):
            column(f"{kind}, tokens/s", f"at {length:,}", partial(_speed, kind, length), "cost")
    return shown


def _perplexity(comparison: Comparison, length: int, row: ModelRow) -> Cell | None:
    point = next((point for point in row.points if point.length == length), None)
    if point is None:
        return None
    small = [] if point.stderr is None else [f"\u00b1 {number(point.stderr)}"]
    for role in COMPARED:
        ratio = comparison.ratio(row, role, length)
        small += [] if ratio is None else [f"{ratio:.3g} {TIMES} {role}"]
    group = [r for r in comparison.rows if r.groups.get("perplexity") == row.groups["perplexity"]]
    lowest = min(r.perplexities.get(length, math.inf) for r in group)
    return Cell(number(point.perplexity), small, best=point.perplexity == lowest and len(group) > 1)


def _last_over_first(first: int, last: int, row: ModelRow) -> Cell | None:
    values = row.perplexities
    if first not in values or last not in values:
        return None
    return Cell(f"{values[last] / values[first]:.2f} {TIMES}")


def _recall(task: str, row: ModelRow) -> Cell | None:
    accuracy, chance = (_mean_recall(row, task, name) for name in ("accuracy", "chance"))
    if accuracy is None or chance is None:
        return None
    return Cell(f"{100 * accuracy:.1f} %", [f"chance {100 * chance:.2g} %"])


def _agreement(row: ModelRow) -> Cell | None:
    one = row.generation
    if one.get("agreement") is None:
        return None
    return Cell(f"{one['agreement']:.1f}", [f"identical {one['identical']}/{one['prompts']}"])


def _kl(row: ModelRow) -> Cell | None:
    one = row.generation
    if one.get("kl") is None:
        return None
    error = [] if one["kl_stderr"] is None else [f"\u00b1 {one['kl_stderr']:.2g}"]
    return Cell(f"{one['kl']:.3g}", [*error, f"same token {one['top1']:.0%}"])


def _training(row: ModelRow) -> Cell | None:
    if row.tokens is None:
        return None
    if "convert" in row.results:
        return Cell(f"{row.tokens:,}", [f"{s.name} {s.results['tokens']:,}" for s in row.stages])
    return Cell(f"{row.tokens:,}", [f"{row.stages[0].results['seconds']:,.0f} s"])


def _validation(row: ModelRow) -> Cell | None:
    if row.validation_change is None:
        return None
    before, after = map(exponential, row.validation_change)
    return Cell(f"{number(before)} \u2192 {number(after)}", ["perplexity"])


def _state(longest: int | None, row: ModelRow) -> Cell | None:
    """Show what `eval.generation` says of the memory: constant, or so much per token."""
    if not row.state:
        return None
    constant, per_token = row.state["state_bytes"], row.state["bytes_per_token"]
    if not per_token:
        return Cell(size(constant), ["at any length"])
    small = [] if longest is None else [f"{size(per_token * longest + constant)} at {longest:,}"]
    return Cell(f"{size(per_token)} per token", small)


def _bytes(length: int, row: ModelRow) -> Cell | None:
    line = _cost_at(row, length)
    if not line:
        return None
    small = _ratio(line["bytes_ratio"]) + ([] if line["measured"] else ["computed"])
    return Cell(size(line["cache_bytes"]), small)


def _speed(kind: str, length: int, row: ModelRow) -> Cell | None:
    line = _cost_at(row, length)
    if not line or not line["measured"]:
        return None
    return Cell(f"{line[f'{kind}_tokens_per_second']:,.0f}", _ratio(line[f"{kind}_ratio"]))


def _ratio(ratio: float | None) -> list[str]:
    return [] if ratio is None else [f"{ratio:.3g} {TIMES} unpatched"]


def flat(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one dictionary per row with the same names in all; None for what is missing."""
    lengths, tasks = lengths_of(comparison), _tasks(comparison)
    cost = {"cache_bytes": _cost_lengths(comparison, measured=False)}
    speeds = [f"{kind}_{name}" for kind in ("prefill", "decode") for name in ("tokens_per_second", "ratio")]
    cost |= dict.fromkeys(["peak_bytes", *speeds], _cost_lengths(comparison, measured=True))
    generation = _GENERATION if any("generation" in row.groups for row in comparison.rows) else ()
    rows = []
    for row in comparison.rows:
        before, after = row.validation_change or (None, None)
        errors = {point.length: point.stderr for point in row.points}
        values = {
            "row": row.name,
            "run": row.name,
            "role": None if row.role == "patch" and row.own_attention is not False else row.role,
            "patch": row.patch,
            "own_attention": row.own_attention,
            "training_tokens": row.tokens,
            "stages": " ".join(f"{stage.name}:{stage.results['tokens']}" for stage in row.stages) or None,
            "fine_tuning_tokens": row.tokens or 0,
            "fine_tuning_seconds": math.fsum(stage.results.get("seconds", 0) for stage in row.stages),
            "validation_loss_before": before,
            "validation_loss_after": after,
            **{f"perplexity_{length}": row.perplexities.get(length) for length in lengths},
            **{f"stderr_{length}": errors.get(length) for length in lengths},
            **{f"ratio_to_{role}_{n}": comparison.ratio(row, role, n) for role in COMPARED for n in lengths},
            "longest_over_shortest": row.longest_over_shortest,
        }
        for task in tasks:
            values[f"recall_{task}"] = _mean_recall(row, task, "accuracy")
            values[f"chance_{task}"] = _mean_recall(row, task, "chance")
        values |= {name: row.generation.get(name) for name in generation}
        for name, places in cost.items():
            values |= {f"{name}_{length}": _cost_at(row, length).get(name) for length in places}
        values |= {name: row.state.get(name) for name in ("state_bytes", "bytes_per_token")}
        for kind, groups in comparison.groups.items():
            # `a` where there is one group
            asked = kind in row.groups
            values[f"{kind}_asked"] = (groups.letter(row.groups[kind]) or "a") if asked else None
        rows.append(values)
    return rows
