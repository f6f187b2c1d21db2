"""One decoded token behind a window on GPUs, in place: launches the two kernels of `window_token_kernels`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton.problem import Problem, last_contiguous
from hf_linattn.ops.triton.tiles import Tile, padded
from hf_linattn.ops.triton.window import LOG2E, Sinks
from hf_linattn.ops.types import Gate

PUSH = Tile(chunk=1, block=1, warps=4, stages=1)
"""Of `window_push`: a program copies a row."""


class Ring(NamedTuple):
    """The window's tokens, in memory that is written over; dense.

    Attributes:
        key: `[B, Hkv, W, D]`.
        value: `[B, Hkv, W, Dv]`.
        valid: boolean `[B, W]`, True at columns that count.
        oldest: int64 `[B]`: the column of the oldest token.
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    oldest: Tensor


class Tail(NamedTuple):
    """What lies behind the window, as a linear attention has it.

    Attributes:
        S: the state, `[B, Hkv, F, Dv]`, float32, dense: written over.
        z: `[B, Hkv, F]`, likewise.
        query: features of the query, or what the kernel's map makes them of, `[B, H, 1, F]`; None for the
            query itself.
        evicted: likewise of the window's oldest token, `[B, Hkv, 1, F]`; None for the key in the window.
        log_decay: of the oldest token, `[B, Hkv, 1]`, at most 0; None for no decay.
        gate: in place of `log_decay`.
        kind: as in `OpConfig`.
        eps: likewise.
        query_log_scale: logarithm of what the query's features were divided by, `[B, H, 1]`; None for 1, and
            where the map is the kernel's.
        mix: the window's share of the output, `[H]`, where each part has a normaliser of its own and the tail
            is not empty; None for one normaliser.
        mix_logit: the sigmoid of `mix` is the share.
    """

    S: Tensor
    z: Tensor
    query: Tensor | None = None
    evicted: Tensor | None = None
    log_decay: Tensor | None = None
    gate: Gate | None = None
    kind: str = "none"
    eps: float = 0.0
    query_log_scale: Tensor | None = None
    mix: Tensor | None = None
    mix_logit: bool = False


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    ring: Ring,
    scaling: float,
    tail: Tail | None = None,
    sinks: Sinks | None = None,
) -> Tensor:
    """Put a token into the window and let its query read all: `[B, H, 1, Dv]` in the dtype of the values.

    A token that does not count changes nothing. Ring, sinks and state are written over.

    Args:
        query: `[B, H, 1, D]`, of the ring's dtype like key and value.
        key: `[B, Hkv, 1, D]`.
        value: `[B, Hkv, 1, Dv]`.
        valid: boolean `[B, 1]`, whether the token counts; None for all.
        ring: what the window holds.
        scaling: of the scores.
        tail: what lies behind the window; at most 256 features.
        sinks: dense, with ranks `[B, 1]` of the token, -1 where it does not count; None for none.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    from hf_linattn.ops.triton import window_token_kernels as kernels

    call = Problem(query, key, value, None, "none", True)
    size, tile = ring.key.shape[2], call.tiles.window_step
    output = call.token_major(call.heads, 1, call.Dv, value.dtype)
    counts = None if valid is None else valid.view(torch.uint8)
    met = None if sinks is None or sinks.query is None else last_contiguous(sinks.query)
    features = call.D if tail is None else tail.S.shape[2]
    tail_query = None if tail is None or tail.query is None else last_contiguous(tail.query)
    new_z = None if tail is None else torch.empty_like(tail.z)
    gate = None if tail is None else tail.gate
    both: dict[str, Any] = {
        "K": call.key,
        "V": call.value,
        "VALID": counts,
        "RING_K": ring.key,
        "RING_V": ring.value,
        "RING_VALID": ring.valid.view(torch.uint8),
        "OLDEST": ring.oldest,
        "COLUMN": torch.empty_like(ring.oldest),
        "RANKS": None if sinks is None or sinks.ranks is None else sinks.ranks.contiguous(),
        "SINK_K": None if sinks is None else sinks.key,
        "SINK_V": None if sinks is None else sinks.value,
        "SINK_VALID": None if sinks is None else sinks.valid.view(torch.uint8),
        "Z": None if tail is None else tail.z,
        "NEW_Z": new_z,
        "k_strides": call.key.stride()[:3],
        "v_strides": call.value.stride()[:3],
        "valid_stride": 0 if counts is None else counts.stride(0),
        "kv_heads": call.kv_heads,
        "size": size,
        "sinks": 0 if sinks is None else sinks.key.shape[2],
        "D": call.D,
        "DV": call.Dv,
        "FEATURES": features,
        "BLOCK_D": padded(call.D),
        "BLOCK_V": padded(call.Dv),
        "BLOCK_F": padded(features),
        "SINKS": 0 if sinks is None else padded(sinks.key.shape[2]),
    }
    call.launch(
        kernels.window_step,
        (call.batch_heads * -(-call.Dv // tile.block),),
        tile,
        {
            **both,
            "Q": call.query,
            "SINK_Q": met,
            "TAIL_Q": tail_query,
            "EVICTED": _dense(None if tail is None else tail.evicted),
            "S": None if tail is None else tail.S,
            "DECAY": _dense(None if tail is None else tail.log_decay),
            "GATE": None if gate is None else gate.weight,
            "GATE_BIAS": None if gate is None else gate.bias,
            "LOG_SCALE": _dense(None if tail is None else tail.query_log_scale),
            "MIX": _dense(None if tail is None else tail.mix),
            "OUT": output,
            "q_strides": call.query.stride()[:3],
            "sink_q_strides": (0, 0, 0) if met is None else met.stride()[:3],
            "tail_q_strides": (0, 0, 0) if tail_query is None else tail_query.stride()[:3],
            "scale": scaling * LOG2E,
            "temperature": 1.0 if gate is None else float(gate.temperature),
            "BLOCK": tile.block,
            "CHUNK": tile.chunk,
            "ROWS": padded(call.group),
            "GROUP": call.group,
            "FEATURE_MAP": "none" if tail is None else tail.kind,
            "EPS": tail.eps if tail is not None and tail.kind == "relu" else 0.0,
            "LOGIT": tail is not None and tail.mix_logit,
            "OPERAND": call.maps["OPERAND"],
        },
    )
    call.launch(kernels.window_push, (call.batch_heads,), PUSH, both)
    return output


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
