"""Salient tokens beside a window: of those that leave it, the ones that the state predicts worst stay exact.

Tokens leave the window in blocks of 16, counted among the visible tokens behind the sinks, so that neither
padding nor the cuts of a prefill move a block. When the last of a block has left, its tokens and those that
are salient so far are ranked by how far their values are from what the state, as it is then, makes of their
keys. The worst stay, and the state takes in the others. Until then a block is seen as the window is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention, Tokens, upcast
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.softmax import capped, scores_of
from hf_linattn.ops.tracing import transforming
from hf_linattn.ops.types import ScaledSums, State

from . import ring
from .ring import KeyValues
from .sinks import Turn, sink_sums, with_own_sink

BLOCK = 16
"""Tokens that leave the window together: one ranking for all of them."""
SEGMENT = 256
"""Tokens computed pair by pair; what is before them is window, salient tokens and state."""


class SalientState(NamedTuple):
    """What is kept of the past: the last tokens, the first ones, the salient ones, and a state of the others.

    Attributes:
        key, value: of the last tokens, `[B, Hkv, size + BLOCK - 1, D]`, in order, from the first column on.
        held: how many of these columns hold a token, int64 `[B]`.
        sink_key, sink_value, sink_valid: of the first tokens, one column each, see `KeyValues`.
        kept_key, kept_value, kept_valid: of the salient ones, `[B, Hkv, salient, D]`: each head has its own,
            the worst first, but all have as many.
        S, z: state of the linear attention.
    """

    key: Tensor
    value: Tensor
    held: Tensor
    sink_key: Tensor
    sink_value: Tensor
    sink_valid: Tensor
    kept_key: Tensor
    kept_value: Tensor
    kept_valid: Tensor
    S: Tensor
    z: Tensor

    @classmethod
    def empty(cls, like: Tokens, size: int, sinks: int, salient: int, state: State) -> SalientState:
        """Return the state before the first token; `state` is that of the linear attention."""

        def columns(length: int) -> KeyValues:
            key, value = (x.new_zeros(*x.shape[:2], length, x.shape[3]) for x in (like.key, like.value))
            return KeyValues(key, value, key.new_zeros(key.shape[0], length, dtype=torch.bool))

        held = like.key.new_zeros(like.key.shape[0], dtype=torch.int64)
        return cls(*columns(size + BLOCK - 1)[:2], held, *columns(sinks), *columns(salient), *state)

    @property
    def linear(self) -> State:
        """The state of the linear attention."""
        return State(self.S, self.z)

    def with_linear(self, state: State) -> SalientState:
        """Replace the state of the linear attention."""
        return SalientState(*self[:-2], *state)


class Segment(NamedTuple):
    """New tokens, and everything that their queries read but the state before them.

    Attributes:
        key, value: columns `[B, Hkv, M, D]`, the salient tokens, the window and the new ones.
        exact: which of them each query sees as they are, boolean `[B, Hkv, N, M]`.
        absorbed: which of them the state has taken in by then, likewise.
        phi_k, phi_value: features `[B, Hkv, M, F]` and values in the state's dtype; None where no block
            leaves and no gradient is wanted.
        sinks: the first tokens; ranks: place of each token among the visible ones, see `Seen`.
        after: the state behind the tokens.
    """

    key: Tensor
    value: Tensor
    exact: Tensor
    absorbed: Tensor
    phi_k: Tensor | None
    phi_value: Tensor | None
    sinks: KeyValues
    ranks: Tensor | None
    after: SalientState


def push(rest: LinearAttention, tokens: Tokens, before: SalientState, size: int) -> Segment:
    """Move the window over new tokens, and choose which of those that leave it stay."""
    valid, ranks = ring.ranked(tokens, before.sink_valid.shape[1], causal=True)
    new, length, slots = ring.masked(tokens, valid), tokens.length, before.kept_valid.shape[1]
    width = before.key.shape[2]
    total = before.held[:, None] + valid.cumsum(1)  # tokens up to each query, [B, N]
    rounds = (total - size).div(BLOCK, rounding_mode="floor").clamp_min(0)  # blocks that have left by then
    place = torch.where(valid, total - 1, width + length)  # the last column is nobody's: padding goes there
    key, value = (
        torch.cat([kept, _put(old, x, place)], 2)
        for kept, old, x in zip((before.kept_key, before.kept_value), before[:2], new[:2], strict=True)
    )
    column = torch.arange(-slots, width + length + 1, device=key.device)
    holds = torch.cat([before.kept_valid, column[slots:] < total[:, -1:]], 1)
    unknown = torch.compiler.is_compiling() or transforming()
    most = -(-length // BLOCK) if unknown else int(rounds[:, -1].max())
    leaves = torch.full_like(key[..., 0], most, dtype=torch.int64)  # the round in which it is absorbed
    phi_k = phi_value = None
    state, kept = before.linear, torch.arange(slots, device=key.device).expand(*key.shape[:2], -1)
    if most or torch.is_grad_enabled():
        phi_k, phi_value, _ = rest.mapped(Tokens(None, key, value, 1.0, holds))
    for number in range(most):
        assert phi_k is not None
        assert phi_value is not None
        block = slots + number * BLOCK + torch.arange(BLOCK, device=key.device)
        block = torch.where((rounds[:, -1:] > number), block, key.shape[2] - 1)
        block = block[:, None].expand(-1, key.shape[1], -1)
        kept, gone = _chosen(phi_k, phi_value, holds, torch.cat([kept, block], 2), slots, state)
        leaves = leaves.scatter(2, gone, number)
        taken = linear.state_of(_at(phi_k, gone), _at(phi_value, gone))
        state = State(state.S + taken.S, state.z + taken.z)
    known = holds[:, None, None] & (column <= (total - 1)[..., None])[:, None]
    stays = leaves[:, :, None] >= rounds[:, None, :, None]
    last = rounds[:, -1:] * BLOCK
    index = (slots + last + torch.arange(width, device=key.device)).clamp_max(key.shape[2] - 1)
    sinks = ring.with_sinks(ring.masked(tokens, valid), ranks, KeyValues(*before[3:6]))
    after = SalientState(
        key.gather(2, ring.spread(index, key)),
        value.gather(2, ring.spread(index, value)),
        (total[:, -1:] - last)[:, 0],
        *sinks,
        _at(key, kept),
        _at(value, kept),
        holds.gather(1, kept[:, 0]),
        *state,
    )
    return Segment(key, value, known & stays, known & ~stays, phi_k, phi_value, sinks, ranks, after)


def _put(old: Tensor, new: Tensor, place: Tensor) -> Tensor:
    """Append columns for new tokens, one more for padding, and put each in its place."""
    blank = new.new_zeros(*new.shape[:2], new.shape[2] + 1, new.shape[3])
    columns = torch.cat([old, blank], 2)
    return columns.scatter(2, ring.spread(place, new), new.to(columns.dtype))


def _at(x: Tensor, index: Tensor) -> Tensor:
    """Gather `[B, Hkv, M, D]` at the columns of each head, `[B, Hkv, K]`."""
    return x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3]))


@torch.no_grad()
def _chosen(
    phi_k: Tensor, value: Tensor, holds: Tensor, columns: Tensor, slots: int, state: State
) -> tuple[Tensor, Tensor]:
    """Rank candidates by |v - S phi(k) / z phi(k)|, 0 for the second term of an empty state.

    Of equal ones the first stays. Copies of a token are equal while the state is empty, up to roundings that
    change with the cuts of a prefill: errors are compared to 16 bits.

    Args:
        phi_k: features of all columns.
        value: of all columns.
        holds: which columns hold a token, `[B, M]`; those that do not come last.
        columns: of the candidates, `[B, Hkv, slots + BLOCK]`.
        slots: salient tokens.
        state: of the linear attention.

    Returns:
        Columns that stay, `[B, Hkv, slots]`, and the others.
    """
    predicted = linear.normalised(*linear.read(_at(phi_k, columns), state))
    error = ring.to_16_bits((_at(value, columns) - predicted).square().sum(-1))
    counts = holds[:, None].expand(-1, columns.shape[1], -1).gather(2, columns)
    order = error.masked_fill(~counts, -1.0).sort(stable=True, dim=-1, descending=True).indices
    ranked = columns.gather(2, order)
    return ranked[..., :slots], ranked[..., slots:]


def read(rest: LinearAttention, query: Tensor, segment: Segment, state: State) -> tuple[Tensor, Tensor]:
    """Sum over what the state has taken in by each query.

    Args:
        rest: the linear attention.
        query: `[B, H, N, D]`, in the state's dtype.
        segment: of these queries.
        state: before them.

    Returns:
        Numerator `[B, H, N, Dv]` and total `[B, H, N]`.
    """
    phi_q = rest.query_map(query)
    numerator, total = linear.read(phi_q, state)
    if segment.phi_k is None or segment.phi_value is None:
        return numerator, total
    weights = linear.grouped(phi_q, state.S.shape[1]) @ segment.phi_k.mT.unsqueeze(2)
    weights = weights.masked_fill(~segment.absorbed.unsqueeze(2), 0.0)
    values = (weights @ segment.phi_value.unsqueeze(2)).flatten(1, 2)
    return numerator + values, total + weights.sum(-1).flatten(1, 2)


def attend(
    tokens: Tokens, segment: Segment, has_sinks: bool, turn: Turn | None, other: ScaledSums | None
) -> Tensor:
    """Compute softmax over window, sinks and salient tokens, and other tokens."""
    assert tokens.query is not None
    query, key, value = upcast(tokens.query), upcast(segment.key), upcast(segment.value)
    if has_sinks:
        sinks = sink_sums(query, segment.sinks, segment.ranks, turn, tokens.scaling, tokens.softcap)
        other = sinks if other is None else band.add_sums(sinks, other)
    other = with_own_sink(tokens, value.shape[-1], other)
    seen = segment.exact.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = capped(scores_of(query, key, tokens.scaling), tokens.softcap, None)
    scores = scores.masked_fill(~seen, float("-inf"))
    return band.normalised_sums(band.softmax_sums(scores, value), other)
