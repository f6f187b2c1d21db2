"""One call of the Triton kernels: its inputs as they want them, how it is cut, and the launch itself."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.triton import measured_tiles
from hf_linattn.ops.triton.tiles import Configuration, Tile, configuration, padded, segment_length
from hf_linattn.ops.types import FEATURE_MAPS

WIDEST = 256
LONGEST = 65535 * 256
"""Tokens: a grid has at most 65535 segments, and some kernels cut theirs to 256 tokens."""
MOST_PROGRAMS = 2**31 - 1
"""Along the first axis of a grid, where a program answers for one column at the least."""
HERE = nullcontext()
NO_DEVICE = (7, 0)
"""Capability that has no tiles of its own."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCAN = Tile(chunk=8, block=128, warps=4, stages=1)
"""Of `accumulate`: slots and elements of a state that one program loads together."""


REGISTERS = (8, 10, 12)
"""Major capabilities whose products take operands from registers, at these tiles."""
FAR = 1 << 23
"""Numbers from row to row: 256 rows and their columns stay below 2^31."""


class KernelSpec(NamedTuple):
    """What a kernel is launched with, whatever the call.

    Attributes:
        name: of its tile in `Configuration`.
        inputs: letters of the tensors that it reads, out of "qkv".
        split: the width whose columns are split over programs, "D" or "DV".
        whole: widths of which every program holds all columns.
        per_query_head: programs go by query heads, else by key heads.
    """

    name: str
    inputs: str
    split: str
    whole: tuple[str, ...]
    per_query_head: bool = False


SEGMENT_STATES = KernelSpec("segment_states", "kv", "DV", ("D",))
OUTPUTS = KernelSpec("outputs", "qkv", "DV", ("D",), per_query_head=True)
STEP = KernelSpec("step", "qkv", "DV", ("D",))
GRADIENT_ROWS = KernelSpec("gradient_rows", "q", "D", ("D", "DV"))
QUERY_GRADIENTS = KernelSpec("query_gradients", "qkv", "D", ("DV",), per_query_head=True)
KEY_GRADIENTS = KernelSpec("key_gradients", "kv", "D", ("DV",))
VALUE_GRADIENTS = KernelSpec("value_gradients", "k", "DV", ("D",))
DIRECT = 9 << 16
"""Bytes of slots that a program may read to sum them up itself; more get a launch of their own."""


class Slots(NamedTuple):
    """Sums of segments, `[batch_heads, slots, D Dv + D]`, and what each leaves of those before; or None."""

    states: Tensor | None
    factors: Tensor | None

    @property
    def many(self) -> bool:
        """Whether there are more than a program sums up by itself."""
        return self.states is not None and self.states[0].numel() * 4 > DIRECT


NONE = Slots(None, None)


class Segments(NamedTuple):
    """How a text is cut, and what stands before each segment, as `kernel_functions.load_state` reads it.

    Attributes:
        tokens: of a segment.
        slots: sums of all segments but the last.
        summed: each slot has what came before in it already.
    """

    tokens: int
    slots: Slots
    summed: bool

    @property
    def arguments(self) -> dict[str, Any]:
        """What kernels take of it."""
        states, factors = self.slots
        slots = 0 if states is None else states.shape[1]
        return {"STATES": states, "FACTORS": factors, "SUMMED": self.summed, "slots": slots}


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


class Kind(NamedTuple):
    """What calls of one kind have in common, found once: short calls wait for Python.

    Attributes:
        maps: constants of all kernels.
        tiles: how kernels are cut.
        longest_chunk: of the tiles of linear attention.
        constants: all constants of a kernel, by its name, collected when it is first launched.
    """

    maps: dict[str, Any]
    tiles: Configuration
    longest_chunk: int
    constants: dict[str, dict[str, Any]]


@functools.lru_cache(maxsize=1024)
def kind_of(
    dtypes: tuple[torch.dtype, ...],
    widths: tuple[int, int],
    group: int,
    features: tuple[str, float],
    masked: bool,
    linked: bool,
    where: tuple[torch.device, Device],
    operand: str,
    changes: int,
) -> Kind:
    """Find what calls of one kind have in common.

    Args:
        dtypes: of queries, keys and values.
        widths: of queries and of values.
        group: query heads per key head.
        features: the map, and what is added to its features.
        masked: some keys do not count.
        linked: there is decay, or there are documents.
        where: the device, and what it is.
        operand: what products are computed in.
        changes: of the tiles that were measured, `measured_tiles.changes`.

    Raises:
        UnsupportedCallError: other dtypes, or wider heads.
    """
    _require(dtypes, widths)
    (feature_map, eps), (device, about) = features, where
    # Products take operands from registers there, on the H100 those of fewer than 64 rows. The compiler then
    # computes features anew for each product, and in every warp, but for a mask on them.
    by_registers = about.capability[0] in REGISTERS or (about.capability[0] == 9 and linked)
    maps = {
        "FEATURE_MAP": feature_map,
        "EPS": eps if feature_map == "relu" else 0.0,
        "MASKED": masked or operand == "fp16" or by_registers,
        "OPERAND": operand,
    }
    # the interpreter has no registers to run out of, and takes its time for every step
    kind, capability = ("fp16", NO_DEVICE) if interpreting() else (operand, about.capability)
    chosen = configuration(*widths, group, kind, capability, linked)
    tiles = measured_tiles.measured(chosen, device, operand, widths, group, linked)
    return Kind(maps, tiles, tiles.longest_chunk, {})


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


def _require(
    dtypes: tuple[torch.dtype, ...], widths: tuple[int, int], tokens: int = 0, rows: int = 0
) -> None:
    why = refusal(dtypes, widths, tokens, rows)
    if why is not None:
        raise UnsupportedCallError(f"the Triton kernels cannot compute this: {why}")


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


def last_contiguous(x: Tensor) -> Tensor:
    """Copy x where its last dimension is strided (the gradient of a sum is one number expanded).

    And where rows are so far apart that 32 bits do not count what lies between those of a chunk.
    """
    _, _, row, last = x.stride()
    return x if last == 1 and row < FAR else x.contiguous()


@functools.cache
def _names(name: str) -> tuple[str, str]:
    return f"{name}_strides", f"{name.upper()}_STRIDE"


def strides(**tensors: Tensor | None) -> dict[str, Any]:
    """Pass the strides of tensors `[B, H, N, D]`, by the names that kernels give them."""
    return {_names(name)[0]: (0, 0, 0) if x is None else x.stride()[:3] for name, x in tensors.items()}


def constant_strides(**tensors: Tensor) -> dict[str, Any]:
    """Pass the strides of tensors that kernels walk: the one from token to token is a constant to them.

    Addresses of a tile's rows are then one register and numbers in the instructions. Models keep it whatever
    the batch and the length, for `[B, N, H, D]` and for `[B, H, N, D]` alike.
    """
    found: dict[str, Any] = {}
    for name, x in tensors.items():
        others, of_token = _names(name)
        batch, head, found[of_token], _ = x.stride()
        found[others] = batch, head
    return found


def run_kernel(
    kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: dict[str, Any], warmup: bool = False
) -> Any:
    """Run a kernel, or only compile it: arguments by position, which triton takes faster than by name."""
    given = map(arguments.__getitem__, kernel.arg_names)
    return kernel.run(*given, grid=grid, warmup=warmup, num_warps=tile.warps, num_stages=tile.stages)


class Problem:
    """Inputs of one call, and its launches. Arguments as `launch.forward` takes them."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        feature_map: str,
        normalise: bool,
        eps: float = 0.0,
        segment: int | None = None,
        log_decay: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> None:
        assert feature_map in FEATURE_MAPS, feature_map
        self.valid = valid
        self.linked = log_decay is not None or documents is not None
        self.batch, self.heads, self.length, self.D = query.shape
        _, self.kv_heads, self.keys, self.Dv = value.shape
        self.group = self.heads // self.kv_heads
        self.batch_heads = self.batch * self.kv_heads
        self.device = query.device
        self.about = device_of(self.device)
        dtypes, widths = (query.dtype, key.dtype, value.dtype), (self.D, self.Dv)
        self.kind = kind_of(
            dtypes,
            widths,
            self.group,
            (feature_map, eps),
            valid is not None,
            self.linked,
            (self.device, self.about),
            operand_of(dtypes),
            measured_tiles.changes(),
        )
        tokens, rows = max(self.length, self.keys), self.batch * self.heads
        if tokens > LONGEST or rows * max(widths) > MOST_PROGRAMS:
            _require(dtypes, widths, tokens, rows)
        self.query, self.key, self.value = map(last_contiguous, (query, key, value))
        self.of_tokens = {"q": self.query, "k": self.key, "v": self.value}
        visible = None if valid is None else valid.view(torch.uint8)
        self.mask = {"VALID": visible, "valid_strides": (0, 0) if visible is None else visible.stride()}
        self.decay = None if log_decay is None else log_decay.to(torch.float32).contiguous()
        self.labels = None if documents is None else documents.to(torch.int32).contiguous()
        self.maps, self.tiles = self.kind.maps, self.kind.tiles
        self.normalise = normalise
        self.segment = segment
        self.given: dict[Any, dict[str, Any]] = {}

    def tile(self, spec: KernelSpec) -> Tile:
        """Look up the tile of a kernel."""
        tile: Tile = getattr(self.tiles, spec.name)
        return tile

    def programs(self, spec: KernelSpec) -> int:
        """Count the programs of a kernel that walk the same segment."""
        rows = self.batch * self.heads if spec.per_query_head else self.batch_heads
        width = self.D if spec.split == "D" else self.Dv
        return rows * -(-width // self.tile(spec).block)

    def cut(self, length: int, spec: KernelSpec) -> tuple[int, int]:
        """Choose the tokens per segment for a kernel, and the number of segments, for so many tokens."""
        segment = self.segment
        if segment is None:
            segment = segment_length(length, self.programs(spec), self.about.processors, self.tiles.least)
        assert segment % self.kind.longest_chunk == 0, segment  # a step never looks past its segment
        return segment, -(-length // segment)

    def inputs(self, names: str, strides: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Pass the tensors named by letters (q, k, v), and the mask where there are keys or values."""
        found: dict[str, Any] = {}
        for name in names:
            one = self.given.get((name, strides))
            if one is None:
                x = self.of_tokens[name]
                one = self.given[name, strides] = {name.upper(): x, **strides(**{name: x})}
            found |= one
        if names != "q":
            found |= self.mask
        return found

    def constants(self, spec: KernelSpec) -> dict[str, Any]:
        """Pass the constants of a kernel."""
        found = self.kind.constants.get(spec.name)
        if found is None:
            tile = self.tile(spec)
            found = {"D": self.D, "DV": self.Dv, "BLOCK": tile.block, **self.maps}
            if tile.chunk > 1:  # a step has no chunks
                found["CHUNK"] = tile.chunk
            if "D" in spec.whole:
                found["BLOCK_D"] = padded(self.D)
            if "DV" in spec.whole:
                found["BLOCK_V"] = padded(self.Dv)
            self.kind.constants[spec.name] = found
        return found

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a result."""
        return self.query.new_empty(*shape, dtype=dtype)  # half the time of torch.empty

    def token_major(self, heads: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
        """Allocate a result `[B, heads, length, width]`, in memory `[B, length, heads, width]`."""
        laid_out = length * heads * width, width, heads * width, 1
        return self.query.new_empty_strided((self.batch, heads, length, width), laid_out, dtype=dtype)

    def new_output(self) -> tuple[Tensor, Tensor]:
        """Allocate output `[B, H, N, Dv]`, in memory `[B, N, H, Dv]`, and total `[B, H, N]`."""
        dtype = self.value.dtype if self.normalise else torch.float32
        output = self.token_major(self.heads, self.length, self.Dv, dtype)
        return output, self.new(self.batch, self.heads, self.length)

    def new_state(self, over: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Allocate S `[B, Hkv, D, Dv]`, unless it is written `over` one, and z `[B, Hkv, D]`."""
        shape = (self.batch, self.kv_heads, self.D)
        return self.new(*shape, self.Dv) if over is None else over, self.new(*shape)

    def new_slots(self, slots: int) -> Slots:
        """Allocate sums of segments; nothing for none."""
        if not slots:
            return NONE
        states = self.new(self.batch_heads, slots, self.D * self.Dv + self.D)
        return Slots(states, self.new(self.batch_heads, slots) if self.linked else None)

    def links(self, spec: KernelSpec) -> dict[str, Any]:
        """Pass decay and documents."""
        if spec is STEP:  # one token is of one document
            return {"DECAY": self.decay}
        return {"DECAY": self.decay, "LABELS": self.labels, "LINKED": self.linked}

    def last_slot(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Cut S and z out of the last slot, as tensors of their own."""
        S, z = states[:, -1].split((self.D * self.Dv, self.D), -1)
        shape = (self.batch, self.kv_heads, self.D)
        return S.reshape(*shape, self.Dv).contiguous(), z.reshape(shape).contiguous()

    def dense(self, S: Tensor | None, z: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Bring a state to the layout that the kernels read."""
        assert (S is None) == (z is None)
        if S is None or z is None:
            return None, None
        assert S.dtype == z.dtype == torch.float32, (S.dtype, z.dtype)
        return S.contiguous(), z.contiguous()

    def states(self, segment: int, slots: int) -> Slots:
        """Compute the sum of each of the first `slots` segments."""
        from hf_linattn.ops.triton import kernels

        found = self.new_slots(slots)
        if not slots:
            return found
        self.run(
            kernels.segment_states,
            SEGMENT_STATES,
            slots,
            {
                "STATES": found.states,
                "FACTORS": found.factors,
                "kv_heads": self.kv_heads,
                "length": self.keys,
                "segment": segment,
                "slots": slots,
            },
        )
        return found

    def before(self, tokens: int, found: Slots, S: Tensor | None, z: Tensor | None) -> Segments:
        """Leave sums of few segments as they are, else sum them up from S and z on, in place."""
        if found.many:
            assert found.states is not None
            self.accumulate(found.states, found.factors, S, z)
        return Segments(tokens, found, found.many)

    def accumulate(self, states: Tensor, factors: Tensor | None, S: Tensor | None, z: Tensor | None) -> None:
        """Sum up along the slots, in place, from S and z on."""
        from hf_linattn.ops.triton import kernels

        batch_heads, slots, size = states.shape
        self.launch(
            kernels.accumulate,
            (batch_heads, -(-size // SCAN.block)),
            SCAN,
            {
                "STATES": states,
                "FACTORS": factors,
                "S0": S,
                "Z0": z,
                "slots": slots,
                "SIZE_S": self.D * self.Dv,
                "SIZE": size,
                "BLOCK": SCAN.block,
                "SLOTS": SCAN.chunk,
            },
        )

    def run(
        self,
        kernel: Any,
        spec: KernelSpec,
        segments: int,
        arguments: dict[str, Any],
        programs: int | None = None,
    ) -> None:
        """Launch a kernel that walks segments, with these arguments and what its description adds to them.

        `programs`, where it is not None, walk the same segment in place of those of the description.
        """
        arguments |= self.inputs(spec.inputs, strides if spec is STEP else constant_strides)
        arguments |= self.links(spec)
        arguments |= self.constants(spec)
        grid = self.programs(spec) if programs is None else programs, segments
        self.launch(kernel, grid, self.tile(spec), arguments)

    def launch(self, kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: dict[str, Any]) -> None:
        """Run a kernel on the device of the inputs, with those of the arguments that it has."""
        here = not self.query.is_cuda or torch.cuda.current_device() == self.device.index
        with HERE if here else torch.cuda.device_of(self.query):
            run_kernel(kernel, grid, tile, arguments)
