"""Softmax over a window and the linear attention behind it on GPUs, in one launch of `window_rest_kernels`.

Forward alone: the numerators, which a backward reads, are not written. Before it segments of the linear
attention are summed up, as for `launch.forward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import plan, problem
from hf_linattn.ops.triton.problem import Problem, constant_strides
from hf_linattn.ops.triton.tiles import padded, segment_length
from hf_linattn.ops.triton.window import LOG2E, Sinks
from hf_linattn.ops.types import Inputs, Window

WIDEST = 64
"""Heads and features: wider ones leave no registers for S beside a softmax."""


class Rest(NamedTuple):
    """A linear attention over the tokens that have left a window.

    Attributes:
        inputs: queries `[B, H, n, D]`, the last n of the window's, or their features; keys and values of n
            tokens. Query i reads the first i + 1 of them, and the state before. No documents.
        kind: the map inside the kernel, "none" for features.
        eps: as in `launch.forward`.
        log_scale: logarithm of what features of queries were divided by, `[B, H, n]`, float32; None for 1,
            and where the map is inside.
    """

    inputs: Inputs
    kind: str
    eps: float = 0.0
    log_scale: Tensor | None = None


def pays(window: Window, features: int, left: int) -> bool:
    """Tell whether one kernel is better than two: no registers spilled, and programs that fill the device.

    Args:
        window: as `forward` takes it.
        features: of the linear attention.
        left: tokens that have left the window.
    """
    query, value = window.query, window.value
    if query.dtype != torch.bfloat16 or max(query.shape[-1], value.shape[-1], features) > WIDEST:
        return False
    about = plan.device_of(query.device)
    rows = query.shape[0] * query.shape[1]
    return about.capability[0] in (8, 9, 10) and rows * (left // 256) >= 2 * about.processors


def forward(
    window: Window, sinks: Sinks | None, rest: Rest, segment: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute softmax over the window, the sinks and the tokens behind it, under one normaliser.

    Args:
        window: as `window.forward` takes it.
        sinks: likewise; None for none.
        rest: at least one token; a state before only where all queries have tokens behind the window.
        segment: tokens that one program walks, a multiple of 64; None chooses by device and shape.

    Returns:
        Output `[B, H, N, Dv]` in the dtype of the values, a view of `[B, N, H, Dv]`; S `[B, Hkv, F, Dv]` and
        z `[B, Hkv, F]` after the last token, float32.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    from hf_linattn.ops.triton import window_rest_kernels

    call = Problem(*window[:4], "none", True)
    query, key, value, valid, S0, z0, decay, _ = rest.inputs
    behind = Problem(query, key, value, valid, rest.kind, True, rest.eps, None, decay)
    S0, z0 = behind.dense(S0, z0)
    alone, left, tile = call.length - behind.length, behind.length, call.tiles.window_and_rest
    assert S0 is None or not alone, alone
    rows, processors = call.batch * call.heads, call.about.processors
    segment = segment or segment_length(left, rows, processors, call.tiles.least)
    segments = -(-left // segment)
    before = behind.states_before(segment, segments, S0, z0)
    output = call.new_output()[0]
    S, z = behind.new_state()
    call.launch(
        window_rest_kernels.window_and_rest,
        (rows, -(-alone // segment) + segments),
        tile,
        {
            **call.tensors,
            **call.strides(),
            **_of_sinks(sinks),
            **_of_rest(behind, rest),
            **before.arguments,
            "S0": S0,
            "Z0": z0,
            "OUT": output,
            "S": S,
            "Z": z,
            **constant_strides(out=output),
            "heads": call.heads,
            "length": call.length,
            "keys": call.keys,
            "span": window.span,
            "offset": window.span - window.n_missing,
            "alone": alone,
            "left": left,
            "scale": window.scaling * LOG2E,
            "segment": segment,
            "D": call.D,
            "DV": call.Dv,
            "F": behind.D,
            "BLOCK_D": padded(call.D),
            "BLOCK_V": padded(call.Dv),
            "BLOCK_F": padded(behind.D),
            "CHUNK": tile.chunk,
            "BLOCK": tile.block,
            "STEP": 32 if rest.kind == "none" and decay is None else 16,
            "GROUP": call.group,
        },
    )
    return output, S, z


def _of_sinks(sinks: Sinks | None) -> dict[str, Any]:
    """Pass the sinks."""
    query = None if sinks is None or sinks.query is None else problem.last_contiguous(sinks.query)
    return {
        "SINK_Q": query,
        "SINK_K": None if sinks is None else sinks.key.contiguous(),
        "SINK_V": None if sinks is None else sinks.value.contiguous(),
        "SINK_VALID": None if sinks is None else sinks.valid.contiguous().view(torch.uint8),
        "RANKS": None if sinks is None or sinks.ranks is None else sinks.ranks.contiguous(),
        "sink_q_strides": (0, 0, 0) if query is None else query.stride()[:3],
        "sinks": 0 if sinks is None else sinks.key.shape[2],
        "SINKS": 0 if sinks is None else padded(sinks.key.shape[2]),
    }


def _of_rest(behind: Problem, rest: Rest) -> dict[str, Any]:
    """Pass what the linear attention reads."""
    valid, scale = behind.valid, rest.log_scale
    return {
        "PHI_Q": behind.query,
        "PHI_K": behind.key,
        "LEFT_V": behind.value,
        **constant_strides(phi_q=behind.query, phi_k=behind.key, left_v=behind.value),
        "LEFT_VALID": None if valid is None else valid.view(torch.uint8),
        "left_valid_strides": (0, 0) if valid is None else valid.stride(),
        "DECAY": behind.decay,
        "LOG_SCALE": None if scale is None else scale.contiguous(),
        **behind.maps,
    }
