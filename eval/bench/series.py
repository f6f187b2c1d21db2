"""Measure one length after the other, from short to long: all candidates in turn, or why one is not run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from . import forms, memory
from .forecast import FIRST, PROBES, Forecast
from .timing import Clock, Timed, measure

Row = dict[str, Any]
Entry = tuple[str, bool, Callable[[], tuple[Timed, Row]]]
"""A candidate before it is known whether it can be run: its name; whether its time is known to grow with the
length, not with its square; what makes the call that is timed, and fields of its row."""
COLUMNS = (
    *("kind", "shape", "dtype", "causal", "length", "candidate", "measured"),
    *("time", "seconds", "low", "high", "cpu_seconds", "speed", "speed_low", "speed_high", "calls"),
    *(
        "peak_bytes",
        "memory_ratio",
        "share",
        "bound",
        "cache_bytes",
        "tokens_per_second",
        "beside",
        "form",
        "note",
    ),
)


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


def short(error: BaseException) -> str:
    """Return kind and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether an error says that memory ran out; on CPUs it has no class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


class Series:
    """All lengths of what else stays the same.

    A subclass says which candidates there are at a length (`_entries`, the reference first), what follows
    from a measured row (`_finish`), and why a candidate that failed has no numbers (`_failure`).
    A candidate that fails, whatever raises, is a row that says so: the others are measured all the same.

    Args:
        reference: name of the candidate that others are compared with.
        device: where they run.
        limits: how much is spent on a length.
        head: what every row says.
    """

    def __init__(self, reference: str, device: str, limits: Limits, head: Row) -> None:
        self.reference, self.device, self.limits, self.head = reference, device, limits, head
        self.forecasts: dict[str, Forecast] = {}

    def _entries(self, length: int) -> Iterator[Entry]:
        raise NotImplementedError

    def _finish(self, row: Row, timed: Timed) -> None:
        raise NotImplementedError

    def _failure(self, name: str, error: Exception) -> str:
        """Say why a candidate has no numbers; the others go on."""
        return "not run: out of memory" if is_out_of_memory(error) else f"failed: {short(error)}"

    def known(self, rows: Sequence[Row]) -> None:
        """Learn from rows of an earlier run of the same series."""
        for row in sorted(rows, key=lambda row: row["length"]):
            if row["measured"]:
                forecast = self.forecasts.setdefault(row["candidate"], Forecast())
                forecast.add(row["length"], row["time"], row["peak_bytes"])

    def run(self, length: int) -> list[Row]:
        """Measure one length: a row per candidate, those that were not run with the reason."""
        if length > FIRST and not self.forecasts:
            for probe in PROBES:
                self._prepare(probe)
        ready, reasons = self._prepare(length)
        candidates = [timed for timed, _ in ready]
        failed: dict[str, Exception] = {}
        limits = {"reference": self.reference, "failed": failed, **vars(self.limits)}
        timings, slow = measure(candidates, Clock(self.device), **limits)
        reasons |= {name: self._failure(name, error) for name, error in failed.items()}
        peaks = {timed.name: fields["peak_bytes"] for timed, fields in ready}
        rows = []
        for timed, fields in ready:
            if timed.name in failed:
                continue
            if timed.name in slow:
                budget = self.limits.budget
                reasons[timed.name] = f"not run: one call took {slow[timed.name]:.3g} s (--budget {budget:g})"
                continue
            timing, own, reference = timings[timed.name], peaks[timed.name], peaks.get(self.reference)
            self.forecasts[timed.name].points[-1] = (length, timing.time, own)
            row = self._empty(length, timed.name) | asdict(timing) | {"measured": True} | fields
            if own is not None and reference:
                row["memory_ratio"] = own / reference
            self._finish(row, timed)
            rows.append(row)
        return rows + [self._empty(length, name) | {"note": reason} for name, reason in reasons.items()]

    def _empty(self, length: int, name: str) -> Row:
        own = {"length": length, "candidate": name, "measured": False, "note": ""}
        return dict.fromkeys(COLUMNS) | self.head | own

    def _prepare(self, length: int) -> tuple[list[tuple[Timed, Row]], dict[str, str]]:
        """Call each candidate once for its memory; return those that can be timed, and why not the others."""
        ready: list[tuple[Timed, Row]] = []
        reasons: dict[str, str] = {}
        for name, linear, prepare in self._entries(length):
            forecast = self.forecasts.setdefault(name, Forecast(linear))
            if reason := forecast.refusal(length, self.limits.budget, self.device):
                reasons[name] = reason
                continue
            try:
                timed, fields = prepare()
                with timed.around():
                    start = time.perf_counter()
                    with forms.watched() as seen:
                        peak = memory.peak(timed.call, self.device)
                    seconds = time.perf_counter() - start
            except Exception as error:  # of a compiler, a driver, anyone's code
                reasons[name] = self._failure(name, error)
                continue
            forecast.add(length, seconds, peak)
            ready.append((timed, fields | {"peak_bytes": peak, "form": forms.text(seen)}))
        return ready, reasons
