"""Make the table of the report, as cells of the page and as flat rows for json and csv."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..common.formatting import exponential, number, size
from .rows import Comparison, ModelRow

NONE = "-"
"""What was not measured."""
TIMES = "\u00d7"


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


def tasks_of(comparison: Comparison) -> list[str]:
    """Return every task of recall, in the order of the results."""
    return list(dict.fromkeys(line["task"] for row in comparison.rows for line in row.recall))


def cost_lengths(comparison: Comparison, *, measured: bool) -> list[int]:
    """Return every length with bytes, or just those that were run."""
    lines = [line for row in comparison.rows for line in row.cost]
    return sorted({line["length"] for line in lines if line["measured"] or not measured})


def mean_recall(row: ModelRow, task: str) -> tuple[float, float] | None:
    """Return accuracy and chance, means over all lengths and depths; None if the task was not asked."""
    lines = [line for line in row.recall if line["task"] == task]
    if not lines:
        return None
    return tuple(math.fsum(line[name] for line in lines) / len(lines) for name in ("accuracy", "chance"))  # type: ignore[return-value]


def cost_at(row: ModelRow, length: int) -> dict[str, Any] | None:
    """Return the row of `bench --cost` at a length."""
    return next((line for line in row.cost if line["length"] == length), None)


def columns(comparison: Comparison) -> list[Column]:
    """Return the columns for which there is any number, from left to right."""
    lengths = lengths_of(comparison)
    shown = [_perplexity(comparison, length) for length in lengths]
    if len(lengths) > 1:
        shown.append(_longest(comparison, lengths))
    shown += [_recall(comparison, task) for task in tasks_of(comparison)]
    if any(row.generation for row in comparison.rows):
        shown += [_generation(comparison, "agreement"), _generation(comparison, "kl")]
    if any(row.stages for row in comparison.rows):
        shown.append(Column("training", "tokens", [_training(row) for row in comparison.rows]))
    if any(row.validation_change for row in comparison.rows):
        shown.append(Column("validation", "swapped to trained", list(map(_validation, comparison.rows))))
    if any(row.state for row in comparison.rows):
        longest = lengths[-1] if lengths else None
        shown.append(Column("memory", "of a sequence", [_state(row, longest) for row in comparison.rows]))
    every, run = cost_lengths(comparison, measured=False), cost_lengths(comparison, measured=True)
    shown += [_bytes(comparison, length) for length in dict.fromkeys(every[:1] + every[-1:])]
    for length in run[-1:]:
        shown += [_speed(comparison, kind, length) for kind in ("prefill", "decode")]
    return shown


def _perplexity(comparison: Comparison, length: int) -> Column:
    groups = comparison.groups["perplexity"]
    best: dict[int, float] = {}
    for row in comparison.rows:
        if length in row.perplexities:
            group = row.groups["perplexity"]
            best[group] = min(best.get(group, math.inf), row.perplexities[length])
    cells = []
    for row in comparison.rows:
        point = next((point for point in row.points if point.length == length), None)
        if point is None:
            cells.append(Cell())
            continue
        small = [] if point.stderr is None else [f"± {number(point.stderr)}"]
        for role, word in (("original", "original"), ("control", "control")):
            ratio = comparison.ratio(row, role, length)  # type: ignore[arg-type]
            small += [] if ratio is None else [f"{ratio:.3g} {TIMES} {word}"]
        group = row.groups["perplexity"]
        alone = sum(other.groups.get("perplexity") == group for other in comparison.rows) == 1
        lowest = point.perplexity == best[group] and not alone
        cells.append(Cell(number(point.perplexity), small, groups.letter(group), lowest))
    return Column("perplexity", f"at {length:,}", cells)


def _longest(comparison: Comparison, lengths: Sequence[int]) -> Column:
    cells = []
    for row in comparison.rows:
        first, last = row.perplexities.get(lengths[0]), row.perplexities.get(lengths[-1])
        cells.append(Cell() if first is None or last is None else Cell(f"{last / first:.2f} {TIMES}"))
    return Column(f"{lengths[-1]:,}", f"over {lengths[0]:,}", cells)


def _recall(comparison: Comparison, task: str) -> Column:
    cells = []
    for row in comparison.rows:
        mean = mean_recall(row, task)
        if mean is None:
            cells.append(Cell())
            continue
        letter = comparison.groups["recall"].letter(row.groups["recall"])
        cells.append(Cell(f"{100 * mean[0]:.1f} %", [f"chance {100 * mean[1]:.2g} %"], letter))
    return Column("recall", task, cells)


def _generation(comparison: Comparison, name: str) -> Column:
    cells = []
    for row in comparison.rows:
        one = row.generation
        if one.get(name) is None:
            cells.append(Cell())
            continue
        letter = comparison.groups["generation"].letter(row.groups["generation"])
        if name == "agreement":
            cells.append(Cell(f"{one[name]:.1f}", [f"identical {one['identical']}/{one['prompts']}"], letter))
        else:
            error = [] if one["kl_stderr"] is None else [f"± {one['kl_stderr']:.2g}"]
            cells.append(Cell(f"{one[name]:.3g}", [*error, f"same token {one['top1']:.0%}"], letter))
    titles = {"agreement": ("agreement", "tokens"), "kl": ("KL", "nats per token")}
    return Column(*titles[name], cells)


def _training(row: ModelRow) -> Cell:
    if row.tokens is None:
        return Cell()
    if "convert" in row.results:
        return Cell(f"{row.tokens:,}", [f"{s.name} {s.results['tokens']:,}" for s in row.stages])
    return Cell(f"{row.tokens:,}", [f"{row.stages[0].results['seconds']:,.0f} s"])


def _validation(row: ModelRow) -> Cell:
    if row.validation_change is None:
        return Cell()
    before, after = map(exponential, row.validation_change)
    return Cell(f"{number(before)} \u2192 {number(after)}", ["perplexity"])


def _state(row: ModelRow, longest: int | None) -> Cell:
    """Show what `eval.generation` says of the memory: constant, or so much per token."""
    if not row.state:
        return Cell()
    constant, per_token = row.state["state_bytes"], row.state["bytes_per_token"]
    if not per_token:
        return Cell(size(constant), ["at any length"])
    small = [] if longest is None else [f"{size(per_token * longest + constant)} at {longest:,}"]
    return Cell(f"{size(per_token)} per token", small)


def _bytes(comparison: Comparison, length: int) -> Column:
    cells = []
    for row in comparison.rows:
        line = cost_at(row, length)
        if line is None:
            cells.append(Cell())
            continue
        small = [] if line["bytes_ratio"] is None else [f"{line['bytes_ratio']:.3g} {TIMES} unpatched"]
        letter = comparison.groups["cost"].letter(row.groups["cost"])
        cells.append(Cell(size(line["cache_bytes"]), small + ["computed"] * (not line["measured"]), letter))
    return Column("state", f"at {length:,}", cells)


def _speed(comparison: Comparison, kind: str, length: int) -> Column:
    cells = []
    for row in comparison.rows:
        line = cost_at(row, length)
        if line is None or not line["measured"]:
            cells.append(Cell())
            continue
        ratio = line[f"{kind}_ratio"]
        small = [] if ratio is None else [f"{ratio:.3g} {TIMES} unpatched"]
        letter = comparison.groups["cost"].letter(row.groups["cost"])
        cells.append(Cell(f"{line[f'{kind}_tokens_per_second']:,.0f}", small, letter))
    return Column(f"{kind}, tokens/s", f"at {length:,}", cells)


def flat(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one dictionary per row with the same names in all; None for what is missing."""
    return [
        {
            "row": row.name,
            "run": row.name,
            "role": None if row.role == "patch" and row.own_attention is not False else row.role,
            "patch": row.patch,
            "own_attention": row.own_attention,
            "training_tokens": row.tokens,
            "stages": " ".join(f"{stage.name}:{stage.results['tokens']}" for stage in row.stages) or None,
            **_flat_training(row),
            **_flat_perplexity(comparison, row),
            **_flat_recall(comparison, row),
            **{name: row.generation.get(name) for name in _GENERATION if _any(comparison, "generation")},
            **_flat_cost(comparison, row),
            **{name: row.state.get(name) for name in ("state_bytes", "bytes_per_token")},
            **{f"{kind}_asked": _asked(comparison, row, kind) for kind in comparison.groups},
        }
        for row in comparison.rows
    ]


_GENERATION = ("agreement", "identical", "prompts", "kl", "kl_stderr", "top1", "repetition")


def _any(comparison: Comparison, kind: str) -> bool:
    return any(kind in row.groups for row in comparison.rows)


def _asked(comparison: Comparison, row: ModelRow, kind: str) -> str | None:
    """Return the letter of a row's group; `a` where there is one group."""
    return None if kind not in row.groups else comparison.groups[kind].letter(row.groups[kind]) or "a"


def _by(lengths: Sequence[int], value: Callable[[int], Any], name: str) -> dict[str, Any]:
    return {f"{name}_{length}": value(length) for length in lengths}


def _flat_training(row: ModelRow) -> dict[str, Any]:
    before, after = row.validation_change or (None, None)
    return {
        "fine_tuning_tokens": row.tokens or 0,
        "fine_tuning_seconds": math.fsum(stage.results.get("seconds", 0) for stage in row.stages),
        "validation_loss_before": before,
        "validation_loss_after": after,
    }


def _flat_perplexity(comparison: Comparison, row: ModelRow) -> dict[str, Any]:
    lengths = lengths_of(comparison)
    errors = {point.length: point.stderr for point in row.points}
    return {
        **_by(lengths, row.perplexities.get, "perplexity"),
        **_by(lengths, errors.get, "stderr"),
        **_by(lengths, lambda n: comparison.ratio(row, "original", n), "ratio_to_original"),
        **_by(lengths, lambda n: comparison.ratio(row, "control", n), "ratio_to_control"),
        "longest_over_shortest": row.longest_over_shortest,
    }


def _flat_recall(comparison: Comparison, row: ModelRow) -> dict[str, Any]:
    values: dict[str, float | None] = {}
    for task in tasks_of(comparison):
        mean = mean_recall(row, task)
        values[f"recall_{task}"], values[f"chance_{task}"] = mean or (None, None)
    return values


def _flat_cost(comparison: Comparison, row: ModelRow) -> dict[str, Any]:
    every, run = cost_lengths(comparison, measured=False), cost_lengths(comparison, measured=True)
    lines = {line["length"]: line for line in row.cost}

    def value(name: str) -> Callable[[int], Any]:
        return lambda length: lines.get(length, {}).get(name)

    values = {
        **_by(every, value("cache_bytes"), "cache_bytes"),
        **_by(run, value("peak_bytes"), "peak_bytes"),
    }
    for kind in ("prefill", "decode"):
        values |= _by(run, value(f"{kind}_tokens_per_second"), f"{kind}_tokens_per_second")
        values |= _by(run, value(f"{kind}_ratio"), f"{kind}_ratio")
    return values
