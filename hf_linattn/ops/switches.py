"""What users say about kernels by environment variables, and the folder where kernels leave files."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal

from hf_linattn.errors import OptionError


@functools.cache
def _key(variable: str) -> object:
    return os.environ.encodekey(variable)


def said(variable: str) -> str:
    """Read a variable; "" where it is not set, which every call of an attention asks."""
    # past `os.environ`'s own look-up, which takes as long as an operation to find nothing
    values = getattr(os.environ, "_data", None)
    if values is not None and _key(variable) not in values:
        return ""
    return os.environ.get(variable, "")


def switch(variable: str, meaning: str) -> Literal["auto", "0", "1"]:
    """Read a variable that is 0, 1, or not set.

    Args:
        variable: its name.
        meaning: what each does, for the error.

    Raises:
        OptionError: it is something else.
    """
    value = said(variable)
    if value not in ("", "0", "1"):
        raise OptionError(f"{variable}={value!r}: {meaning}")
    return value or "auto"  # type: ignore[return-value]


def cache_folder() -> Path:
    """Tell where compiled libraries and verdicts on kernels go.

    Raises:
        RuntimeError: there is no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_linattn"
