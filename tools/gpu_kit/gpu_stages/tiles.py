"""Candidates of tiles, timed kernel by kernel; the best become a table that the launcher reads.

Only the kernel whose tile is tried is timed, in a whole forward and backward. The table gets a tile where it
is faster than the chosen one by more than noise, and only after the package's own check has passed with it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from hf_linattn.ops import linear_attention
from hf_linattn.ops.triton import launch, measured_tiles, plan, problem
from hf_linattn.ops.triton.tiles import Configuration, Tile
from hf_linattn.ops.types import Inputs, OpConfig

from . import precompile, timing, windows
from .correct import disagreement, key_of
from .work import Case, Context, Row, needs_triton

GAIN = 0.97
"""A measured tile takes at most this part of the time of the chosen one."""
SAMPLES = 7
NAME = "tiles.json"


class Problem(NamedTuple):
    """What tiles are measured on."""

    dtype: str
    width: int
    group: int
    linked: bool
    batch: int
    heads: int
    length: int
    windows: bool = False


PROBLEMS = (
    Problem("bfloat16", 128, 1, False, 1, 32, 8192),
    Problem("bfloat16", 64, 1, False, 8, 16, 2048),
    Problem("bfloat16", 128, 4, False, 1, 32, 8192),
    Problem("bfloat16", 64, 4, False, 4, 16, 4096),
    Problem("bfloat16", 256, 1, False, 1, 16, 4096),
    Problem("bfloat16", 128, 1, True, 1, 32, 8192),
    Problem("bfloat16", 64, 1, True, 8, 16, 2048),
    Problem("float16", 128, 1, False, 1, 32, 8192),
    Problem("float16", 64, 1, False, 8, 16, 2048),
    Problem("float32", 64, 1, False, 8, 16, 2048),
    Problem("bfloat16", 128, 1, False, 1, 32, 8192, windows=True),
    Problem("bfloat16", 64, 1, False, 8, 16, 2048, windows=True),
    Problem("bfloat16", 128, 4, False, 1, 32, 8192, windows=True),
    Problem("bfloat16", 64, 4, False, 4, 16, 4096, windows=True),
    Problem("bfloat16", 256, 1, False, 1, 16, 4096, windows=True),
    Problem("float16", 128, 1, False, 1, 32, 8192, windows=True),
)
TINY = Problem("float32", 16, 1, False, 1, 1, 20)


def cases(context: Context) -> list[Case]:
    """List the problems."""
    problems = (TINY, TINY._replace(windows=True)) if context.dry else PROBLEMS
    return [Case({"case": "tiles", **each._asdict()}, partial(_row, context, each)) for each in problems]


def inputs_of(about: Problem, device: str) -> Inputs:
    """Draw numbers, laid out as models lay them out."""
    kv_heads, dtype = about.heads // about.group, getattr(torch, about.dtype)

    def new(heads: int) -> torch.Tensor:
        x = torch.randn(about.batch, about.length, heads, about.width, device=device).to(dtype)
        return x.transpose(1, 2).requires_grad_()

    decay = None
    if about.linked:
        decay = -0.01 * torch.rand(about.batch, kv_heads, about.length, device=device)
    return Inputs(new(about.heads), new(kv_heads), new(kv_heads), None, None, None, decay)


def once(about: Problem, inputs: Inputs) -> None:
    """Run forward and backward, and one token."""
    if about.windows:
        windows.once(*inputs[:3], min(windows.SPAN, about.length // 2))
        return
    outputs = linear_attention.attention(inputs, OpConfig("elu1"), True, "triton")
    torch.autograd.grad(outputs.output, inputs[:3], torch.ones_like(outputs.output))
    one = [x[:, :, :1].detach() for x in inputs[:3]]
    decay = None if inputs.log_decay is None else inputs.log_decay[..., :1].contiguous()
    assert outputs.S is not None
    assert outputs.z is not None
    given = Inputs(*one, None, outputs.S.detach(), outputs.z.detach(), decay)
    launch.step(given, OpConfig("elu1"))


def compile_with(about: Problem, name: str, tile: Tile) -> None:
    """Compile what a candidate launches, in a process without a device."""
    with measured_tiles.trial({name: tile}):
        once(about, inputs_of(about, "meta"))


@contextmanager
def watched() -> Iterator[dict[str, list[Any]]]:
    """Collect tile and time of every launch meanwhile, by kernel."""
    seen: dict[str, list[Any]] = {}
    run = problem.Launches.launch

    def timed(self: Any, kernel: Any, grid: Any, tile: Tile, *arguments: Any) -> None:
        if self.device.type != "cuda":
            run(self, kernel, grid, tile, *arguments)
            seen.setdefault(kernel.__name__, []).append((tile, lambda: 1.0))
            return
        begin, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timing.prepare("cuda")
        timing._flush["buffer"].zero_()
        torch.cuda._sleep(timing.BUSY)  # the host is ahead when the kernel begins
        begin.record()
        run(self, kernel, grid, tile, *arguments)
        after.record()
        seen.setdefault(kernel.__name__, []).append((tile, lambda: begin.elapsed_time(after)))

    problem.Launches.launch = timed
    try:
        yield seen
    finally:
        problem.Launches.launch = run


def neighbours(name: str, tile: Tile, width: int, dry: bool) -> list[Tile]:
    """List tiles around one: half, same and twice its chunk and block, 4 or 8 warps, then other stages."""
    # a block of a window's walks are tokens, of all others columns
    widest = 128 if name.startswith("window") and name != "window_step" else problem.padded(width)
    if dry:
        return [tile._replace(warps=1 if tile.warps > 1 else 2)]
    chunks = (
        {tile.chunk} if tile.chunk == 1 else {max(tile.chunk // 2, 16), tile.chunk, min(2 * tile.chunk, 128)}
    )
    blocks = {max(tile.block // 2, 16), tile.block, min(2 * tile.block, widest, 128)}
    if name == "step" and tile.block == widest:  # in narrower ones a copy would follow, which is not timed
        blocks = {tile.block}
    found = [Tile(c, b, w, tile.stages) for c in sorted(chunks) for b in sorted(blocks) for w in (4, 8)]
    found += [tile._replace(stages=stages) for stages in (1, 2, 3)]
    return [each for each in dict.fromkeys(found) if each != tile]


def _sample(context: Context, about: Problem, inputs: Inputs, name: str) -> float:
    """Return the milliseconds of one kernel."""
    times = []
    for index in range(1 if context.dry else SAMPLES + 1):
        with watched() as seen:
            once(about, inputs)
        if context.device == "cuda":
            torch.cuda.synchronize()
        if index or context.dry:  # the first one compiles
            times.append(sum(milliseconds() for _, milliseconds in seen[name]))
    return statistics.median(times)


def _row(context: Context, about: Problem) -> Row:
    """Time candidates of all kernels; add the best to the table."""
    needs_triton(context)
    torch.manual_seed(0)
    inputs = inputs_of(about, context.device)
    with watched() as seen:
        once(about, inputs)
    own = {name: launches[-1][0] for name, launches in seen.items() if name in Configuration._fields}
    found: dict[str, list[Tile]] = {
        name: neighbours(name, tile, about.width, context.dry) for name, tile in own.items()
    }
    if context.dry:
        found = {name: found[name] for name in list(found)[:1]}
    row: Row = {"candidates": [], "chosen": {name: list(tile) for name, tile in own.items()}}
    if not context.dry:
        calls = [(compile_with, (about, name, tile)) for name, tiles in found.items() for tile in tiles]
        row["precompiled"] = precompile.run(context, calls, 0.25)
    best: dict[str, Tile] = {}
    for name, tiles in found.items():
        base = least = _sample(context, about, inputs, name)
        row["candidates"].append([name, list(own[name]), base])
        for tile in tiles:
            try:
                with measured_tiles.trial({name: tile}):
                    took = _sample(context, about, inputs, name)
            except Exception as error:  # too much shared memory, say
                row["candidates"].append([name, list(tile), f"{type(error).__name__}: {str(error)[:100]}"])
                torch.cuda.synchronize() if context.device == "cuda" else None
                continue
            row["candidates"].append([name, list(tile), took])
            if took < GAIN * base and took < least:
                best[name], least = tile, took
        row[f"{name}_gain"] = base / least
    return row | _added(context, about, inputs, best)


def _added(context: Context, about: Problem, inputs: Inputs, best: dict[str, Tile]) -> Row:
    """Check the best tiles against float64, and write them into the table."""
    where = measured_tiles.setting(
        *(inputs.query.device, plan.operand_of((inputs.query.dtype,)), (about.width, about.width)),
        *(about.group, about.linked),
    )
    forms: tuple[tuple[Any, ...], ...] = (("elu1", True, True, about.linked),)
    if about.windows:
        forms = (("window", True, True), ("token", 0, "elu1", True, "gate", ""))
    wrong = None
    with measured_tiles.trial(best):
        for form in forms[: 1 if context.dry else None]:
            widths = about.width, about.width
            trial = key_of(about.dtype, widths, 1 + (about.group > 1), form, context.device)
            wrong = wrong or disagreement(trial, context.dry)
    row: Row = {"best": {name: list(tile) for name, tile in best.items()}}
    if wrong:
        return row | {"error": f"with the best tiles {wrong}; they are not in the table"}
    path = context.folder / NAME
    table = measured_tiles.read(path) if path.exists() else {}
    # linear attention and windows of the same sizes share a row
    measured_tiles.write(path, table | {where: {**table.get(where, {}), **best}} if best else table)
    return row
