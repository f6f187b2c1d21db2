"""From how many tokens on is a patch faster or smaller than softmax? Read off between measured lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .config import IN_PLACE, SDPA

MARGIN = 0.03
"""What a ratio must be above 1 at the longest length to count."""
REFERENCES = (SDPA, "unpatched")
GROUP = ("shape", "dtype", "causal")
KIND_WORDS = {"prefill": "prefill", "decode": "decode", "train": "training"}
Row = Mapping[str, Any]


@dataclass(frozen=True)
class BreakEven:
    """Where an advantage begins that lasts to the end of what was measured.

    Attributes:
        tokens: from here on; None for never.
        first, last: shortest and longest length measured; None where it was computed for all lengths.
        everywhere: it is there at the shortest length already, so it may begin below.
    """

    tokens: int | None
    first: int | None
    last: int | None
    everywhere: bool = False

    def describe(self, what: str, better: str) -> str:
        """Return a phrase: `decode faster from 1,234 tokens on`."""
        if self.tokens is None and self.first is None:
            return f"{what} never {better}"
        if self.tokens is None:
            where = f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"
            return f"{what} never {better} within what was measured ({where} tokens)"
        if self.everywhere:
            measured = "" if self.first is None else f" measured, from {self.first:,} tokens on"
            return f"{what} {better} at every length{measured}"
        return f"{what} {better} from {self.tokens:,} tokens on"


def break_even(points: Sequence[tuple[int, float]]) -> BreakEven | None:
    """Find the length from which on a ratio stays above 1.

    An advantage of no more than `MARGIN` at the longest length is none: that much is noise. Between two
    lengths the logarithm of the ratio is taken as linear in the logarithm of the length: time and
    memory are nearly powers of it.

    Args:
        points: (tokens, ratio), the ratio above 1 where the candidate is better; any order.

    Returns:
        None without points.
    """
    ordered = sorted(points)
    if not ordered:
        return None
    first, last = ordered[0][0], ordered[-1][0]
    if ordered[-1][1] <= 1 + MARGIN:
        return BreakEven(None, first, last)
    behind = [index for index, (_, ratio) in enumerate(ordered) if ratio <= 1]
    if not behind:
        return BreakEven(first, first, last, everywhere=True)
    (low, before), (high, then) = ordered[behind[-1]], ordered[behind[-1] + 1]
    share = -math.log(before) / (math.log(then) - math.log(before))
    tokens = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return BreakEven(min(high, math.ceil(tokens - 1e-6)), first, last)


def groups(rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """Return (shape, dtype, causal) in the order of the rows."""
    return list(dict.fromkeys(tuple(row[key] for key in GROUP) for row in rows))


def rows_of(rows: Sequence[Row], group: tuple[Any, ...], kind: str, name: str) -> list[Row]:
    """Return the measured rows of one candidate, by length, one for each.

    Args:
        rows: of a run.
        group: shape, dtype and whether causal.
        kind: "prefill", "train" or "decode".
        name: of the candidate.
    """
    by_length = {
        row["length"]: row
        for row in rows
        if row["measured"]
        and row["kind"] == kind
        and row["candidate"] == name
        and tuple(row[key] for key in GROUP) == group
    }
    return [by_length[length] for length in sorted(by_length)]


def names(rows: Sequence[Row], *, references: bool = False) -> list[str]:
    """Return candidates in the order of the rows, without what others are compared with."""
    candidates = dict.fromkeys(row["candidate"] for row in rows)
    return [name for name in candidates if references or name not in (*REFERENCES, IN_PLACE)]


def faster(own: Sequence[Row]) -> BreakEven | None:
    """Find where the advantage in time of a candidate begins, from its rows; None without any."""
    return break_even([(row["length"], row["speed"]) for row in own if row["speed"]])


def smaller(own: Sequence[Row]) -> BreakEven | None:
    """Find where the advantage in peak memory of a candidate begins, from its rows; None without any."""
    return break_even([(row["length"], 1 / row["memory_ratio"]) for row in own if row["memory_ratio"]])


def summary(rows: Sequence[Row], caches: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a sentence per candidate and group; `caches` tells where a candidate's cache becomes smaller."""
    sentences = []
    several = len(groups(rows)) > 1
    for group in groups(rows):
        for name in names(rows):
            parts = [
                where.describe(KIND_WORDS[kind], "faster")
                for kind in KIND_WORDS
                if (where := faster(rows_of(rows, group, kind, name))) is not None
            ]
            if name in caches:
                parts.append(BreakEven(**caches[name]).describe("its cache", "smaller"))
            elif (where := smaller(rows_of(rows, group, "prefill", name))) is not None:
                parts.append(where.describe("memory of prefill", "smaller"))
            if parts:
                place = f" at {group[0]}, {group[1]}" if several else ""
                sentences.append(f"{name}{place}: " + "; ".join(parts) + ".")
    return sentences
