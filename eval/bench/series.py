"""Measure one length after the other, from short to long: all candidates in turn, or why one is not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from . import memory
from .forecast import FIRST, PROBES, Forecast
from .timing import Clock, Timed, Timing, measure

Row = dict[str, Any]
EMPTY = dict.fromkeys(
    (
        *("time", "seconds", "low", "high", "cpu_seconds", "speed", "speed_low", "speed_high", "calls"),
        *("peak_bytes", "memory_ratio", "share", "bound", "cache_bytes", "tokens_per_second", "beside"),
    )
)
COLUMNS = ("kind", "shape", "dtype", "causal", "length", "candidate", "measured", *EMPTY, "note")


@dataclass(frozen=True)
class Limits:
    """How much is spent on a length.

    Attributes:
        rounds: that count.
        least: seconds that one sample lasts.
        budget: seconds of one call beyond which a candidate is not run.
    """

    rounds: int = 5
    least: float = 0.005
    budget: float = 10.0


@dataclass(frozen=True)
class Entry:
    """A candidate before it is known whether it can be run.

    Attributes:
        name: in tables.
        linear: its time is known to grow with the length, not with its square.
        prepare: makes what is timed, and fields of its row.
    """

    name: str
    linear: bool
    prepare: Callable[[], tuple[Timed, Row]]


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that memory ran out; on CPUs it has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


class Series:
    """All lengths of what else stays the same.

    A subclass says which candidates there are (`entries`) and what their rows hold besides times and memory
    (`head`, `finish_row`).

    Args:
        reference: name of the candidate that others are compared with.
        device: where they run.
        limits: how much is spent on a length.
    """

    def __init__(self, reference: str, device: str, limits: Limits) -> None:
        self.reference, self.device, self.limits = reference, device, limits
        self.forecasts: dict[str, Forecast] = {}

    def entries(self, length: int) -> Iterator[Entry]:
        """Yield the candidates at a length, the reference first."""
        raise NotImplementedError

    def head(self, length: int, name: str) -> Row:
        """Return what a row says of the candidate before it was measured."""
        raise NotImplementedError

    def finish_row(self, row: Row, timed: Timed) -> None:
        """Add what follows from a measured row."""

    def failure(self, name: str, error: Exception) -> str:
        """Say why a candidate that failed has no numbers.

        Raises:
            Exception: the error, if it is a mistake of ours.
        """
        if is_out_of_memory(error):
            return "not run: out of memory"
        raise error

    def known(self, rows: Sequence[Row]) -> None:
        """Learn from rows of an earlier run of the same series."""
        for row in sorted(rows, key=lambda row: row["length"]):
            if row["measured"]:
                forecast = self._forecast(row["candidate"], False)
                forecast.add(row["length"], row["time"], row["peak_bytes"])

    def _forecast(self, name: str, linear: bool) -> Forecast:
        return self.forecasts.setdefault(name, Forecast(linear))

    def run(self, length: int) -> list[Row]:
        """Measure one length: a row per candidate, those that were not run with the reason."""
        if length > FIRST and not self.forecasts:
            for probe in PROBES:
                self._prepare(probe)
        ready, reasons = self._prepare(length)
        timings: dict[str, Timing] = {}
        if ready:
            limits = self.limits
            timings, slow = measure(
                [timed for timed, _ in ready],
                Clock(self.device),
                rounds=limits.rounds,
                least=limits.least,
                budget=limits.budget,
            )
            for name, seconds in slow.items():
                reasons[name] = f"not run: one call took {seconds:.3g} s (--budget {limits.budget:g})"
        if self.reference not in timings:  # then what came first is no reference
            timings = {
                name: replace(timing, speed=None, speed_low=None, speed_high=None)
                for name, timing in timings.items()
            }
        peaks = {timed.name: fields["peak_bytes"] for timed, fields in ready}
        rows = []
        for timed, fields in ready:
            if (timing := timings.get(timed.name)) is None:
                continue
            own, reference = peaks[timed.name], peaks.get(self.reference)
            self.forecasts[timed.name].points[-1] = (length, timing.time, own)
            row = self._empty(length, timed.name) | asdict(timing) | {"measured": True} | fields
            row["memory_ratio"] = own / reference if own is not None and reference else None
            self.finish_row(row, timed)
            rows.append(row)
        return rows + [self._empty(length, name) | {"note": reason} for name, reason in reasons.items()]

    def _empty(self, length: int, name: str) -> Row:
        head = self.head(length, name)
        return {**head, "length": length, "candidate": name, "measured": False, **EMPTY, "note": ""}

    def _prepare(self, length: int) -> tuple[list[tuple[Timed, Row]], dict[str, str]]:
        """Call each candidate once for its memory; return those that can be timed, and why not the others."""
        ready: list[tuple[Timed, Row]] = []
        reasons: dict[str, str] = {}
        for entry in self.entries(length):
            forecast = self._forecast(entry.name, entry.linear)
            reason = forecast.refusal(length, self.limits.budget, self.device)
            if not reason:
                try:
                    timed, fields = entry.prepare()
                    with timed.around():
                        start = time.perf_counter()
                        peak = memory.peak(timed.call, self.device)
                        seconds = time.perf_counter() - start
                except Exception as error:  # `failure` raises what is none of the reasons it knows
                    reason = self.failure(entry.name, error)
                else:
                    forecast.add(length, seconds, peak)
                    ready.append((timed, fields | {"peak_bytes": peak}))
            if reason:
                reasons[entry.name] = reason
        return ready, reasons
