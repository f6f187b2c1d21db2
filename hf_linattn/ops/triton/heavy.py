"""A window with heavy hitters on GPUs, all tokens of a call in one launch of `heavy_kernels`.

Programs are as many as there are rows and key heads: each walks its text from one choice of tokens to the
next. What a step reads is known on the device, so nothing waits for it, with padding neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.triton.problem import Problem, last_contiguous, strides
from hf_linattn.ops.triton.tiles import Tile, padded
from hf_linattn.ops.triton.window import LOG2E
from hf_linattn.ops.types import HeavyColumns, HeavyPlaces, HeavyState

WIDEST = 128
"""Heads: wider ones leave no registers beside a softmax of all query heads of a key head."""
LARGEST_GROUP = 64
"""Query heads of a key head."""


def fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether the kernel is made for heads like these."""
    group = query.shape[1] // key.shape[1]
    return max(query.shape[-1], value.shape[-1]) <= WIDEST and group <= LARGEST_GROUP


def tile_of(width: int, members: int, operand: str, capability: tuple[int, int], length: int) -> Tile:
    """Choose the tokens and columns of a step, without spilled registers in bfloat16.

    Args:
        width: padded width of heads.
        members: padded query heads of a key head; rows of a product are tokens times these.
        operand: as in `kernel_functions`.
        capability: of the device.
        length: tokens of the call; one takes the smallest tile.
    """
    short, narrow = operand in ("bf16", "fp16"), width <= 64
    rows = (128 if narrow else 64) if short else 32
    # blocks are of 32 tokens by default, and no tokens of two choices come together
    tokens = max(1, min(32, rows // members) if length > 1 else 1, 16 // members)
    # others have 99 KiB of shared memory for a program or less
    roomy = short and (capability == (8, 0) or capability[0] in (9, 10))
    # of heads of 64 on an H100 these take the least time: many tokens by narrow tiles, one by wide ones
    if tokens * members * width <= 2048:
        return Tile(tokens, 64 if short and narrow and length == 1 else 32, 4, 2 if roomy else 1)
    wide = not narrow and roomy and capability[0] != 10
    return Tile(tokens, 64 if wide else 32, 8, 2 if roomy else 1)


def forward(
    query: Tensor,
    near: Tensor | None,
    key: Tensor,
    value: Tensor,
    places: HeavyPlaces,
    before: HeavyState | None,
    columns: HeavyColumns,
    scaling: float,
    chosen: Tensor | None = None,
) -> tuple[Tensor, HeavyState]:
    """Attend to sinks, heavy hitters and window, choosing anew whenever a block leaves.

    Args:
        query: `[B, H, N, D]`, float32, bfloat16 or float16.
        near: as it meets the sinks, likewise; None for as it is.
        key: `[B, Hkv, N, D]`, of the same dtype.
        value: `[B, Hkv, N, Dv]`, likewise.
        places: of the tokens that are no padding, which may hold anything.
        before: the cache; None for nothing. Stays as it is.
        columns: its sizes.
        scaling: of the scores.
        chosen: where ranks of what stays after each choice are written, of a text from its first token on,
            int32 `[B, Hkv, choices, heavy]`; nothing is written for who is not there. None for nowhere.

    Returns:
        Output `[B, H, N, Dv]` in the dtype of the values, 0 for padding, a view of `[B, N, H, Dv]`; and the
        cache after.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    from hf_linattn.ops.triton import heavy_kernels

    call = Problem(query, key, value, None, "none", True)
    operand = str(call.maps["OPERAND"])
    rows = 1 << (call.group - 1).bit_length()
    tile = tile_of(padded(max(call.D, call.Dv)), rows, operand, call.about.capability, call.length)
    new = torch.empty if places.order is None else torch.zeros
    shape = call.batch, call.length, call.heads, call.Dv
    output = new(shape, dtype=value.dtype, device=call.device).transpose(1, 2)
    held = call.batch, call.kv_heads, columns.total
    after = HeavyState(
        call.new(*held, call.D, dtype=key.dtype),
        call.new(*held, call.Dv, dtype=value.dtype),
        call.new(*held),
        call.new(*held, dtype=torch.int32),
    )
    near = None if near is None else last_contiguous(near)
    old = (None, None, None, None) if before is None else tuple(x.contiguous() for x in before)
    call.launch(
        heavy_kernels.window_and_heavy,
        (call.batch_heads,),
        tile,
        Q=call.query,
        NEAR=near,
        K=call.key,
        V=call.value,
        ORDER=places.order,
        SEEN=places.seen,
        COUNT=places.new,
        OLD_K=old[0],
        OLD_V=old[1],
        OLD_WEIGHT=old[2],
        OLD_RANK=old[3],
        SOURCE=call.new(*held[:2], 2, columns.total, dtype=torch.int32),
        WEIGHT=call.new(*held[:2], 2, columns.total),
        CHOSEN=chosen,
        OUT=output,
        NEW_K=after.key,
        NEW_V=after.value,
        NEW_WEIGHT=after.weight,
        NEW_RANK=after.rank,
        **strides(q=call.query, near=near, k=call.key, v=call.value, out=output),
        kv_heads=call.kv_heads,
        length=call.length,
        choices=0 if chosen is None else chosen.shape[2],
        size=columns.size,
        heavy=columns.heavy,
        sinks=columns.sinks,
        block=columns.block,
        reach=columns.reach or 0,
        scale=scaling * LOG2E,
        rate=0.0 if columns.half_life is None else 1 / columns.half_life,
        D=call.D,
        DV=call.Dv,
        BLOCK_D=padded(call.D),
        BLOCK_V=padded(call.Dv),
        GROUP=call.group,
        MEMBERS=rows,
        TOKENS=tile.chunk,
        COLUMNS=tile.block,
        OPERAND=operand,
    )
    return output, after
