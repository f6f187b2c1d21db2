"""The tokens of one call as an attention with a state sees them; slices of them can be summed again later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def upcast(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass
class Tokens:
    """Queries, keys and values in the model's dtype, and which of them count.

    Attributes:
        query: `[B, H, N, D]`; None where only keys are known (stored by another attention).
        key: `[B, Hkv, S, D]`; S == N except in cross-attention.
        value: `[B, Hkv, S, Dv]`.
        scaling: of scores, for parts that are softmax.
        valid: boolean `[B, S]`, False for padding; None when all count.
        count: visible keys n_i of each query, `[B or 1, N]`; None unless the attention asks by `counts`.
        gates: what the attention made of each token's hidden state, `[B, Hkv, S, F]`; None for nothing.
        sink: logits of sinks of the model's own, which have no value, `[H]`; None for none.
        softcap: c of scores c tanh(s / c); None for scores as they are.
        documents: `[B, N]` ascending; a new number starts from nothing. None where nothing is packed.
        keep: the state after them is wanted; else none need be made.
        in_place: nobody wants the state before them, so its tensors may be written over.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    scaling: float
    valid: Tensor | None = None
    count: Tensor | None = None
    gates: Tensor | None = None
    sink: Tensor | None = None
    softcap: float | None = None
    documents: Tensor | None = None
    keep: bool = True
    in_place: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether softmax is that of the scores alone."""
        return self.sink is None and self.softcap is None

    @property
    def length(self) -> int:
        """Number of keys."""
        return self.key.shape[2]

    def hide(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Fill `[B, H, S, ...]` at padded tokens. Not by a product: padded rows may hold NaN."""
        if self.valid is None:
            return x
        hidden = ~self.valid[:, None, :]
        return x.masked_fill(hidden.reshape(*hidden.shape, *(1,) * (x.ndim - 3)), fill)

    def slice(self, start: int, stop: int) -> Tokens:
        """Return tokens `start` to `stop`; without documents."""

        def cut(x: Tensor | None, axis: int) -> Tensor | None:
            return None if x is None else x.narrow(axis, start, stop - start)

        return self._each(cut)

    def take(self, places: Tensor) -> Tokens:
        """Return tokens at `places` `[rows, L]` in rows joined end to end, as rows; without documents."""
        batch = self.key.shape[0]

        def each(x: Tensor | None, axis: int) -> Tensor | None:
            if x is None:
                return None
            x = x.expand(batch, *x.shape[1:]).transpose(1, axis)
            return x.flatten(0, 1)[places].transpose(1, axis)

        return self._each(each)

    def _each(self, function: Callable[[Tensor | None, int], Tensor | None]) -> Tokens:
        """Apply a function of a tensor and its axis of tokens to each."""
        key, value = function(self.key, 2), function(self.value, 2)
        assert key is not None
        assert value is not None
        return replace(
            self,
            query=function(self.query, 2),
            key=key,
            value=value,
            valid=function(self.valid, 1),
            count=function(self.count, 1),
            gates=function(self.gates, 2),
            documents=None,
        )

    def map(self, function: Any) -> Tokens:
        """Apply a function of tensors with rows first to each."""
        batch = self.key.shape[0]

        def each(x: Tensor | None) -> Tensor | None:
            return None if x is None else function(x.expand(batch, *x.shape[1:]))

        return replace(
            self,
            query=each(self.query),
            key=function(self.key),
            value=function(self.value),
            valid=each(self.valid),
            count=each(self.count),
            gates=each(self.gates),
        )


def in_backward_again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of which the backward keeps the inputs alone, and runs it again."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def joined(parts: list[Tokens]) -> Tokens:
    """Join consecutive tokens; where any part has padding, `valid` is spelled out for all."""
    first = parts[0]
    batch = first.key.shape[0]

    def valid(part: Tokens) -> Tensor:
        if part.valid is not None:
            return part.valid
        return torch.ones(batch, part.length, dtype=torch.bool, device=part.key.device)

    queries = [part.query for part in parts if part.query is not None]
    counts = [part.count.expand(batch, -1) for part in parts if part.count is not None]
    gates = [part.gates for part in parts if part.gates is not None]
    padded = any(part.valid is not None for part in parts)
    return Tokens(
        torch.cat(queries, 2) if len(queries) == len(parts) else None,
        torch.cat([part.key for part in parts], 2),
        torch.cat([part.value for part in parts], 2),
        first.scaling,
        torch.cat([valid(part) for part in parts], 1) if padded else None,
        torch.cat(counts, 1) if len(counts) == len(parts) else None,
        torch.cat(gates, 2) if len(gates) == len(parts) else None,
        first.sink,
        first.softcap,
    )
