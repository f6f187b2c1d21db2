"""The C++ kernels of `ops/cpp` as a shared library: compiled for this machine, and loaded.

Plain C functions on addresses: neither the headers of torch nor those of Python are needed, a compiler is.
Built here and not by `torch.utils.cpp_extension`, which needs ninja and half a minute, and whose lock
outlives a process that is killed.

A library's name says what it is: `native-PROCESSOR-COMPILER-SOURCES-CONTENT.so` in the cache, where all but
the first are hashes. So several machines may share a folder, and a damaged file or one of other sources is
known before it is loaded.
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
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import switches
from hf_linattn.ops.cpp import layout

CPP = "HF_LINATTN_CPP"
"""Environment variable that asks for the C++ kernels."""
SOURCES = Path(__file__).parent
MAIN = "kernels.cpp"
HEADER = "layout.h"
"""Written when the kernels are compiled, by `layout.header`."""
COMPILERS = ("c++", "g++", "clang++")
COMMON = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC")
TARGET = "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"
"""What older compilers for ARM do not know by the other name."""
FLAGS = (*COMMON, TARGET, "-shared")
THREADED = "-fopenmp"
KERNELS = (
    *("forward", "backward", "delta_forward", "delta_backward"),
    *("softmax_map", "window_forward", "window_backward", "window_decode", "heavy"),
)
trial: ContextVar[ctypes.CDLL | None] = ContextVar("trial", default=None)
"""The library that is being checked, in the thread that checks it."""
chosen: list[ctypes.CDLL] = []
"""What `auto.found` has found: at most one."""


def asked() -> Literal["auto", "0", "1"]:
    """Tell what the user asks for: the C++ kernels, torch's operations, or what is there.

    Raises:
        OptionError: the variable is neither 0 nor 1.
    """
    meaning = "1 asks for kernels in C++, 0 does not; unset they run where a library fits"
    return switches.switch(CPP, meaning)


def library() -> ctypes.CDLL:
    """Return the library in force: the one on trial, the one that was found, or one compiled now.

    Raises:
        UnsupportedCallError: as `compiled`.
    """
    return trial.get() or (chosen[0] if chosen else compiled())


@functools.cache
def compiled() -> ctypes.CDLL:
    """Load the library for this processor by this compiler: from the cache, or compiled now.

    Raises:
        UnsupportedCallError: no compiler, or it fails (with what it said), or the cache cannot be used.
    """
    command = compiler()
    folder, name = cache_folder(), f"native-{processor()}-{_target(command)}-{sources()}"
    found = next(folder.glob(f"{name}-*.so"), None)
    if found is not None:
        return load_cached(found)
    try:
        return _compile(command, folder, name)
    except OSError as error:
        raise UnsupportedCallError(
            f"{folder}, where compiled kernels go, cannot be written ({error}): name another "
            f"folder by XDG_CACHE_HOME. {_without()}"
        ) from error


def load(path: Path) -> ctypes.CDLL:
    """Load a library that is what its name says.

    Raises:
        UnsupportedCallError: it is damaged, or cannot be loaded here.
    """
    try:
        if digest(path.read_bytes()) != path.stem.rpartition("-")[2]:
            raise OSError("it is not what was compiled")
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnsupportedCallError(
            f"{path} cannot be loaded ({error}): delete it, or name another folder by XDG_CACHE_HOME. "
            f"{_without()}"
        ) from error
    for name in ("threaded", "rounds", "permitted"):
        getattr(loaded, f"linattn_{name}").restype = ctypes.c_int64
    if not loaded.linattn_permitted():
        raise UnsupportedCallError(
            f"{path} computes with AMX, which the system refuses to this process: compile without it, by "
            f"CXX='c++ -mno-amx-tile'. {_without()}"
        )
    for name in KERNELS:
        function = getattr(loaded, f"linattn_{name}")
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_float), None
    return loaded


def load_cached(path: Path) -> ctypes.CDLL:
    """Load a library of the cache, if nobody else can have put it there.

    File and folder must belong to this user or to root, and only their owner may write them.

    Raises:
        UnsupportedCallError: somebody else can have, or as `load`.
    """
    if os.name == "posix":
        for each, status in ((path, path.lstat()), (path.parent, path.parent.stat())):
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise UnsupportedCallError(
                    f"{path} is not loaded, because others can write {each}: chmod go-w it if it is yours, "
                    f"or name another folder by XDG_CACHE_HOME. {_without()}"
                )
    return load(path)


def _without() -> str:
    return f"Or unset {CPP}: without a library the same sums are made of torch's operations."


def compiler() -> list[str]:
    """Tell how the compiler is called.

    Raises:
        UnsupportedCallError: there is none.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    name = next((path for path in map(shutil.which, named[:1] or COMPILERS) if path), None)
    if name is None:
        wanted = named[0] if named else ", ".join(COMPILERS)
        raise UnsupportedCallError(
            f"{CPP}=1 asks for kernels in C++, and there is no compiler ({wanted}): install one, or name it "
            f"by CXX. {_without()}"
        )
    return [name, *named[1:]]


def cache_folder() -> Path:
    """Tell where compiled kernels go.

    Raises:
        UnsupportedCallError: there is no home directory.
    """
    try:
        return switches.cache_folder()
    except RuntimeError as error:
        raise UnsupportedCallError(f"no folder for compiled kernels ({error}): set XDG_CACHE_HOME") from error


def digest(content: bytes) -> str:
    """Hash what a library is made of, or the library."""
    return hashlib.sha256(content).hexdigest()[:16]


@functools.cache
def sources() -> str:
    """Hash the sources and the layout of what they are given."""
    parts = [layout.header()]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    return digest("\0".join(parts).encode())


def processor_facts() -> dict[str, str]:
    """Read what the system tells of the first processor; nothing where it tells nothing."""
    if platform.system() == "Darwin":
        sysctl = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        ran = subprocess.run(sysctl, capture_output=True, text=True, check=False)
        return {"model name": ran.stdout}
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): text.strip() for name, _, text in pairs}


@functools.cache
def processor() -> str:
    """Hash what instructions this processor has; "unknown" where the system does not tell."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    facts = processor_facts()
    parts = [platform.machine(), *(facts.get(name, "") for name in names)]
    return digest("\0".join(parts).encode()) if any(parts[1:]) else "unknown"


def _target(compiler: list[str]) -> str:
    """Hash the compiler, and what it takes this processor for."""
    target = run([*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull], "cannot say what it compiles for")
    return digest("\0".join([target, *FLAGS, THREADED, *compiler]).encode())


def _compile(compiler: list[str], to: Path, name: str) -> ctypes.CDLL:
    to.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as folder:  # many processes may do this at once
        Path(folder, HEADER).write_text(layout.header())
        built = Path(folder) / "library.so"
        command = [*compiler, *FLAGS, f"-I{folder}", str(SOURCES / MAIN), "-o", str(built)]
        try:
            run([*command, THREADED], "")
            load(result := named(built, name))
        except UnsupportedCallError:  # Apple's compiler has no OpenMP; Zig's takes the option only
            run(command, "cannot compile them")
            load(result := named(built, name))
            warnings.warn(
                f"{CPP}=1: {compiler[0]} has no OpenMP, so the kernels in C++ use one thread. Install it "
                f"(libomp), or name another compiler by CXX, and delete {to / result.name}.",
                stacklevel=2,
            )
        return load_cached(result.replace(to / result.name))


def named(built: Path, name: str) -> Path:
    """Let a library's name say what is in it, and nobody but its owner write it."""
    built.chmod(0o755)
    return built.rename(built.with_name(f"{name}-{digest(built.read_bytes())}.so"))


def run(command: list[str], failure: str) -> str:
    """Run a compiler and return what it printed.

    Raises:
        UnsupportedCallError: it fails, with what it said.
    """
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise UnsupportedCallError(
            f"{CPP}=1 asks for kernels in C++, and {command[0]} {failure}:\n{ran.stderr[-2000:]}\n"
            f"{_without()}"
        )
    return ran.stdout
