"""Libraries that come with the package, for whoever has no compiler: which there are, and which fits."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path
from typing import NamedTuple

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.cpp import build, layout

FOLDER = build.SOURCES / "lib"
"""`TARGET-SOURCES-CONTENT.so`, as `build` has it; empty in a checkout and in a wheel for any machine."""
V3 = "avx avx2 bmi1 bmi2 f16c fma abm movbe popcnt sse4_1 sse4_2 ssse3 cx16 xsave"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
V4_FLAGS = ("-march=x86-64-v4", "-mprefer-vector-width=512")


class Target(NamedTuple):
    """Processors that a library is compiled for.

    Attributes:
        name: as in the file's name.
        flags: of the compiler.
        needs: what such a processor has, in the words of /proc/cpuinfo.
    """

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str] = frozenset()


LINUX = ("-s",)
TARGETS = {
    ("Linux", "x86_64"): (
        Target(
            "x86-64-v4-amx",
            (*LINUX, *V4_FLAGS, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
            frozenset(f"{V4} avx512_bf16 amx_tile amx_bf16".split()),
        ),
        Target(
            "x86-64-v4-bf16",
            (*LINUX, *V4_FLAGS, "-mavx512bf16"),
            frozenset(f"{V4} avx512_bf16".split()),
        ),
        Target("x86-64-v4", (*LINUX, *V4_FLAGS), frozenset(V4.split())),
        Target("x86-64-v3", (*LINUX, "-march=x86-64-v3"), frozenset(V3.split())),
    ),
    ("Linux", "aarch64"): (Target("aarch64", LINUX, frozenset({"asimd"})),),
    ("Darwin", "arm64"): (Target("macos-arm64", ("-mcpu=apple-m1", "-undefined", "dynamic_lookup")),),
}
"""System and machine, as `platform` names them -> targets, the best first."""


def targets() -> tuple[Target, ...]:
    """List what libraries are compiled for on this system."""
    return TARGETS.get((platform.system(), platform.machine()), ())


def fitting() -> list[tuple[str, Path]]:
    """List names of targets and libraries that this processor can run, the best first.

    Raises:
        UnsupportedCallError: there is none, with the reason.
    """
    there = {path.name.partition(f"-{build.sources()}-")[0]: path for path in sorted(FOLDER.glob("*.so"))}
    if not there:
        raise UnsupportedCallError("this installation has no prebuilt library")
    facts = build.processor_facts()
    has = set(f"{facts.get('flags', '')} {facts.get('Features', '')}".split())
    found = [(x.name, there[x.name]) for x in targets() if x.name in there and x.needs <= has]
    if not found:
        names = ", ".join(path.name.rpartition("-")[0] for path in there.values())
        raise UnsupportedCallError(f"no prebuilt library is of this version and fits this processor: {names}")
    return found


def make(folder: Path) -> None:
    """Compile a library for each target of this system.

    Without the compiler's own OpenMP: its functions are left to be found in torch's, so that there is never a
    second one in the process.

    Args:
        folder: where they go; made.

    Raises:
        UnsupportedCallError: no compiler, or it fails, or there is no target.
    """
    if not targets():
        raise UnsupportedCallError(f"no prebuilt libraries for {platform.system()} {platform.machine()}")
    folder.mkdir(parents=True, exist_ok=True)
    openmp = ("-Xpreprocessor", build.THREADED) if platform.system() == "Darwin" else (build.THREADED,)
    with tempfile.TemporaryDirectory() as temporary:
        Path(temporary, build.HEADER).write_text(layout.header())
        for target in targets():
            compile_only = [*build.compiler(), *build.COMMON, f"-I{temporary}"]
            flags = [flag for flag in target.flags if flag.startswith("-m")]
            objects, built = f"{temporary}/{target.name}.o", Path(temporary, f"{target.name}.so")
            source = str(build.SOURCES / build.MAIN)
            build.run([*compile_only, *flags, *openmp, "-c", source, "-o", objects], "cannot compile them")
            link = [*build.compiler(), "-shared", *target.flags, objects, "-o", str(built)]
            build.run(link, "cannot link them")
            named = build.named(built, f"{target.name}-{build.sources()}")
            (folder / named.name).write_bytes(named.read_bytes())
