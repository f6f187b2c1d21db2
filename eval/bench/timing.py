"""Time candidates in turn: one warm-up round, then rounds in which each is timed once, in rotating order.

A busy machine slows down neighbours in a round alike, so ratios are taken within a round, and the median
over rounds is robust where absolute times are not. With one thread the time that the processor gave to the
thread (`time.thread_time`) leaves out what others took; with several, and on accelerators, that would
miss work, and the wall clock or the device's own events are compared.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

MOST = 1000
"""Calls timed as one, at most."""
WARM = 3
"""Calls before the first round, where they are short."""


@dataclass(frozen=True)
class TimeSample:
    """Seconds of one call: on the wall, and of this thread's processor; None where that would miss work."""

    wall: float
    cpu: float | None


@dataclass
class Timed:
    """Something to time.

    Attributes:
        name: in tables.
        call: does it once.
        around: what to be in while it is called, entered outside the time.
    """

    name: str
    call: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


class Clock:
    """Times calls on a device.

    Args:
        device: "cpu", "cuda" or another accelerator of torch.

    Attributes:
        basis: what ratios are made of: "thread time", "wall time" or "events of the device".
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        self.basis = "thread time" if alone else "wall time"
        if self.device.type == "cuda":
            self.basis = "events of the device"

    def sample(self, call: Callable[[], Any], count: int = 1) -> TimeSample:
        """Return the mean of so many calls one after the other."""
        if self.device.type == "cuda":
            return TimeSample(self._events(call, count), None)
        self.wait()
        wall, cpu = time.perf_counter(), time.thread_time()
        for _ in range(count):
            call()
        self.wait()
        cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
        return TimeSample(wall / count, cpu / count if self.device.type == "cpu" else None)

    def _events(self, call: Callable[[], Any], count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        start.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000 / count

    def wait(self) -> None:
        """Wait until the accelerator is done."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def compared(self, sample: TimeSample) -> float:
        """Return the seconds that ratios are made of."""
        return sample.cpu if self.basis == "thread time" and sample.cpu is not None else sample.wall


@dataclass(frozen=True)
class Timing:
    """One candidate over the counted rounds.

    Attributes:
        time: of one call in the seconds that ratios are made of; median.
        seconds, low, high: on the wall (on CUDA: by events); median and range.
        cpu_seconds: of the thread's processor; None on accelerators.
        speed: median over rounds of reference seconds / own seconds in the same round; above 1 is faster.
            None for the reference, and where it was not run. speed_low, speed_high: range.
        calls: timed as one sample.
    """

    time: float
    seconds: float
    low: float
    high: float
    cpu_seconds: float | None
    speed: float | None
    speed_low: float | None
    speed_high: float | None
    calls: int


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from running in one candidate for what all of them left."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _warm(call: Callable[[], Any], clock: Clock, least: float) -> tuple[int, float]:
    """Make calls that do not count; return how many make `least` seconds, and seconds of the fastest."""
    seconds = clock.compared(clock.sample(call))
    for _ in range(WARM - 1 if seconds < least else 0):
        seconds = min(seconds, clock.compared(clock.sample(call)))
    return max(1, min(MOST, math.ceil(least / max(seconds, 1e-9)))), seconds


def measure(
    timed: Sequence[Timed],
    clock: Clock,
    *,
    rounds: int = 5,
    least: float = 0.005,
    budget: float = math.inf,
    reference: str | None = None,
    failed: dict[str, Exception] | None = None,
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Time all candidates in turn.

    Args:
        timed: their names differ.
        clock: of their device.
        rounds: that count; a warm-up round comes first.
        least: seconds that one sample lasts; short calls are repeated inside it.
        budget: seconds of a warm-up call beyond which its candidate is left out of the rounds.
        reference: name of the one that the others are compared with; None for the first.
        failed: gets the error of each candidate that raises one and is left out then; None lets it pass.

    Returns:
        name -> timing of those within the budget; name -> seconds of one call of the others.
    """
    counts, slow = {}, {}
    samples: dict[str, list[TimeSample]] = {}
    with _no_collection():
        for item in timed:
            try:
                with item.around():
                    counts[item.name], seconds = _warm(item.call, clock, least)
            except Exception as error:
                _note(item, error, failed)
                continue
            if seconds > budget:
                slow[item.name] = seconds
            else:
                samples[item.name] = []
        chosen = [item for item in timed if item.name in samples]
        for index in range(rounds if chosen else 0):
            # who goes first takes turns: the next one finds the machine as this one left it
            turn = index % len(chosen)
            for item in [*chosen[turn:], *chosen[:turn]]:
                if item.name not in samples:
                    continue
                try:
                    with item.around():
                        samples[item.name].append(clock.sample(item.call, counts[item.name]))
                except Exception as error:
                    _note(item, error, failed)
                    del samples[item.name]
    first = reference or timed[0].name
    compared = {name: [clock.compared(sample) for sample in own] for name, own in samples.items()}
    timings = {}
    for name, own in samples.items():
        base = compared.get(first, []) if name != first else []
        speeds = [a / max(b, 1e-12) for a, b in zip(base, compared[name], strict=True)] if base else []
        walls = [sample.wall for sample in own]
        cpus = [sample.cpu for sample in own if sample.cpu is not None]
        timings[name] = Timing(
            statistics.median(compared[name]),
            *(statistics.median(walls), min(walls), max(walls)),
            statistics.median(cpus) if cpus else None,
            *spread(speeds),
            counts[name],
        )
    return timings, slow


def _note(item: Timed, error: Exception, failed: dict[str, Exception] | None) -> None:
    if failed is None:
        raise error
    failed[item.name] = error


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return median, lowest and highest value; None for all of them where there are none."""
    return (statistics.median(values), min(values), max(values)) if values else (None, None, None)
