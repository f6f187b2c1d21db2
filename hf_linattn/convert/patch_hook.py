"""A forward hook that lets the patch of an attention module work on what the module's own attention got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hf_linattn.patching.interface import NAME


class PatchHook:
    """Base of forward hooks on modules whose own attention is in force (`bypassed`).

    While `run` lasts, the patch is in force: the module may be called again, and the hook keeps out.
    """

    def __init__(self) -> None:
        self.busy = False

    def run(
        self, module: Any, child: Any, own: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Do the hook's work.

        Args:
            module: the attention module.
            child: its patch.
            own: the implementation of its own attention.
            args: what the module was called with.
            kwargs: likewise, by name.
            output: what it gave.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run")

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Run, unless this call is one of `run`'s own."""
        if self.busy:
            return
        self.busy = True
        child: Any = module._modules[NAME]
        own, child.bypass = child.bypass, None
        try:
            self.run(module, child, own, args, kwargs, output)
        finally:
            child.bypass, self.busy = own, False


@contextmanager
def computing_by(child: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Have a function compute in the place of `PatchedAttention.forward`, while this lasts."""
    child.forward = forward
    try:
        yield
    finally:
        del child.forward
