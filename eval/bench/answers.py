"""What a user wants to know, in sentences: from how many tokens on is a patch faster, or smaller?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .break_even import Crossing, crossing
from .candidates import IN_PLACE, SDPA

Row = Mapping[str, Any]
REFERENCES = (SDPA, "unpatched")
GROUP = ("shape", "dtype", "causal")


def groups(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """(shape, dtype, causal) in the order of the rows."""
    return list(dict.fromkeys(tuple(row[key] for key in GROUP) for row in rows))


def rows_of(rows: Sequence[Row], group: tuple[Any, ...], kind: str, name: str) -> list[Row]:
    """Measured rows of one candidate, by length, one for each."""
    found = {
        row["length"]: row
        for row in rows
        if row["measured"]
        and row["kind"] == kind
        and row["candidate"] == name
        and tuple(row[key] for key in GROUP) == group
    }
    return [found[length] for length in sorted(found)]


def names(rows: Sequence[Row], *, references: bool = False) -> list[str]:
    """Candidates in the order of the rows; without what others are compared with."""
    found = dict.fromkeys(row["candidate"] for row in rows)
    return [name for name in found if references or name not in (*REFERENCES, IN_PLACE)]


def faster(rows: Sequence[Row], group: tuple[Any, ...], kind: str, name: str) -> Crossing | None:
    """Where the candidate's advantage in time begins."""
    own = rows_of(rows, group, kind, name)
    return crossing([(row["length"], row["speed"]) for row in own if row["speed"]])


def smaller(rows: Sequence[Row], group: tuple[Any, ...], kind: str, name: str) -> Crossing | None:
    """Where the candidate's advantage in peak memory begins."""
    own = rows_of(rows, group, kind, name)
    return crossing([(row["length"], 1 / row["memory_ratio"]) for row in own if row["memory_ratio"]])


def sentences(rows: Sequence[Row], caches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One per candidate and group.

    Args:
        rows: of a run.
        caches: candidate -> fields of a `Crossing`: where its cache is the smaller one.
    """
    found = []
    several = len(groups(rows)) > 1
    for group in groups(rows):
        for name in names(rows):
            parts = [
                where.told(TOLD[kind], "faster")
                for kind in TOLD
                if (where := faster(rows, group, kind, name)) is not None
            ]
            if name in caches:
                parts.append(Crossing(**caches[name]).told("its cache", "smaller"))
            elif (where := smaller(rows, group, "prefill", name)) is not None:
                parts.append(where.told("memory of prefill", "smaller"))
            if parts:
                place = f" at {group[0]}, {group[1]}" if several else ""
                found.append(f"{name}{place}: " + "; ".join(parts) + ".")
    return found


TOLD = {"prefill": "prefill", "decode": "decode", "train": "training"}
