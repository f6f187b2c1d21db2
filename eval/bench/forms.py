"""Which form of a linear attention runs on an accelerator: what its calls were told when they asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_linattn.ops.triton import check


@contextmanager
def watched() -> Iterator[dict[str, bool]]:
    """Collect name of a call -> whether Triton kernels compute it, for all calls meanwhile."""
    seen: dict[str, bool] = {}
    ask = check.CHECKS.takes

    def takes(key: Any, *arguments: Any, **options: Any) -> bool:
        answer = ask(key, *arguments, **options)
        seen[key.name] = answer
        return answer

    check.CHECKS.takes = takes  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del check.CHECKS.takes  # the method of the class again


def text(seen: dict[str, bool]) -> str | None:
    """Say it in a word or two; None where nothing was asked, as on a CPU."""
    if not seen:
        return None
    words = {True: "triton", False: "torch operations"}
    return " and ".join(dict.fromkeys(words[answer] for answer in seen.values()))


def wish(device: str) -> str:
    """Say what is asked for by environment before anything has run.

    Raises:
        OptionError: `HF_LINATTN_TRITON` is neither 0 nor 1.
    """
    from hf_linattn.ops.dispatch import kernels

    if device != "cuda":
        return kernels().get(device, "not known on this device")
    asked = {"auto": "triton where it agrees with float64, else torch operations", "1": "triton, or an error"}
    return asked.get(check.asked(), "torch operations")
