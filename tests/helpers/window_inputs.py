"""Random inputs of the kernels of windows, and their definition in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.types import ScaledSums, Window

from . import definitions

SHAPES = {  # rows, heads, key heads, queries, reach, head dim
    "whole blocks": (2, 2, 2, 64, 32, 4),
    "ragged": (2, 4, 2, 75, 9, 8),
    "reach beyond the text": (1, 2, 1, 40, 100, 4),
    "one query": (3, 4, 2, 1, 16, 4),
    "many calls": (1, 1, 1, 32 * 65, 5, 2),
}


OTHER = ("nothing", "sums", "none at times")


def inputs(shape, other, hide):
    """Leaves in float64 and what they make: a window, and sums beside it."""
    rows, heads, shared, length, span, size = shape
    generator = torch.Generator().manual_seed(length)

    def new(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    leaves = [new(rows, heads, length, size)]
    leaves += [new(rows, shared, length + span, size) for _ in "kv"]
    valid = torch.ones(rows, length + span, dtype=torch.bool)
    if hide:
        valid = torch.rand(rows, length + span, generator=generator) > 0.4
        valid[0, : span + length // 2] = False  # a past that is empty, and queries that see nothing
    if other != "nothing":
        total = new(rows, heads, length).exp()
        if other == "none at times":
            total *= torch.rand(rows, heads, length, generator=generator) > 0.5
        values = new(rows, heads, length, size) * (total > 0).unsqueeze(-1)
        leaves += [values, total, 2 * new(rows, heads, length)]
    leaves = [x.requires_grad_() for x in leaves]
    query, key, value = (leaves[0], *(x * valid[:, None, :, None] for x in leaves[1:3]))
    seen = Window(query, key, value, valid, span, 0.3)
    return leaves, seen, ScaledSums(*leaves[3:]) if leaves[3:] else None


def definition(seen: Window, other: ScaledSums | None) -> Tensor:
    """All pairs at once."""
    row, column = torch.arange(seen.query.shape[2])[:, None], torch.arange(seen.key.shape[2])
    visible = (column > row) & (column <= row + seen.span) & seen.valid[:, None, None]
    scores = seen.scaling * seen.query @ definitions.repeated(seen.key, seen.query.shape[1]).mT
    return definitions.softmax(scores.masked_fill(~visible, float("-inf")), seen.value, other)


def without_first(seen: Window, count: int) -> tuple[Window, Window]:
    """A window whose first columns do not count, and the same with only those behind them given."""
    valid = seen.valid.clone()
    valid[:, :count] = False
    hidden = seen._replace(valid=valid)
    behind = hidden._replace(
        key=seen.key[:, :, count:], value=seen.value[:, :, count:], valid=valid[:, count:]
    )
    return hidden, behind
