"""Markdown tables of docs/results.md, and how figures and rows are written in them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from study_row import Row


def told(row: Row) -> str:
    """What a row is."""
    if row.told:
        return row.told
    text = f"`{row.patch}`" if row.patch else "softmax"
    if row.options:
        text += " (" + ", ".join(f"{name} {value}" for name, value in row.options.items()) + ")"
    if row.rope:
        text += f", RoPE {row.rope.replace(':', ' x')}"
    return text + (", not trained" if row.how == "none" else "")


def spread(values: Sequence[float]) -> str:
    """The mean, and behind it the least and the greatest."""
    if not values:
        return "-"
    if len(values) == 1:
        return number(values[0])
    return f"{number(mean(values))} ({number(min(values))} to {number(max(values))})"


def number(value: float) -> str:
    """Four digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(row)} |" for row in body]
    return "\n".join(lines) + "\n"
