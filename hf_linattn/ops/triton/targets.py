"""GPUs that are not there: the kernels compiled for them as a launch on them would, and what came out.

Only in a process of its own, as `compiled` starts them: a driver without a device replaces triton's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hf_linattn.ops.triton import launcher, machine_code, plan, problem
from hf_linattn.ops.triton.sample_calls import BESIDE, CALLS, COLUMNS, SPAN, WINDOWS, Shape
from hf_linattn.ops.triton.sample_calls import calls as calls_of_shape
from hf_linattn.ops.triton.tiles import Tile

TIMED = 50
"""Calls in each of the rounds whose shortest is the host's time: others use the processor too."""
ROUNDS = 10


class Target(NamedTuple):
    """A GPU: its numbers are of CUDA's programming guide and AMD's architecture tables.

    Attributes:
        device: one that has it.
        capability: as `torch.cuda.get_device_capability` says it; (0, 0) for AMD.
        processors: multiprocessors, or compute units.
        shared: KiB of shared memory of a processor.
        largest: KiB that one program may have.
        threads: of a processor.
    """

    device: str
    capability: tuple[int, int]
    processors: int
    shared: int
    largest: int
    threads: int


TARGETS = {
    "sm_80": Target("A100", (8, 0), 108, 164, 163, 2048),
    "sm_90": Target("H100", (9, 0), 132, 228, 227, 2048),
    "sm_100": Target("B200", (10, 0), 148, 228, 227, 2048),
    "sm_120": Target("RTX 5090", (12, 0), 170, 100, 99, 1536),
    "gfx942": Target("MI300X", (0, 0), 304, 64, 64, 2048),
}


class Compiled(NamedTuple):
    """One launch on one target.

    Attributes:
        name: of the kernel.
        calls: how often each of CALLS launches it.
        tile: how it is cut.
        grid: programs.
        tensors: arguments as large as the queries, float32 beside 16 bits twice: each is read or written
            once.
        resident: programs that a processor holds at once.
        work: warp instructions per 64 tokens (a token: per token) and query head.
        code: what was compiled.
    """

    name: str
    calls: dict[str, int]
    tile: Tile
    grid: tuple[int, ...]
    tensors: int
    resident: int
    work: int
    code: machine_code.Code


class Report(NamedTuple):
    """All launches of a case.

    Attributes:
        kernels: each kernel once.
        launches: by call.
        tensors: passes over memory of tensors as large as the queries, by call.
        host: microseconds of Python and of triton's binder per call; {} where nothing was timed.
    """

    kernels: list[Compiled]
    launches: dict[str, int]
    tensors: dict[str, int]
    host: dict[str, float]


class NoDevice:
    """A driver that knows only what it compiles for."""

    def __init__(self, name: str) -> None:
        from triton.backends.compiler import GPUTarget

        amd = name.startswith("gfx")
        self.target = GPUTarget("hip", name, 64) if amd else GPUTarget("cuda", int(name[3:]), 32)
        # triton keeps compiled kernels by number of device
        self.number = int(name.lstrip("smgfx_"))

    def get_current_device(self) -> int:
        """Name the device by a number of its own."""
        return self.number

    def get_current_stream(self, device: int) -> int:
        """Name the only stream."""
        return 0

    def get_current_target(self) -> Any:
        """Tell what is compiled for."""
        return self.target


def compiled(
    cases: Sequence[tuple[str, Shape]],
    *,
    kernels: Sequence[str] | None = None,
    calls: Sequence[str] = CALLS,
    timed: bool = False,
    jobs: int = 1,
) -> Iterator[Report]:
    """Compile cases, each a name of TARGETS and a shape, in processes whose triton does not interpret.

    Args:
        cases: what to compile.
        kernels: names; None for all.
        calls: of CALLS.
        timed: measure the host too.
        jobs: processes.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_compile_here) as pool:
        futures = [pool.submit(report, *case, kernels=kernels, calls=calls, timed=timed) for case in cases]
        for future in futures:
            yield future.result()


def _compile_here() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def report(
    name: str,
    shape: Shape,
    *,
    kernels: Sequence[str] | None = None,
    calls: Sequence[str] = CALLS,
    timed: bool = False,
) -> Report:
    """Compile one case, in this process. Arguments as those of `compiled`."""
    target = TARGETS[name]
    found: dict[str, Compiled] = {}
    launches, tensors = dict.fromkeys(calls, 0), dict.fromkeys(calls, 0)
    call = ""

    def compile_only(
        self: Any, kernel: Any, grid: tuple[int, ...], tile: Tile, own: dict[str, Any], walk: Any = None
    ) -> None:
        launches[call] += 1
        given = launcher.all_arguments(own, walk)
        arguments = {name: given[name] for name in kernel.arg_names}
        tokens = [x for x in arguments.values() if isinstance(x, Tensor) and x.dim() == 4]
        size = getattr(torch, shape.dtype).itemsize
        large = sum(
            x.element_size() // size for x in tokens if x.shape[2] in (shape.length, shape.length - SPAN)
        )
        tensors[call] += 0 if "token" in call else large
        if kernels is not None and kernel.__name__ not in kernels:
            return
        if kernel.__name__ in found:
            calls_of = found[kernel.__name__].calls
            calls_of[call] = calls_of.get(call, 0) + 1
            return
        built = launcher.compile_kernel(kernel, grid, tile, arguments, warmup=True)
        code, step = machine_code.read(built), arguments.get("STEP", arguments.get("LOOKING", 1))
        found[kernel.__name__] = Compiled(
            kernel.__name__,
            {call: 1},
            tile,
            grid,
            large,
            _resident(target, code, tile.warps),
            _work(shape, code, grid, tile, call, kernel.__name__, step),
            code,
        )

    host = {}
    with _target(name), torch.no_grad():
        for call, run in calls_of_shape(shape, "meta").items():
            if call in calls:
                with mock.patch.object(problem.Launches, "launch", compile_only):
                    run()
        if timed:  # torch is slower without memory than with
            small = shape._replace(heads=2, kv_heads=2, length=512, segment=256)
            timed_calls = calls_of_shape(small, "cpu")
            timed_calls.pop("map backward", None)  # half of it is a product by torch, here of the CPU
            host = {call: _host(run) for call, run in timed_calls.items() if call in calls}
    return Report(list(found.values()), launches, tensors, host)


@contextmanager
def _target(name: str) -> Iterator[None]:
    """Be on a device that is not there."""
    from triton.runtime import driver

    target = TARGETS[name]
    driver.set_active(NoDevice(name))
    about = plan.Device(target.capability, target.processors)
    hip = "6.4" if name.startswith("gfx") else None

    def device(_: torch.device) -> plan.Device:  # a Mock would cost every call 8 microseconds
        return about

    of = mock.patch.object(plan, "device_of", device)
    with of, mock.patch("torch.version.hip", hip):
        yield


def _resident(target: Target, code: machine_code.Code, warps: int) -> int:
    """Count the programs that a processor holds, by registers, shared memory and threads."""
    if target.capability == (0, 0):  # four units of 512 registers a lane; a warp has 64 lanes
        units = min(512 // (-(-code.registers // 8) * 8), 8)
        by_registers, by_threads = 4 * units // warps, target.threads // (64 * warps)
        reserved = 0
    else:
        by_registers = 65536 // (-(-code.registers * 32 // 256) * 256 * warps)
        by_threads, reserved = target.threads // (32 * warps), 1024
    by_memory = target.shared * 1024 // max(code.shared + reserved, 1)
    fits = code.shared <= target.largest * 1024
    return min(by_registers, by_threads, by_memory) if fits else 0


def _work(
    shape: Shape,
    code: machine_code.Code,
    grid: tuple[int, ...],
    tile: Tile,
    call: str,
    name: str,
    step: int,
) -> int:
    """Count warp instructions per 64 tokens and query head; of a token, and of a sum of states, in all."""
    rows = shape.batch * shape.heads
    programs = grid[0] / rows
    # steps of a program over the window, and what is outside
    if call in WINDOWS[:2] or name == "window_outputs":
        own, step = (tile.block, tile.chunk) if name == "window_key_gradients" else (tile.chunk, tile.block)
        group = shape.heads // shape.kv_heads if name == "window_key_gradients" else 1
        steps = -(-(own + SPAN - 1) // step) * group
        each = code.instructions - code.loop + steps * code.loop
        return round(each * tile.warps * programs * 64 / shape.length)
    if name == "window_and_rest":  # a chunk takes its tokens in steps, then its queries go over the window
        taken, steps = code.inner if len(code.inner) == 2 else (0, *code.inner)
        again = (tile.chunk // step - 1) * taken + (-(-(tile.chunk + SPAN - 1) // tile.block) - 1) * steps
        return round((code.loop + again) * tile.warps * programs * 64 / tile.chunk)
    if name.startswith(("prompt", "heavy")):
        of_warp = _prompt_work(code, tile, name, step, shape.length)
        return round(of_warp * tile.warps * programs * 64 / shape.length)
    if name == "window_and_heavy":  # all columns twice for a token
        again = (-(-COLUMNS.total // tile.block) - 1) * sum(code.inner)
        return round((code.loop + again) * tile.warps * programs)
    if "token" in call:
        again = -(-SPAN // tile.chunk) - 1 if name == "window_step" else 0
        return round((code.instructions + again * code.loop) * tile.warps * programs)
    if name in ("gate_outputs", "map_features", "map_gradients"):
        return round(code.instructions * tile.warps * programs * 64 / shape.length)
    if call in BESIDE:
        return round(code.loop * tile.warps * shape.kv_heads / shape.heads * 64 / tile.chunk)
    if tile is problem.SCAN:
        return round(code.instructions * tile.warps * grid[0] * grid[1] / rows * 64 / shape.length)
    return round(code.loop * tile.warps * programs * 64 / tile.chunk)


def _prompt_work(code: machine_code.Code, tile: Tile, name: str, looking: int, length: int) -> int:
    """Count the instructions of a warp of one program: of a text's kernels with heavy hitters.

    Of what `heavy_key_gradients` sums up at its end, one part.
    """
    if name == "prompt_choices":  # a step: its heavy hitters, and who looked at a block that leaves
        *met, first, others = code.innermost
        behind = SPAN + COLUMNS.block - -(-(COLUMNS.block - 1) // looking) * looking
        again = (-(-(COLUMNS.block - 1) // looking) - 1) * first + (-(-behind // looking) - 1) * others
        if len(met) == 1:
            again += (-(-COLUMNS.block // tile.chunk) - 1) * met[0]
        else:  # heavy hitters in tiles of 32, once for the sums and once for what they get
            again += (-(-COLUMNS.heavy // 32) - 1) * sum(met)
        return (code.loop + again) * (length // COLUMNS.block)
    columns = COLUMNS.total - (COLUMNS.heavy if name == "prompt_sums" else 0)
    queries = {
        "prompt_cache": SPAN + COLUMNS.block,
        "heavy_key_parts": COLUMNS.block,
        "heavy_key_gradients": SPAN + COLUMNS.block + tile.block,
    }
    steps = -(-queries[name] // tile.chunk) if name in queries else -(-columns // tile.block)
    return code.instructions + (steps - 1) * code.loop


class _Idle:
    """A compiled kernel that is not handed to a driver."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        """Do nothing."""


def _host(run: Callable[[], Any]) -> float:
    """Measure microseconds of Python in a call, its kernels compiled, without the driver: the best round."""
    idle = _Idle()

    def compile_only(kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: Any) -> _Idle:
        compile_kernel(kernel, grid, tile, arguments, warmup=True)
        return idle

    def bind_only(
        self: Any, kernel: Any, grid: tuple[int, ...], tile: Tile, own: dict[str, Any], walk: Any = None
    ) -> None:
        launcher.run_kernel(kernel, grid, tile, own, 0, walk)

    compile_kernel = launcher.compile_kernel
    compiling = mock.patch.object(launcher, "compile_kernel", compile_only)
    with compiling, mock.patch.object(problem.Launches, "launch", bind_only):
        run()
        rounds = []
        for _ in range(ROUNDS):
            begin = time.perf_counter()
            for _ in range(TIMED):
                run()
            rounds.append((time.perf_counter() - begin) / TIMED * 1e6)
    return min(rounds)
