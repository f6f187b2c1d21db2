"""Kernels behind triton's autotuner, as fla's are: their configurations are compiled before they are timed.

On the device the autotuner compiles one configuration after the other in one process, which takes minutes.
Here many processes compile a part of them each; the autotuner then finds all in triton's cache.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch

PARTS = 48
"""Into which the configurations of one call are cut: some five each."""
WARMING, TIMING = 5, 20
"""Milliseconds that the autotuner spends on a configuration, in place of triton's 25 and 100."""
_memory: list[int] = []


class Facts(NamedTuple):
    """What fla asks a device when it is imported."""

    name: str
    capability: tuple[int, int]
    properties: dict[str, Any]


def facts() -> Facts:
    """Ask this process's device."""
    from triton.runtime import driver

    index = torch.cuda.current_device()
    properties = driver.active.utils.get_device_properties(index)
    return Facts(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), properties)


def pretend(about: Facts) -> None:
    """Answer for a device that this process does not open."""
    given: Any = torch.cuda
    given.get_device_name = lambda *_: about.name
    given.get_device_capability = lambda *_: about.capability
    _memory.append(about.properties["max_shared_mem"])


def _tell() -> None:
    """Tell fla the memory of that device: a tensor on "meta" has no index by which to look it up."""
    hardware: Any = _home("check_shared_mem")
    memory = _memory[-1]
    hardware.get_all_max_shared_mem = lambda: {None: memory, 0: memory}
    hardware.check_shared_mem.cache_clear()


def _home(name: str) -> Any:
    """Find the module in which a function of fla's helpers stands; it has moved."""
    return importlib.import_module(getattr(importlib.import_module("fla.utils"), name).__module__)


@contextmanager
def compiling(part: int, parts: int = PARTS) -> Iterator[None]:
    """Let autotuners meanwhile compile a part of all their configurations, and run nothing."""
    from triton.runtime.autotuner import Autotuner

    _tell()
    count, own = itertools.count(), Autotuner.run

    def run(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> None:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            if next(count) % parts == part:
                with suppress(Exception):  # the autotuner leaves such a configuration out, or fails itself
                    self.fn.warmup(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = own


def briefly() -> None:
    """Let autotuners of this process time each configuration for less long."""
    from triton.runtime import driver
    from triton.testing import do_bench

    timer: Callable[..., Any] = partial(do_bench, warmup=WARMING, rep=TIMING)
    driver.active.get_benchmarker = lambda: timer
