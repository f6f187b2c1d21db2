"""Softmax over a sliding window by the C++ kernels of `ops/cpp`, joined with sums from elsewhere."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, linear
from hf_linattn.ops.cpp.linear import SUMS
from hf_linattn.ops.types import Sums, Window, by_token

BLOCK = 96
"""Queries, and columns, that go through a product together: measured, from 32 to 128."""
VECTOR = 16
"""Floats in the longest vectors of any processor."""
_FORWARD, _BACKWARD = struct.Struct("40q").pack, struct.Struct("67q").pack
"""`WindowProblem` of ops/cpp/window.h; a forward reads the first part of it."""


def takes(window: Window, other: Sums | None) -> bool:
    """Whether they were asked for and can read these: as `linear.reads`, sums in float32."""
    return linear.reads(window.query, window.key, window.value) and all(x.dtype == SUMS for x in other or ())


def forward(window: Window, other: Sums | None) -> tuple[Tensor, Tensor]:
    """Output `[B, H, N, Dv]`, a view of `[B, N, H, Dv]`, and the log-sum-exp `[B, H, N]`, 0 where nothing is.

    Raises:
        UnsupportedCallError: they cannot be compiled.
    """
    window, other = _dense(window, other)
    query, value = window.query, window.value
    (batch, heads, length, _), wide = query.shape, value.shape[3]
    output = by_token(query, batch, heads, length, wide)
    lse = query.new_empty(batch, heads, length, dtype=SUMS)
    problem = _FORWARD(*_numbers(window, other, output, lse))
    build.library().linattn_window_forward(problem, window.scaling)
    return output, lse


def backward(grad: Tensor, window: Window, other: Sums | None, output: Tensor, lse: Tensor) -> list[Tensor]:
    """By query, key and value, and by the three of the other sums."""
    window, other = _dense(window, other)
    grad, output, lse = linear.rows(grad), linear.rows(output), lse.contiguous()
    found = [torch.empty_like(x) for x in (*window[:3], *(other or ()))]
    query, key, value, *by_other = found
    arrays = [x for y in (grad, query, key, value) for x in linear.array(y)]
    rest = _of_others(by_other)
    problem = _BACKWARD(*_numbers(window, other, output, lse), *arrays, *rest)
    build.library().linattn_window_backward(problem, window.scaling)
    return found


def _numbers(window: Window, other: Sums | None, output: Tensor, lse: Tensor) -> tuple[int, ...]:
    """`WindowProblem` up to `lse`."""
    query, key, value, marks, reach, _ = window
    (batch, heads, length, size), kv_heads, wide = query.shape, key.shape[1], value.shape[3]
    block = min(BLOCK, -(-length // VECTOR) * VECTOR)
    sizes = (batch, heads, kv_heads, length, size, wide, reach, window.missing, block)
    arrays = [x for y in (query, key, value, output) for x in linear.array(y)]
    rest = (marks.data_ptr(), marks.stride(0), *_of_others(other or ()), lse.data_ptr())
    return (*sizes, torch.get_num_threads(), *arrays, *rest)


def _of_others(other: Sums | list[Tensor] | tuple[()]) -> tuple[int, ...]:
    """An array and two addresses, or zeros."""
    if not other:
        return (0,) * 7
    values, total, log_scale = other
    return (*linear.array(values), total.data_ptr(), log_scale.data_ptr())


def _dense(window: Window, other: Sums | None) -> tuple[Window, Sums | None]:
    """As the kernels read them."""
    query, key, value, marks = map(linear.rows, window[:4])
    if other is not None:
        other = Sums(linear.rows(other.values), other.total.contiguous(), other.log_scale.contiguous())
    return Window(query, key, value, marks, *window[4:]), other
