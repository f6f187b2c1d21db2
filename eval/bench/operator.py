"""Measure the attention alone: one length after the other, all candidates in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import peers
from .candidates import Candidate, entries
from .config import SDPA, BenchConfig
from .roofline import Ceiling, count_operations, share
from .series import Entry, Limits, Row, Series
from .timing import Timed


class OperatorSeries(Series):
    """The lengths of one shape, kind, dtype and direction.

    Args:
        config: everything but the length.
        specs: the patches.
        options: of the patches.
        limits: how much is spent on a length.
        ceiling: what the machine can do.
        seed: of the inputs.
        peers: names of other implementations.
        notes: peer -> what to know of it; filled while running.
    """

    def __init__(
        self,
        config: BenchConfig,
        specs: Sequence[str],
        options: dict[str, Any],
        limits: Limits,
        ceiling: Ceiling,
        *,
        seed: int = 0,
        peers: Sequence[str] = (),
        notes: dict[str, str] | None = None,
    ) -> None:
        head = {"kind": config.kind, "shape": str(config.shape), "dtype": config.dtype}
        super().__init__(SDPA, config.device, limits, head | {"causal": config.causal})
        self.config, self.specs, self.options, self.ceiling = config, list(specs), options, ceiling
        self.seed, self.peers, self.notes = seed, peers, {} if notes is None else notes

    def _entries(self, length: int) -> Iterator[Entry]:
        """Yield softmax, the patches and other implementations, all on the same tensors."""
        config = replace(self.config, length=length)
        for name, linear, make in entries(config, self.specs, self.options, self.seed):
            yield name, linear, lambda make=make: (make(), {})  # type: ignore[misc]
        if self.peers:
            others, notes = peers.candidates(config, self.seed, self.peers)
            self.notes.update(notes)
            for each in others:
                yield each.name, each.linear, lambda each=each: (each, {})  # type: ignore[misc]

    def _finish(self, row: Row, timed: Timed) -> None:
        """Add the share of what the machine can do, where the work of a candidate is known."""
        if isinstance(timed, Candidate) and timed.model is not None:
            count = count_operations(replace(self.config, length=row["length"]), timed.model)
            if count is not None:
                row["share"], row["bound"] = share(count, row["time"], self.ceiling)
