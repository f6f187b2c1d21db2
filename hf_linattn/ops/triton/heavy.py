"""A window with heavy hitters on GPUs: few tokens in one launch of `heavy_kernels`, a prompt in four.

What is kept is chosen step by step, so of each key head of a row one program walks from choice to choice. Few
tokens are all in its way; of a prompt the other three kernels of `heavy_prompt_kernels` compute all but what
choices need, all tokens at once. What a step reads is known on the device, so nothing waits for it, with
padding neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton.problem import Problem, last_contiguous, strides
from hf_linattn.ops.triton.tiles import Tile, padded
from hf_linattn.ops.triton.window import LOG2E
from hf_linattn.ops.types import HeavyChoices, HeavyColumns, HeavyPlaces, HeavyState

WIDEST = 128
"""Heads: wider ones leave no registers beside a softmax of all query heads of a key head."""
LARGEST_GROUP = 64
"""Query heads of a key head."""
NO_CUDA = (0, 0)
"""Capability of AMD's devices."""
FEW = 16
"""Tokens of a call that has a launch of its own: below, more of them take longer than one program."""


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
        length: tokens that come together at most: of the call, or of a block.
    """
    short, narrow = operand in ("bf16", "fp16"), width <= 64
    rows = (128 if narrow else 64) if short else 32
    # no tokens of two choices come together
    tokens = min(32, rows // members, 1 << (length - 1).bit_length())
    tokens = max(1, tokens, 16 // members)
    # others have 99 KiB of shared memory for a program or less
    roomy = short and (capability == (8, 0) or capability[0] in (9, 10))
    # of heads of 64 on an H100 these take the least time: many tokens by narrow tiles, one by wide ones
    if tokens * members * width <= 2048:
        one = short and narrow and length == 1 and capability != (8, 0)
        return Tile(tokens, 64 if one else 32, 4, 2 if roomy else 1)
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
    choices: HeavyChoices | None = None,
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
        choices: told what a backward needs, of a text from its first token on; None for nobody.

    Returns:
        Output `[B, H, N, Dv]` in the dtype of the values, 0 for padding, a view of `[B, N, H, Dv]`; and the
        cache after.

    Raises:
        UnsupportedCallError: for other dtypes and wider heads.
    """
    call = Problem(query, key, value, None, "none", True)
    operand = str(call.maps["OPERAND"])
    rows = 1 << (call.group - 1).bit_length()
    few = call.length < FEW and choices is None
    together = call.length if few else min(call.length, columns.block)
    tile = tile_of(padded(max(call.D, call.Dv)), rows, operand, call.about.capability, together)
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
    given = {
        "Q": call.query,
        "NEAR": near,
        "K": call.key,
        "V": call.value,
        "ORDER": places.order,
        "SEEN": places.seen,
        "COUNT": places.new,
        "OLD_K": old[0],
        "OLD_V": old[1],
        "OLD_WEIGHT": old[2],
        "OLD_RANK": old[3],
        "OUT": output,
        "NEW_K": after.key,
        "NEW_V": after.value,
        "NEW_WEIGHT": after.weight,
        "NEW_RANK": after.rank,
        "CHOSEN": None if choices is None else choices.chosen,
        **strides(q=call.query, near=near, k=call.key, v=call.value, out=output),
        "kv_heads": call.kv_heads,
        "length": call.length,
        "choices": 0 if choices is None else choices.chosen.shape[2],
        "size": columns.size,
        "heavy": columns.heavy,
        "sinks": columns.sinks,
        "block": columns.block,
        "reach": columns.reach or 0,
        "scale": scaling * LOG2E,
        "rate": 0.0 if columns.half_life is None else 1 / columns.half_life,
        "D": call.D,
        "DV": call.Dv,
        "BLOCK_D": padded(call.D),
        "BLOCK_V": padded(call.Dv),
        "GROUP": call.group,
        "MEMBERS": rows,
        "TOKENS": tile.chunk,
        "COLUMNS": tile.block,
        "OPERAND": operand,
    }
    if few:
        _few(call, tile, given, columns)
    else:
        log_sum = _prompt(call, tile, given, columns)
        if choices is not None:
            choices.count, choices.log_sum = places.new, log_sum
    return output, after


def _few(call: Problem, tile: Tile, given: dict[str, Any], columns: HeavyColumns) -> None:
    """Launch the kernel of few tokens."""
    from hf_linattn.ops.triton import heavy_kernels

    held = call.batch, call.kv_heads, 2, columns.total
    own = {"SOURCE": call.new(*held, dtype=torch.int32), "WEIGHT": call.new(*held)}
    call.launch(heavy_kernels.window_and_heavy, (call.batch_heads,), tile, given | own)


def _prompt(call: Problem, tile: Tile, given: dict[str, Any], columns: HeavyColumns) -> Tensor:
    """Launch the kernels of a prompt; returns the logarithms of what outputs are divided by."""
    from hf_linattn.ops.triton import heavy_prompt_kernels as kernels

    steps, width = -(-call.length // columns.block) + 1, columns.heavy + columns.block
    log_sum = call.new(call.batch, call.heads, call.length)
    own: dict[str, Any] = {
        "LSE": log_sum,
        "SOURCE": call.new(call.batch, call.kv_heads, steps + 1, width, dtype=torch.int32),
        "WEIGHT": call.new(call.batch, call.kv_heads, 2, width),
        "slots": steps + 1,
    }
    given = given | own
    tiles = call.batch_heads * steps * -(-columns.block // tile.chunk)
    narrow = tile._replace(block=32)
    of_cache = call.batch_heads * -(-columns.total // narrow.block)
    # scores stay in registers; of few sizes, for each of them is compiled
    capability = call.about.capability
    rows, roomy = tile.chunk * given["MEMBERS"], capability != NO_CUDA
    most, looking = 32, tile.chunk
    if given["OPERAND"] in ("bf16", "fp16"):
        most = 32 if not roomy else min(64 if columns.heavy <= 64 else 128, 16384 // rows)
        # rows of queries that look at a block together: with more of them these spill
        wanted = 64 if not roomy else 32 if capability == (8, 0) and rows < 64 < given["BLOCK_D"] else 128
        looking = min(4 * looking, wanted // given["MEMBERS"])
    chosen = {
        "COLUMNS": most,
        "ONE_TILE": columns.heavy <= most,
        "LEAVING": 32,
        "LOOKING": looking,
        "RANKED": 128 if width <= 128 or not roomy else 256,
    }
    call.launch(kernels.prompt_sums, (tiles,), tile, given)
    # a program alone: as many warps as share its steps
    alone = tile._replace(warps=8, stages=1 if capability[0] == 10 else tile.stages)
    call.launch(kernels.prompt_choices, (call.batch_heads,), alone, given | chosen)
    call.launch(kernels.prompt_outputs, (tiles,), tile, given)
    call.launch(kernels.prompt_cache, (of_cache,), narrow, given | {"COLUMNS": narrow.block})
    return log_sum
