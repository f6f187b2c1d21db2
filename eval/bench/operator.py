"""The bare attention: one setting after the other, all candidates of it in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from . import memory, peers
from .candidates import SDPA, Candidate, build
from .forecast import FIRST, PROBES, Forecast
from .roofline import Ceiling, share, work
from .settings import Setting
from .timing import Clock, Timing, measure

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
    """How much is spent on a setting.

    Attributes:
        rounds: that count.
        least: seconds that one sample lasts.
        budget: seconds of one call beyond which a candidate is not run.
    """

    rounds: int = 5
    least: float = 0.005
    budget: float = 10.0


@dataclass
class Series:
    """The lengths of one shape, kind, dtype and direction, from short to long.

    Attributes:
        specs, options: the patches.
        peers: names of other implementations.
        notes: peer -> what to know of it.
    """

    specs: Sequence[str]
    options: dict[str, Any]
    limits: Limits
    ceiling: Ceiling
    seed: int = 0
    peers: Sequence[str] = ()
    notes: dict[str, str] = field(default_factory=dict)
    forecasts: dict[str, Forecast] = field(default_factory=dict)

    def known(self, rows: Sequence[Row]) -> None:
        """Rows of an earlier run of the same series."""
        for row in sorted(rows, key=lambda row: row["length"]):
            if row["measured"]:
                self._forecast(row["candidate"], False).add(row["length"], row["time"], row["peak_bytes"])

    def _forecast(self, name: str, linear: bool) -> Forecast:
        return self.forecasts.setdefault(name, Forecast(linear))

    def run(self, setting: Setting) -> list[Row]:
        """One setting: a row per candidate, those that were not run with the reason."""
        if setting.length > FIRST and not self.forecasts:
            for length in PROBES:
                self._sized(
                    self._candidates(replace(setting, length=length)), replace(setting, length=length)
                )
        ready, reasons, peaks = self._sized(self._candidates(setting), setting)
        found: dict[str, Timing] = {}
        if ready:
            clock, limits = Clock(setting.device), self.limits
            found, slow = measure(
                ready, clock, rounds=limits.rounds, least=limits.least, budget=limits.budget
            )
            for name, seconds in slow.items():
                reasons[name] = f"not run: one call took {seconds:.3g} s (--budget {limits.budget:g})"
            if ready[0].name != SDPA:  # then what came first is no reference
                found = {
                    name: replace(timing, speed=None, speed_low=None, speed_high=None)
                    for name, timing in found.items()
                }
        rows = [self._row(setting, each, found[each.name], peaks) for each in ready if each.name in found]
        return rows + [head(setting, name) | {"note": reason} for name, reason in reasons.items()]

    def _candidates(self, setting: Setting) -> list[Candidate]:
        found = build(setting, list(self.specs), self.options, self.seed)
        if self.peers:
            others, notes = peers.candidates(setting, self.seed, self.peers)
            found += others
            self.notes.update(notes)
        return found

    def _sized(
        self, candidates: list[Candidate], setting: Setting
    ) -> tuple[list[Candidate], dict[str, str], dict[str, int | None]]:
        """One call of each for its memory: those that can be timed, why not the others, bytes."""
        ready, reasons, peaks = [], {}, {}
        for each in candidates:
            forecast = self._forecast(each.name, each.linear)
            reason = forecast.refusal(setting.length, self.limits.budget, setting.device)
            if not reason:
                start = time.perf_counter()
                try:
                    peaks[each.name] = memory.peak(each.call, setting.device)
                except torch.OutOfMemoryError:
                    reason = "not run: out of memory"
                except Exception as error:
                    reason = _failure(each, error)
                else:
                    forecast.add(setting.length, time.perf_counter() - start, peaks[each.name])
                    ready.append(each)
            if reason:
                reasons[each.name] = reason
        return ready, reasons, peaks

    def _row(self, setting: Setting, each: Candidate, timing: Timing, peaks: dict[str, int | None]) -> Row:
        own, beside = peaks[each.name], peaks.get(SDPA)
        self.forecasts[each.name].points[-1] = (setting.length, timing.time, own)
        row = head(setting, each.name) | asdict(timing) | {"measured": True, "peak_bytes": own}
        row["memory_ratio"] = own / beside if own is not None and beside else None
        done = None if each.model is None else work(setting, each.model)
        if done is not None:
            row["share"], row["bound"] = share(done, timing.time, self.ceiling)
        return row


def _failure(each: Candidate, error: Exception) -> str:
    """What to write into the row of a peer that fails, and of anybody who runs out of memory.

    Raises:
        Exception: the error, if it is one of our own.
    """
    if "allocate memory" in str(error):
        return "not run: out of memory"
    if each.name in peers.PEERS:
        return f"failed: {peers.short(error)}"
    raise error


def head(setting: Setting, name: str) -> Row:
    """A row without numbers."""
    return {
        "kind": setting.kind,
        "shape": str(setting.shape),
        "dtype": setting.dtype,
        "causal": setting.causal,
        "length": setting.length,
        "candidate": name,
        "measured": False,
        **EMPTY,
        "note": "",
    }
