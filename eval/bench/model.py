"""A whole model with its own attention and patched: reading, one step of writing, one step of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn import is_patched
from hf_linattn.errors import UnsupportedModelError

from ..common.nll import forward, scoring
from ..cost import measure as cost_measure
from ..cost.measure import PATCHED, UNPATCHED, Growth
from . import memory
from .break_even import Crossing
from .candidates import put_back
from .forecast import FIRST, PROBES, Forecast
from .operator import EMPTY, Limits, Row
from .timing import Clock, Timed, Timing, measure

PROBE = 8
"""Tokens from whose cache its bytes at other lengths are computed."""
LONGEST = 2**30


class Whole:
    """One model, patched or not, over the lengths from short to long.

    Args:
        model: a causal language model; left as it is found.
        label: name of the patched side in tables; name: of the model.
        batch: sequences side by side.
    """

    def __init__(
        self, model: nn.Module, label: str, name: str, *, batch: int, seed: int, limits: Limits
    ) -> None:
        self.model: Any = model
        self.name, self.batch, self.seed, self.limits = name, batch, seed, limits
        self.labels = {PATCHED: label, UNPATCHED: UNPATCHED}
        first = next(model.parameters())
        self.device, self.dtype = str(first.device), str(first.dtype).removeprefix("torch.")
        self.forecasts: dict[tuple[str, str], Forecast] = {}

    def known(self, rows: Sequence[Row]) -> None:
        """Rows of an earlier run."""
        for row in sorted(rows, key=lambda row: row["length"]):
            if row["measured"]:
                forecast = self.forecasts.setdefault((row["kind"], row["candidate"]), Forecast())
                forecast.add(row["length"], row["time"], row["peak_bytes"])

    def ids(self, length: int) -> Tensor:
        """Random tokens `[B, N]`, the same on every machine."""
        size = self.model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(size, (self.batch, length), generator=generator).to(self.device)

    def run(self, kind: str, length: int) -> list[Row]:
        """One length of one kind: a row per side, those that were not run with the reason."""
        if length > FIRST and not any(known == kind for known, _ in self.forecasts):
            for probe in PROBES:
                self._ready(kind, probe)
        ready, sizes, reasons = self._ready(kind, length)
        found: dict[str, Timing] = {}
        slow: dict[str, float] = {}
        if ready:
            clock, limits = Clock(self.device), self.limits
            found, slow = measure(
                [item for item, _ in ready],
                clock,
                rounds=limits.rounds,
                least=limits.least,
                budget=limits.budget,
            )
        for name, seconds in slow.items():
            reasons[name] = f"not run: one call took {seconds:.3g} s (--budget {self.limits.budget:g})"
        rows = []
        for item, peak in ready:
            if item.name in found:
                self.forecasts[kind, item.name].points[-1] = (length, found[item.name].time, peak)
                row = self._head(kind, length, item.name) | asdict(found[item.name])
                row |= {"measured": True, "peak_bytes": peak, "cache_bytes": sizes.get(item.name)}
                new = 1 if kind == "decode" else length
                row["tokens_per_second"] = self.batch * new / row["seconds"]
                rows.append(row)
        peaks = {row["candidate"]: row["peak_bytes"] for row in rows}
        for row in rows:
            if UNPATCHED not in found:
                row |= dict.fromkeys(("speed", "speed_low", "speed_high"))
            beside = peaks.get(UNPATCHED)
            row["memory_ratio"] = row["peak_bytes"] / beside if beside and row["peak_bytes"] else None
        return rows + [self._head(kind, length, name) | {"note": reason} for name, reason in reasons.items()]

    def _head(self, kind: str, length: int, name: str) -> Row:
        head = {"kind": kind, "shape": self.name, "dtype": self.dtype, "causal": True, "length": length}
        return {**head, "candidate": name, "measured": False, **EMPTY, "note": ""}

    def _ready(
        self, kind: str, length: int
    ) -> tuple[list[tuple[Timed, int | None]], dict[str, int], dict[str, str]]:
        """What can be timed with its peak, the unpatched side first; bytes of caches; why not the others."""
        ready: list[tuple[Timed, int | None]] = []
        sizes: dict[str, int] = {}
        reasons: dict[str, str] = {}
        sides = cost_measure.sides(self.model)
        for side in [name for name in (UNPATCHED, PATCHED) if name in sides]:
            name = self.labels[side]
            forecast = self.forecasts.setdefault((kind, name), Forecast())
            reason = forecast.refusal(length, self.limits.budget, self.device)
            if not reason:
                try:
                    with sides[side](), self._evaluating():
                        call, size = self._call(kind, length)
                        start = time.perf_counter()
                        peak = memory.peak(call, self.device)
                        seconds = time.perf_counter() - start
                except UnsupportedModelError as error:
                    reason = f"not run: {error}"
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                        raise
                    reason = "not run: out of memory"
                else:
                    forecast.add(length, seconds, peak)
                    sizes |= {} if size is None else {name: size}
                    ready.append((Timed(name, call, self._around(sides[side])), peak))
            if reason:
                reasons[name] = reason
        return ready, sizes, reasons

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with scoring(self.model):
            yield

    def _around(self, side: Callable[[], Any]) -> Callable[[], Any]:
        @contextmanager
        def around() -> Iterator[None]:
            with side(), self._evaluating():
                yield

        return around

    def _call(self, kind: str, length: int) -> tuple[Callable[[], Any], int | None]:
        """What is timed, on the side that is in force; and the bytes of the cache where there is one."""
        if kind == "train":
            return self._training(self.ids(length)), None
        ids = self.ids(length + 1)
        _, cache = cost_measure._read(self.model, ids[:, :length])
        size = cost_measure.cache_bytes(cache)
        if kind == "prefill":
            return lambda: cost_measure._read(self.model, ids[:, :length])[0], size
        references, numbers = put_back(cache)

        def step() -> Tensor:
            out = forward(self.model, ids[:, length:], 1, past_key_values=cache, use_cache=True)
            references()
            numbers()
            logits: Tensor = out.logits
            return logits

        return step, size

    def _training(self, ids: Tensor) -> Callable[[], Any]:
        def step() -> Tensor:
            with torch.enable_grad():
                out = forward(self.model, ids, ids.shape[1], labels=ids, use_cache=False)
                loss: Tensor = out.loss
                loss.backward()
            self.model.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    def smaller(self) -> Crossing | None:
        """From how many tokens on the patched cache is smaller, computed; None where that is not known."""
        if not is_patched(self.model):
            return None
        sides = cost_measure.computed(self.model, self.ids(PROBE))
        own, other = sides[PATCHED], sides[UNPATCHED]
        if own is None or other is None:
            return None
        return first_smaller(own, other)


def first_smaller(own: Sequence[Growth], other: Sequence[Growth]) -> Crossing:
    """Found by halving: a state is a constant, a cache grows until its windows are full."""

    def holds(tokens: int) -> bool:
        return sum(layer.at(tokens) for layer in own) < sum(layer.at(tokens) for layer in other)

    if not holds(LONGEST):
        return Crossing(None, None, None)
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return Crossing(high, None, None, everywhere=high == 1)
