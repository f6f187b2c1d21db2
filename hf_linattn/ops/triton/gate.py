"""Gates of a state and gradients of decays on GPUs: launches the kernels of `gate_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton.problem import Launches, last_contiguous
from hf_linattn.ops.triton.tiles import Tile, padded
from hf_linattn.ops.types import Gate

TILE = Tile(chunk=64, block=0, warps=4, stages=1)
WIDE = Tile(chunk=32, block=0, warps=4, stages=1)
"""Of values wider than 64."""
SEGMENT = 512
"""Tokens whose part of the weights' gradients is one sum."""
SCAN = Tile(chunk=1024, block=0, warps=4, stages=1)
"""Of `decay_gradients`: tokens that one program takes together."""


def forward(value: Tensor, valid: Tensor | None, gate: Gate) -> Tensor:
    """Compute the logarithm of the gates of tokens, `[B, Hkv, N]` float32; 0 where one does not count.

    Args:
        value: `[B, Hkv, N, Dv]`, float32, bfloat16 or float16, anyhow in memory.
        valid: boolean `[B, N]`; None for all.
        gate: weights of any of these dtypes.
    """
    from hf_linattn.ops.triton import gate_kernels

    call = _Call(value, valid, gate)
    output = value.new_empty(value.shape[:3], dtype=torch.float32)
    if output.numel():
        rows = call.rows * -(-call.length // call.tile.chunk)
        call.launch(gate_kernels.gate_outputs, (rows,), call.tile, {**call.given, "OUT": output})
    return output


def backward(
    grad: Tensor, value: Tensor, valid: Tensor | None, gate: Gate, onto: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of `forward`: of the values in their dtype, of weights and biases in float32.

    Args:
        grad: of its result, `[B, Hkv, N]`.
        value: as the forward took it, like all that follow.
        valid: likewise.
        gate: likewise.
        onto: other gradients of the values, to which these are added in place; None for none.
    """
    from hf_linattn.ops.triton import gate_kernels

    call = _Call(value, valid, gate)
    d_value = torch.empty_like(call.value) if onto is None else onto
    batch, kv_heads, length, width = value.shape
    segments = -(-length // SEGMENT)
    parts = value.new_empty((batch, kv_heads, segments, width + 1), dtype=torch.float32)
    if parts.numel():
        own = {
            "D_OUT": grad.to(torch.float32).contiguous(),
            "D_V": d_value,
            "PARTS": parts,
            "d_v_strides": d_value.stride()[:3],
            "segment": SEGMENT,
            "ADD": onto is not None,
        }
        call.launch(gate_kernels.gate_gradients, (call.rows * segments,), call.tile, {**call.given, **own})
    of_weights = parts.sum((0, 2))
    return d_value, of_weights[:, :width], of_weights[:, width]


def decay_gradients(of_query: Tensor, of_key: Tensor, last: Tensor | None, call: Launches) -> Tensor:
    """Turn gradients of running sums of a decay into those of the decay, `[B, Hkv, N]` float32.

    Args:
        of_query: parts of what queries add, `[parts, B, H, N]` float32.
        of_key: parts of what keys take away, `[parts, B, Hkv, N]` float32.
        last: what the state after adds to the last, `[B, Hkv]`; None for nothing.
        call: whose gradients they are.
    """
    from hf_linattn.ops.triton import gate_kernels

    parts, batch, kv_heads, length = of_key.shape
    found = of_key.new_empty((batch, kv_heads, length))
    own = {
        "OF_QUERY": of_query,
        "OF_KEY": of_key,
        "LAST": None if last is None else last.contiguous(),
        "OUT": found,
        "batch_heads": batch * kv_heads,
        "length": length,
        "QUERY_PARTS": of_query.shape[0],
        "KEY_PARTS": parts,
        "GROUP": of_query.shape[2] // kv_heads,
        "CHUNK": SCAN.chunk,
    }
    call.launch(gate_kernels.decay_gradients, (batch * kv_heads,), SCAN, own)
    return found


class _Call(Launches):
    """What forward and backward share."""

    def __init__(self, value: Tensor, valid: Tensor | None, gate: Gate) -> None:
        super().__init__(value)
        self.value = last_contiguous(value)
        batch, kv_heads, self.length, width = value.shape
        self.rows, self.tile = batch * kv_heads, TILE if width <= 64 else WIDE
        seen = None if valid is None else valid.view(torch.uint8)
        self.given: dict[str, Any] = {
            "V": self.value,
            "VALID": seen,
            "GATE": gate.weight.contiguous(),
            "GATE_BIAS": gate.bias.contiguous(),
            "v_strides": self.value.stride()[:3],
            "valid_strides": (0, 0) if seen is None else seen.stride(),
            "kv_heads": kv_heads,
            "length": self.length,
            "temperature": float(gate.temperature),
            "DV": width,
            "BLOCK_V": padded(width),
            "CHUNK": self.tile.chunk,
        }
