"""Modules in a process without a device: they take kernels as they would on one, and say what is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from hf_linattn.ops.triton import check, launch, problem

from .correct import compile_key

_wanted: dict[Any, None] = {}
"""What the package would have checked, each once."""


@contextmanager
def kernels() -> Iterator[None]:
    """Let modules take kernels for tensors on "meta"."""

    def takes(self: check.Checks, key: Any, *_: Any, **__: Any) -> bool:
        _wanted[key] = None
        return check.asked() != "0"

    with (
        mock.patch.object(torch.Tensor, "is_cuda", property(lambda _: True)),
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        mock.patch.object(launch, "available", return_value=True),
        mock.patch.object(check.Checks, "takes", takes),
    ):
        yield


def compile_check(call: Callable[..., None], arguments: tuple[Any, ...], number: int) -> None:
    """Compile one of the package's checks that come before a call, and nothing of the call itself."""
    _wanted.clear()
    with mock.patch.object(problem.Launches, "launch"):
        call(*arguments)
    if number < len(_wanted):
        compile_key(list(_wanted)[number])
