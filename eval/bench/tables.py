"""Ratios as tables: times as fast as softmax, part of its memory, share of what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..common.formatting import size
from .answers import GROUP, REFERENCES, faster, groups, names, rows_of
from .break_even import Crossing
from .candidates import IN_PLACE
from .plots import KINDS, tokens, told

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A title, heads, and rows of cells."""

    title: str
    heads: list[str]
    body: list[list[str]]


def speeds(rows: Sequence[Row], *, spread: bool = False) -> list[Table]:
    """Times as fast as the reference by length, and from where on it is faster."""
    found = []
    for group, kind in _parts(rows):
        lengths = _lengths(rows, group, kind)
        body = []
        for name in [*_in_place(rows), *names(rows)]:
            own = {row["length"]: row for row in rows_of(rows, group, kind, name)}
            cells = [_speed(own.get(n), spread) for n in lengths]
            if any(cell != "-" for cell in cells):
                where = None if name == IN_PLACE else faster(rows, group, kind, name)
                body.append([name, *cells, _where(where)])
        if body:
            heads = ["", *map(tokens, lengths), "faster from"]
            found.append(Table(f"{KINDS[kind]}, {told(group)}", heads, body))
    return found


def memories(rows: Sequence[Row]) -> list[Table]:
    """Peak memory above the inputs over the reference's, by length."""
    return _plain(rows, "memory_ratio", lambda value: f"{value:.3g}")


def shares(rows: Sequence[Row]) -> list[Table]:
    """Least time on this machine over the time that was needed, in percent."""
    return _plain(rows, "share", lambda value: f"{100 * value:.0f} %", references=True)


def tokens_per_second(rows: Sequence[Row]) -> list[Table]:
    """Of a whole model, by length."""
    return _plain(rows, "tokens_per_second", lambda value: f"{value:,.0f}", references=True)


def caches(rows: Sequence[Row]) -> list[Table]:
    """Bytes of the cache or state behind the prefill of a whole model."""
    own = [row for row in rows if row["kind"] == "prefill"]
    return _plain(own, "cache_bytes", size, references=True)


def _plain(rows: Sequence[Row], column: str, form: Any, *, references: bool = False) -> list[Table]:
    found = []
    for group, kind in _parts(rows):
        lengths = _lengths(rows, group, kind)
        body = []
        for name in [n for n in names(rows, references=True) if references or n not in REFERENCES]:
            own = {row["length"]: row[column] for row in rows_of(rows, group, kind, name)}
            cells = ["-" if own.get(n) is None else form(own[n]) for n in lengths]
            if any(cell != "-" for cell in cells):
                body.append([name, *cells])
        if body:
            found.append(Table(f"{KINDS[kind]}, {told(group)}", ["", *map(tokens, lengths)], body))
    return found


def refusals(rows: Sequence[Row]) -> list[str]:
    """What was not run, and why, in sentences."""
    return [
        f"{row['candidate']}, {KINDS[row['kind']]}, {told(tuple(row[key] for key in GROUP))}, "
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


def _where(where: Crossing | None) -> str:
    if where is None:
        return ""
    if where.tokens is None:
        return "never"
    return f"{where.tokens:,}" if not where.everywhere else f"{where.tokens:,} or below"


def aligned(table: Table) -> str:
    """As text for a terminal."""
    widths = [max(len(row[k]) for row in [table.heads, *table.body]) for k in range(len(table.heads))]
    lines = [table.title]
    for row in [table.heads, *table.body]:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(table: Table) -> str:
    """As Markdown, without the title."""
    rule = "|" + "---|" * len(table.heads)
    lines = ["| " + " | ".join(row) + " |" for row in [table.heads, *table.body]]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
