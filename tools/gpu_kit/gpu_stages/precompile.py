"""Compile kernels in many processes before they are needed: what is compiled lies in triton's cache then.

Each process makes the very calls of a case on tensors without memory, with launches that compile and do not
run. A call that fails here fails again where its case runs, and is a row there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch

from . import autotuned
from .work import Context


def run(
    context: Context, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], share: float
) -> dict[str, Any]:
    """Make these calls on "meta" tensors, in as many processes as there are processors.

    Args:
        context: of the stage.
        calls: functions of a module, with arguments that can be pickled; the first ones are begun first.
        share: part of the time left that this may take.

    Returns:
        Fields of a row: how many were compiled, and what failed.
    """
    workers = max(1, min(len(calls), os.cpu_count() or 1))
    end = time.monotonic() + share * context.remaining()
    failed: list[str] = []
    done = 0
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_begin, initargs=(*_target(), sys.path)
    )
    futures = [pool.submit(function, *arguments) for function, arguments in calls]
    try:
        for future in as_completed(futures, timeout=max(end - time.monotonic(), 1)):
            done += 1
            error = future.exception()
            if error is not None:
                failed.append(f"{type(error).__name__}: {str(error)[:200]}")
    except TimeoutError:
        pass  # the rest is compiled where it is needed
    finally:
        for process in (pool._processes or {}).values():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
    return {
        "calls": len(calls),
        "done": done,
        "processes": workers,
        "failed": len(failed),
        "first": failed[:3],
    }


def _target() -> tuple[Any, Any, autotuned.Facts]:
    """Say what triton compiles for here, what tiles are chosen by, and what fla asks."""
    from triton.runtime import driver

    from hf_linattn.ops.triton import plan

    device = plan.device_of(torch.device("cuda", torch.cuda.current_device()))
    return driver.active.get_current_target(), device, autotuned.facts()


class _NoDevice:
    """A driver that knows only what it compiles for."""

    def __init__(self, target: Any, properties: dict[str, Any]) -> None:
        self.target = target
        self.utils = SimpleNamespace(get_device_properties=lambda index: properties)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def _begin(target: Any, device: Any, about: autotuned.Facts, path: list[str]) -> None:
    """Let this process compile for a device that it does not open."""
    sys.path[:] = path
    torch.set_num_threads(1)
    from triton.runtime import driver

    from hf_linattn.ops.triton import launcher, plan, problem

    def launch(self: Any, kernel: Any, grid: Any, tile: Any, own: dict[str, Any], walk: Any = None) -> None:
        launcher.compile_kernel(kernel, grid, tile, launcher.all_arguments(own, walk), warmup=True)

    driver.set_active(_NoDevice(target, about.properties))
    autotuned.pretend(about)
    plan.device_of = lambda _: device
    problem.Launches.launch = launch
