"""The first tokens beside a window, and how queries far behind them are turned to meet them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import Tokens, upcast
from hf_linattn.attention.masks import once, with_notes
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import ScaledSums, WindowSinks

from .rest import of_all_queries
from .ring import KeyValues
from .rotary import Rotary


class Turn(NamedTuple):
    """How queries are turned where they meet the sinks.

    Attributes:
        rotary: the model's embedding.
        last: rank of the last token that meets them as it is; those behind it are turned back to it.
    """

    rotary: Rotary
    last: int

    def steps(self, ranks: Tensor) -> Tensor:
        """Count the tokens by which queries of these ranks `[B, N]` are turned back."""
        return once(ranks, "steps", (self.last,), lambda: with_notes((ranks - self.last).clamp_min(0)))

    def of(self, query: Tensor, ranks: Tensor) -> Tensor:
        """Turn queries `[B, H, N, D]` of these ranks, so that sinks stand inside the cache."""
        return self.rotary.back(query, self.steps(ranks))


def sink_sums(
    query: Tensor,
    sinks: KeyValues,
    ranks: Tensor | None,
    turn: Turn | None,
    scaling: float,
    softcap: float | None = None,
) -> ScaledSums:
    """Sum over the sinks by torch's operations.

    Args:
        query: `[B, H, N, D]`, float32 (float64 in float64 models).
        sinks: in any dtype.
        ranks: of the queries, which see sinks up to their own, `[B, N]`; None for all.
        turn: None for queries as they are.
        scaling: of the scores.
        softcap: c of scores c tanh(s / c); None for scores as they are.
    """
    if ranks is not None and turn is not None:
        query = turn.of(query, ranks)
    return band.sink_sums(query, WindowSinks(*sinks, ranks), scaling, softcap)


def with_own_sink(tokens: Tokens, width: int, other: ScaledSums | None) -> ScaledSums | None:
    """Add the model's own sink to sums: exp(t) in the normaliser, for a value of 0.

    Args:
        tokens: with queries, and the sink's logits `[H]` or None.
        width: of values.
        other: sums of all queries or of the last ones; None for none.
    """
    if tokens.sink is None:
        return other
    assert tokens.query is not None
    if other is not None:
        other = ScaledSums(*of_all_queries(tokens.query.shape[2], *other))
    query = upcast(tokens.query)
    logits = tokens.sink.to(query.dtype)[None, :, None].expand(query.shape[:3]).contiguous()
    values = query.new_zeros(*query.shape[:3], width)
    own = ScaledSums(values, torch.ones_like(logits), logits)
    return own if other is None else band.add_sums(own, other)


def for_triton(query: Tensor, sinks: KeyValues, ranks: Tensor | None, turn: Turn | None) -> Sinks:
    """Hand sinks to kernels on a GPU, and the queries turned to where they meet them; as `sink_sums`."""
    turned = None
    if ranks is not None and turn is not None:
        turned = turn.of(upcast(query), ranks).to(query.dtype)
    return Sinks(turned, *sinks, ranks)


def for_cpp(query: Tensor, sinks: KeyValues, ranks: Tensor | None, turn: Turn | None) -> WindowSinks | None:
    """Hand sinks to kernels in C++, as `sink_sums`; None where they cannot turn as the embedding does."""
    table = None
    if ranks is not None and turn is not None:
        steps = turn.steps(ranks)
        if steps.any():
            table = turn.rotary.turns(query, steps)
            if table is None:
                return None
    return WindowSinks(*sinks, ranks, table)
