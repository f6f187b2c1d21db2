"""Learned maps [softmax(W x), softmax(-W x)] on GPUs: launches the kernels of `softmax_map_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton import plan
from hf_linattn.ops.triton.problem import Launches, last_contiguous
from hf_linattn.ops.triton.tiles import Tile, padded

WIDEST = 128
"""Heads, and rows of W."""
FORWARD = Tile(chunk=64, block=0, warps=4, stages=1)
BRIEF = torch.bfloat16, torch.float16


def backward_tile(operand: str, widest: int, family: int) -> Tile:
    """Choose the tile of `map_gradients`, as compiled with the least work that spills no registers.

    Args:
        operand: what products are computed in.
        widest: D or the rows of W, the larger number.
        family: major compute capability, 0 for AMD.
    """
    if widest <= 64 or family == 0:
        return FORWARD
    if operand == "bf16":
        return FORWARD if family in (9, 10) else FORWARD._replace(chunk=32)
    return FORWARD._replace(chunk=64 if family in (8, 10) else 32, warps=8)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernels compute a map of `[B, H, N, D]` by W `[H, F / 2, D]`: of 16 bits.

    Of float32 torch's own products take less time; beside bfloat16 W may be float32.
    """
    beside = (x.dtype, torch.float32) if x.dtype == torch.bfloat16 else (x.dtype,)
    return x.dtype in BRIEF and weight.dtype in beside and max(weight.shape[1:]) <= WIDEST


def forward(x: Tensor, weight: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
    """Compute features `[B, H, N, F]` of a dtype, a view of `[B, N, H, F]`.

    Args:
        x: `[B, H, N, D]`, float32, bfloat16 or float16, anyhow in memory.
        weight: W of each head, `[H, F / 2, D]`, of any of these dtypes.
        floor: the least feature.
        dtype: of the features.
    """
    from hf_linattn.ops.triton import softmax_map_kernels

    call = _Call(x, weight, floor, FORWARD)
    batch, heads, length, _ = x.shape
    output = x.new_empty((batch, length, heads, 2 * weight.shape[1]), dtype=dtype).transpose(1, 2)
    if output.numel():
        rows = batch * heads * -(-length // FORWARD.chunk)
        own = {"OUT": output, "out_strides": output.stride()[:3]}
        call.launch(softmax_map_kernels.map_features, (rows,), FORWARD, call.given | own)
    return output


def backward(grad: Tensor, x: Tensor, weight: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Compute the gradients of `forward`: of x in its dtype, of the weight in float32.

    Args:
        grad: of the features, `[B, H, N, F]`.
        x: as the forward took it, like all that follow.
        weight: likewise.
        floor: likewise.
    """
    from hf_linattn.ops.triton import softmax_map_kernels

    operand, family = plan.operand_of((x.dtype,)), plan.device_of(x.device).capability[0]
    tile = backward_tile(operand, max(weight.shape[1:]), family)
    call, grad = _Call(x, weight, floor, tile), last_contiguous(grad)
    batch, heads, length, _ = x.shape
    d_x, brief = torch.empty_like(call.x), x.dtype == torch.bfloat16
    dtype = x.dtype if brief else torch.float32  # float16 has no room for what is small
    d_logits = x.new_empty((batch, length, heads, weight.shape[1]), dtype=dtype).transpose(1, 2)
    if d_logits.numel():
        own = {
            "D_OUT": grad,
            "D_X": d_x,
            "D_LOGITS": d_logits,
            "d_out_strides": grad.stride()[:3],
            "d_x_strides": d_x.stride()[:3],
            "d_logits_strides": d_logits.stride()[:3],
        }
        rows = batch * heads * -(-length // tile.chunk)
        call.launch(softmax_map_kernels.map_gradients, (rows,), tile, call.given | own)
    return d_x, (d_logits.mT @ x.to(dtype)).sum(0, dtype=torch.float32)


class _Call(Launches):
    """What forward and backward share."""

    def __init__(self, x: Tensor, weight: Tensor, floor: float, tile: Tile) -> None:
        super().__init__(x)
        self.x = last_contiguous(x)
        _, heads, length, width = x.shape
        half = weight.shape[1]
        self.given: dict[str, Any] = {
            "X": self.x,
            "W": weight.contiguous(),
            "x_strides": self.x.stride()[:3],
            "heads": heads,
            "length": length,
            "floor": floor,
            "D": width,
            "HALF": half,
            "BLOCK_D": padded(width),
            "BLOCK_F": padded(half),
            "CHUNK": tile.chunk,
            "OPERAND": plan.operand_of((x.dtype,)),
        }
