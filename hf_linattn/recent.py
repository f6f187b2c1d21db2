"""What a window keeps of the past: the last tokens and the first ones, as tensors of constant size."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.tokens import Tokens


class Kept(NamedTuple):
    """Keys `[B, Hkv, N, D]`, values `[B, Hkv, N, Dv]`, and a mark `[B, N]` for each that counts."""

    key: Tensor
    value: Tensor
    marks: Tensor

    def visible(self) -> Kept:
        """Zeros in place of what does not count: it may hold NaN."""
        hidden = ~self.marks[:, None, :, None]
        return Kept(self.key.masked_fill(hidden, 0), self.value.masked_fill(hidden, 0), self.marks)


class Recent(NamedTuple):
    """The state: the window's tokens and the first ones ("sinks")."""

    window: Kept
    sinks: Kept

    @classmethod
    def of(cls, state: tuple[Tensor, ...]) -> Recent:
        """From the first six tensors of a flat state."""
        return cls(Kept(*state[:3]), Kept(*state[3:6]))

    @classmethod
    def nothing(cls, like: Tokens, size: int, sinks: int) -> Recent:
        """Before the first token."""

        def empty(length: int) -> Kept:
            (batch, heads), device = like.key.shape[:2], like.key.device
            return Kept(
                like.key.new_zeros(batch, heads, length, like.key.shape[3]),
                like.value.new_zeros(batch, heads, length, like.value.shape[3]),
                torch.zeros(batch, length, dtype=torch.bool, device=device),
            )

        return cls(empty(size), empty(sinks))

    def flat(self) -> tuple[Tensor, ...]:
        """As a state."""
        return (*self.window, *self.sinks)


def ranked(tokens: Tokens, sinks: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Marks of tokens that are neither padding nor sinks, and ranks among the visible ones: `[B, N]` each."""
    batch, length = tokens.key.shape[0], tokens.length
    valid = tokens.valid
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=tokens.key.device)
    count = tokens.count if causal else valid.cumsum(1)
    assert count is not None
    rank = torch.where(valid, count.expand(batch, -1).long() - 1, -1)
    return valid & (rank >= sinks), rank


def with_sinks(tokens: Tokens, rank: Tensor, before: Kept) -> Kept:
    """The first tokens, those among the new ones put in their places."""
    slots = before.marks.shape[1]
    if not slots:
        return before
    hit = rank[:, None] == torch.arange(slots, device=rank.device)[:, None]  # [B, slots, N]
    place, new = hit.int().argmax(-1)[:, None, :, None], hit.any(-1)

    def put(x: Tensor, old: Tensor) -> Tensor:
        found = x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3]))
        return torch.where(new[:, None, :, None], found, old)

    return Kept(put(tokens.key, before.key), put(tokens.value, before.value), before.marks | new)


def advance(tokens: Tokens, before: Recent) -> tuple[Kept, Tensor, Tokens, Recent]:
    """Move the window over new tokens.

    Returns:
        What the new queries see, `[B, Hkv, size + N, D]`, token i the columns i < c <= i + size; their ranks
        `[B, N]`; the tokens that leave the window, one as each comes; and what is kept after the last.
    """
    marks, ranks = ranked(tokens, before.sinks.marks.shape[1], causal=True)
    seen = Kept(
        torch.cat([before.window.key, tokens.key], 2),
        torch.cat([before.window.value, tokens.value], 2),
        torch.cat([before.window.marks, marks], 1),
    )
    cut = tokens.length
    leaving = Tokens(None, seen.key[:, :, :cut], seen.value[:, :, :cut], tokens.scaling, seen.marks[:, :cut])
    window = Kept(seen.key[:, :, cut:], seen.value[:, :, cut:], seen.marks[:, cut:])
    return seen, ranks, leaving, Recent(window, with_sinks(tokens, ranks, before.sinks))


def padded(kept: Kept, before: int, behind: int) -> Kept:
    """With columns that do not count on both sides."""
    sides = (0, 0, before, behind)
    return Kept(F.pad(kept.key, sides), F.pad(kept.value, sides), F.pad(kept.marks, (before, behind)))
