"""The C++ kernels of `ops/cpp` as a shared library: compiled once for this machine, then loaded.

Plain C functions on addresses: neither the headers of torch nor those of Python are needed, a compiler is.
Built here and not by `torch.utils.cpp_extension`, which needs ninja and half a minute, and whose lock
outlives a process that is killed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops.cpp import layout

CPP = "HF_LINATTN_CPP"
"""Environment variable that asks for the C++ kernels."""
SOURCES = Path(__file__).parent
MAIN = "kernels.cpp"
HEADER = "layout.h"
"""Written when the kernels are compiled, by `layout.header`."""
COMPILERS = ("c++", "g++", "clang++")
TARGET = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
"""What older compilers for ARM do not know by the other name."""
FLAGS = ("-std=c++17", "-O3", TARGET, "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared")
THREADED = "-fopenmp"
KERNELS = (
    *("forward", "backward", "delta_forward", "delta_backward"),
    *("window_forward", "window_backward", "window_decode"),
)


def asked() -> bool:
    """Tell whether the user asks for the C++ kernels.

    Raises:
        OptionError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(CPP, "")
    if value not in ("", "0", "1"):
        raise OptionError(f"{CPP}={value!r}: 1 asks for kernels in C++, 0 does not")
    return value == "1"


@functools.cache
def library() -> ctypes.CDLL:
    """Load the library: from the cache, or compiled now.

    Raises:
        UnsupportedCallError: no compiler, or it fails (with what it said), or the cache cannot be used.
    """
    compiler = _compiler()
    built = _folder() / f"native-{_digest(compiler)}.so"
    if not built.exists():
        try:
            _compile(compiler, built)
        except OSError as error:
            raise UnsupportedCallError(
                f"{built.parent}, where compiled kernels go, cannot be written ({error}): name another "
                f"folder by XDG_CACHE_HOME. {_without()}"
            ) from error
    try:
        loaded = ctypes.CDLL(str(built))
    except OSError as error:
        raise UnsupportedCallError(f"{built} cannot be loaded ({error}): delete it. {_without()}") from error
    for name in KERNELS:
        function = getattr(loaded, f"linattn_{name}")
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_float), None
    return loaded


def _without() -> str:
    return f"Or unset {CPP}: without it the same sums are made of torch's operations."


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    name = next((path for path in map(shutil.which, named[:1] or COMPILERS) if path), None)
    if name is None:
        wanted = named[0] if named else ", ".join(COMPILERS)
        raise UnsupportedCallError(
            f"{CPP}=1 asks for kernels in C++, and there is no compiler ({wanted}): install one, or name it "
            f"by CXX. {_without()}"
        )
    return [name, *named[1:]]


def _folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hf_linattn"


def _digest(compiler: list[str]) -> str:
    """Hash the sources, the compiler and this processor: different machines may share a folder."""
    target = _run(
        [*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull], "cannot say what it compiles for"
    )
    parts = [target, *FLAGS, THREADED, *compiler]
    parts += [layout.header()]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compile(compiler: list[str], to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:  # many processes may do this at once
        Path(folder, HEADER).write_text(layout.header())
        built = Path(folder) / to.name
        command = [*compiler, *FLAGS, f"-I{folder}", str(SOURCES / MAIN), "-o", str(built)]
        try:
            _run([*command, THREADED], "")
            ctypes.CDLL(str(built))
        except (UnsupportedCallError, OSError):  # Apple's compiler has no OpenMP; Zig's takes the option only
            _run(command, "cannot compile them")
            warnings.warn(
                f"{CPP}=1: {compiler[0]} has no OpenMP, so the kernels in C++ use one thread. Install it "
                f"(libomp), or name another compiler by CXX, and delete {to}.",
                stacklevel=2,
            )
        built.replace(to)


def _run(command: list[str], failure: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise UnsupportedCallError(
            f"{CPP}=1 asks for kernels in C++, and {command[0]} {failure}:\n{ran.stderr[-2000:]}\n"
            f"{_without()}"
        )
    return ran.stdout
