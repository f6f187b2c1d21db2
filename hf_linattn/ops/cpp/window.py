"""Softmax over a sliding window by the C++ kernels, joined with sinks and sums over other tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout, linear
from hf_linattn.ops.cpp.layout import address, array
from hf_linattn.ops.cpp.linear import SUMS
from hf_linattn.ops.types import ScaledSums, Window, WindowSinks, token_major

BLOCK = 96
"""Queries, and columns, that go through a product together, at most: measured, from 32 to 128."""
VECTOR = 16
"""Floats in the longest vectors of any processor."""


def forward(
    window: Window, other: ScaledSums | None, sinks: WindowSinks | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax over the window, the sinks and the other tokens, under one normaliser.

    Args:
        window: queries, and what they see.
        other: of all queries, or of the last ones, before which there are no others; None for none.
        sinks: None for none.

    Returns:
        Output `[B, H, N, Dv]`, in memory `[B, N, H, Dv]`, and log-sum-exp `[B, H, N]`, 0 where nothing is
        seen.

    Raises:
        UnsupportedCallError: the kernels cannot be compiled.
    """
    window, other, sinks = _dense(window, other, sinks)
    query, value = window.query, window.value
    (batch, heads, length, _), value_dim = query.shape, value.shape[3]
    output = token_major(query, batch, heads, length, value_dim)
    lse = query.new_empty(batch, heads, length, dtype=SUMS)
    problem = _problem(window, other, sinks, output, lse, layout.NO_WINDOW_GRADS)
    build.library().linattn_window_forward(problem, window.scaling)
    return output, lse


def backward(
    grad: Tensor,
    window: Window,
    other: ScaledSums | None,
    output: Tensor,
    lse: Tensor,
    sinks: WindowSinks | None = None,
) -> list[Tensor]:
    """Compute gradients of query, key and value, of the three tensors of the other sums, of the sinks.

    Args:
        grad: gradient of the output, `[B, H, N, Dv]`.
        window: as `forward` took it.
        other: likewise.
        output: what `forward` returned.
        lse: likewise.
        sinks: as `forward` took them; the gradients of their keys and values are float32.
    """
    window, other, sinks = _dense(window, other, sinks)
    grad, output, lse = linear.rows(grad), linear.rows(output), lse.contiguous()
    query, key, value = (torch.empty_like(x) for x in window[:3])
    others = [torch.empty_like(x) for x in other or ()]
    beside = [x.new_empty(x.shape, dtype=SUMS) for x in sinks[:2]] if sinks is not None else []
    grads = layout.WindowGrads.pack(
        d_output=array(grad),
        d_query=array(query),
        d_key=array(key),
        d_value=array(value),
        d_others=array(others[0]) if others else layout.NO_ARRAY,
        d_total=address(others[1]) if others else 0,
        d_log_scale=address(others[2]) if others else 0,
        d_sink_key=address(beside[0]) if beside else 0,
        d_sink_value=address(beside[1]) if beside else 0,
    )
    problem = _problem(window, other, sinks, output, lse, grads)
    build.library().linattn_window_backward(problem, window.scaling)
    return [query, key, value, *others, *beside]


def _problem(
    window: Window,
    other: ScaledSums | None,
    sinks: WindowSinks | None,
    output: Tensor,
    lse: Tensor,
    grads: bytes,
) -> bytes:
    query, key, value, valid, span, _ = window
    length = query.shape[2]
    block = _whole(-(-length // -(-length // BLOCK)))
    if key.shape[2] == length <= span:  # of no column before the first query: as short as blocks are whole
        span = -(-length // block) * block
    return layout.WindowProblem.pack(
        sizes=layout.sizes(query.shape[1], length, key, value),
        grads=grads,
        beside=layout.NO_SINKS if sinks is None else _beside(sinks),
        span=span,
        n_missing=length + span - key.shape[2],
        block=block,
        query=array(query),
        key=array(key),
        value=array(value),
        output=array(output),
        valid=address(valid),
        valid_row=valid.stride(0),
        others=layout.NO_ARRAY if other is None else array(other.values),
        others_from=0 if other is None else length - other.total.shape[2],
        total=0 if other is None else address(other.total),
        log_scale=0 if other is None else address(other.log_scale),
        lse=address(lse),
    )


def _whole(length: int) -> int:
    return -(-length // VECTOR) * VECTOR


def _beside(sinks: WindowSinks) -> bytes:
    key, value, valid, ranks, turn = sinks
    cos, sin = turn or (None, None)
    return layout.WindowSinks.pack(
        sinks=key.shape[2],
        sink_key=array(key),
        sink_value=array(value),
        sink_valid=address(valid),
        ranks=address(ranks),
        turn_cos=address(cos),
        turn_sin=address(sin),
        turned=0 if cos is None else cos.shape[2],
        turn_row=0 if cos is None or cos.shape[0] == 1 else cos.stride(0),
    )


def _dense(
    window: Window, other: ScaledSums | None, sinks: WindowSinks | None
) -> tuple[Window, ScaledSums | None, WindowSinks | None]:
    """Make the last axes dense, and what else the kernels read as a whole."""
    query, key, value, valid = map(linear.rows, window[:4])
    if other is not None:
        values, total, log_scale = other
        other = ScaledSums(linear.rows(values), total.contiguous(), log_scale.contiguous())
    if sinks is not None:
        ranks, turn = sinks.ranks, sinks.turn
        sinks = WindowSinks(
            linear.rows(sinks.key),
            linear.rows(sinks.value),
            sinks.valid.contiguous(),
            None if ranks is None else ranks.contiguous(),
            None if turn is None else (turn[0].contiguous(), turn[1].contiguous()),
        )
    return Window(query, key, value, valid, *window[4:]), other, sinks
