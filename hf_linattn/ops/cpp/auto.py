"""Whether the C++ kernels run: asked for, or because a library that fits is there. Nothing is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from pathlib import Path
from typing import NamedTuple

import torch

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.cpp import build, layout, prebuilt, selfcheck


class Found(NamedTuple):
    """A library, or why there is none, as text."""

    library: CDLL | None
    text: str


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def ready() -> bool:
    """Tell whether the kernels run: a library is there, or the first call may compile one.

    Raises:
        OptionError: the variable that asks for them is neither 0 nor 1.
    """
    asked = build.asked()
    return asked != "0" and (found(asked == "1").library is not None or asked == "1")


@functools.cache
def found(compiles: bool) -> Found:
    """Look for a library that works here, among those of the package, then in the cache.

    Args:
        compiles: a library for this processor can be compiled, so those of the cache are not looked at.
    """
    reasons: list[str] = []
    for name, load in _candidates(compiles, reasons):
        try:
            library = load()
            _check(library)
        except (UnsupportedCallError, OSError, RuntimeError, AttributeError) as error:
            reasons.append(f"{name}: {error}")
            continue
        build.chosen[:] = [library]
        return Found(library, f"cpp, {name}")
    return Found(None, f"torch: {'; '.join(reasons)}")


def _candidates(compiles: bool, reasons: list[str]) -> Iterator[tuple[str, Callable[[], CDLL]]]:
    try:
        for name, path in prebuilt.fitting():
            yield f"prebuilt {name}", functools.partial(build.load, path)
    except (UnsupportedCallError, OSError) as error:
        reasons.append(str(error))
    if compiles:
        return
    try:
        paths = _compiled_before()
    except (UnsupportedCallError, OSError) as error:
        reasons.append(str(error))
        return
    for path in paths:
        yield "compiled for this processor", functools.partial(build.load_cached, path)
    if not paths:
        reasons.append(f"none was compiled here by {build.CPP}=1")


def _compiled_before() -> list[Path]:
    """List libraries of these sources and this processor, by any compiler, the newest first."""
    if build.processor() == "unknown":
        return []
    name = f"native-{build.processor()}-*-{build.sources()}-*.so"
    return sorted(build.cache_folder().glob(name), key=lambda path: path.lstat().st_mtime, reverse=True)


def _check(library: CDLL) -> None:
    """Compare each kernel with torch, in a thread of its own: no modes, devices, gradients of this one.

    Raises:
        UnsupportedCallError: one differs, or threads are wanted and the library has none.
    """
    if not library.linattn_threaded() and torch.get_num_threads() > 1:
        raise UnsupportedCallError(f"it uses one thread, torch {torch.get_num_threads()}")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(selfcheck.check, library).result()


def verdict() -> str:
    """Say which form runs on CPUs and why: `cpp, prebuilt x86-64-v4`, or `torch: ` and the reason."""
    asked = build.asked()
    if asked == "0":
        return f"torch: {build.CPP}=0"
    library, text = found(asked == "1")
    if library is None and asked == "auto":
        return text
    if library is None:
        when = "for this processor" if build.compiled.cache_info().currsize else "at the first call"
        text = f"cpp, compiled {when}"
    return f"{text}, in one thread: this process was forked" if layout.forked else text
