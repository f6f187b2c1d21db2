"""One call of the Triton kernels: its inputs as they want them, how it is cut, and the launch itself."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import launcher, measured_tiles, plan
from hf_linattn.ops.triton.tiles import Tile, padded, segment_length
from hf_linattn.ops.types import FEATURE_MAPS

SCAN = Tile(chunk=8, block=128, warps=4, stages=1)
"""Of `accumulate`: slots and elements of a state that one program loads together."""

FAR = 1 << 23
"""Numbers from row to row: 256 rows and their columns stay below 2^31."""


class KernelSpec(NamedTuple):
    """What a kernel is launched with, whatever the call.

    Attributes:
        name: of its tile in `Configuration`.
        split: the width whose columns are split over programs, "D" or "DV".
        whole: widths of which every program holds all columns.
        per_query_head: programs go by query heads, else by key heads.
    """

    name: str
    split: str
    whole: tuple[str, ...]
    per_query_head: bool = False


SEGMENT_STATES = KernelSpec("segment_states", "DV", ("D",))
OUTPUTS = KernelSpec("outputs", "DV", ("D",), per_query_head=True)
STEP = KernelSpec("step", "DV", ("D",))
GRADIENT_ROWS = KernelSpec("gradient_rows", "D", ("D", "DV"))
QUERY_GRADIENTS = KernelSpec("query_gradients", "D", ("DV",), per_query_head=True)
KEY_GRADIENTS = KernelSpec("key_gradients", "D", ("DV",))
VALUE_GRADIENTS = KernelSpec("value_gradients", "DV", ("D",))
DIRECT = 9 << 16
"""Bytes of slots that a program may read to sum them up itself; more get a launch of their own."""


class Slots(NamedTuple):
    """Sums of segments, `[batch_heads, slots, D Dv + D]`, and what each leaves of those before; or None."""

    states: Tensor | None
    factors: Tensor | None

    @property
    def many(self) -> bool:
        """Whether there are more than a program sums up by itself."""
        return self.states is not None and self.states.shape[1] * self.states.shape[2] * 4 > DIRECT


NONE = Slots(None, None)


class Segments(NamedTuple):
    """How a text is cut, and what stands before each segment, as `kernel_functions.load_state` reads it.

    Attributes:
        tokens: of a segment.
        slots: sums of all segments but the last, or of parts of them.
        summed: each slot has what came before in it already.
        parts: slots of a segment.
    """

    tokens: int
    slots: Slots
    summed: bool
    parts: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """What kernels take of it."""
        states, factors = self.slots
        slots = 0 if states is None else states.shape[1]
        sums = {"STATES": states, "FACTORS": factors}
        return {**sums, "SUMMED": self.summed, "slots": slots, "parts": self.parts}


def apart(segments: Segments | None) -> tuple[Slots, Segments | None]:
    """Take the tensors, which belong to what torch saves for a backward, out of what a forward knows."""
    return (NONE, None) if segments is None else (segments.slots, segments._replace(slots=NONE))


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


class Launches:
    """Launches kernels where a tensor is."""

    def __init__(self, on: Tensor) -> None:
        self.device, self.on_gpu = on.device, on.is_cuda

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tile: Tile,
        own: dict[str, Any],
        walk: plan.Walk | None = None,
    ) -> None:
        """Run a kernel there, with those of the arguments that it has.

        `own` are all, or those beside what a `walk` shares with other calls.
        """
        index = self.device.index
        if not self.on_gpu:  # interpreted
            launcher.compile_kernel(kernel, grid, tile, launcher.all_arguments(own, walk))
        elif torch.cuda.current_device() == index:
            launcher.run_kernel(kernel, grid, tile, own, index, walk)
        else:
            with torch.cuda.device(index):
                launcher.run_kernel(kernel, grid, tile, own, index, walk)


class Problem(Launches):
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
        super().__init__(query)
        self.valid, self.normalise, self.segment = valid, normalise, segment
        self.linked = log_decay is not None or documents is not None
        self.batch, self.heads, self.length, self.D = query.shape
        _, self.kv_heads, self.keys, self.Dv = value.shape
        self.group = self.heads // self.kv_heads
        self.batch_heads = self.batch * self.kv_heads
        self.about = plan.device_of(self.device)
        self.query, self.key, self.value = map(last_contiguous, (query, key, value))
        visible = None if valid is None else valid.view(torch.uint8)
        self.valid_strides = (0, 0) if visible is None else visible.stride()
        self.decay = None if log_decay is None else log_decay.to(torch.float32).contiguous()
        self.labels = None if documents is None else documents.to(torch.int32).contiguous()
        self.tensors: dict[str, Tensor | None] = {
            "Q": self.query,
            "K": self.key,
            "V": self.value,
            "VALID": visible,
            "DECAY": self.decay,
            "LABELS": self.labels,
        }
        dtypes = query.dtype, key.dtype, value.dtype
        self.plan = plan.plan_of(
            (query.shape, key.shape, value.shape),
            (self.query.stride(), self.key.stride(), self.value.stride(), self.valid_strides),
            dtypes,
            (feature_map, eps, normalise),
            (valid is not None, self.linked, segment),
            (self.device, self.about),
            plan.operand_of(dtypes),
            measured_tiles.changes(),
        )
        self.maps, self.tiles = self.plan[:2]

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
        found = self.plan.cuts.get((spec.name, length))
        if found is None:
            segment = self.segment
            if segment is None:
                segment = segment_length(length, self.programs(spec), self.about.processors, self.tiles.least)
            # a step never looks past its segment
            assert segment % self.tiles.longest_chunk == 0, segment
            found = self.plan.cuts[spec.name, length] = segment, -(-length // segment)
        return found

    def strides(self) -> dict[str, Any]:
        """Pass the strides of queries, keys, values and mask."""
        found = strides(q=self.query, k=self.key, v=self.value)
        return found | {"valid_strides": self.valid_strides}

    def walk(self, spec: KernelSpec) -> plan.Walk:
        """Find how a kernel is launched that walks segments: alike in all calls of one layout."""
        found = self.plan.walks.get(spec.name)
        if found is None:
            tile = self.tile(spec)
            fixed = {
                "heads": self.heads,
                "kv_heads": self.kv_heads,
                "length": self.length,
                "GROUP": self.group,
                "LINKED": self.linked,
                "NORMALISE": self.normalise,
                "D": self.D,
                "DV": self.Dv,
                "BLOCK": tile.block,
                "CHUNK": tile.chunk,
                "BLOCK_D": padded(self.D),
                "BLOCK_V": padded(self.Dv),
                **self.maps,
                "WHOLE": self.whole(spec),
                **self.strides(),
            }
            if spec is not STEP:
                fixed |= constant_strides(q=self.query, k=self.key, v=self.value)
                # an output lies as `new_output` lays it, gradients as their tensors
                row = self.heads * self.Dv
                fixed |= {"out_strides": (self.length * row, self.Dv), "OUT_STRIDE": row}
                of = {"d_q": self.query, "d_k": self.key, "d_v": self.value, "features": self.query}
                fixed |= constant_strides(**{x: torch.empty_like(of[x], device="meta") for x in of})
            found = self.plan.walks[spec.name] = plan.Walk(fixed, self.programs(spec), tile, {})
        return found

    def whole(self, spec: KernelSpec) -> bool:
        """Tell whether no chunk is cut off, so that a kernel need not look where the text ends.

        Loads without a mask let the compiler unroll the loop over query heads in the gradients of keys and
        values, and leave `segment_states` too few registers on the B200: there they spill, and all look.
        """
        grouped = self.group > 1 and spec in (KEY_GRADIENTS, VALUE_GRADIENTS)
        few = spec is SEGMENT_STATES and self.maps["PAIRS"] == 10
        return self.maps["WHOLE"] and not grouped and not few

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

    def new_state(self) -> tuple[Tensor, Tensor]:
        """Allocate S `[B, Hkv, D, Dv]` and z `[B, Hkv, D]`."""
        shape = (self.batch, self.kv_heads, self.D)
        return self.new(*shape, self.Dv), self.new(*shape)

    def new_slots(self, slots: int) -> Slots:
        """Allocate sums of segments; nothing for none."""
        if not slots:
            return NONE
        states = self.new(self.batch_heads, slots, self.D * self.Dv + self.D)
        return Slots(states, self.new(self.batch_heads, slots) if self.linked else None)

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
                "length": self.keys,
                "segment": segment,
                "slots": slots,
            },
        )
        return found

    def parts(self, tokens: int, count: int) -> int:
        """Choose in how many parts each of `count` segments is summed up.

        Key heads may be too few to fill the device, but more slots must not cost a launch.
        """
        found = self.plan.parts.get(tokens)
        if found is None:
            slots, chunks = max(count - 1, 1), tokens // self.tiles.longest_chunk
            most = self.about.processors // (self.programs(SEGMENT_STATES) * slots)
            size = slots * (self.D * self.Dv + self.D) * 4
            if size <= DIRECT:
                most = min(most, DIRECT // size)
            found = max((x for x in range(1, most + 1) if chunks % x == 0), default=1)
            self.plan.parts[tokens] = found
        return found

    def states_before(self, tokens: int, count: int, S: Tensor | None, z: Tensor | None) -> Segments:
        """Compute what stands before each of so many segments; S and z stand before the first."""
        parts = self.parts(tokens, count)
        found = self.states(tokens // parts, (count - 1) * parts)
        return self.before(tokens, found, S, z)._replace(parts=parts)

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
        """Launch a kernel that walks segments, with these arguments and what calls of the layout share.

        `programs`, where it is not None, walk the same segment in place of those of the description.
        """
        walk = self.walk(spec)
        grid = walk.programs if programs is None else programs, segments
        self.launch(kernel, grid, walk.tile, {**self.tensors, **arguments}, walk)
