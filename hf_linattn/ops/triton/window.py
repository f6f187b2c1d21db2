"""Softmax over a window, its sinks and other tokens on GPUs: launches the kernels of `window_kernels`.

The linear attention behind the window hands over its numerators and totals, as `launch.forward` computes them
without dividing; both are joined here under one normaliser. Forward is one launch, backward two, beside those
of the linear attention.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton.problem import Problem, last_contiguous
from hf_linattn.ops.triton.tiles import Tile, padded
from hf_linattn.ops.types import Elu1Sums, OtherSums, ScaledSums, Window

LOG2E = math.log2(math.e)
MOST_SINKS = 64
"""That a program takes in one product; more are other tokens, summed by torch."""


class Sinks(NamedTuple):
    """The first tokens, beside the window.

    Attributes:
        query: queries as they meet them, `[B, H, N, D]`; None for those of the window.
        key: `[B, Hkv, n, D]`.
        value: `[B, Hkv, n, Dv]`.
        valid: boolean `[B, n]`, True at sinks that are there.
        ranks: int64 `[B, N]`: a query sees sinks up to its own; None for all.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    valid: Tensor
    ranks: Tensor | None


class WindowGrads(NamedTuple):
    """Gradients of a window, of its sinks and of the other sums; None where there were none."""

    query: Tensor
    key: Tensor
    value: Tensor
    sink_query: Tensor | None = None
    sink_key: Tensor | None = None
    sink_value: Tensor | None = None
    others: OtherSums | None = None


def forward(window: Window, sinks: Sinks | None, other: OtherSums | None) -> tuple[Tensor, Tensor]:
    """Compute softmax over the window, the sinks and the other tokens, under one normaliser.

    Args:
        window: query, key and value of one dtype, float32, bfloat16 or float16, anyhow in memory; heads of at
            most 256. Keys that do not count are finite.
        sinks: at most `MOST_SINKS`; None for none.
        other: float32, of all queries or of the last ones, before which nothing lies behind the window; None
            for none.

    Returns:
        Output `[B, H, N, Dv]` in the dtype of the values, a view of `[B, N, H, Dv]`, 0 where nothing is seen;
        and the logarithm to base 2 of what it was divided by, `[B, H, N]` float32, 0 there.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    from hf_linattn.ops.triton import window_kernels

    call = _problem(window)
    output, lse = call.new_output()
    if not output.numel():
        return output, lse
    tile = call.tiles.window_outputs
    call.launch(
        window_kernels.window_outputs,
        (call.batch * call.heads * -(-call.length // tile.chunk),),
        tile,
        {
            **_inputs(call, window, sinks, other),
            "OUT": output,
            "LSE": lse,
            "out_strides": output.stride()[:3],
            **_sizes(call, tile, sinks),
        },
    )
    return output, lse


def backward(
    grad: Tensor,
    window: Window,
    sinks: Sinks | None,
    other: OtherSums | None,
    output: Tensor,
    lse: Tensor,
) -> WindowGrads:
    """Compute the gradients of `forward`.

    Args:
        grad: of the output, `[B, H, N, Dv]`.
        window: as the forward took it.
        sinks: likewise.
        other: likewise.
        output: what it returned.
        lse: likewise.
    """
    from hf_linattn.ops.triton import window_kernels

    call, grad = _problem(window), last_contiguous(grad)
    d_query, d_key, d_value = (_token_major(x, call, x.shape) for x in (call.query, call.key, call.value))
    tile = call.tiles.window_query_gradients
    chunks = -(-call.length // tile.chunk)
    turned = sinks is not None and sinks.query is not None
    d_sink_query = _token_major(call.query, call, call.query.shape) if turned else None
    parts: list[Tensor | None] = [None, None]
    if sinks is not None:
        shape = call.batch, call.heads, chunks, sinks.key.shape[2]
        parts = [call.new(*shape, width) for width in (call.D, call.Dv)]
    d_other: OtherSums | None = None
    d_scale = None
    if other is not None:
        d_other = Elu1Sums(_token_major(other.values, call, other.values.shape), call.new(*other.total.shape))
        if isinstance(other, ScaledSums):
            d_scale = call.new(*other.total.shape)
            d_other = ScaledSums(*d_other, d_scale)
    t = call.new(call.batch, call.heads, call.length)
    given = _inputs(call, window, sinks, other)
    if call.query.numel() and call.value.numel():
        call.launch(
            window_kernels.window_query_gradients,
            (call.batch * call.heads * chunks,),
            tile,
            {
                **given,
                "OUT": output,
                "LSE": lse,
                "D_OUT": grad,
                "T": t,
                "D_Q": d_query,
                "D_SINK_Q": d_sink_query,
                "D_SINK_K": parts[0],
                "D_SINK_V": parts[1],
                "D_OTHER": None if d_other is None else d_other.values,
                "D_TOTAL": None if d_other is None else d_other.total,
                "D_LOG_SCALE": d_scale,
                "out_strides": output.stride()[:3],
                "d_out_strides": grad.stride()[:3],
                "d_q_strides": d_query.stride()[:3],
                "d_sink_q_strides": _strides(d_sink_query),
                "d_other_strides": _strides(None if d_other is None else d_other.values),
                "scaling": window.scaling,
                **_sizes(call, tile, sinks),
            },
        )
        tile = call.tiles.window_key_gradients
        call.launch(
            window_kernels.window_key_gradients,
            (call.batch_heads * -(-call.keys // tile.block),),
            tile,
            {
                **given,
                "LSE": lse,
                "D_OUT": grad,
                "T": t,
                "D_K": d_key,
                "D_V": d_value,
                "d_out_strides": grad.stride()[:3],
                "d_k_strides": d_key.stride()[:3],
                "d_v_strides": d_value.stride()[:3],
                "scaling": window.scaling,
                **_sizes(call, tile, None),
            },
        )
    else:
        d_key, d_value = d_key.zero_(), d_value.zero_()
    d_sink_key, d_sink_value = (
        None if x is None else x.unflatten(1, (call.kv_heads, -1)).sum((2, 3)).to(call.key.dtype)
        for x in parts
    )
    return WindowGrads(d_query, d_key, d_value, d_sink_query, d_sink_key, d_sink_value, d_other)


def _problem(window: Window) -> Problem:
    query, key, value, valid, _, _ = window
    return Problem(query, key, value, valid, "none", True)


def _token_major(like: Tensor, call: Problem, shape: Any) -> Tensor:
    """Allocate a gradient `[B, H, N, D]` that lies token by token, in the dtype of its tensor."""
    _, heads, length, width = shape
    return call.token_major(heads, length, width, like.dtype)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _inputs(call: Problem, window: Window, sinks: Sinks | None, other: OtherSums | None) -> dict[str, Any]:
    """Pass what forward and backward read."""
    query = None if sinks is None or sinks.query is None else last_contiguous(sinks.query)
    values = None if other is None else last_contiguous(other.values)
    return {
        **call.tensors,
        **call.strides(),
        "SINK_Q": query,
        "SINK_K": None if sinks is None else sinks.key.contiguous(),
        "SINK_V": None if sinks is None else sinks.value.contiguous(),
        "SINK_VALID": None if sinks is None else sinks.valid.contiguous().view(torch.uint8),
        "RANKS": None if sinks is None or sinks.ranks is None else sinks.ranks.contiguous(),
        "OTHER": values,
        "TOTAL": None if other is None else other.total.contiguous(),
        "LOG_SCALE": other.log_scale.contiguous() if isinstance(other, ScaledSums) else None,
        "sink_q_strides": _strides(query),
        "other_strides": _strides(values),
        "heads": call.heads,
        "length": call.length,
        "keys": call.keys,
        "span": window.span,
        "offset": window.span - window.n_missing,
        "alone": 0 if other is None else call.length - other.values.shape[2],
        "sinks": 0 if sinks is None else sinks.key.shape[2],
        "scale": window.scaling * LOG2E,
    }


def _sizes(call: Problem, tile: Tile, sinks: Sinks | None) -> dict[str, Any]:
    """Pass the constants of a kernel."""
    return {
        "D": call.D,
        "DV": call.Dv,
        "BLOCK_D": padded(call.D),
        "BLOCK_V": padded(call.Dv),
        "CHUNK": tile.chunk,
        "BLOCK": tile.block,
        "GROUP": call.group,
        "SINKS": 0 if sinks is None else padded(sinks.key.shape[2]),
        "OPERAND": call.maps["OPERAND"],
    }
