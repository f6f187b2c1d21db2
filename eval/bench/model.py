"""Measure a whole model with its own attention and patched: prefill, one decoded token, one training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn import is_patched
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patching.cache_layers import cache_argument

from ..common.models import UNPATCHED
from ..common.nll import forward, scoring
from . import caches
from .break_even import BreakEven
from .caches import PATCHED, Growth
from .candidates import put_back
from .series import Entry, Limits, Row, Series
from .timing import Timed

LONGEST = 2**30


class ModelSeries(Series):
    """One model, patched or not, over the lengths of one kind of call.

    Args:
        model: a causal language model; left as it was.
        kind: "prefill", "train" or "decode".
        label: name of the patched side in tables.
        name: of the model.
        batch: sequences side by side.
        seed: of the tokens.
        limits: how much is spent on a length.
    """

    def __init__(
        self, model: nn.Module, kind: str, label: str, name: str, *, batch: int, seed: int, limits: Limits
    ) -> None:
        first = next(model.parameters())
        dtype = str(first.dtype).removeprefix("torch.")
        head = {"kind": kind, "shape": name, "dtype": dtype, "causal": True, "beside": label}
        super().__init__(UNPATCHED, str(first.device), limits, head)
        self.model: Any = model
        self.kind, self.batch, self.seed = kind, batch, seed
        self.labels = {PATCHED: label, UNPATCHED: UNPATCHED}

    def _entries(self, length: int) -> Iterator[Entry]:
        """Yield the model with its own attention, then patched."""
        contexts = caches.sides(self.model)
        for side in [name for name in (UNPATCHED, PATCHED) if name in contexts]:
            yield self.labels[side], False, partial(self._timed, side, contexts[side], length)

    def _finish(self, row: Row, timed: Timed) -> None:
        """Add the tokens per second on the wall."""
        tokens = 1 if self.kind == "decode" else row["length"]
        row["tokens_per_second"] = self.batch * tokens / row["seconds"]

    def _failure(self, name: str, error: Exception) -> str:
        """Also say what the model does not support, such as positions beyond its table."""
        if isinstance(error, UnsupportedModelError):
            return f"not run: {error}"
        return super()._failure(name, error)

    def _timed(
        self, side: str, context: Callable[[], AbstractContextManager[None]], length: int
    ) -> tuple[Timed, Row]:
        with context(), scoring(self.model):
            call, restore, size = self._call(length)

        @contextmanager
        def around() -> Iterator[None]:
            with context(), scoring(self.model):
                yield
                restore()

        return Timed(self.labels[side], call, around), {"cache_bytes": size}

    def _call(self, length: int) -> tuple[Callable[[], Any], Callable[[], None], int | None]:
        """Return what is timed, on the side that is in force.

        Returns:
            The call; another that makes good what calls leave behind; the bytes of the cache if there is one.
        """
        if self.kind == "train":
            ids = caches.random_tokens(self.model, self.batch, length, self.seed)
            return self._training(ids), _nothing, None
        ids = caches.random_tokens(self.model, self.batch, length + 1, self.seed)
        _, cache = caches.read(self.model, ids[:, :length])
        size = caches.cache_bytes(cache)
        if self.kind == "prefill":
            return lambda: caches.read(self.model, ids[:, :length])[0], _nothing, size
        references, numbers = put_back(cache)
        given = {cache_argument(self.model): cache}

        def step() -> Tensor:
            out = forward(self.model, ids[:, length:], 1, **given, use_cache=True)
            references()
            return out.logits  # type: ignore[no-any-return]

        return step, numbers, size

    def _training(self, ids: Tensor) -> Callable[[], Any]:
        def step() -> Tensor:
            with torch.enable_grad():
                out = forward(self.model, ids, ids.shape[1], labels=ids, use_cache=False)
                loss: Tensor = out.loss
                loss.backward()
            self.model.zero_grad(set_to_none=True)
            return loss.detach()

        return step


def _nothing() -> None:
    """Make nothing good."""


def smaller_cache(model: nn.Module, batch: int, seed: int) -> BreakEven | None:
    """Compute from how many tokens on the patched cache is smaller; None where that is not known."""
    if not is_patched(model):
        return None
    growths = caches.growth_by_side(model, caches.random_tokens(model, batch, caches.PROBE, seed))
    own, other = growths[PATCHED], growths[UNPATCHED]
    return None if own is None or other is None else first_smaller(own, other)


def first_smaller(own: Sequence[Growth], other: Sequence[Growth]) -> BreakEven:
    """Find the break-even by halving: a state is a constant, a cache grows until its windows are full."""

    def holds(tokens: int) -> bool:
        return caches.bytes_at(own, tokens) < caches.bytes_at(other, tokens)

    if not holds(LONGEST):
        return BreakEven(None, None, None)
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return BreakEven(high, None, None, everywhere=high == 1)
