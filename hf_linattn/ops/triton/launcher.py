"""Launches of kernels that triton has compiled before.

Triton's own launch looks at every argument to find out for which of the kernels that it has compiled they
are. That takes Python longer than a kernel runs on a short text, and a layer launches six in a training step.
Here all that triton looks at is a key, and a kernel that is found goes straight to its launcher in C.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor

from hf_linattn.ops.triton.plan import Walk, release
from hf_linattn.ops.triton.tiles import Tile

ALIGNMENT = 16
"""Bytes: triton compiles other instructions for tensors that begin at a multiple of these."""
MOST = 4096
"""Sets of arguments of a kernel that are remembered: every length of a text is one."""
KNOWN = (3, 9)
"""The newest triton whose compiled kernels are known to take what `run_kernel` hands them."""


class _Launch:
    """A kernel, with those of its arguments that all calls of a layout share.

    Attributes:
        tensors: takes the others that are tensors out of a dictionary: names in capitals, no constants.
        numbers: takes those that are none.
        fixed: what is shared.
        ordered: brings tensors, numbers and what is shared, one after the other, to the kernel's order.
        count: of names in the dictionary.
        compiled: by all that triton looks at.
    """

    def __init__(self, kernel: Any, own: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
        names, self.count = kernel.arg_names, len(own)
        pointers = {x.name for x in kernel.params if x.name.isupper() and not x.is_constexpr}
        tensors = [name for name in names if name in own and name in pointers]
        numbers = [name for name in names if name in own and name not in pointers]
        shared = [name for name in names if name not in own]
        self.fixed = tuple(fixed[name] for name in shared)
        assert not any(isinstance(x, Tensor) for x in (*self.fixed, *map(own.__getitem__, numbers))), names
        place = {name: number for number, name in enumerate(tensors + numbers + shared)}
        self.tensors, self.numbers = _taking(tensors), _taking(numbers)
        self.ordered = _taking([place[name] for name in names])
        self.compiled: dict[tuple[Any, ...], Any] = {}


def _taking(keys: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Make a function that takes what lies at these keys, in their order."""
    if len(keys) > 1:
        return itemgetter(*keys)
    return (lambda x: (x[keys[0]],)) if keys else lambda x: ()


_launches: dict[Any, _Launch] = {}
"""Of kernels that get all of their arguments in every call."""


def run_kernel(
    kernel: Any,
    grid: tuple[int, ...],
    tile: Tile,
    own: Mapping[str, Any],
    device: int,
    walk: Walk | None = None,
) -> None:
    """Run a kernel on the current device.

    Args:
        kernel: a function under `triton.jit`.
        grid: numbers of programs, at most three.
        tile: has its warps and stages.
        own: arguments of this call by name, the same names in all calls; more than the kernel has, too.
        device: its number.
        walk: has the arguments that calls share; None where `own` are all.
    """
    launches = _launches if walk is None else walk.launches
    launch = launches.get(kernel.fn)
    if launch is None:
        launch = launches[kernel.fn] = _Launch(kernel, own, {} if walk is None else walk.fixed)
    assert len(own) == launch.count, kernel.arg_names
    tensors, numbers = launch.tensors(own), launch.numbers(own)
    about = (
        device,
        tile,
        numbers,
        *[
            None if x is None else x.dtype if not x.data_ptr() % ALIGNMENT else (x.dtype, "unaligned")
            for x in tensors
        ],
    )
    compiled = launch.compiled.get(about)
    if compiled is None:
        if len(launch.compiled) >= MOST:
            launch.compiled.clear()
        launch.compiled[about] = compile_kernel(kernel, grid, tile, all_arguments(own, walk))
        return
    (x, y, z), (driver, runtime, direct) = (*grid, 1, 1)[:3], _triton()
    given = launch.ordered(tensors + numbers + launch.fixed)
    if not direct or _listens(runtime.launch_enter_hook) or _listens(runtime.launch_exit_hook):
        compiled[x, y, z](*given)
        return
    stream = driver.active.get_current_stream(device)
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)


def _listens(hook: Any) -> bool:
    """Tell whether anybody, a profiler say, is to be told about launches: a function, or one in a chain."""
    return hook is not None and bool(getattr(hook, "calls", True))


def all_arguments(own: Mapping[str, Any], walk: Walk | None) -> Mapping[str, Any]:
    """Join arguments of a call and those that a walk shares."""
    return own if walk is None else {**walk.fixed, **own}


def compile_kernel(
    kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: Mapping[str, Any], warmup: bool = False
) -> Any:
    """Compile a kernel unless it is, and run it unless this is a `warmup`; return what was compiled."""
    given = map(arguments.__getitem__, kernel.arg_names)
    # multiply-adds as one instruction: what triton does unasked changes with 3.10, and 3.9 warns of it
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}
    return kernel.run(*given, grid=grid, warmup=warmup, **options)


@functools.cache
def _triton() -> tuple[Any, Any, bool]:
    """Find triton's driver, its settings at run time, and whether its kernels may be called directly."""
    triton = importlib.import_module("triton")
    return triton.runtime.driver, triton.knobs.runtime, release(triton.__version__) <= KNOWN
