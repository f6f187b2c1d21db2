"""Write ratios as tables: times as fast as softmax, part of its memory, share of what the machine can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..common.formatting import size, text_table
from .break_even import GROUP, REFERENCES, faster, groups, names, rows_of
from .config import IN_PLACE
from .plots import KINDS, group_text, tokens

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A title, heads, and rows of cells."""

    title: str
    heads: list[str]
    body: list[list[str]]


def speeds(rows: Sequence[Row], *, spread: bool = False) -> list[Table]:
    """Return times as fast as the reference by length, and from where on it is faster."""

    def cell(row: Row) -> str:
        text = f"{row['speed']:.3g}"
        return f"{text} ({row['speed_low']:.3g} to {row['speed_high']:.3g})" if spread else text

    return _tables(rows, "speed", cell, [IN_PLACE, *names(rows)], where=True)


def memories(rows: Sequence[Row]) -> list[Table]:
    """Return peak memory above the inputs over the reference's, by length."""
    others = [name for name in names(rows, references=True) if name not in REFERENCES]
    return _tables(rows, "memory_ratio", lambda row: f"{row['memory_ratio']:.3g}", others)


def shares(rows: Sequence[Row]) -> list[Table]:
    """Return the least time on this machine over the time that was needed, in percent."""
    return _tables(rows, "share", lambda row: f"{100 * row['share']:.0f} %")


def tokens_per_second(rows: Sequence[Row]) -> list[Table]:
    """Return tokens per second of a whole model, by length."""
    return _tables(rows, "tokens_per_second", lambda row: f"{row['tokens_per_second']:,.0f}")


def caches(rows: Sequence[Row]) -> list[Table]:
    """Return bytes of the cache or state behind the prefill of a whole model."""
    own = [row for row in rows if row["kind"] == "prefill"]
    return _tables(own, "cache_bytes", lambda row: size(row["cache_bytes"]))


def _tables(
    rows: Sequence[Row],
    column: str,
    cell: Callable[[Row], str],
    shown: Sequence[str] | None = None,
    *,
    where: bool = False,
) -> list[Table]:
    """Make a table per group and kind: lengths across, a line per candidate with any number."""
    tables = []
    for group, kind in product(groups(rows), KINDS):
        measured = {name: rows_of(rows, group, kind, name) for name in names(rows, references=True)}
        lengths = sorted({row["length"] for own in measured.values() for row in own})
        body = []
        for name in measured if shown is None else shown:
            own = measured.get(name, [])
            texts = {row["length"]: cell(row) for row in own if row[column] is not None}
            if texts:
                last = [_where(name, own)] if where else []
                body.append([name, *(texts.get(length, "-") for length in lengths), *last])
        if body:
            heads = ["", *map(tokens, lengths), *(["faster from"] if where else [])]
            tables.append(Table(f"{KINDS[kind]}, {group_text(group)}", heads, body))
    return tables


def _where(name: str, own: Sequence[Row]) -> str:
    where = None if name == IN_PLACE else faster(own)
    if where is None:
        return ""
    if where.tokens is None:
        return "never"
    return f"{where.tokens:,}" if not where.everywhere else f"{where.tokens:,} or below"


def refusals(rows: Sequence[Row]) -> list[str]:
    """Say what was not run, and why."""
    return [
        f"{row['candidate']}, {KINDS[row['kind']]}, {group_text(tuple(row[key] for key in GROUP))}, "
        f"{row['length']:,} tokens: {row['note']}"
        for row in rows
        if not row["measured"]
    ]


def aligned(table: Table) -> str:
    """Return the table as text for a terminal."""
    return f"{table.title}\n{text_table(table.heads, table.body)}"


def markdown(table: Table) -> str:
    """Return the table as Markdown, without the title."""
    rule = "|" + "---|" * len(table.heads)
    lines = ["| " + " | ".join(row) + " |" for row in [table.heads, *table.body]]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
