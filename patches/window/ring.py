"""What a window keeps of the past: the last tokens and the first ones, as tensors of constant size."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import Tokens


class Kept(NamedTuple):
    """Keys `[B, Hkv, N, D]`, values `[B, Hkv, N, Dv]`, and a mark `[B, N]` for each that counts.

    Where padding is not marked there may be anything finite, and it has no influence; NaN is not kept.
    """

    key: Tensor
    value: Tensor
    marks: Tensor

    def columns(self, place: Tensor) -> Kept:
        """Those at these places `[K]`."""
        key, value = (x.index_select(2, place) for x in self[:2])
        return Kept(key, value, self.marks.index_select(1, place))

    def put(self, place: Tensor, new: Kept, in_place: bool) -> Kept:
        """With other columns at these places."""
        put = Tensor.index_copy_ if in_place else Tensor.index_copy
        return Kept(*(put(old, axis, place, x) for axis, old, x in zip((2, 2, 1), self, new, strict=True)))


class Recent(NamedTuple):
    """The state: the window's tokens, the first ones ("sinks"), and where the next token goes.

    The window is a ring: a single token takes the place of the oldest, and nothing else is moved.

    Attributes:
        window: `size` columns.
        sinks: one column each.
        turn: column of the oldest token of the window, `[B]`, the same in all rows.
    """

    window: Kept
    sinks: Kept
    turn: Tensor

    @classmethod
    def of(cls, state: tuple[Tensor, ...]) -> Recent:
        """From the first tensors of a flat state."""
        return cls(Kept(*state[:3]), Kept(*state[3:6]), state[6])

    @classmethod
    def nothing(cls, like: Tokens, size: int, sinks: int) -> Recent:
        """Before the first token."""
        (batch, heads), device = like.key.shape[:2], like.key.device

        def empty(length: int) -> Kept:
            return Kept(
                like.key.new_zeros(batch, heads, length, like.key.shape[3]),
                like.value.new_zeros(batch, heads, length, like.value.shape[3]),
                torch.zeros(batch, length, dtype=torch.bool, device=device),
            )

        return cls(empty(size), empty(sinks), torch.zeros(batch, dtype=torch.int64, device=device))

    def flat(self) -> tuple[Tensor, ...]:
        """As a state."""
        return (*self.window, *self.sinks, self.turn)

    def in_order(self) -> Kept:
        """The window, the oldest token first."""
        if not torch.compiler.is_compiling() and int(self.turn[0]) == 0:
            return self.window
        size = self.window.marks.shape[1]
        return self.window.columns((torch.arange(size, device=self.turn.device) + self.turn[0]) % size)


def begun(tokens: Tokens, size: int, sinks: int) -> Recent:
    """After the first tokens of a text, at most `size`: in the first columns, where `step` can tell them."""
    nothing = Recent.nothing(tokens, 0, sinks)
    marks, ranks = ranked(tokens, sinks, causal=True)
    new = own(tokens, marks)
    turn = nothing.turn.fill_(tokens.length % size)
    return Recent(padded(new, 0, size - tokens.length), with_sinks(new, ranks, nothing.sinks), turn)


def longer(tokens: Tokens, size: int, sinks: int) -> tuple[Kept, Tensor | None, Tokens, Recent]:
    """After the first tokens of a text, more than `size`: nothing is before them, so nothing is moved.

    Returns:
        As `advance`, but what the queries see are the tokens themselves, `[B, Hkv, N, D]`; and the tokens
        that leave are one for each query from `size` on.
    """
    marks, ranks = ranked(tokens, sinks, causal=True)
    seen, cut = own(tokens, marks), tokens.length - size
    leaving = tokens.slice(0, cut)
    leaving = replace(leaving, query=None, count=None, valid=marks[:, :cut] if sinks else leaving.valid)
    first = with_sinks(seen, ranks, Recent.nothing(tokens, 0, sinks).sinks)
    window = Kept(seen.key[:, :, cut:], seen.value[:, :, cut:], seen.marks[:, cut:])
    if tokens.keep:  # in memory of its own, which may be written over
        window = Kept(*(x.clone(memory_format=torch.contiguous_format) for x in window))
    return seen, ranks, leaving, Recent(window, first, torch.zeros_like(marks[:, 0], dtype=torch.int64))


TENSORS = 7
"""Of a flat state."""


def ranked(tokens: Tokens, sinks: int, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Marks of tokens that are neither padding nor sinks, and ranks among the visible ones: `[B, N]` each.

    Without sinks nobody wants ranks.
    """
    batch, length = tokens.key.shape[0], tokens.length
    valid = tokens.valid
    if valid is None:
        valid = torch.ones(batch, length, dtype=torch.bool, device=tokens.key.device)
    if not sinks:
        return valid, None
    count = tokens.count if causal else valid.cumsum(1)
    assert count is not None
    rank = torch.where(valid, count.expand(batch, -1).long() - 1, -1)
    return valid & (rank >= sinks), rank


def own(tokens: Tokens, marks: Tensor) -> Kept:
    """The tokens themselves, with zeros in place of padding."""
    return Kept(tokens.hide(tokens.key), tokens.hide(tokens.value), marks)


def with_sinks(new: Kept, rank: Tensor | None, before: Kept) -> Kept:
    """The first tokens, those among the new ones put in their places."""
    slots = before.marks.shape[1]
    if rank is None:
        return before
    hit = rank[:, None] == torch.arange(slots, device=rank.device)[:, None]  # [B, slots, N]
    place, found = hit.int().argmax(-1)[:, None, :, None], hit.any(-1)

    def put(x: Tensor, old: Tensor) -> Tensor:
        first = x.gather(2, place.expand(-1, x.shape[1], -1, x.shape[3]))
        return torch.where(found[:, None, :, None], first, old)

    return Kept(put(new.key, before.key), put(new.value, before.value), before.marks | found)


def advance(tokens: Tokens, before: Recent) -> tuple[Kept, Tensor | None, Tokens, Recent]:
    """Move the window over new tokens.

    Returns:
        What the new queries see, `[B, Hkv, size + N, D]`, token i the columns i < c <= i + size; their ranks
        `[B, N]`, if there are sinks; the tokens that leave the window, one as each comes; and what is kept
        after the last.
    """
    marks, ranks = ranked(tokens, before.sinks.marks.shape[1], causal=True)
    new, old = own(tokens, marks), before.in_order()
    seen = Kept(
        torch.cat([old.key, new.key], 2),
        torch.cat([old.value, new.value], 2),
        torch.cat([old.marks, marks], 1),
    )
    cut = tokens.length
    leaving = Kept(seen.key[:, :, :cut], seen.value[:, :, :cut], seen.marks[:, :cut])
    window = Kept(seen.key[:, :, cut:], seen.value[:, :, cut:], seen.marks[:, cut:])
    sinks = with_sinks(new, ranks, before.sinks)
    after = Recent(window, sinks, torch.zeros_like(before.turn))
    return seen, ranks, _as_tokens(leaving, tokens), after


def steps(tokens: Tokens, before: Recent) -> bool:
    """Whether `step` can take them: one token, of the kind that is kept, and no gradients."""
    alike = tokens.key.dtype == before.window.key.dtype and tokens.value.dtype == before.window.value.dtype
    return tokens.length == 1 and alike and not torch.is_grad_enabled()


class Step(NamedTuple):
    """One token more.

    Attributes:
        seen: what its query sees; marks are None where all of it counts.
        rank: of the token, `[B, 1]`, if there are sinks.
        leaving: the token whose place it takes; None where there is none, or nobody asked.
        after: what is kept, in the tensors from before where `tokens.in_place`.
    """

    seen: tuple[Tensor, Tensor, Tensor | None]
    rank: Tensor | None
    leaving: Tokens | None
    after: Recent


def step(tokens: Tokens, before: Recent, wants_leaving: bool) -> Step:
    """`advance` by one token, which takes the place of the oldest."""
    count = _first_columns(tokens, before)
    if count is not None:
        return _step_behind(count, tokens, before, wants_leaving)
    marks, rank = ranked(tokens, before.sinks.marks.shape[1], causal=True)
    new, place = own(tokens, marks), before.turn[:1]
    leaving = _as_tokens(before.window.columns(place), tokens) if wants_leaving else None
    window = before.window.put(place, new, tokens.in_place)
    turn = (before.turn + 1) % before.window.marks.shape[1]
    return Step(window, rank, leaving, Recent(window, with_sinks(new, rank, before.sinks), turn))


def _first_columns(tokens: Tokens, before: Recent) -> int | None:
    """How many columns count, where these are the first ones or all, and it takes no time to ask."""
    marks = before.window.marks
    if tokens.valid is not None or marks.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if marks.all():
        return marks.shape[1]
    place = int(before.turn[0])
    first = marks[:, :place].all() and not marks[:, place:].any()
    return place if first and not before.sinks.marks.shape[1] else None


def _step_behind(count: int, tokens: Tokens, before: Recent, wants_leaving: bool) -> Step:
    """Where the first columns count: sinks are full, and no mark changes but that of the token's place."""
    (key, value, marks), sinks, turn = before
    size, place = marks.shape[1], int(turn[0])
    slots, leaving = sinks.marks.shape[1], None
    rank = ranked(tokens, slots, causal=True)[1] if slots else None
    if wants_leaving and count == size:
        old_key, old_value = (x.narrow(2, place, 1).clone() for x in (key, value))
        leaving = Tokens(None, old_key, old_value, tokens.scaling, in_place=tokens.in_place)
    if not tokens.in_place:
        key, value, marks, turn = (x.clone() for x in (key, value, marks, turn))
    key.narrow(2, place, 1).copy_(tokens.key)
    value.narrow(2, place, 1).copy_(tokens.value)
    turn.fill_((place + 1) % size)
    seen = key, value, None
    if count < size:
        marks.narrow(1, place, 1).fill_(True)
        seen = key.narrow(2, 0, count + 1), value.narrow(2, 0, count + 1), None
    return Step(seen, rank, leaving, Recent(Kept(key, value, marks), sinks, turn))


def _as_tokens(kept: Kept, like: Tokens) -> Tokens:
    return Tokens(None, kept.key, kept.value, like.scaling, kept.marks, in_place=like.in_place)


def padded(kept: Kept, before: int, behind: int) -> Kept:
    """With columns that do not count on both sides."""
    sides, whole = (0, 0, before, behind), torch.contiguous_format
    if not before and not behind:  # F.pad would keep the order of tokens and heads in memory
        return Kept(*(x.clone(memory_format=whole) for x in kept))
    return Kept(F.pad(kept.key, sides), F.pad(kept.value, sides), F.pad(kept.marks, (before, behind)))
