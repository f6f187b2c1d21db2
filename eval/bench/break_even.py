"""From how many tokens on is one thing better than another? Read off between measured lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.03
"""What a ratio must be above 1 at the longest length to count."""


@dataclass(frozen=True)
class Crossing:
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

    def told(self, what: str, better: str) -> str:
        """In words: `decode faster from 1,234 tokens on`."""
        if self.first is None or self.last is None:
            if self.tokens is None:
                return f"{what} never {better}"
            return f"{what} {better} " + (
                "at every length" if self.everywhere else f"from {self.tokens:,} tokens on"
            )
        if self.tokens is None:
            where = f"{self.first:,}" if self.first == self.last else f"{self.first:,} to {self.last:,}"
            return f"{what} never {better} within what was measured ({where} tokens)"
        if self.everywhere:
            return f"{what} {better} at every length measured, from {self.first:,} tokens on"
        return f"{what} {better} from {self.tokens:,} tokens on"


def crossing(points: Sequence[tuple[int, float]]) -> Crossing | None:
    """The length from which on a ratio stays above 1.

    An advantage of no more than `MARGIN` at the longest length is none: that much is noise. Between two
    lengths the logarithm of the ratio is taken as linear in the logarithm of the length: time and
    memory are nearly powers of it.

    Args:
        points: (tokens, ratio), the ratio above 1 where the one asked about is better; any order.

    Returns:
        None without points.
    """
    ordered = sorted(points)
    if not ordered:
        return None
    first, last = ordered[0][0], ordered[-1][0]
    if ordered[-1][1] <= 1 + MARGIN:
        return Crossing(None, first, last)
    behind = [index for index, (_, ratio) in enumerate(ordered) if ratio <= 1]
    if not behind:
        return Crossing(first, first, last, everywhere=True)
    (low, before), (high, then) = ordered[behind[-1]], ordered[behind[-1] + 1]
    share = -math.log(before) / (math.log(then) - math.log(before))
    tokens = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return Crossing(min(high, math.ceil(tokens - 1e-6)), first, last)
