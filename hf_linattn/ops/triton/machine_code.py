"""Compiled kernels, read: registers, spills, and the instructions of the loop over chunks.

NVIDIA's by the tools that come with triton (cuobjdump, nvdisasm), AMD's from the assembly that triton keeps.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from hf_linattn.errors import UnsupportedCallError

LABEL = re.compile(r"^\s*(\.L\w+):")
SASS = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
AMDGCN = re.compile(r"^\t([a-z][a-z0-9_]+)\b(.*)")
SHORTEST = 40
"""Instructions of a loop below which it only waits."""
TENSOR_CORES = ("HGMMA", "HMMA", "UTC", "OMMA", "QMMA", "v_mfma")
"""What products by tensor cores begin with: Hopper's, those before and after, Blackwell's, AMD's."""


class Code(NamedTuple):
    """What one kernel came to.

    Attributes:
        registers: of a thread.
        spilled: bytes of local memory of a thread.
        shared: bytes of a program.
        instructions: of one warp, in all.
        loop: of one warp, in one pass of the loop with most products, else of the longest; 0 for no loop.
        products: tensor-core instructions in all, by kind.
        kinds: instructions of that loop, by kind, the most first.
        inner: those of the loops with products inside that loop, in their order.
        innermost: those of loops with products and no such loop inside, likewise.
    """

    registers: int
    spilled: int
    shared: int
    instructions: int
    loop: int
    products: dict[str, int]
    kinds: dict[str, int]
    inner: tuple[int, ...] = ()
    innermost: tuple[int, ...] = ()


def read(kernel: Any) -> Code:
    """Read a compiled kernel of triton.

    Raises:
        UnsupportedCallError: a tool is missing, or says something else than it used to.
    """
    shared = int(kernel.metadata.shared)
    if "amdgcn" in kernel.asm:
        text = kernel.asm["amdgcn"]
        registers, spilled = (
            _number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        body = text.split(".amdhsa_kernel")[0]
        pattern = AMDGCN
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            used = _told("cuobjdump", "-res-usage", file.name)
            body = _told("nvdisasm", "-c", file.name)
        registers, stack, local = (_number(rf"{name}:(\d+)", used) for name in ("REG", "STACK", "LOCAL"))
        spilled, pattern = stack + local, SASS
    names, spans = _spans(body, pattern)
    loops = _outermost(spans)

    def products(name: str) -> bool:
        return name.startswith(TENSOR_CORES)

    def weight(span: tuple[int, int]) -> tuple[int, int]:
        return sum(map(products, names[slice(*span)])), span[1] - span[0]

    most = max(loops, key=weight, default=(0, 0))
    loop = names[slice(*most)]
    within = [span for span in spans if most[0] < span[0] and span[1] < most[1]]
    inner = tuple(last - first for first, last in _outermost(within) if weight((first, last))[0])
    innermost = tuple(last - first for first, last in _innermost([x for x in within if weight(x)[0]]))
    kinds = Counter(name.split(".")[0] for name in loop)
    found = Counter(name.split(".")[0] for name in names if products(name))
    return Code(
        registers,
        spilled,
        shared,
        len(names),
        len(loop),
        dict(found),
        dict(kinds.most_common()),
        inner,
        innermost,
    )


def _told(tool: str, *arguments: str) -> str:
    """Run one of the tools that come with triton."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    try:
        return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnsupportedCallError(
            f"{tool}, which comes with triton's wheels for Linux, does not run ({error}): without it "
            "compiled kernels cannot be read. Install triton from PyPI"
        ) from error


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise UnsupportedCallError(f"no {pattern!r} in what triton's tools say about a kernel")
    return int(match[1])


def _spans(body: str, pattern: re.Pattern[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """List all instructions, and the first and the end of what each jump back repeats, in order."""
    places: dict[str, int] = {}
    names: list[str] = []
    jumps: list[tuple[str, int]] = []
    for line in body.splitlines():
        label = LABEL.match(line)
        if label:
            places[label[1]] = len(names)
            continue
        match = pattern.search(line)
        if match is None:
            continue
        target = re.search(r"(\.L\w+)", match[2])
        if target and match[1].lower().startswith(("bra", "s_branch", "s_cbranch")):
            jumps.append((target[1], len(names)))
        names.append(match[1])
    spans = sorted((places.get(target, len(names)), place + 1) for target, place in jumps)
    return names, [(first, last) for first, last in spans if last - first >= SHORTEST]


def _innermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leave out loops around others."""
    return [(a, b) for a, b in spans if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in spans)]


def _outermost(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leave out loops inside of others; of those with one beginning the longest."""
    outermost: list[tuple[int, int]] = []
    for first, last in spans:
        if not (outermost and last <= outermost[-1][1]):
            if outermost and outermost[-1][0] == first:
                outermost.pop()
            outermost.append((first, last))
    return outermost
