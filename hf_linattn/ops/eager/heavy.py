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


class Options(NamedTuple):
    """What else an attention depends on.

    Attributes:
        columns: sizes of the cache.
        scaling: of the scores.
        softcap: of the scores; None for none.
    """

    columns: HeavyColumns
    scaling: float
    softcap: float | None


def parts_of(text: HeavyText, columns: HeavyColumns) -> Iterator[tuple[int, int]]:
    """Divide queries: few before the first choice, then whole steps; yields where each part starts, stops."""
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


class _Part(NamedTuple):
    """Some queries, and what they see.

    Attributes:
        start, stop: which queries.
        steps: that they are divided into.
        width: queries of a step; the last one may have fewer.
        tokens: that each step sees, `[B, Hkv, steps, M]`; None for the first `stop` ones.
        hidden: what of them a query does not see, expands to `[B, Hkv, steps, G, width, M]`.
    """

    start: int
    stop: int
    steps: int
    width: int
    tokens: Tensor | None
    hidden: Tensor

    def seen(self, x: Tensor) -> Tensor:
        """Take keys or values, `[B, Hkv, N, D]`, as each step sees them, `[B, Hkv, steps, M, D]`."""
        return x[:, :, None, : self.stop] if self.tokens is None else _rows(x, self.tokens)

    def by_step(self, x: Tensor, heads: int) -> Tensor:
        """Bring queries `[B, H, N, D]` to `[B, Hkv, steps, G width, D]`, zeros behind the last."""
        lacking = self.steps * self.width - (self.stop - self.start)
        x = F.pad(x[:, :, self.start : self.stop], (0, 0, 0, lacking))
        x = x.unflatten(2, (self.steps, self.width)).unflatten(1, (heads, -1))
        return x.transpose(2, 3).flatten(3, 4)

    def in_order(self, x: Tensor) -> Tensor:
        """Bring them back, `[B, H, stop - start, D]`."""
        x = x.unflatten(3, (-1, self.width)).transpose(2, 3).flatten(1, 2).flatten(2, 3)
        return x[:, :, : self.stop - self.start]


def _part(chosen: Tensor, columns: HeavyColumns, length: int, start: int, stop: int) -> _Part:
    """Find what queries see of a text of so many tokens."""
    if start < columns.begin(1):
        at = torch.arange(stop, device=chosen.device)
        return _Part(start, stop, 1, stop - start, None, at > at[start:, None])
    first = columns.left(start)
    steps = -(-(stop - start) // columns.block)
    some = chosen[:, :, first - 1 : first - 1 + steps]
    return _Part(start, stop, steps, columns.block, *_columns_of(some, columns, first, length))


def attended(text: HeavyText, chosen: Tensor, options: Options, start: int, stop: int) -> Tensor:
    """Compute the outputs of a part, `[B, H, stop - start, Dv]`, with gradients.

    Args:
        text: in the dtype that it is computed in.
        chosen: heavy hitters after each choice, -1 for none, `[B, Hkv, choices, heavy]`.
        options: what else it depends on.
        start: as `parts_of` says.
        stop: likewise.
    """
    heads, (columns, scaling, softcap) = text.key.shape[1], options
    part = _part(chosen, columns, text.key.shape[2], start, stop)
    key, value = part.seen(text.key), part.seen(text.value)
    scores = part.by_step(text.query * scaling, heads) @ key.mT
    if text.near is not None:
        met = part.by_step(text.near * scaling, heads) @ key[..., : columns.sinks, :].mT
        scores = torch.cat([met, scores[..., columns.sinks :]], -1)
    scores = capped(scores, softcap, None).unflatten(3, (-1, part.width))
    weights = _softmax(scores.masked_fill(part.hidden, float("-inf")), text.sink)[..., : key.shape[3]]
    return part.in_order(weights.flatten(3, 4) @ value)


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Compute the softmax of `[B, Hkv, steps, G, width, M]`, a column more where there are sinks."""
    if sink is not None:
        own = sink.view(scores.shape[1], 1, -1, 1, 1).expand(*scores.shape[:5], 1)
        scores = torch.cat([scores, own], -1)
    return scores.softmax(-1)


def add_gradients(
    sums: HeavyText, grad: Tensor, text: HeavyText, chosen: Tensor, options: Options, start: int, stop: int
) -> None:
    """Add what a part gives to the gradients of a text, in place.

    Args:
        sums: as large as the text, dense; written over.
        grad: of all outputs, `[B, H, N, Dv]`.
        text: as `attended` takes it, and all that follows.
        chosen: likewise.
        options: likewise.
        start: likewise.
        stop: likewise.
    """
    columns, scaling, softcap = options
    heads, sinks = text.key.shape[1], columns.sinks
    part = _part(chosen, columns, text.key.shape[2], start, stop)
    key, value = part.seen(text.key), part.seen(text.value)
    query, grad = part.by_step(text.query, heads) * scaling, part.by_step(grad, heads)
    scores, near = query @ key.mT, None
    if text.near is not None:
        near = part.by_step(text.near, heads) * scaling
        scores[..., :sinks] = near @ key[..., :sinks, :].mT
    slope = None
    if softcap is not None:
        slope = scores.div_(softcap).tanh_().square().neg_().add_(1)
        scores = scores * softcap
    shape = scores.shape
    scores = scores.unflatten(3, (-1, part.width)).masked_fill_(part.hidden, float("-inf"))
    weights = _softmax(scores, text.sink)
    if sums.sink is not None:
        weights, own = weights[..., :-1], weights[..., -1:]
    through = (grad @ value.mT).view_as(weights)
    total = torch.linalg.vecdot(weights, through)[..., None]
    if sums.sink is not None:
        sums.sink.sub_((own * total).sum((0, 2, 4, 5)).flatten())
    d_scores = through.sub_(total).mul_(weights).view(shape)
    if slope is not None:
        d_scores = d_scores * slope
    weights = weights.reshape(shape)
    d_key, d_query = d_scores.mT @ query, d_scores
    if near is not None:
        assert sums.near is not None
        d_near = d_scores[..., :sinks]
        d_key[..., :sinks, :] = d_near.mT @ near
        sums.near[:, :, start:stop] = part.in_order(d_near @ key[..., :sinks, :]) * scaling
        d_query, key = d_scores[..., sinks:], key[..., sinks:, :]
    sums.query[:, :, start:stop] = part.in_order(d_query @ key) * scaling
    rows = None if part.tokens is None else table_rows(part.tokens, text.key.shape[2])
    for sum_, x in ((sums.key, d_key), (sums.value, weights.mT @ grad)):
        if rows is None:
            sum_[:, :, :stop] += x[:, :, 0]
        else:
            sum_.view(-1, sum_.shape[3]).index_add_(0, rows, x.flatten(0, 3))


def _columns_of(chosen: Tensor, columns: HeavyColumns, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the tokens that each step sees, `[B, Hkv, steps, M]`, and what of them its queries do not see.

    Args:
        chosen: of these steps.
        columns: sizes of the cache.
        first: blocks that have left before the first of them.
        length: tokens of the text.
    """
    of_steps = chosen.shape[:3]
    at = torch.arange(columns.size + columns.block - 1, device=chosen.device)
    gone = (torch.arange(of_steps[2], device=chosen.device) + first) * columns.block + columns.sinks
    window = (gone[:, None] + at).clamp_max(length - 1).expand(*of_steps, -1)
    sinks = torch.arange(columns.sinks, device=chosen.device).expand(*of_steps, -1)
    tokens = torch.cat([sinks, chosen.clamp_min(0), window], -1)
    query = torch.arange(columns.block, device=chosen.device)[:, None]
    behind = (at >= columns.size + query).expand(*of_steps, 1, -1, -1)
    lacking = (chosen < 0)[..., None, None, :].expand(*of_steps, 1, columns.block, -1)
    shown = lacking.new_zeros(*of_steps, 1, columns.block, columns.sinks)
    return tokens, torch.cat([shown, lacking, behind], -1)


def table_rows(index: Tensor, length: int) -> Tensor:
    """Return which rows of one table tokens of each row and key head are, `[B, Hkv, ...]`, flat.

    To select rows is much faster than to gather.

    Args:
        index: of tokens.
        length: tokens of a row and key head.
    """
    first = torch.arange(index.shape[0] * index.shape[1], device=index.device) * length
    return (index.flatten(0, 1) + first.view(-1, *(1,) * (index.dim() - 2))).flatten()


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of each row and head: `[B, Hkv, ...]` of `[B, Hkv, N, D]`."""
    rows = table_rows(index, x.shape[2])
    return x.flatten(0, 2).index_select(0, rows).view(*index.shape, x.shape[3])


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
