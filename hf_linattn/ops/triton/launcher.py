"""Launches of kernels that triton has compiled before.

Triton's own launch looks at every argument to find out for which of the kernels that it has compiled they
are. That takes Python longer than a kernel runs on a short text, and a layer launches six in a training step.
Here all that triton looks at is a key, and a kernel that is found goes straight to its launcher in C.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor

from hf_linattn.ops.triton.tiles import Tile

ALIGNMENT = 16
"""Bytes: triton compiles other instructions for tensors that begin at a multiple of these."""
MOST = 8192
"""Sets of arguments that are remembered: every length of a text is one."""
KNOWN = (3, 9)
"""The newest triton whose compiled kernels are known to take what `_Runtime.direct` hands them."""


class _Arguments(NamedTuple):
    """How arguments of a kernel are taken out of a dictionary of them.

    Attributes:
        tensors: takes tensors, whose names are in capitals and which are no constants to the compiler.
        others: takes all others.
        ordered: brings tensors and others, one after the other, to the kernel's order.
    """

    tensors: Callable[[dict[str, Any]], tuple[Any, ...]]
    others: Callable[[dict[str, Any]], tuple[Any, ...]]
    ordered: Callable[[tuple[Any, ...]], tuple[Any, ...]]


_arguments: dict[Any, _Arguments] = {}
_compiled: dict[tuple[Any, ...], Any] = {}


def run_kernel(
    kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: dict[str, Any], device: int
) -> None:
    """Run a kernel on the current device.

    Args:
        kernel: a function under `triton.jit`.
        grid: numbers of programs, at most three.
        tile: has its warps and stages.
        arguments: by name; more than the kernel has, too.
        device: its number.
    """
    takes = _arguments.get(kernel.fn) or _arguments_of(kernel)
    tensors, others = takes.tensors(arguments), takes.others(arguments)
    dtypes = [
        None if x is None else x.dtype if not x.data_ptr() % ALIGNMENT else (x.dtype, "unaligned")
        for x in tensors
    ]
    about = kernel.fn, device, tile.warps, tile.stages, others, *dtypes
    compiled = _compiled.get(about)
    if compiled is None:
        assert not any(isinstance(x, Tensor) for x in others), kernel.arg_names
        if len(_compiled) >= MOST:
            _compiled.clear()
        _compiled[about] = compile_kernel(kernel, grid, tile, arguments)
        return
    x, y, z, *_ = *grid, 1, 1
    given, (driver, runtime, direct) = takes.ordered(tensors + others), _triton()
    if direct and not runtime.launch_enter_hook.calls and not runtime.launch_exit_hook.calls:
        stream = driver.active.get_current_stream(device)
        compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *given)
    else:  # a profiler listens, which is told about the kernel
        compiled[x, y, z](*given)


def compile_kernel(
    kernel: Any, grid: tuple[int, ...], tile: Tile, arguments: dict[str, Any], warmup: bool = False
) -> Any:
    """Compile a kernel unless it is, and run it unless this is a `warmup`; return what was compiled."""
    given = map(arguments.__getitem__, kernel.arg_names)
    return kernel.run(*given, grid=grid, warmup=warmup, num_warps=tile.warps, num_stages=tile.stages)


def _arguments_of(kernel: Any) -> _Arguments:
    names = kernel.arg_names
    tensors = [x.name for x in kernel.params if x.name.isupper() and not x.is_constexpr]
    others = [name for name in names if name not in tensors]
    place = {name: number for number, name in enumerate(tensors + others)}
    found = _Arguments(itemgetter(*tensors), itemgetter(*others), itemgetter(*map(place.__getitem__, names)))
    _arguments[kernel.fn] = found
    return found


@functools.cache
def _triton() -> tuple[Any, Any, bool]:
    """Find triton's driver, its settings at run time, and whether its kernels are called without it."""
    triton = importlib.import_module("triton")
    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
    return triton.runtime.driver, triton.knobs.runtime, version <= KNOWN
