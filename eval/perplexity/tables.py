"""The tables of the perplexity command: what they hold, and how they look."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = (
    "length",
    "perplexity",
    "byte_perplexity",
    "stderr",
    "tokens",
    "model",
    "byte_stderr",
    "bytes",
    "nats",
    "windows",
    "documents",
    "stderr_over",
)


def curve_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per curve, one column of perplexities per length, as aligned text."""
    labels = list(dict.fromkeys(row["model"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    found = {(row["model"], row["length"]): f"{row['perplexity']:.5g}" for row in rows}
    width = max(map(len, labels))
    lines = [" ".join([f"{'perplexity at':<{max(width, 13)}}", *(f"{length:>9}" for length in lengths)])]
    for label in labels:
        cells = (f"{found.get((label, length), '-'):>9}" for length in lengths)
        lines.append(" ".join([f"{label:<{max(width, 13)}}", *cells]))
    return "\n".join(lines)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text."""
    width = max([len("model"), *(len(row["model"]) for row in rows)])
    lines = [
        f"{'model':<{width}} {'length':>9} {'perplexity':>11} {'stderr':>9} {'byte_ppl':>9} {'tokens':>9}"
    ]
    for row in rows:
        error = "-" if row["stderr"] is None else f"{row['stderr']:.4g}"
        lines.append(
            f"{row['model']:<{width}} {row['length']:>9} {row['perplexity']:>11.5g} {error:>9} "
            f"{row['byte_perplexity']:>9.4f} {row['tokens']:>9}"
        )
    return "\n".join(lines)


def overall(rows: Sequence[Mapping[str, Any]]) -> float:
    """Perplexity of all tokens of the rows together; meaningful where rows are disjoint, as in a stream."""
    return math.exp(
        math.fsum(row["nats"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    )
