"""The machine that numbers were measured on, in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def machine() -> str:
    """Processor, cores, system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
