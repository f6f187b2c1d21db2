"""A window with heavy hitters where it is known what was chosen: all steps of a text at once.

Whoever knows the choices computes outputs again without walking from one to the next, for gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.softmax import capped
from hf_linattn.ops.types import HeavyColumns

ROWS = 512
"""Queries that go together before the first choice."""
NUMBERS = 1 << 24
"""Of keys, values and scores that go together after it, at most; a step is whole."""


class HeavyText(NamedTuple):
    """A text from its first token on, without padding before the last visible one.

    Attributes:
        query: `[B, H, N, D]`.
        near: as it meets the sinks, likewise; None for as it is.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        sink: logits of a sink of each head, `[H]`; None for none.
    """

    query: Tensor
    near: Tensor | None
    key: Tensor
    value: Tensor
    sink: Tensor | None


def parts_of(text: HeavyText, columns: HeavyColumns) -> Iterator[tuple[int, int]]:
    """Divide queries: few before the first choice, then whole steps; yields where each part begins and ends."""
    length = text.key.shape[2]
    before = min(length, columns.begin(1))
    for start in range(0, before, ROWS):
        yield start, min(start + ROWS, before)
    rows, width = text.key.shape[0] * text.key.shape[1], text.key.shape[3] + text.value.shape[3]
    group = text.query.shape[1] // text.key.shape[1]
    step = rows * columns.total * (width + group * columns.block)
    some = max(1, NUMBERS // step) * columns.block
    for start in range(before, length, some):
        yield start, min(start + some, length)


def attended(
    text: HeavyText,
    chosen: Tensor,
    columns: HeavyColumns,
    scaling: float,
    softcap: float | None,
    start: int,
    stop: int,
) -> Tensor:
    """Compute the outputs of a part, `[B, H, stop - start, Dv]`, with gradients.

    Args:
        text: in the dtype that it is computed in.
        chosen: heavy hitters after each choice, -1 for none, `[B, Hkv, choices, heavy]`.
        columns: sizes of the cache.
        scaling: of the scores.
        softcap: of the scores; None for none.
        start: as `parts_of` says.
        stop: likewise.
    """
    heads = text.key.shape[1]
    if start < columns.begin(1):
        steps, width, keys = 1, stop - start, [x[:, :, None, :stop] for x in (text.key, text.value)]
        at = torch.arange(stop, device=chosen.device)
        hidden = at > at[start:, None]
    else:
        first, width = columns.left(start), columns.block
        steps = -(-(stop - start) // width)
        index, hidden = _columns_of(chosen[:, :, first - 1 : first - 1 + steps], columns, first, text.key)
        keys = [_rows(x, index) for x in (text.key, text.value)]
    key, value = keys

    def by_step(x: Tensor) -> Tensor:
        """Bring queries to `[B, Hkv, steps, G width, D]`, zeros behind the last."""
        x = F.pad(x[:, :, start:stop], (0, 0, 0, steps * width - (stop - start)))
        x = x.unflatten(2, (steps, width)).unflatten(1, (heads, -1))
        return x.transpose(2, 3).flatten(3, 4)

    scores = by_step(text.query * scaling) @ key.mT
    if text.near is not None:
        met = by_step(text.near * scaling) @ key[..., : columns.sinks, :].mT
        scores = torch.cat([met, scores[..., columns.sinks :]], -1)
    scores = capped(scores, softcap, None).unflatten(3, (-1, width)).masked_fill(hidden, float("-inf"))
    if text.sink is not None:
        own = text.sink.view(heads, 1, -1, 1, 1).expand(*scores.shape[:5], 1)
        scores = torch.cat([scores, own], -1)
    weights = scores.softmax(-1)[..., : key.shape[3]]
    output = weights.flatten(3, 4) @ value
    output = output.unflatten(3, (-1, width)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
    return output[:, :, : stop - start]


def _columns_of(chosen: Tensor, columns: HeavyColumns, first: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens that each step sees, `[B, Hkv, steps, M]`, and what of them its queries do not see.

    Args:
        chosen: of these steps.
        columns: sizes of the cache.
        first: blocks that have left before the first of them.
        key: `[B, Hkv, N, D]`.
    """
    steps, most = chosen.shape[2], key.shape[2] - 1
    at = torch.arange(columns.size + columns.block - 1, device=chosen.device)
    gone = (torch.arange(steps, device=chosen.device) + first) * columns.block + columns.sinks
    window = (gone[:, None] + at).clamp_max(most)
    sinks = at.new_tensor(range(columns.sinks)).expand(steps, -1)
    fixed = torch.cat([sinks, window], -1).expand(*chosen.shape[:3], -1)
    index = torch.cat([fixed[..., : columns.sinks], chosen.clamp_min(0), fixed[..., columns.sinks :]], -1)
    query = torch.arange(columns.block, device=chosen.device)[:, None]
    hidden = torch.cat([query.new_zeros(columns.block, columns.sinks).bool(), at >= columns.size + query], -1)
    hidden = hidden.expand(*chosen.shape[:3], 1, -1, -1)
    lacking = (chosen < 0)[..., None, None, :].expand(-1, -1, -1, -1, columns.block, -1)
    parts = hidden[..., : columns.sinks], lacking, hidden[..., columns.sinks :]
    return index, torch.cat(parts, -1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of each row and head: `[B, Hkv, N, D]` at `[B, Hkv, ...]`; much faster than to gather."""
    first = torch.arange(x.shape[0] * x.shape[1], device=x.device) * x.shape[2]
    flat = index.flatten(0, 1) + first.view(-1, *(1,) * (index.dim() - 2))
    return x.flatten(0, 2).index_select(0, flat.flatten()).view(*index.shape, x.shape[3])


def kept(x: Tensor, rank: Tensor, columns: HeavyColumns, count: Tensor) -> Tensor:
    """Take the keys or values that a cache holds from a text, with gradients; 0 where it holds none.

    Args:
        x: `[B, Hkv, N, D]`.
        rank: of the token of each column, `[B, Hkv, columns]`.
        columns: sizes of the cache.
        count: visible tokens of each row, `[B]`.
    """
    column = torch.arange(columns.total, device=x.device)
    gone = columns.left(count - 1).clamp_min(0)[:, None] * columns.block
    sinks, first = columns.sinks, columns.sinks + columns.heavy
    window = (column - columns.heavy + gone) < count[:, None]
    holds = torch.where(
        column < sinks, column < count[:, None], torch.where(column < first, column - sinks < gone, window)
    )
    return _rows(x, rank.long()).masked_fill(~holds[:, None, :, None], 0)
