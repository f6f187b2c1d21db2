"""What the loops over chunks on the CPU share: heads that go together, buffers, feature maps, links.

Everything is brought to float32 (float64 for float64 inputs) chunk by chunk: half precision is never
multiplied on a CPU, where that is slow, and nothing as long as the sequence is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.types import How

SPLIT = 40.0
"""Decay of a chunk, as a logarithm, up to which that between two tokens is made of two exponentials."""
PAIRS = 32
"""Rows times key heads that go through a loop together: large operations, small buffers."""


def groups(batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and of key heads, at most `PAIRS` pairs each."""
    rows = max(1, PAIRS // heads)
    for row in range(0, batch, rows):
        for head in range(0, heads, PAIRS):
            yield slice(row, min(row + rows, batch)), slice(head, min(head + PAIRS, heads))


class Buffer:
    """Numbers of one chunk, written over in the next.

    Attributes:
        flat: `[pairs, rows, D]`, for products.
        apart: the same memory as `[b, h, m, D]`, for what comes in and goes out.
    """

    __slots__ = ("apart", "flat")

    def __init__(self, like: Tensor, shape: tuple[int, ...], pairs: int) -> None:
        self.apart = like.new_empty(shape)
        self.flat = self.apart.view(pairs, -1, shape[-1])

    def load(self, x: Tensor, copy: bool = False) -> Tensor:
        """`[b, h, m, D]` as `flat` is: a view of dense rows where strides and dtype allow, else a copy."""
        rows, heads, _, size = x.shape
        if (
            not copy
            and x.dtype == self.flat.dtype
            and rows * heads == self.flat.shape[0]
            and x.stride(2) == size
        ):
            if rows == 1:
                return x[0]
            if heads == 1:
                return x[:, 0]
            if x.stride(0) == heads * x.stride(1):
                return x.flatten(0, 1)
        self.apart.copy_(x)
        return self.flat


class Features:
    """Phi of one chunk of queries or of keys; the queries of one key head follow each other.

    Args:
        how: which phi.
        query: these are queries, else keys.
        like, shape, pairs: as `Buffer`.

    Attributes:
        slope: derivative of phi by the input, after a call; unless the kind is "none".
    """

    def __init__(self, how: How, query: bool, like: Tensor, shape: tuple[int, ...], pairs: int) -> None:
        self.kind, self.eps, self.query = how.kind, how.eps, query
        self.found = Buffer(like, shape, pairs)
        self.slope = self.found if how.kind == "none" else Buffer(like, shape, pairs)
        self.raised: Tensor | None = None

    def __call__(self, x: Tensor, own: bool) -> Tensor:
        """`[b, h, m, D]` -> `[pairs, rows, D]`; `own`: never a view of x, because it will be written to."""
        if self.kind == "none":
            return self.found.load(x, own)
        found, slope = self.found.apart, self.slope.apart
        if x.dtype != found.dtype:
            self.raised = torch.empty_like(found) if self.raised is None else self.raised
            x = self.raised.copy_(x)
        torch.clamp(x, min=0, out=found)
        if self.kind == "relu":
            torch.gt(found, 0, out=slope)
            return self.found.flat.add_(self.eps)
        torch.clamp(x, max=0, out=slope)
        if self.query:
            # over exp(max_d q_d) where all of q is negative: it divides away, and nothing underflows
            slope.sub_(slope.amax(-1, keepdim=True))
        found.add_(slope.exp_())
        return self.found.flat


class Links(NamedTuple):
    """What decay and borders between documents do to one chunk.

    Attributes:
        inside: `[b, h, 1, m, m]`, what each query takes of each key of the chunk; 0 above the diagonal.
        reading: `[b, h, 1, m, 1]`, what it takes of the state before the chunk.
        entering: `[b, h, m, 1]`, what the state after the chunk takes of each key.
        surviving: `[b, h, 1, 1]`, what it takes of the state before.
    """

    inside: Tensor
    reading: Tensor
    entering: Tensor
    surviving: Tensor


def links(log_decay: Tensor | None, labels: Tensor | None, before: Tensor | None, like: Tensor) -> Links:
    """Of a chunk.

    Args:
        log_decay: `[b, h, m]`, at most 0, or None.
        labels: documents `[b, m]`, or None.
        before: the document that the state belongs to, `[b, 1]`, with `labels`.
        like: a tensor in the dtype of sums.
    """
    if log_decay is None:
        assert labels is not None
        total = like.new_zeros(labels.shape)[:, None]
    else:
        total = log_decay.cumsum(-1)
    last = total[..., -1:]
    reading, entering, surviving = total.exp(), (last - total).exp(), last.exp()
    if last.min() >= -SPLIT:
        inside = (reading.unsqueeze(-1) * (-total).exp().unsqueeze(-2)).tril_()
    else:  # above the diagonal differences are positive and could overflow: held at 0, then taken out
        inside = (total.unsqueeze(-1) - total.unsqueeze(-2)).clamp_(max=0).exp_().tril_()
    if labels is not None:
        assert before is not None
        inside = inside * (labels.unsqueeze(-1) == labels.unsqueeze(-2))[:, None]
        reading = reading * (labels == before)[:, None]
        entering = entering * (labels == labels[:, -1:])[:, None]
        surviving = surviving * (labels[:, -1:] == before)[:, None]
    by_query = inside[:, :, None], reading[:, :, None, :, None]
    return Links(*by_query, entering.unsqueeze(-1), surviving.unsqueeze(-1))
