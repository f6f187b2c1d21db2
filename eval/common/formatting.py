"""Numbers and tables as text."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOT_FINITE = "the weights hold NaN, or a sum overflows: in 16 bits, try --dtype float32"
"""Where numbers that are none come from."""


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Align cells in columns: the first `left` to the left, the others to the right.

    >>> print(text_table(["model", "length"], [["elu1", "512"], ["window+elu1", "1024"]]))
    model        length
    elu1            512
    window+elu1    1024
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def number(value: float) -> str:
    """Write three digits, or more where the whole part has more."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def times(ratio: float) -> str:
    """Write a ratio as `2.3 times`."""
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def percent(ratio: float) -> str:
    """Write how far a ratio is from 1, as `12 %`."""
    distance = abs(ratio - 1) * 100
    return f"{distance:.0f} %" if distance >= 2 else f"{distance:.1f} %"


def change(ratio: float) -> str:
    """Write a ratio as `12 % more`, or from a doubling on as `2.3 times as much`."""
    if ratio >= 2:
        return f"{times(ratio)} as much"
    if abs(ratio - 1) < 0.0005:
        return "no change"
    return f"{percent(ratio)} {'more' if ratio > 1 else 'less'}"


def size(count: float) -> str:
    """Write bytes in a unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" or count >= 100 else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def exponential(nats: float) -> float:
    """Turn nats into a perplexity; infinite where it does not fit."""
    return math.exp(nats) if nats < 700 else math.inf
