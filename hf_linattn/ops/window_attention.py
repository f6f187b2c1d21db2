"""Softmax over a sliding window through the fused kernel of the CPU, joined with sums from elsewhere.

Or by the kernels in C++, `ops.native_window`, which do all of this tile by tile, where they were asked for.

A block of queries sees one run of keys, so blocks become rows of the kernel: overlapping views of the keys,
no copies. It gives o = sum_W exp(s_j) v_j / Z and lse = log Z. Sums over other tokens, e^l sum_j f_j v_j and
e^l sum_j f_j, join by

    lse' = log(Z + e^l sum_j f_j),  o' = o exp(lse - lse') + exp(l - lse') sum_j f_j v_j

and with p'_j = exp(s_j - lse') the window's gradients are those of ordinary attention,
ds_j = p'_j (do . v_j - do . o'), from the backward kernel given o' and lse' for output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.cpp import window as native_window
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.softmax import scores_of
from hf_linattn.ops.softmax_sink import BACKWARD, FORWARD, dense, fits
from hf_linattn.ops.types import Sums, Window

BLOCK = 32
"""Queries per row of the kernel: measured, from 32 to 256."""
SPAN = 16
"""Blocks per call: their masks are all that is made."""


def attention(window: Window, other: Sums | None) -> Tensor:
    """Window and other tokens under one normaliser: `[B, H, N, Dv]`; 0 where nothing is seen."""
    if not fits(window.query, window.key, window.value, None, 0.0):
        return band.attention(window, other)
    given = (*window[:4], *(other or (None, None, None)), window.reach, window.scaling)
    if torch.compiler.is_compiling():
        return torch.ops.hf_linattn.softmax_of_window(*given)[0]  # type: ignore[no-any-return]
    output: Tensor = _Attention.apply(*given)  # type: ignore[no-untyped-call]
    return output


def decode(
    query: Tensor, key: Tensor, value: Tensor, marks: Tensor | None, scaling: float, other: Sums | None
) -> Tensor:
    """A single query `[B, H, 1, D]` over all marked keys, `marks` `[B, N]`, None for all; no gradients."""
    if torch.compiler.is_compiling() or not fits(query, key, value, None, 0.0):
        scores = scores_of(query, key, scaling)
        if marks is not None:
            scores = scores.masked_fill(~marks[:, None, None], float("-inf"))
        return band.joined(band.softmax_sums(scores, value), other)
    output: Tensor
    if marks is None or marks.all():
        output, lse = FORWARD(query, key, value, 0.0, False, scale=scaling)
        return output if other is None else _beside(output, lse, *other)
    mask = torch.zeros(marks.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(~marks, float("-inf"))[:, None, None]
    some = marks.any(1)[:, None, None]
    output, lse = FORWARD(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
    if other is not None:
        return _join(output, lse, some, *other)[0]
    return output.masked_fill_(~some.unsqueeze(-1), 0.0)


def _beside(output: Tensor, lse: Tensor, values: Tensor, total: Tensor, log_scale: Tensor) -> Tensor:
    """`_join` where the window has keys everywhere and nobody wants the log-sum-exp."""
    share = (log_scale + total.log()).sub_(lse).sigmoid_()
    joined: Tensor = output.lerp_(linear.normalised(values, total), share.unsqueeze(-1))
    return joined


class _Blocks:
    """A window cut into blocks of queries, each with its run of columns.

    Queries and columns are padded to whole blocks where they must be, and columns that are missing filled in.
    """

    def __init__(self, window: Window) -> None:
        query, key, value, marks, reach, _ = window
        length = query.shape[2]
        self.size = min(BLOCK, length)
        self.left, self.right = -reach % self.size, -length % self.size
        self.columns, self.before = self.size + reach + self.left, self.left + window.missing
        self.count = (length + self.right) // self.size
        self.query = self.over_queries(query)
        self.key, self.value = self._over_columns(key), self._over_columns(value)
        self.marks = F.pad(marks, (self.before, self.right)) if self.before or self.right else marks
        row = torch.arange(self.size, device=query.device)[:, None] + self.left
        column = torch.arange(self.columns, device=query.device)
        self.near = (column > row) & (column <= row + reach)

    def over_queries(self, x: Tensor) -> Tensor:
        """`[B, H, N, ...]` with zeros up to a whole block."""
        if not self.right:
            return x
        return F.pad(x, (*(0, 0) * (x.ndim - 3), 0, self.right))

    def _over_columns(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, self.before, self.right)) if self.before or self.right else x

    def spans(self) -> Iterator[tuple[slice, slice, slice]]:
        """Rows, queries and columns that go through the kernel together."""
        if self.count == 1:
            yield slice(None), slice(0, self.size), slice(0, self.columns)
            return
        for row in range(self.query.shape[0]):
            for first in range(0, self.count, SPAN):
                start, end = first * self.size, min(first + SPAN, self.count) * self.size
                yield slice(row, row + 1), slice(start, end), slice(start, end - self.size + self.columns)

    def queries(self, x: Tensor, rows: slice, part: slice) -> Tensor:
        """`[B, H, N, ...]` -> `[blocks, H, size, ...]`."""
        cut = x[rows, :, part]
        if self.count == 1:
            return cut
        blocks: Tensor = cut[0].unflatten(1, (-1, self.size)).transpose(0, 1)
        return blocks

    def runs(self, x: Tensor, rows: slice, part: slice) -> Tensor:
        """`[B, Hkv, columns, D]` -> overlapping views `[blocks, Hkv, size + reach, D]`."""
        cut = x[rows, :, part]
        if self.count == 1:
            return cut
        return cut[0].unfold(1, self.columns, self.size).permute(1, 0, 3, 2)

    def inputs(self, rows: slice, part: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a call."""
        key, value = (self.runs(x, rows, columns) for x in (self.key, self.value))
        return self.queries(self.query, rows, part), key, value

    def mask(self, rows: slice, part: slice, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[blocks, 1, size, size + reach]`."""
        live = self.marks[rows, part]
        runs = live if self.count == 1 else live[0].unfold(0, self.columns, self.size)
        seen = self.near if bool(live.all()) else self.near & runs[:, None, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return mask.expand(runs.shape[0], 1, -1, -1)

    def add_runs(self, total: Tensor, part: Tensor, rows: slice, columns: slice) -> None:
        """Add `[blocks, Hkv, size + reach, D]` up where the columns came from."""
        if self.count == 1:
            total[rows, :, columns] += part
            return
        blocks = part.shape[0]
        for piece in range(self.columns // self.size):
            start = columns.start + piece * self.size
            place = total[rows.start, :, start : start + blocks * self.size].unflatten(1, (blocks, self.size))
            place += part[:, :, piece * self.size : (piece + 1) * self.size].transpose(0, 1)

    def own_columns(self, x: Tensor) -> Tensor:
        """Those that were given."""
        return x[:, :, self.before : x.shape[2] - self.right]


def _parts(*inputs: Any) -> tuple[Window, Sums | None]:
    """Of the operator's arguments."""
    query, key, value, marks, *sums, reach, scaling = inputs
    return Window(query, key, value, marks, reach, scaling), None if sums[0] is None else Sums(*sums)


def _forward(window: Window, other: Sums | None) -> tuple[Tensor, Tensor]:
    """o', and lse' `[B, H, N]`, 0 where nothing is seen."""
    if native_window.takes(window, other):
        return native_window.forward(window, other)
    query, _, value, _, reach, scaling = window
    blocks = _Blocks(window)
    (batch, heads, length), padded = query.shape[:3], blocks.count * blocks.size
    output = query.new_empty(batch, padded, heads, value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(batch, heads, padded, dtype=torch.promote_types(query.dtype, torch.float32))
    for rows, part, columns in blocks.spans():
        found, logs = FORWARD(
            *blocks.inputs(rows, part, columns),
            0.0,
            False,
            attn_mask=blocks.mask(rows, columns, query.dtype),
            scale=scaling,
        )
        blocks.queries(output, rows, part).copy_(found)
        blocks.queries(lse, rows, part).copy_(logs)
    output, lse = output[:, :, :length], lse[:, :, :length]
    if other is None:
        return output, lse
    count = F.pad(window.marks.cumsum(1), (1 + window.missing, 0))
    near = (count[:, 1 + reach :] > count[:, 1 : 1 + length])[:, None]
    return _join(output, lse, near, *other)


def _join(
    output: Tensor, lse: Tensor, near: Tensor, values: Tensor, total: Tensor, log_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Output, written over, and log-sum-exp of a window with other sums; `near`: where it has any key."""
    some, rest = total > 0, log_scale + total.log()
    joined = torch.logaddexp(lse.masked_fill(~near, float("-inf")), rest)
    joined = joined.masked_fill_(~(near | some), 0.0)
    share = (lse - joined).exp_().masked_fill_(~near, 0.0)
    output.mul_(share.unsqueeze(-1))
    output.addcmul_(values, _share(some, log_scale, joined).unsqueeze(-1))
    return output, joined


def _share(some: Tensor, log_scale: Tensor, lse: Tensor) -> Tensor:
    return torch.where(some, log_scale - lse, float("-inf")).exp()


def _backward(grad: Tensor, window: Window, other: Sums | None, output: Tensor, lse: Tensor) -> list[Tensor]:
    """By query, key and value, and by the three of the other sums."""
    if native_window.takes(window, other):
        return native_window.backward(grad, window, other, output, lse)
    query, blocks = window.query, _Blocks(window)
    outputs, logs, given = (blocks.over_queries(x) for x in (output, lse, grad))
    by_query = torch.empty_like(blocks.query)
    by_key, by_value = (x.new_zeros(x.shape) for x in (blocks.key, blocks.value))
    for rows, part, columns in blocks.spans():
        found = BACKWARD(
            blocks.queries(given, rows, part),
            *blocks.inputs(rows, part, columns),
            blocks.queries(outputs, rows, part),
            blocks.queries(logs, rows, part).contiguous(),
            0.0,
            False,
            attn_mask=blocks.mask(rows, columns, query.dtype),
            scale=window.scaling,
        )
        blocks.queries(by_query, rows, part).copy_(found[0])
        blocks.add_runs(by_key, found[1], rows, columns)
        blocks.add_runs(by_value, found[2], rows, columns)
    by = [by_query[:, :, : query.shape[2]], blocks.own_columns(by_key), blocks.own_columns(by_value)]
    if other is None:
        return by
    values, total, log_scale = other
    share = _share(total > 0, log_scale, lse)
    fall = (grad * output).sum(-1)
    by_scale = share * ((grad * values).sum(-1) - fall * total)
    return [*by, grad * share.unsqueeze(-1), -fall * share, by_scale]


def _backward_of(grad: Tensor, *inputs: Any) -> list[Tensor]:
    """`_backward` of the operator's arguments."""
    *given, output, lse, reach, scaling = inputs
    return _backward(grad, *_parts(*given, reach, scaling), output, lse)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.how = inputs[7:]


def _grads(by: list[Tensor]) -> tuple[Tensor | None, ...]:
    other = by[3:] or (None, None, None)
    return (*by[:3], None, *other, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output, lse = _forward(*_parts(*inputs))
        _remember(ctx, inputs, (output, lse))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _grads(_backward_of(grad, *ctx.saved_tensors, *ctx.how))


_operator = torch.library.custom_op(
    "hf_linattn::softmax_of_window",
    dense(lambda *inputs: _forward(*_parts(*inputs))),
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor marks, Tensor? values, Tensor? total, "
        "Tensor? log_scale, int reach, float scaling) -> (Tensor, Tensor)"
    ),
)
_backward_operator = torch.library.custom_op(
    "hf_linattn::softmax_of_window_backward",
    lambda *inputs: [x.contiguous() for x in _backward_of(*inputs)],
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor marks, Tensor? values, Tensor? total, "
        "Tensor? log_scale, Tensor output, Tensor lse, int reach, float scaling) -> Tensor[]"
    ),
)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    sums = torch.promote_types(query.dtype, torch.float32)
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[-1]), query.new_empty(shape, dtype=sums)


@_backward_operator.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, marks: Tensor, *others: Any) -> list[Tensor]:
    like = (query, key, value, *(x for x in others[:3] if x is not None))
    return [x.new_empty(x.shape) for x in like]


def _autograd_backward(ctx: Any, grad: Tensor, by_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _grads(torch.ops.hf_linattn.softmax_of_window_backward(grad, *ctx.saved_tensors, *ctx.how))


_operator.register_autograd(_autograd_backward, setup_context=_remember)
