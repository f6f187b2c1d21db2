"""Normalised linear attention on GPUs by Triton: forward, backward, one token; causal or over all keys.

Importing this page does not import triton, the first call does. The kernels are in `triton_kernels` and
`triton_backward_kernels`. A causal forward is three launches, or one where the batch alone fills the device;
a backward is seven, or four. Results do not depend on the order in which programs run.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from hf_linattn.ops.triton.backward import backward, global_backward
from hf_linattn.ops.triton.problem import Problem, interpreting, supports

__all__ = ["available", "backward", "decode", "forward", "global_backward", "global_forward", "supports"]


@functools.cache
def _installed() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # someone put None in its place
        return False


def available(device: torch.device | str) -> bool:
    """Whether the kernels run there: triton is installed, and the device is CUDA or ROCm, or interpreted."""
    kind = torch.device(device).type
    if kind == "cuda":
        return _installed()
    # asked for by environment only, so that a call on a CPU does not import triton to say no
    return kind == "cpu" and "TRITON_INTERPRET" in os.environ and _installed() and interpreting()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    feature_map: str,
    normalise: bool,
    *,
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Causal linear attention after the state (S0, z0).

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
        segment: tokens that one program walks, a multiple of 64; None chooses by device and shape.

    Returns:
        Output `[B, H, N, Dv]` in the dtype of the values, a view of `[B, N, H, Dv]`; total `[B, H, N]`, S and
        z after the last token, float32.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    from hf_linattn.ops.triton import kernels

    call = Problem(query, key, value, valid, feature_map, normalise, segment)
    S0, z0 = call.dense(S0, z0)
    if not call.length or not call.batch:
        return _nothing(call, S0, z0)
    if call.length == 1:
        return _step(call, S0, z0)
    tile = call.tiles.outputs
    blocks = call.blocks(call.Dv, tile)
    tokens, segments = call.cut(call.length, call.batch * call.heads * blocks)
    # the last segment's own sum is not needed before anything
    states = call.states(S0, z0, tokens, segments - 1)
    output, total = call.new_output()
    S, z = call.new_state()
    call.launch(
        kernels.outputs,
        (call.batch * call.heads * blocks, segments),
        tile,
        STATES=states,
        S0=S0,
        Z0=z0,
        S=S,
        Z=z,
        **_outputs(call, output, total, tokens, segments - 1),
        CAUSAL=True,
    )
    return output, total, S, z


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    feature_map: str,
    normalise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token, N = 1, in one launch: the state takes its key in, then its queries read.

    Returns:
        Output `[B, H, 1, Dv]`, and the new S and z; the old ones stay as they were.
    """
    call = Problem(query, key, value, valid, feature_map, normalise)
    output, _, S, z = _step(call, *call.dense(S, z))
    return output, S, z


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
    segment: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every query reads all keys, `forward` otherwise; N of the queries may differ from that of the keys."""
    from hf_linattn.ops.triton import kernels

    call = Problem(query, key, value, valid, feature_map, normalise, segment)
    S, z = call.dense(S0, z0)
    if call.keys and call.batch:
        tokens, slots = call.cut(call.keys, call.pairs * call.blocks(call.Dv, call.tiles.segment_states))
        states = call.states(S, z, tokens, slots)
        assert states is not None
        S, z = call.last_slot(states)
    if S is None or z is None or not call.length or not call.batch:
        return _nothing(call, S, z)
    output, total = call.new_output()
    tile = call.tiles.outputs
    blocks = call.blocks(call.Dv, tile)
    tokens, segments = call.cut(call.length, call.batch * call.heads * blocks)
    call.launch(
        kernels.outputs,
        (call.batch * call.heads * blocks, segments),
        tile,
        STATES=None,
        S0=S,
        Z0=z,
        S=None,
        Z=None,
        **_outputs(call, output, total, tokens, 0),
        CAUSAL=False,
    )
    return output, total, S, z


def _nothing(call: Problem, S: Tensor | None, z: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """No tokens, or queries of nothing: zeros, and the state unchanged in memory of its own."""
    output, total = call.new_output()
    new_S, new_z = call.new_state()
    new_S = new_S.zero_() if S is None else new_S.copy_(S)
    new_z = new_z.zero_() if z is None else new_z.copy_(z)
    return output.zero_(), total.zero_(), new_S, new_z


def _outputs(call: Problem, output: Tensor, total: Tensor, segment: int, slots: int) -> dict[str, object]:
    """Arguments of `outputs` that its causal and its global form share."""
    return {
        "OUT": output,
        "out_strides": output.stride()[:3],
        "TOTAL": total,
        "heads": call.heads,
        "length": call.length,
        "segment": segment,
        "slots": slots,
        "GROUP": call.group,
        "NORMALISE": call.normalise,
        **call.inputs("qkv"),
        **call.sizes(call.tiles.outputs, "BLOCK_D"),
        **call.maps,
    }


def _step(call: Problem, S0: Tensor | None, z0: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from hf_linattn.ops.triton import kernels

    assert call.length == call.keys == 1, (call.length, call.keys)
    output, total = call.new_output()
    S, z = call.new_state()
    tile = call.tiles.step
    sizes = call.sizes(tile, "BLOCK_D")
    del sizes["CHUNK"]
    call.launch(
        kernels.step,
        (call.pairs * call.blocks(call.Dv, tile),),
        tile,
        S0=S0,
        Z0=z0,
        OUT=output,
        TOTAL=total,
        S=S,
        Z=z,
        kv_heads=call.kv_heads,
        GROUP=call.group,
        NORMALISE=call.normalise,
        **call.inputs("qkv"),
        **sizes,
        **call.maps,
    )
    return output, total, S, z
