"""One call of the Triton kernels: its inputs as they want them, how it is cut, and the launch itself."""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.triton.tiles import Tile, configuration, padded, segment_length
from hf_linattn.ops.types import FEATURE_MAPS

WIDEST = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCAN = Tile(chunk=8, block=128, warps=4, stages=1)
"""Of `accumulate`: slots and elements of a state that one program loads together."""


class Device(NamedTuple):
    """What the choice of tiles and segments asks of a device."""

    capability: tuple[int, int]
    processors: int


@functools.lru_cache
def device_of(device: torch.device) -> Device:
    """Of a CUDA or ROCm device; in the interpreter, one processor."""
    if device.type != "cuda":
        return Device((9, 0), 1)
    found = torch.cuda.get_device_properties(device)
    # AMD counts versions of its own, and has 64 KiB of shared memory: the small tiles
    capability = (0, 0) if torch.version.hip else (found.major, found.minor)
    return Device(capability, found.multi_processor_count)


def interpreting() -> bool:
    """Whether triton is told to interpret kernels, on CPU tensors."""
    triton = importlib.import_module("triton")
    return bool(triton.knobs.runtime.interpret)


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels take these: 16 or 32 bits, heads of at most 256."""
    widths = (query.shape[-1], value.shape[-1])
    return all(x.dtype in DTYPES for x in (query, key, value)) and max(widths) <= WIDEST


def operand_of(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What the products are computed in; the names are explained in `triton_kernels`."""
    dtypes = {query.dtype, key.dtype, value.dtype}
    if interpreting():
        # the interpreter holds bfloat16 as integers, and would multiply those
        return "tf32" if dtypes == {torch.float16} else "ieee"
    if dtypes == {torch.bfloat16}:
        return "bf16"
    if torch.version.hip is not None:
        return "ieee"
    if dtypes == {torch.float16}:
        # scores, S and totals of float16 inputs pass 65504; tf32 keeps their bits and has the range
        return "tf32"
    # who lets torch take tensor cores for float32 gets them here, at nearly float32's accuracy
    return "tf32x3" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def last_contiguous(x: Tensor) -> Tensor:
    """X, or a copy where its last dimension is strided (the gradient of a sum is one number expanded)."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Problem:
    """Inputs of one call. Arguments as `triton_linear.forward`; `segment` None chooses."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        feature_map: str,
        normalise: bool,
        segment: int | None = None,
    ) -> None:
        if not supports(query, key, value):
            raise UnsupportedCallError(
                f"the Triton kernels take float32, bfloat16 and float16, and heads of at most {WIDEST}; got "
                f"{query.dtype}, {key.dtype}, {value.dtype} and widths {query.shape[-1]}, {value.shape[-1]}"
            )
        assert feature_map in FEATURE_MAPS, feature_map
        self.query, self.key, self.value = (last_contiguous(x) for x in (query, key, value))
        self.valid = valid
        self.batch, self.heads, self.length, self.D = query.shape
        self.kv_heads, self.keys, self.Dv = *key.shape[1:3], value.shape[3]
        self.group = self.heads // self.kv_heads
        self.pairs = self.batch * self.kv_heads
        self.device = query.device
        operand = operand_of(query, key, value)
        self.maps = {"FEATURE_MAP": feature_map, "OPERAND": operand}
        self.normalise = normalise
        self.segment = segment
        self.about = device_of(self.device)
        # the interpreter has no registers to run out of, and takes its time for every step
        kind = "tf32" if interpreting() else operand
        self.tiles = configuration(self.D, self.Dv, self.group, kind, self.about.capability)

    def cut(self, length: int, programs: int) -> tuple[int, int]:
        """Tokens per segment, and segments, where each segment keeps `programs` programs busy."""
        segment = self.segment
        if segment is None:
            segment = segment_length(length, programs, self.about.processors, self.tiles.least)
        assert segment % self.tiles.longest_chunk == 0, segment  # a step never looks past its segment
        return segment, -(-length // segment)

    def blocks(self, width: int, tile: Tile) -> int:
        """Programs that share the columns of an output."""
        return -(-width // tile.block)

    def inputs(self, names: str) -> dict[str, Any]:
        """Where the tensors named by letters (q, k, v) lie, and the mask where there are keys or values."""
        found: dict[str, Any] = {}
        for name, x in (("q", self.query), ("k", self.key), ("v", self.value)):
            if name in names:
                found |= {name.upper(): x, f"{name}_strides": x.stride()[:3]}
        if "k" in names or "v" in names:
            valid = None if self.valid is None else self.valid.view(torch.uint8)
            found |= {"VALID": valid, "valid_strides": (0, 0) if valid is None else valid.stride()}
        return found

    def sizes(self, tile: Tile, *whole: str) -> dict[str, int]:
        """Constants of a kernel; `whole` names the widths of which it needs all columns."""
        full = {"BLOCK_D": padded(self.D), "BLOCK_V": padded(self.Dv)}
        own = {"D": self.D, "DV": self.Dv, "BLOCK": tile.block, "CHUNK": tile.chunk}
        return own | {name: full[name] for name in whole}

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def new_output(self) -> tuple[Tensor, Tensor]:
        """Output `[B, H, N, Dv]`, in memory `[B, N, H, Dv]` as the next projection reads it, and total."""
        output = self.new(self.batch, self.length, self.heads, self.Dv, dtype=self.value.dtype)
        return output.transpose(1, 2), self.new(self.batch, self.heads, self.length)

    def new_state(self) -> tuple[Tensor, Tensor]:
        """S `[B, Hkv, D, Dv]` and z `[B, Hkv, D]`."""
        shape = (self.batch, self.kv_heads, self.D)
        return self.new(*shape, self.Dv), self.new(*shape)

    def new_slots(self, slots: int) -> Tensor:
        """Room for S and z of each segment, `[pairs, slots, D Dv + D]`."""
        return self.new(self.pairs, slots, self.D * self.Dv + self.D)

    def last_slot(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """S and z as tensors of their own."""
        S, z = states[:, -1].split((self.D * self.Dv, self.D), -1)
        shape = (self.batch, self.kv_heads, self.D)
        return S.reshape(*shape, self.Dv).contiguous(), z.reshape(shape).contiguous()

    def dense(self, S: Tensor | None, z: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """A state as the kernels read it."""
        assert (S is None) == (z is None)
        if S is None or z is None:
            return None, None
        assert S.dtype == z.dtype == torch.float32, (S.dtype, z.dtype)
        return S.contiguous(), z.contiguous()

    def states(self, S: Tensor | None, z: Tensor | None, segment: int, slots: int) -> Tensor | None:
        """S and z after each of the first `slots` segments, as `new_slots`; None for no slots."""
        from hf_linattn.ops.triton import kernels

        if not slots:
            return None
        states = self.new_slots(slots)
        tile = self.tiles.segment_states
        self.launch(
            kernels.segment_states,
            (self.pairs * self.blocks(self.Dv, tile), slots),
            tile,
            STATES=states,
            kv_heads=self.kv_heads,
            length=self.keys,
            segment=segment,
            slots=slots,
            **self.inputs("kv"),
            **self.sizes(tile, "BLOCK_D"),
            **self.maps,
        )
        self.accumulate(states, S, z)
        return states

    def accumulate(self, states: Tensor, S: Tensor | None, z: Tensor | None) -> None:
        """Running sum along the slots, in place, from S and z."""
        from hf_linattn.ops.triton import kernels

        pairs, slots, size = states.shape
        self.launch(
            kernels.accumulate,
            (pairs, -(-size // SCAN.block)),
            SCAN,
            STATES=states,
            S0=S,
            Z0=z,
            slots=slots,
            SIZE_S=self.D * self.Dv,
            SIZE=size,
            BLOCK=SCAN.block,
            SLOTS=SCAN.chunk,
        )

    def launch(self, kernel: Any, grid: tuple[int, ...], tile: Tile, **arguments: Any) -> None:
        """Run a kernel on the device of the inputs."""
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        with torch.cuda.device_of(self.query):  # nothing on a CPU
            kernel[grid](**arguments, **options)
