"""How the Triton kernels are cut: tiles and segments, chosen in Python; nothing is timed.

The bfloat16 tiles are the largest tried that compile for sm_80 and sm_90 without spilled registers and
within their shared memory (`tests/ops/test_triton_compiled.py` holds them to that; at heads of 256 `outputs`
spills 8 bytes). Float32 operands spill at some widths whatever the tile. An autotuner would need a device to
choose, would slow every first call, and could make two runs of one program differ.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple


class Tile(NamedTuple):
    """How one kernel is cut.

    Attributes:
        chunk: tokens in one step of a walk.
        block: columns of what is written that one program answers for.
        warps: of one program.
        stages: steps whose loads are under way together.
    """

    chunk: int
    block: int
    warps: int
    stages: int


class Configuration(NamedTuple):
    """A tile per kernel, each named after it; `least` is what segments are multiples of, in tokens."""

    segment_states: Tile
    outputs: Tile
    step: Tile
    gradient_rows: Tile
    query_gradients: Tile
    key_gradients: Tile
    value_gradients: Tile
    window_outputs: Tile
    window_and_rest: Tile
    window_query_gradients: Tile
    window_key_gradients: Tile
    window_step: Tile
    least: int

    @property
    def longest_chunk(self) -> int:
        """Segments are multiples of all chunks, that is of this one: chunks are powers of two."""
        walks = (tile for name, tile in self._asdict().items() if not name.startswith("window"))
        return max(tile.chunk for tile in walks if isinstance(tile, Tile))


# Heads of up to 64, 128 and 256. A walk keeps a state `[width, block]` in registers beside its chunk.
WALKS = {
    "bf16, wgmma": (Tile(64, 64, 4, 2), Tile(64, 128, 8, 2), Tile(64, 32, 8, 2)),
    "bf16": (Tile(32, 64, 4, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 2)),
    "fp16": (Tile(32, 32, 4, 2), Tile(16, 32, 8, 2), Tile(16, 16, 8, 2)),
    "tf32x3": (Tile(16, 32, 4, 1), Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    "ieee": (Tile(16, 32, 4, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}
# Sums over a segment: one product a chunk, so more room
SUMS = {
    "bf16, wgmma": (Tile(64, 64, 4, 2), Tile(64, 128, 8, 2), Tile(64, 64, 8, 2)),
    "bf16": (Tile(64, 64, 4, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    "fp16": (Tile(32, 32, 4, 2), Tile(32, 64, 8, 2), Tile(32, 32, 8, 2)),
    "tf32x3": (Tile(32, 32, 4, 1), Tile(32, 64, 8, 1), Tile(16, 32, 8, 1)),
    "ieee": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
}


# Queries and keys of a step over a window; all columns are one program's. Many queries waste less of the keys
# that some of them do not see, and take more registers.
WINDOW_OUTPUTS = {
    "bf16, wgmma": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 8, 2)),
    "bf16": (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
    "fp16, wgmma": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 8, 2)),
    "fp16": (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
    "tf32x3": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    "ieee": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}
# The same beside a linear attention, whose state stays in registers; wider heads are computed apart.
WINDOW_AND_REST = {"bf16, wgmma": Tile(64, 64, 4, 2), "ieee": Tile(32, 32, 4, 1)}
WINDOW_QUERIES = {
    "bf16, wgmma": (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2), Tile(64, 32, 8, 1)),
    "bf16": (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2), Tile(16, 32, 8, 1)),
    "fp16, wgmma": (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(16, 32, 8, 1)),
    "fp16": (Tile(64, 32, 4, 2), Tile(128, 16, 8, 2), Tile(16, 32, 8, 1)),
    "tf32x3": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    "ieee": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}
WINDOW_KEYS = {
    "bf16, wgmma": (Tile(64, 64, 4, 2), Tile(32, 128, 8, 2), Tile(64, 32, 8, 1)),
    "bf16": (Tile(32, 64, 4, 2), Tile(32, 128, 8, 2), Tile(64, 32, 8, 1)),
    "fp16, wgmma": (Tile(64, 64, 4, 2), Tile(32, 128, 8, 2), Tile(64, 32, 8, 1)),
    "fp16": (Tile(32, 64, 4, 2), Tile(16, 128, 8, 2), Tile(64, 32, 8, 1)),
    "tf32x3": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
    "ieee": (Tile(32, 32, 4, 1), Tile(32, 32, 8, 1), Tile(16, 16, 8, 1)),
}


# What is better elsewhere than on the A100: by major capability (0: AMD) and operand, heads of up to 64 and
# 128. AMD threads have more registers in fewer warps. Blackwell tensor cores take no fewer than 64 rows
# of queries, and their way through a memory of their own costs a window more than it saves.
FOUR = ("outputs", "query_gradients", "key_gradients", "value_gradients")
Tiles = dict[str, Tile]


def _four(*tiles: Tile) -> Tiles:
    """Give four kernels a tile each, or the same."""
    return dict(zip(FOUR, tiles * 4 if len(tiles) == 1 else tiles, strict=False))


WIDE, HALF, NARROW = Tile(32, 64, 4, 2), Tile(16, 64, 4, 2), Tile(16, 32, 4, 2)
MANY = Tile(16, 64, 8, 2)
"""As `HALF`, in more warps."""
ROWS = {"gradient_rows": Tile(64, 64, 8, 1)}
STATES = {"segment_states": Tile(64, 64, 4, 2)}, {"segment_states": Tile(32, 128, 8, 2)}
BOTH = STATES[0] | {"gradient_rows": Tile(64, 64, 4, 2)}, STATES[1] | {"gradient_rows": Tile(32, 128, 8, 2)}
"""Sums over a segment in float16, by width."""
OWN: dict[tuple[int, str], tuple[Tiles, Tiles]] = {
    (0, "bf16"): (
        _four(*[Tile(32, 64, 2, 2)] * 2, Tile(64, 64, 2, 2), Tile(32, 64, 2, 2))
        | {"gradient_rows": Tile(64, 64, 2, 2)},
        _four(WIDE, WIDE, Tile(32, 64, 2, 2), Tile(32, 64, 2, 2)),
    ),
    (0, "fp16"): ({}, _four(NARROW)),
    (8, "bf16"): ({}, _four(HALF, HALF, HALF, WIDE) | ROWS),
    (8, "fp16"): (
        _four(WIDE, WIDE, Tile(32, 32, 4, 2), WIDE) | BOTH[0],
        _four(MANY, HALF, NARROW, HALF) | BOTH[1],
    ),
    (9, "fp16"): (_four(WIDE) | BOTH[0], _four(HALF) | BOTH[1]),
    (10, "bf16"): ({}, _four(HALF, HALF, WIDE, WIDE)),
    (10, "fp16"): (_four(HALF, WIDE, WIDE, WIDE) | BOTH[0], _four(MANY) | BOTH[1]),
    (12, "bf16"): ({}, _four(HALF, HALF, HALF, WIDE) | ROWS),
    (12, "fp16"): (_four(HALF) | BOTH[0], _four(MANY, HALF, Tile(16, 32, 8, 2), HALF) | BOTH[1]),
}
# The same where query heads share key heads: a loop over them inside a chunk takes registers.
GROUPED: dict[tuple[int, str], tuple[Tiles, Tiles]] = {
    (0, "bf16"): (
        _four(*[Tile(32, 64, 2, 2)] * 2, *[Tile(16, 64, 2, 2)] * 2),
        _four(WIDE, WIDE, HALF, HALF),
    ),
    (0, "fp16"): ({}, _four(NARROW)),
    (8, "bf16"): (
        {"key_gradients": HALF, "value_gradients": HALF},
        _four(HALF, HALF, WIDE._replace(warps=8), HALF),
    ),
    (8, "fp16"): (
        _four(WIDE, WIDE, Tile(32, 32, 4, 2), HALF) | STATES[0],
        _four(MANY, HALF, NARROW, HALF) | STATES[1],
    ),
    (9, "bf16"): (
        {"value_gradients": Tile(64, 64, 4, 2)},
        {"key_gradients": WIDE, "value_gradients": Tile(64, 64, 8, 2)},
    ),
    (9, "fp16"): (_four(WIDE, WIDE, HALF, WIDE) | STATES[0], _four(HALF, HALF, NARROW, MANY) | STATES[1]),
    (10, "bf16"): ({"value_gradients": HALF}, _four(HALF, HALF, WIDE, WIDE)),
    (10, "fp16"): (_four(HALF, WIDE, HALF, WIDE) | STATES[0], _four(MANY) | STATES[1]),
    (12, "bf16"): (
        {"key_gradients": WIDE, "value_gradients": WIDE},
        _four(HALF, HALF, WIDE._replace(warps=8), WIDE._replace(warps=8)),
    ),
    (12, "fp16"): (
        _four(HALF, HALF, Tile(32, 32, 4, 2), HALF) | STATES[0],
        _four(MANY, HALF, NARROW, HALF) | STATES[1],
    ),
}
OWN_WINDOWS: dict[tuple[int, str], tuple[Tiles, Tiles]] = {
    (0, "bf16"): (
        {},
        {"window_query_gradients": Tile(64, 32, 4, 2), "window_key_gradients": Tile(32, 64, 4, 2)},
    ),
    (0, "fp16"): ({}, {"window_query_gradients": Tile(64, 16, 4, 2)}),
    (10, "bf16"): (
        {
            "window_outputs": Tile(32, 64, 4, 2),
            "window_query_gradients": Tile(32, 64, 4, 2),
            "window_key_gradients": Tile(32, 128, 4, 1),
        },
        {
            "window_outputs": Tile(32, 64, 4, 2),
            "window_query_gradients": Tile(32, 64, 8, 2),
            "window_key_gradients": Tile(32, 128, 4, 1),
        },
    ),
    (10, "fp16"): (
        {
            "window_outputs": Tile(32, 64, 4, 2),
            "window_query_gradients": Tile(32, 64, 4, 2),
            "window_key_gradients": Tile(32, 128, 4, 1),
        },
        {
            "window_outputs": Tile(32, 64, 4, 2),
            "window_query_gradients": Tile(16, 64, 4, 2),
            "window_key_gradients": Tile(32, 64, 4, 1),
        },
    ),
    (12, "bf16"): (
        {},
        {
            "window_outputs": Tile(128, 32, 8, 3),
            "window_query_gradients": Tile(128, 16, 8, 2),
            "window_key_gradients": Tile(16, 128, 8, 1),
        },
    ),
    (12, "fp16"): (
        {},
        {
            "window_outputs": Tile(128, 32, 8, 3),
            "window_query_gradients": Tile(32, 64, 8, 1),
            "window_key_gradients": Tile(64, 32, 4, 2),
        },
    ),
}


def padded(width: int) -> int:
    """Round up to the next power of two that a tensor core takes."""
    return max(16, 1 << (width - 1).bit_length())


@functools.lru_cache(maxsize=256)  # every launch asks
def configuration(
    D: int, Dv: int, group: int, operand: str, capability: tuple[int, int], linked: bool = False
) -> Configuration:
    """Choose the tiles for one kind of head.

    Args:
        D: width of queries and keys, at most 256.
        Dv: width of values, likewise.
        group: query heads per key head.
        operand: what the products are computed in, as in `kernels`: "bf16", "fp16", "tf32x3", "ieee".
        capability: of the device, as `torch.cuda.get_device_capability` says it.
        linked: there is decay, or there are documents, whose factors take registers.
    """
    head_dim, value_dim = padded(D), padded(Dv)
    index = 0 if max(head_dim, value_dim) <= 64 else 1 if max(head_dim, value_dim) <= 128 else 2
    kind = operand
    if operand == "bf16" and capability[0] == 9 and not linked:
        kind = "bf16, wgmma"  # which takes no fewer than 64 rows
    walk, total = WALKS[kind][index], SUMS[kind][index]
    windows = f"{operand}, wgmma" if operand in ("bf16", "fp16") and capability[0] == 9 else operand
    if linked:
        walk = walk._replace(block=max(walk.block // 2, 16), chunk=16 if index else walk.chunk)
        total = total._replace(chunk=16 if group > 1 and not index else min(total.chunk, 32))
    outputs = query = key = values = walk
    rows = total
    if index == 2 and kind == "bf16, wgmma":
        outputs = Tile(16, 32, 8, 2)  # 8 bytes spilled; the next without any issues 1.8 times as much
        values, rows = Tile(16, 32, 8, 2), total._replace(stages=1)
    elif index == 2 and kind == "bf16":
        query = Tile(16, 32, 8, 2)
    # the loop over grouped heads inside a chunk costs registers
    if group > 1 and index:
        rows = total._replace(chunk=min(total.chunk, 32))
    if group > 1 and kind == "bf16, wgmma":
        key = values = WALKS["bf16"][index]
    if group > 1 and operand == "bf16" and index == 1:
        key = key._replace(block=32)
    elif group > 1 and operand == "bf16" and linked and not index:
        key = key._replace(chunk=16)

    def of(tile: Tile, width: int) -> Tile:
        return tile._replace(block=min(tile.block, width))

    chosen = Configuration(
        segment_states=of(total, value_dim),
        outputs=of(outputs, value_dim),
        # a program that has all columns writes z itself: of heads of up to 128 one does
        step=Tile(1, min(value_dim, 16384 // head_dim), 4 if head_dim <= 64 else 8, 1),
        gradient_rows=of(rows, head_dim),
        query_gradients=of(query, head_dim),
        key_gradients=of(key, head_dim),
        value_gradients=of(values, value_dim),
        window_outputs=WINDOW_OUTPUTS[windows][index],
        window_and_rest=WINDOW_AND_REST.get(windows, Tile(64, 32, 4, 2)),
        window_query_gradients=WINDOW_QUERIES[windows][index],
        window_key_gradients=WINDOW_KEYS[windows][index],
        window_step=Tile(64 if index < 2 else 32, min(value_dim, 8192 // head_dim), 4, 2),
        least=256,
    )
    family, small = (capability[0], operand), index < 2
    own: dict[str, Any] = OWN_WINDOWS[family][index] if small and family in OWN_WINDOWS else {}
    table = OWN if group == 1 else GROUPED
    if small and family in table and not linked:  # they were compiled without decay and documents
        written = dict.fromkeys(("outputs", "value_gradients", "segment_states"), value_dim)
        of_call = table[family][index].items()
        own = own | {name: of(tile, written.get(name, head_dim)) for name, tile in of_call}
        if group > 1 and 64 < D < head_dim and family == (8, "bf16"):
            own["key_gradients"] = NARROW  # which columns there are takes registers too
    return chosen._replace(**own)


def segment_length(length: int, programs: int, processors: int, least: int) -> int:
    """Choose the tokens per segment: few long ones, for each costs a state, but enough to fill the device.

    Two programs a processor, so that one computes while the other loads, and no more: those left over would
    begin when the others have ended, and the device wait for them.

    Args:
        length: tokens, at least 1.
        programs: how many run per segment.
        processors: of the device.
        least: a segment is a multiple of it.
    """
    wanted = max(2 * processors // programs, 1)
    return -(-length // (wanted * least)) * least
