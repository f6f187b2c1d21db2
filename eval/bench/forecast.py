"""Forecast what a call takes at a length that was not run, so that nobody waits or runs out of memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .memory import available

SPARE = 0.7
"""Part of the free memory that a call may take."""
FEW = 256
"""Up to so many tokens a call takes what it takes for one: most of it does not grow."""
FIRST = 4096
"""A series that begins beyond this many tokens is tried at the lengths below first."""
PROBES = (1024, 2048)


@dataclass
class Forecast:
    """Know one candidate at some lengths, and extrapolate.

    Attributes:
        linear: with one point alone, time and memory are taken to grow with the length, else with its square.
        points: (tokens, seconds of a call, bytes at its peak or None).
    """

    linear: bool = False
    points: list[tuple[int, float, int | None]] = field(default_factory=list)

    def add(self, tokens: int, seconds: float, size: int | None) -> None:
        """Add one more length, longer than those before."""
        self.points.append((tokens, seconds, size))

    def seconds(self, tokens: int) -> float | None:
        """Return the seconds of one call; None without a point."""
        return self._at(tokens, [(n, seconds) for n, seconds, _ in self.points], 1.0)

    def size(self, tokens: int) -> float | None:
        """Return the bytes at the peak of one call."""
        return self._at(tokens, [(n, float(size)) for n, _, size in self.points if size], 0.0)

    def _at(self, tokens: int, points: list[tuple[int, float]], least: float) -> float | None:
        if not points:
            return None
        points, tokens = [(max(n, FEW), value) for n, value in points], max(tokens, FEW)
        power = 1.0 if self.linear else 2.0
        if len(points) > 1 and points[-1][0] > points[-2][0]:
            (a, x), (b, y) = points[-2:]
            power = min(2.0, max(least, math.log(y / x) / math.log(b / a)))
        length, value = points[-1]
        return float(value * (tokens / length) ** power)

    def refusal(self, tokens: int, budget: float, device: str) -> str:
        """Say why this length is better not run, or nothing."""
        seconds, size, free = self.seconds(tokens), self.size(tokens), available(device)
        if seconds is not None and seconds > budget:
            return f"not run: one call would take about {seconds:.3g} s (--budget {budget:g})"
        if size is not None and free is not None and size > SPARE * free:
            return f"not run: it would take about {size / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"
        return ""
