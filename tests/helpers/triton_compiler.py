"""Compiles the Triton kernels for GPUs that are not there, exactly as a launch on them would.

Run in a process of its own (the tests do): it puts a driver without a device in place of triton's.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch


class Compiled(NamedTuple):
    """One kernel for one device; memory in bytes."""

    name: str
    registers: int
    spilled: int
    shared: int
    tensor_cores: bool
    warps: int


class NoDevice:
    """A driver that knows only what it compiles for."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        # triton keeps compiled kernels by number of device
        self.number = self.target.arch

    def get_current_device(self):
        return self.number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return self.target


def usage(kernel):
    """Registers and bytes of local memory per thread, as the assembler left them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        found = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", found)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local


def compiled(case, capability, segments=4, only=None):
    """What every kernel of forward, backward and one step comes to.

    Args:
        case: D, Dv, dtype as a name, H, Hkv, feature map, and whether there are decay and documents.
        capability: such as (9, 0).
        segments: more than one gives the form with states between them.
        only: names of kernels; None for all.
    """
    from triton.runtime import driver

    from hf_linattn.ops.triton import launch as triton_linear
    from hf_linattn.ops.triton import problem

    D, Dv, name, heads, kv_heads, feature_map, linked = case
    dtype = getattr(torch, name)
    found = {}

    def launch(self, kernel, grid, tile, **arguments):
        if only is not None and kernel.__name__ not in only:
            return
        built = kernel.warmup(**arguments, grid=grid, num_warps=tile.warps, num_stages=tile.stages)
        # wgmma on Hopper, mma before
        cores = "wgmma" in built.asm["ptx"] or "mma.sync" in built.asm["ptx"]
        found[kernel.__name__] = Compiled(
            kernel.__name__, *usage(built), built.metadata.shared, cores, tile.warps
        )

    driver.set_active(NoDevice(capability))
    before = problem.device_of, problem.Problem.launch
    problem.device_of = lambda device: problem.Device(capability, 132)
    problem.Problem.launch = launch
    try:
        length = 256 * segments
        new = {"device": "meta", "dtype": dtype}
        query, key, value = (
            torch.empty(2, length, n, d, **new).transpose(1, 2)
            for n, d in ((heads, D), (kv_heads, D), (kv_heads, Dv))
        )
        state = torch.empty(2, kv_heads, D, Dv, device="meta"), torch.empty(2, kv_heads, D, device="meta")
        options = feature_map, True
        decay = torch.empty(2, kv_heads, length, device="meta") if linked else None
        documents = torch.empty(2, length, device="meta", dtype=torch.int32) if linked else None
        links = {"log_decay": decay, "documents": documents}
        given = query, key, value, None, *state
        output, total, *after = triton_linear.forward(*given, *options, segment=256, **links)
        triton_linear.backward(output, None, *after, *given, output, total, *options, segment=256, **links)
        one = (x[:, :, :1] for x in (query, key, value))
        decay = None if decay is None else decay[:, :, :1]
        triton_linear.decode(*one, None, *state, feature_map, log_decay=decay)
    finally:
        problem.device_of, problem.Problem.launch = before
    return list(found.values())
