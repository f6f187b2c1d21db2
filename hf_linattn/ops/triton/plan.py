"""What calls of the Triton kernels have in common, found once: short calls wait for Python."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.triton import measured_tiles
from hf_linattn.ops.triton.tiles import Configuration, Tile, configuration

WIDEST = 256
LONGEST = 65535 * 256
"""Tokens: a grid has at most 65535 segments, and some kernels cut theirs to 256 tokens."""
MOST_PROGRAMS = 2**31 - 1
"""Along the first axis of a grid, where a program answers for one column at the least."""
NO_DEVICE = (7, 0)
"""Capability that has no tiles of its own."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REGISTERS = (8, 10, 12)
"""Major capabilities whose products take operands from registers, at these tiles."""


class Device(NamedTuple):
    """What tiles and segments are chosen by."""

    capability: tuple[int, int]
    processors: int


@functools.lru_cache
def device_of(device: torch.device) -> Device:
    """Describe a CUDA or ROCm device; in the interpreter, one processor."""
    if device.type != "cuda":
        return Device((9, 0), 1)
    properties = torch.cuda.get_device_properties(device)
    # AMD counts versions of its own, and has 64 KiB of shared memory: the small tiles
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return Device(capability, properties.multi_processor_count)


@functools.cache
def interpreting() -> bool:
    """Tell whether triton interprets kernels, on CPU tensors: a process does from the start, or never."""
    triton = importlib.import_module("triton")
    return bool(triton.knobs.runtime.interpret)


def release(version: str) -> tuple[int, ...]:
    """Read major and minor version, `(3, 7)` of "3.7.1+cu130"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


class Walk(NamedTuple):
    """How a kernel that walks segments is launched, whatever the call.

    Attributes:
        fixed: its arguments that are no tensors, and more than it has.
        programs: that walk the same segment.
        tile: how it is cut.
        launches: of `launcher`, by kernel.
    """

    fixed: dict[str, Any]
    programs: int
    tile: Tile
    launches: dict[Any, Any]


class Plan(NamedTuple):
    """What calls of one layout have in common, filled as they come.

    Attributes:
        maps: constants of all kernels.
        tiles: how kernels are cut.
        cuts: tokens of a segment and their number, by kernel and length.
        walks: how kernels are launched.
        parts: in which a segment is summed up, by its tokens.
    """

    maps: dict[str, Any]
    tiles: Configuration
    cuts: dict[tuple[str, int], tuple[int, int]]
    walks: dict[str, Walk]
    parts: dict[int, int]


@functools.lru_cache(maxsize=256)
def plan_of(
    shapes: tuple[torch.Size, torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    features: tuple[str, float, bool],
    how: tuple[bool, bool, int | None],
    where: tuple[torch.device, Device],
    operand: str,
    changes: int,
) -> Plan:
    """Find what calls of one layout have in common: whatever their arguments but tensors depend on is here.

    Args:
        shapes: of queries, keys and values.
        strides: of these and of the mask.
        dtypes: of queries, keys and values.
        features: the map, what is added to its features, and whether outputs are divided by their totals.
        how: whether some keys do not count, whether there is decay or there are documents, and the segment.
        where: the device, and what it is.
        operand: what products are computed in.
        changes: of the tiles that were measured, `measured_tiles.changes`.

    Raises:
        UnsupportedCallError: other dtypes, wider heads, or more programs than a grid holds.
    """
    (batch, heads, length, D), _, (_, kv_heads, keys, Dv) = shapes
    widths, (device, about) = (D, Dv), where
    why = refusal(dtypes, widths, max(length, keys), batch * heads)
    if why is not None:
        raise UnsupportedCallError(f"the Triton kernels cannot compute this: {why}")
    (feature_map, eps, _), (masked, linked, _), group = features, how, heads // kv_heads
    # Products take operands from registers there, on the H100 those of fewer than 64 rows. The compiler then
    # computes features anew for each product, and in every warp, but for a mask on them.
    by_registers = about.capability[0] in REGISTERS or (about.capability[0] == 9 and linked)
    maps: dict[str, Any] = {
        "FEATURE_MAP": feature_map,
        "EPS": eps if feature_map == "relu" else 0.0,
        "MASKED": masked or operand == "fp16" or by_registers,
        "OPERAND": operand,
        "PAIRS": about.capability[0] if operand == "bf16" else 0,
    }
    # the interpreter has no registers to run out of, and takes its time for every step
    kind, capability = ("fp16", NO_DEVICE) if interpreting() else (operand, about.capability)
    chosen = configuration(*widths, group, kind, capability, linked)
    tiles = measured_tiles.measured(chosen, device, operand, widths, group, linked)
    # then no program looks whether a token is behind the last one
    maps["WHOLE"] = not length % tiles.longest_chunk and not keys % tiles.longest_chunk
    return Plan(maps, tiles, {}, {}, {})


def refusal(
    dtypes: tuple[torch.dtype, ...], widths: tuple[int, int], tokens: int = 0, rows: int = 0
) -> str | None:
    """Say why the kernels do not take a call; None where they do.

    Addresses are 64 bits wide, so tensors of more than 2^31 numbers are taken; a grid has limits.

    Args:
        dtypes: of queries, keys and values.
        widths: of queries and of values.
        tokens: queries or keys, the larger number.
        rows: batch times query heads.
    """
    wrong = next((x for x in dtypes if x not in DTYPES), None)
    if wrong is not None:
        return f"they take float32, bfloat16 and float16, not {wrong}"
    if max(widths) > WIDEST:
        return f"they take heads of at most {WIDEST}, not {widths[0]} and {widths[1]}"
    if tokens > LONGEST:
        return f"they take at most {LONGEST:,} tokens, not {tokens:,}"
    if rows * max(widths) > MOST_PROGRAMS:
        return f"they take at most {MOST_PROGRAMS:,} rows times heads times their size"
    return None


def operand_of(dtypes: tuple[torch.dtype, ...]) -> str:
    """Choose what products are computed in, by the dtypes of queries, keys and values: the fewest bits.

    So features in float32 are rounded like the values beside them. The names are explained in `kernels`.
    """
    if torch.bfloat16 in dtypes:
        return "bf16 by bits" if interpreting() else "bf16"
    if torch.float16 in dtypes:
        return "fp16"
    # who lets torch take tensor cores for float32 gets them here, at nearly float32's accuracy
    cores = torch.version.hip is None and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32x3" if cores and not interpreting() else "ieee"
