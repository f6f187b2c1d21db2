"""Milliseconds and bytes of a call: eager, and as the replay of a CUDA graph, which leaves the host out.

Before each sample the L2 cache is overwritten, so that inputs come from memory, and the device is kept busy
for a moment, so that a first launch does not wait for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .work import Row

LEAST, MOST, SECONDS = 5, 30, 0.3
"""Samples: at least, at most, and what they may take together."""
LONG, FEW = 1.0, 2
"""Seconds of one call, from which on it gets this many samples."""
BUSY = 100_000
"""Clock cycles, some 60 microseconds."""
_flush: dict[str, Any] = {}


def prepare(device: str) -> None:
    """Bring clocks up and allocate what overwrites L2; once a process."""
    if device != "cuda" or _flush:
        return
    size = max(256 << 20, 4 * torch.cuda.get_device_properties(0).L2_cache_size)
    _flush["buffer"] = torch.empty(size, dtype=torch.uint8, device=device)
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        a @ a
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return the median and the least over some samples of one call each.

    There are at least `LEAST` samples behind two calls that are not timed, and `FEW` where the second of them
    took longer than `LONG` seconds: the first one may compile.
    """
    if device != "cuda":  # of a dry run
        start = time.perf_counter()
        call()
        found = (time.perf_counter() - start) * 1000
        return found, found
    prepare(device)
    for _ in range(2):
        start = time.monotonic()
        call()
        torch.cuda.synchronize()
    least = LEAST if time.monotonic() - start < LONG else FEW
    samples: list[float] = []
    end = time.monotonic() + SECONDS
    while len(samples) < least or (len(samples) < MOST and time.monotonic() < end):
        begin, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        _flush["buffer"].zero_()
        torch.cuda._sleep(BUSY)
        begin.record()
        call()
        after.record()
        after.synchronize()
        samples.append(begin.elapsed_time(after))
    return statistics.median(samples), min(samples)


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """Capture a call in a CUDA graph; return its replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def both(call: Callable[[], Any], device: str, name: str = "ms") -> Row:
    """Time a call eagerly and replayed; where it cannot be captured, the row says why.

    Args:
        call: does it once.
        device: where.
        name: the fields are called after it.
    """
    median, least = milliseconds(call, device)
    row: Row = {name: median, f"{name}_least": least}
    if device != "cuda":
        return row
    try:
        row[f"{name}_graph"] = milliseconds(captured(call), device)[0]
    except Exception as error:  # of anyone's code: the eager time stands
        row["graph"] = _first_line(error)
        torch.cuda.synchronize()
    return row


def busy(call: Callable[[], Any], device: str) -> Row:
    """Count the milliseconds for which the device computes in a call; what is left of it waits for Python."""
    if device != "cuda":
        return {}
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            call()
            torch.cuda.synchronize()
        kernels = [each for each in found.key_averages() if each.device_type == DeviceType.CUDA]
        return {"device_ms": sum(each.self_device_time_total for each in kernels) / 1000}
    except Exception as error:  # a profiler that cannot start costs this number alone
        torch.cuda.synchronize()
        return {"device": _first_line(error)}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]


def peak(call: Callable[[], Any], device: str) -> Row:
    """Count the most memory that a call takes beyond what was there; nothing where that is not known."""
    if device != "cuda":
        return {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return {"peak_mb": (torch.cuda.max_memory_allocated() - before) / 1e6}


def machine(device: str) -> Row:
    """Measure what the machine can do: a product in bfloat16, a copy."""
    if device != "cuda":
        return {"device": device}
    properties = torch.cuda.get_device_properties(0)
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product, copy = (
        milliseconds(lambda: a @ a, device)[0],
        milliseconds(lambda: target.copy_(source), device)[0],
    )
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "l2_mb": properties.L2_cache_size / 1e6,
        "memory_gb": properties.total_memory / 1e9,
        "tflops": 2 * 8192**3 / product / 1e9,
        "tb_s": 2 * 2**30 / copy / 1e9,
    }
