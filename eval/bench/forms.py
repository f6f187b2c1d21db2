"""Which form of a linear attention runs on an accelerator: what its calls were told when they asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_linattn.ops.triton import check


@contextmanager
def watched() -> Iterator[dict[str, str]]:
    """Collect name of a call -> who computes it, for all calls meanwhile."""
    seen: dict[str, str] = {}

    def watch(checks: check.Checks) -> None:
        ask = checks.takes

        def takes(key: Any, *arguments: Any, **options: Any) -> bool:
            answer = ask(key, *arguments, **options)
            seen[key.name] = checks.form if answer else "torch operations"
            return answer

        checks.takes = takes  # type: ignore[method-assign]

    every = list(check.ALL)
    for checks in every:
        watch(checks)
    try:
        yield seen
    finally:
        for checks in every:
            del checks.takes  # the method of the class again


def text(seen: dict[str, str]) -> str | None:
    """Say it in a word or two; None where nothing was asked, as on a CPU."""
    return " and ".join(dict.fromkeys(seen.values())) or None


def wish(device: str) -> str:
    """Say what is asked for by environment before anything has run.

    Raises:
        OptionError: `HF_LINATTN_TRITON` is neither 0 nor 1.
    """
    from hf_linattn.ops.dispatch import kernels

    if device != "cuda":
        return kernels().get(device, "not known on this device")
    asked = {
        "auto": "triton and fla where they agree with float64, else torch operations",
        "1": "triton and fla, or an error",
    }
    return asked.get(check.asked(), "torch operations")
