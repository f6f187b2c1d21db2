"""Normalised linear attention on GPUs by Triton: forward, backward, one token; causal or over all keys.

Importing this page does not import triton, the first call does. The kernels are in `kernels` and
`backward_kernels`. A causal forward is one launch where the batch alone fills the device, two where few
segments do, else three; a backward four, or five behind three. Where it is not told what stood before the
forward's segments, it sums them up in as many launches more. Results do not depend on the order in which
programs run.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton.backward import backward, global_backward
from hf_linattn.ops.triton.plan import interpreting
from hf_linattn.ops.triton.problem import (
    OUTPUTS,
    SEGMENT_STATES,
    STEP,
    Problem,
    Segments,
)
from hf_linattn.ops.types import Inputs, OpConfig

__all__ = ["available", "backward", "decode", "forward", "global_backward", "global_forward", "step"]


@functools.cache
def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # someone put None in its place
        return False


def available(device: torch.device | str) -> bool:
    """Tell whether the kernels run there: triton is there, and the device is CUDA, ROCm, or interpreted."""
    kind = torch.device(device).type
    if kind == "cuda":
        return _installed()
    # asked for by environment only, so that a call on a CPU does not import triton to say no
    return kind == "cpu" and "TRITON_INTERPRET" in os.environ and _installed() and interpreting()


def forward_and_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    feature_map: str,
    normalise: bool,
    *,
    eps: float = 0.0,
    log_decay: Tensor | None = None,
    documents: Tensor | None = None,
    segment: int | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], Segments | None]:
    """Compute causal linear attention after the state (S0, z0), and say what `backward` may read again.

    Args:
        query: `[B, H, N, D]` before the feature map; D at most 256. Float32, bfloat16 or float16, anyhow in
            memory.
        key: `[B, Hkv, N, D]`; H a multiple of Hkv.
        value: `[B, Hkv, N, Dv]`.
        valid: boolean `[B, N]`; False at keys that do not count, which may hold anything. None for all.
        S0: float32 `[B, Hkv, D, Dv]`, the state before; None for nothing.
        z0: float32 `[B, Hkv, D]`, likewise.
        feature_map: "elu1" (queries scaled per row by a positive factor, which only `total` and unnormalised
            outputs show), "relu" or "none".
        normalise: divide by the total; rows whose total is 0 give 0.
        eps: added to the features of "relu".
        log_decay: `[B, Hkv, N]`, at most 0, float32: each token scales all before it by its exponential.
        documents: integers `[B, N]`, ascending: a query sees its own, and the state before belongs to the
            first of each row, that after to the last.
        segment: tokens that one program walks, a multiple of 64; None chooses by device and shape.

    Returns:
        First, what `forward` returns: output `[B, H, N, Dv]` in the dtype of the values, float32 where it is
        not divided, a view of `[B, N, H, Dv]`; total `[B, H, N]`, S and z after the last token, float32.
        Then what stands before the segments; None where there are none. These states take as much memory as
        two programs on each processor of the device hold, whatever the batch and the length: at most 17 MB
        on an H100.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    call = Problem(query, key, value, valid, feature_map, normalise, eps, segment, log_decay, documents)
    S0, z0 = call.dense(S0, z0)
    if not call.length or not call.batch:
        return _nothing(call, S0, z0), None
    if call.length == 1:
        return _step(call, S0, z0), None
    S, z = call.new_state()
    output, total, segments = _outputs(call, S0, z0, S, z)
    return (output, total, S, z), segments


def forward(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute what `forward_and_segments` does, and return the output, the total, S and z alone."""
    return forward_and_segments(*arguments, **options)[0]


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    feature_map: str,
    normalise: bool = True,
    *,
    eps: float = 0.0,
    log_decay: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode one token, N = 1, in one launch: the state takes its key in, then its queries read.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, Hkv, 1, D]`.
        value: `[B, Hkv, 1, Dv]`.
        valid: boolean `[B, 1]`; None for all.
        S: float32 `[B, Hkv, D, Dv]`, the state before; None for nothing.
        z: float32 `[B, Hkv, D]`, likewise.
        feature_map: as in `forward`.
        normalise: divide by the total.
        eps: as in `forward`.
        log_decay: `[B, Hkv, N]`, at most 0, float32: each token scales all before it by its exponential.
        in_place: write the new state over the old one, which is dense and not None.

    Returns:
        Output `[B, H, 1, Dv]`, and the new S and z; the old ones stay as they were, unless written over.
    """
    call = Problem(query, key, value, valid, feature_map, normalise, eps, None, log_decay)
    output, _, S, z = _step(call, *call.dense(S, z), in_place)
    return output, S, z


def step(inputs: Inputs, config: OpConfig) -> tuple[Tensor, Tensor]:
    """Decode one token and write its state over the one before.

    Args:
        inputs: of one token; S and z dense.
        config: as in `forward`.

    Returns:
        Output `[B, H, 1, Dv]` and total `[B, H, 1]`.
    """
    query, key, value, valid, S, z, log_decay, _ = inputs
    call = Problem(query, key, value, valid, config.kind, config.normalise, config.eps, None, log_decay)
    return _step(call, S, z, in_place=True)[:2]


def global_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    feature_map: str,
    normalise: bool,
    *,
    eps: float = 0.0,
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute linear attention over all keys; there may be more or fewer queries than keys.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, M, D]`.
        value: `[B, Hkv, M, Dv]`.
        valid: boolean `[B, M]`; None for all.
        S0: float32 `[B, Hkv, D, Dv]`, sums to begin from; None for nothing.
        z0: float32 `[B, Hkv, D]`, likewise.
        feature_map: as in `forward`.
        normalise: divide by the total.
        eps: as in `forward`.
        segment: as in `forward`.

    Returns:
        Output `[B, H, N, Dv]` in the dtype of the values, float32 where it is not divided; total `[B, H, N]`,
        S and z over all keys, float32.
    """
    call = Problem(query, key, value, valid, feature_map, normalise, eps, segment)
    S, z = call.dense(S0, z0)
    if call.keys and call.batch:
        tokens, slots = call.cut(call.keys, SEGMENT_STATES)
        states, factors = call.states(tokens, slots)
        assert states is not None
        call.accumulate(states, factors, S, z)
        S, z = call.last_slot(states)
    if S is None or z is None or not call.length or not call.batch:
        return _nothing(call, S, z)
    return *_outputs(call, S, z, None, None)[:2], S, z


def _nothing(call: Problem, S: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Answer a call without tokens or without keys: zeros, and the state unchanged in memory of its own."""
    output, total = call.new_output()
    new_S, new_z = call.new_state()
    new_S = new_S.zero_() if S is None else new_S.copy_(S)
    new_z = new_z.zero_() if z is None else new_z.copy_(z)
    return output.zero_(), total.zero_(), new_S, new_z


def _outputs(
    call: Problem, S0: Tensor | None, z0: Tensor | None, S: Tensor | None, z: Tensor | None
) -> tuple[Tensor, Tensor, Segments]:
    """Launch the kernel of outputs and totals.

    With S and z it is causal, and writes the state after there; S0 and z0 are that before, else of all keys.
    """
    from hf_linattn.ops.triton import kernels

    causal = S is not None
    tokens, segments = call.cut(call.length, OUTPUTS)
    before = call.states_before(tokens, segments if causal else 1, S0, z0)
    output, total = call.new_output()
    call.run(
        kernels.outputs,
        OUTPUTS,
        segments,
        {
            **before.arguments,
            "S0": S0,
            "Z0": z0,
            "OUT": output,
            "TOTAL": total,
            "S": S,
            "Z": z,
            "segment": tokens,
            "CAUSAL": causal,
        },
    )
    return output, total, before


def _step(
    call: Problem, S0: Tensor | None, z0: Tensor | None, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from hf_linattn.ops.triton import kernels

    assert call.length == call.keys == 1, (call.length, call.keys)
    output, total = call.new_output()
    S, z = call.new_state() if not in_place or S0 is None or z0 is None else (S0, z0)
    # programs that share z leave it as it was until all have read it
    shared = z is z0 and call.Dv > call.tile(STEP).block
    new_z = torch.empty_like(z) if shared else z
    call.run(
        kernels.step,
        STEP,
        1,
        {
            "S0": S0,
            "Z0": z0,
            "OUT": output,
            "TOTAL": total,
            "S": S,
            "Z": new_z,
        },
    )
    if shared:
        z.copy_(new_z)
    return output, total, S, z
