"""Softmax over a sliding window by the C++ kernels, joined with sums over other tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout, linear
from hf_linattn.ops.cpp.layout import address, array
from hf_linattn.ops.cpp.linear import SUMS
from hf_linattn.ops.types import ScaledSums, Window, token_major

BLOCK = 96
"""Queries, and columns, that go through a product together: measured, from 32 to 128."""
VECTOR = 16
"""Floats in the longest vectors of any processor."""


def forward(window: Window, other: ScaledSums | None) -> tuple[Tensor, Tensor]:
    """Compute softmax over the window and the other tokens, under one normaliser.

    Returns:
        Output `[B, H, N, Dv]`, in memory `[B, N, H, Dv]`, and log-sum-exp `[B, H, N]`, 0 where nothing is
        seen.

    Raises:
        UnsupportedCallError: the kernels cannot be compiled.
    """
    window, other = _dense(window, other)
    query, value = window.query, window.value
    (batch, heads, length, _), value_dim = query.shape, value.shape[3]
    output = token_major(query, batch, heads, length, value_dim)
    lse = query.new_empty(batch, heads, length, dtype=SUMS)
    problem = _problem(window, other, output, lse, layout.NO_WINDOW_GRADS)
    build.library().linattn_window_forward(problem, window.scaling)
    return output, lse


def backward(
    grad: Tensor, window: Window, other: ScaledSums | None, output: Tensor, lse: Tensor
) -> list[Tensor]:
    """Compute gradients of query, key and value, and of the three tensors of the other sums.

    Args:
        grad: gradient of the output, `[B, H, N, Dv]`.
        window: as `forward` took it.
        other: likewise.
        output: what `forward` returned.
        lse: likewise.
    """
    window, other = _dense(window, other)
    grad, output, lse = linear.rows(grad), linear.rows(output), lse.contiguous()
    gradients = [torch.empty_like(x) for x in (*window[:3], *(other or ()))]
    query, key, value, *others = gradients
    grads = layout.WindowGrads.pack(
        d_output=array(grad),
        d_query=array(query),
        d_key=array(key),
        d_value=array(value),
        d_others=array(others[0]) if others else layout.NO_ARRAY,
        d_total=address(others[1]) if others else 0,
        d_log_scale=address(others[2]) if others else 0,
    )
    problem = _problem(window, other, output, lse, grads)
    build.library().linattn_window_backward(problem, window.scaling)
    return gradients


def _problem(window: Window, other: ScaledSums | None, output: Tensor, lse: Tensor, grads: bytes) -> bytes:
    query, key, value, valid, span, _ = window
    length = query.shape[2]
    return layout.WindowProblem.pack(
        sizes=layout.sizes(query.shape[1], length, key, value),
        grads=grads,
        span=span,
        n_missing=window.n_missing,
        block=min(BLOCK, -(-length // VECTOR) * VECTOR),
        query=array(query),
        key=array(key),
        value=array(value),
        output=array(output),
        valid=address(valid),
        valid_row=valid.stride(0),
        others=layout.NO_ARRAY if other is None else array(other.values),
        total=0 if other is None else address(other.total),
        log_scale=0 if other is None else address(other.log_scale),
        lse=address(lse),
    )


def _dense(window: Window, other: ScaledSums | None) -> tuple[Window, ScaledSums | None]:
    """Make the last axes dense, and the sums' totals and scales all of them, as the kernels read them."""
    query, key, value, valid = map(linear.rows, window[:4])
    if other is not None:
        values, total, log_scale = other
        other = ScaledSums(linear.rows(values), total.contiguous(), log_scale.contiguous())
    return Window(query, key, value, valid, *window[4:]), other
