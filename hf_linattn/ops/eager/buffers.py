"""What the loops over chunks on the CPU share: blocks of heads, buffers, feature maps, decay of a chunk.

Everything is brought to float32 (float64 for float64 inputs) chunk by chunk: half precision is never
multiplied on a CPU, where that is slow, and nothing as long as the sequence is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.types import OpConfig

SPLIT = 40.0
"""Decay of a chunk, as a logarithm, up to which that between two tokens is made of two exponentials."""
BATCH_HEADS = 32
"""Rows times key heads that go through a loop as a block: large operations, small buffers."""


def head_blocks(batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Cut batch and key heads into slices of both, at most `BATCH_HEADS` rows times key heads each."""
    rows = max(1, BATCH_HEADS // heads)
    for row in range(0, batch, rows):
        for head in range(0, heads, BATCH_HEADS):
            yield slice(row, min(row + rows, batch)), slice(head, min(head + BATCH_HEADS, heads))


class Buffer:
    """Numbers of one chunk, written over in the next.

    Attributes:
        flat: `[b hkv, rows, D]`, for products; b is the rows of the block and hkv its key heads.
        per_head: the same memory as `[b, h, m, D]`, for what comes in and goes out.
    """

    __slots__ = ("flat", "per_head")

    def __init__(self, like: Tensor, shape: tuple[int, ...], batch_heads: int) -> None:
        self.per_head = like.new_empty(shape)
        self.flat = self.per_head.view(batch_heads, -1, shape[-1])

    def load(self, x: Tensor, copy: bool = False) -> Tensor:
        """Bring `[b, h, m, D]` to the shape of `flat`: a view where that is possible, else a copy."""
        rows, heads = x.shape[:2]
        if (
            not copy
            and x.dtype == self.flat.dtype
            and rows * heads == self.flat.shape[0]
            and x.stride(3) == 1
        ):
            if rows == 1:
                return x[0]
            if heads == 1:
                return x[:, 0]
            if x.stride(0) == heads * x.stride(1):
                return x.flatten(0, 1)
        self.per_head.copy_(x)
        return self.flat


class Features:
    """The feature map phi of one chunk of queries or of keys; the queries of one key head follow each other.

    Args:
        config: which phi.
        query: these are queries, else keys.
        like: a tensor in the dtype of sums.
        shape: `[b, h, m, D]`.
        batch_heads: b times the key heads.

    Attributes:
        mapped: phi of the last call's input.
        derivative: its derivative, unless the kind is "none".
    """

    def __init__(
        self, config: OpConfig, query: bool, like: Tensor, shape: tuple[int, ...], batch_heads: int
    ) -> None:
        self.kind, self.eps, self.query = config.kind, config.eps, query
        self.mapped = Buffer(like, shape, batch_heads)
        self.derivative = self.mapped if config.kind == "none" else Buffer(like, shape, batch_heads)
        self.upcast: Tensor | None = None

    def __call__(self, x: Tensor, copy: bool) -> Tensor:
        """Map `[b, h, m, D]` to `[b hkv, rows, D]`; `copy`: never a view of x, because it is written to."""
        if self.kind == "none":
            return self.mapped.load(x, copy)
        mapped, derivative = self.mapped.per_head, self.derivative.per_head
        if x.dtype != mapped.dtype:
            self.upcast = torch.empty_like(mapped) if self.upcast is None else self.upcast
            x = self.upcast.copy_(x)
        torch.clamp(x, min=0, out=mapped)
        if self.kind == "relu":
            torch.gt(mapped, 0, out=derivative)
            return self.mapped.flat.add_(self.eps)
        torch.clamp(x, max=0, out=derivative)
        if self.query:
            # over exp(max_d q_d) where all of q is negative: it divides away, and nothing underflows
            derivative.sub_(derivative.amax(-1, keepdim=True))
        mapped.add_(derivative.exp_())
        return self.mapped.flat


def write_output(target: Tensor, numerator: Buffer, total: Buffer, config: OpConfig) -> None:
    """Write numerators, divided by totals where asked for; the totals are used up.

    Args:
        target: written, `[b, h, m, Dv]`.
        numerator: `[b, h, m, Dv]`.
        total: `[b, h, m, 1]`.
        config: whether to divide, and whether totals can be negative.
    """
    if not config.normalise:
        target.copy_(numerator.per_head)
        return
    if config.kind == "none":
        total.flat.masked_fill_(total.flat <= 0, 1)
    else:  # never negative, and 0 where the numerator is
        total.flat.clamp_min_(torch.finfo(total.flat.dtype).tiny)
    torch.div(numerator.per_head, total.per_head, out=target)


class ChunkDecay(NamedTuple):
    """What decay and borders between documents leave, factors from 0 to 1 for one chunk of m tokens.

    Attributes:
        intra: `[b, hkv, 1, m, m]`, of each key for each query of the chunk; 0 above the diagonal.
        query: `[b, hkv, 1, m, 1]`, of the state before the chunk for each query.
        key: `[b, hkv, m, 1]`, of each key for the state after the chunk.
        state: `[b, hkv, 1, 1]`, of the state before for the state after.
    """

    intra: Tensor
    query: Tensor
    key: Tensor
    state: Tensor


def chunk_decay(
    log_decay: Tensor | None, labels: Tensor | None, before: Tensor | None, like: Tensor
) -> ChunkDecay:
    """Compute the factors of one chunk.

    Args:
        log_decay: `[b, hkv, m]`, at most 0; None for no decay.
        labels: documents `[b, m]`; None for one.
        before: the document that the state belongs to, `[b, 1]`, with `labels`.
        like: a tensor in the dtype of sums.
    """
    if log_decay is None:
        assert labels is not None
        total = like.new_zeros(labels.shape)[:, None]
    else:
        total = log_decay.cumsum(-1)
    last = total[..., -1:]
    query, key, state = total.exp(), (last - total).exp(), last.exp()
    if last.min() >= -SPLIT:
        intra = (query.unsqueeze(-1) * (-total).exp().unsqueeze(-2)).tril_()
    else:  # above the diagonal differences are positive and could overflow: held at 0, then taken out
        intra = (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp_(max=0).exp_().tril_()
    if labels is not None:
        assert before is not None
        intra = intra * (labels.unsqueeze(-1) == labels.unsqueeze(-2))[:, None]
        query = query * (labels == before)[:, None]
        key = key * (labels == labels[:, -1:])[:, None]
        state = state * (labels[:, -1:] == before)[:, None]
    return ChunkDecay(intra[:, :, None], query[:, :, None, :, None], key.unsqueeze(-1), state.unsqueeze(-1))
