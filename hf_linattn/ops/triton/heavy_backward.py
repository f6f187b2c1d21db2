"""Gradients of a window with heavy hitters on GPUs: three kernels of `heavy_backward_kernels`.

Sinks and heavy hitters have gradients from every step. Each step writes its part, and whoever sums up the
parts of a token finds them by a list of all parts in order of their tokens. Parts of some key heads are there
at a time, so that they stay few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.triton.heavy import NO_CUDA
from hf_linattn.ops.triton.problem import Problem, last_contiguous, strides
from hf_linattn.ops.triton.tiles import Tile, padded
from hf_linattn.ops.triton.window import LOG2E
from hf_linattn.ops.types import HeavyChoices, HeavyColumns

BYTES = 1 << 28
"""Of parts that are there at a time; those of a key head are whole."""


class Gradients(NamedTuple):
    """Of queries, of them as they meet the sinks (None for as they are), of keys and of values."""

    query: Tensor
    near: Tensor | None
    key: Tensor
    value: Tensor


def tile_of(width: int, members: int, operand: str, capability: tuple[int, int], block: int) -> Tile:
    """Choose the tokens and columns of a step, without spilled registers in 16 bits.

    Four warps: twice as many take nearly twice the instructions.

    Args:
        width: padded width of heads.
        members: padded query heads of a key head; rows of a product are tokens times these.
        operand: as in `kernel_functions`.
        capability: of the device.
        block: tokens that leave at once; no tokens of two choices come together.
    """
    short = operand in ("bf16", "fp16")
    most = 16 if capability == NO_CUDA and width > 64 else 32
    tokens = min(most, (64 if short else 32) // members, 1 << (block - 1).bit_length())
    tokens = max(1, tokens, 16 // members)
    if not short:
        return Tile(tokens, 32, 8, 1)
    wide = width <= 64 and capability[0] in (9, 10)
    few = tokens * members * width <= 4096 and capability != NO_CUDA
    return Tile(tokens, 64 if wide else 32, 4, 2 if few else 1)


def backward(
    grad: Tensor,
    query: Tensor,
    near: Tensor | None,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    choices: HeavyChoices,
    columns: HeavyColumns,
    scaling: float,
) -> Gradients:
    """Compute gradients from what `heavy.forward` chose, of texts from their first token on.

    Args:
        grad: of the outputs, `[B, H, N, Dv]`.
        query: `[B, H, N, D]`, visible tokens first, as `heavy.forward` takes it.
        near: likewise.
        key: `[B, Hkv, N, D]`, likewise; numbers where there is no visible token.
        value: `[B, Hkv, N, Dv]`, likewise.
        output: of the forward.
        choices: which wrote them.
        columns: sizes of the cache.
        scaling: of the scores.

    Returns:
        In the dtypes of the inputs, that of `near` in float32; 0 behind the visible tokens.

    Raises:
        UnsupportedCallError: as the forward does.
    """
    from hf_linattn.ops.triton import heavy_backward_kernels as kernels

    call = Problem(query, key, value, None, "none", True)
    assert choices.count is not None
    assert choices.log_sum is not None
    operand, members = str(call.maps["OPERAND"]), 1 << (call.group - 1).bit_length()
    width = padded(max(call.D, call.Dv))
    tile = tile_of(width, members, operand, call.about.capability, columns.block)
    near = None if near is None else last_contiguous(near)
    grad, output = last_contiguous(grad), last_contiguous(output)
    shape = call.batch, call.length, call.heads, call.D
    # no program writes behind the visible tokens of a row
    d_query = torch.zeros(shape, dtype=query.dtype, device=call.device).transpose(1, 2)
    d_near = None if near is None else torch.zeros_like(d_query, dtype=torch.float32)
    of_keys = (call.batch, call.length, call.kv_heads)
    d_key = call.new(*of_keys, call.D, dtype=key.dtype).transpose(1, 2)
    d_value = call.new(*of_keys, call.Dv, dtype=value.dtype).transpose(1, 2)
    made = choices.chosen.shape[2]
    parts_of, first_part = _by_token(choices.chosen, columns.sinks, call.length)
    of_head = parts_of.shape[1]
    some = min(call.batch_heads, max(1, BYTES // (of_head * (call.D + call.Dv) * 4)))
    given: dict[str, Any] = {
        "Q": call.query,
        "NEAR": near,
        "K": call.key,
        "V": call.value,
        "OUT": output,
        "GRAD": grad,
        "LSE": choices.log_sum,
        "SEEN": torch.zeros_like(choices.count),
        "COUNT": choices.count,
        "CHOSEN": choices.chosen,
        "DELTA": call.new(call.batch, call.heads, call.length),
        "D_Q": d_query,
        "D_NEAR": d_near,
        "D_K": d_key,
        "D_V": d_value,
        "PARTS_OF": parts_of,
        "FIRST_PART": first_part,
        "PART_K": call.new(some, of_head, call.D),
        "PART_V": call.new(some, of_head, call.Dv),
        **strides(q=call.query, near=near, k=call.key, v=call.value, out=output, grad=grad),
        **strides(d_q=d_query, d_near=d_near, d_k=d_key, d_v=d_value),
        "kv_heads": call.kv_heads,
        "length": call.length,
        "choices": made,
        "size": columns.size,
        "heavy": columns.heavy,
        "sinks": columns.sinks,
        "block": columns.block,
        "scale": scaling * LOG2E,
        "scaling": scaling,
        "D": call.D,
        "DV": call.Dv,
        "BLOCK_D": padded(call.D),
        "BLOCK_V": padded(call.Dv),
        "GROUP": call.group,
        "MEMBERS": members,
        "TOKENS": tile.chunk,
        "COLUMNS": tile.block,
        "OPERAND": operand,
    }

    steps = -(-call.length // columns.block) + 1
    tiles = sum(-(-count // tile.block) for count in (columns.sinks, columns.heavy))
    programs = call.batch_heads * steps * -(-columns.block // tile.chunk)
    call.launch(kernels.heavy_query_gradients, (programs,), tile, given)
    for first in range(0, call.batch_heads, some):
        heads = min(some, call.batch_heads - first)
        given["first_head"] = first
        call.launch(kernels.heavy_key_parts, (heads * (made + 1) * tiles,), tile, given)
        call.launch(kernels.heavy_key_gradients, (heads * -(-call.length // tile.block),), tile, given)
    return Gradients(d_query, d_near, d_key, d_value)


def _by_token(chosen: Tensor, sinks: int, length: int) -> tuple[Tensor, Tensor]:
    """List the parts of all steps by token, those of no token first, and where those of each begin.

    Args:
        chosen: `[B, Hkv, choices, heavy]`; a step more comes before the first choice.
        sinks: each step has them before its heavy hitters.
        length: tokens.

    Returns:
        `[B Hkv, (choices + 1) (sinks + heavy)]`, int64, and `[B Hkv, N + 1]`, int32.
    """
    steps = F.pad(chosen, (0, 0, 1, 0), value=-1).flatten(0, 1)
    of_sinks = torch.arange(sinks, dtype=chosen.dtype, device=chosen.device)
    tokens = torch.cat([of_sinks.expand(*steps.shape[:2], -1), steps], -1).flatten(1)
    ordered = tokens.sort(dim=1, stable=True)
    each = torch.arange(length + 1, dtype=chosen.dtype, device=chosen.device).repeat(len(tokens), 1)
    return ordered.indices, torch.searchsorted(ordered.values, each, out_int32=True)
