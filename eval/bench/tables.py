"""Write ratios as tables: times as fast as softmax, part of its memory, share of what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.formatting import size, text_table
from .break_even import GROUP, REFERENCES, BreakEven, faster, groups, names, rows_of
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
    tables = []
    for group, kind in _parts(rows):
        lengths = _lengths(rows, group, kind)
        body = []
        for name in [*_in_place(rows), *names(rows)]:
            own = rows_of(rows, group, kind, name)
            by_length = {row["length"]: row for row in own}
            cells = [_speed(by_length.get(n), spread) for n in lengths]
            if any(cell != "-" for cell in cells):
                where = None if name == IN_PLACE else faster(own)
                body.append([name, *cells, _where(where)])
        if body:
            heads = ["", *map(tokens, lengths), "faster from"]
            tables.append(Table(f"{KINDS[kind]}, {group_text(group)}", heads, body))
    return tables


def memories(rows: Sequence[Row]) -> list[Table]:
    """Return peak memory above the inputs over the reference's, by length."""
    return _plain(rows, "memory_ratio", lambda value: f"{value:.3g}")


def shares(rows: Sequence[Row]) -> list[Table]:
    """Return the least time on this machine over the time that was needed, in percent."""
    return _plain(rows, "share", lambda value: f"{100 * value:.0f} %", references=True)


def tokens_per_second(rows: Sequence[Row]) -> list[Table]:
    """Return tokens per second of a whole model, by length."""
    return _plain(rows, "tokens_per_second", lambda value: f"{value:,.0f}", references=True)


def caches(rows: Sequence[Row]) -> list[Table]:
    """Return bytes of the cache or state behind the prefill of a whole model."""
    own = [row for row in rows if row["kind"] == "prefill"]
    return _plain(own, "cache_bytes", size, references=True)


def _plain(rows: Sequence[Row], column: str, form: Any, *, references: bool = False) -> list[Table]:
    tables = []
    for group, kind in _parts(rows):
        lengths = _lengths(rows, group, kind)
        body = []
        for name in [n for n in names(rows, references=True) if references or n not in REFERENCES]:
            own = {row["length"]: row[column] for row in rows_of(rows, group, kind, name)}
            cells = ["-" if own.get(n) is None else form(own[n]) for n in lengths]
            if any(cell != "-" for cell in cells):
                body.append([name, *cells])
        if body:
            tables.append(Table(f"{KINDS[kind]}, {group_text(group)}", ["", *map(tokens, lengths)], body))
    return tables


def refusals(rows: Sequence[Row]) -> list[str]:
    """Say what was not run, and why."""
    return [
        f"{row['candidate']}, {KINDS[row['kind']]}, {group_text(tuple(row[key] for key in GROUP))}, "
        f"{row['length']:,} tokens: {row['note']}"
        for row in rows
        if not row["measured"]
    ]


def _parts(rows: Sequence[Row]) -> list[tuple[tuple[Any, ...], str]]:
    return [(group, kind) for group in groups(rows) for kind in KINDS]


def _in_place(rows: Sequence[Row]) -> list[str]:
    return [IN_PLACE] if any(row["candidate"] == IN_PLACE for row in rows) else []


def _lengths(rows: Sequence[Row], group: tuple[Any, ...], kind: str) -> list[int]:
    own = [row for row in rows if row["kind"] == kind and tuple(row[key] for key in GROUP) == group]
    return sorted({row["length"] for row in own if row["measured"]})


def _speed(row: Row | None, spread: bool) -> str:
    if row is None or row["speed"] is None:
        return "-"
    text = f"{row['speed']:.3g}"
    return f"{text} ({row['speed_low']:.3g} to {row['speed_high']:.3g})" if spread else text


def _where(where: BreakEven | None) -> str:
    if where is None:
        return ""
    if where.tokens is None:
        return "never"
    return f"{where.tokens:,}" if not where.everywhere else f"{where.tokens:,} or below"


def aligned(table: Table) -> str:
    """Return the table as text for a terminal."""
    return f"{table.title}\n{text_table(table.heads, table.body)}"


def markdown(table: Table) -> str:
    """Return the table as Markdown, without the title."""
    rule = "|" + "---|" * len(table.heads)
    lines = ["| " + " | ".join(row) + " |" for row in [table.heads, *table.body]]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
