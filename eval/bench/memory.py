"""Measure the most memory that a call has in use at once, above what was there before it; and what it moves.

CUDA: torch's allocator counts it. CPU: torch's profiler writes down every allocation and release of tensors;
the running sum has its top. Buffers that a library takes for itself, outside torch's allocator, are in
neither. Other devices: not known.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

METHODS = {"cpu": "torch.profiler's record of allocations", "cuda": "torch.cuda.max_memory_allocated"}
MEMINFO = Path("/proc/meminfo")


def peak(call: Callable[[], Any], device: str = "cpu") -> int | None:
    """Return the bytes at the peak of a call; None on devices that do not tell."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = call()
        torch.cuda.synchronize()
        del output
        return int(torch.cuda.max_memory_allocated() - before)
    return _recorded(call) if kind == "cpu" else None


class _Moved(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        read, written = _tensors((args, kwargs)), _tensors(result)
        memory = {x.untyped_storage()._cdata for x in read}
        same = all(x.untyped_storage()._cdata in memory for x in written)  # a view, unless it is written over
        if not (same and not function._schema.is_mutable) and "empty" not in function.name():
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *written))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def moved(call: Callable[[], Any]) -> int:
    """Count the bytes that torch's operations of a call read and write, each tensor of each operation once.

    Caches are not thought of, and kernels of other libraries not seen. The device "meta" computes nothing.
    """
    count = _Moved()
    with count:
        call()
    return count.bytes


def _recorded(call: Callable[[], Any]) -> int:
    # two lines on stderr per profile otherwise; read when the first profile starts
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    gc.collect()  # what others left would count as given back by this call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        output = call()
    del output
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        record.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    now = most = 0
    for _, size in sorted(changes, key=lambda change: change[0]):
        now += size
        most = max(most, now)
    return most


def available(device: str = "cpu") -> int | None:
    """Return the bytes that can still be taken; None where that is not known."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if torch.device(device).type != "cpu" or not MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text(encoding="ascii").splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None
