"""Measure the attention alone: one length after the other, all candidates in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from . import peers
from .candidates import Candidate, build
from .config import SDPA, BenchConfig
from .roofline import Ceiling, count_operations, share
from .series import Entry, Limits, Row, Series, is_out_of_memory
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
        super().__init__(SDPA, config.device, limits)
        self.config, self.specs, self.options, self.ceiling = config, list(specs), options, ceiling
        self.seed, self.peers, self.notes = seed, peers, {} if notes is None else notes

    def entries(self, length: int) -> Iterator[Entry]:
        """Yield softmax, the patches and other implementations, all on the same tensors."""
        config = replace(self.config, length=length)
        candidates = build(config, self.specs, self.options, self.seed)
        if self.peers:
            others, notes = peers.candidates(config, self.seed, self.peers)
            candidates += others
            self.notes.update(notes)
        for each in candidates:
            yield Entry(each.name, each.linear, lambda each=each: (each, {}))  # type: ignore[misc]

    def head(self, length: int, name: str) -> Row:
        """Return the config as a row says it."""
        config = self.config
        shape = str(config.shape)
        return {"kind": config.kind, "shape": shape, "dtype": config.dtype, "causal": config.causal}

    def finish_row(self, row: Row, timed: Timed) -> None:
        """Add the share of what the machine can do, where the work of a candidate is known."""
        model = timed.model if isinstance(timed, Candidate) else None
        if model is None:
            return
        count = count_operations(replace(self.config, length=row["length"]), model)
        if count is not None:
            row["share"], row["bound"] = share(count, row["time"], self.ceiling)

    def failure(self, name: str, error: Exception) -> str:
        """Also let other people's implementations fail.

        Raises:
            Exception: the error, if it is a mistake of ours.
        """
        if name in peers.PEERS and not is_out_of_memory(error):
            return f"failed: {peers.short(error)}"
        return super().failure(name, error)
