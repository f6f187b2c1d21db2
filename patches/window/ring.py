"""What a window keeps of the past: the last tokens and the first ones, as tensors of constant size.

A window counts visible tokens. So padding inside a row is moved before the tokens (`without_gaps`), where it
changes nothing, and a padded token that comes alone leaves the ring of its row as it is.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import Tokens
from hf_linattn.attention.masks import once, with_notes
from hf_linattn.errors import OptionError
from hf_linattn.ops.tracing import transforming
from hf_linattn.ops.types import State

LARGE = 2**20
"""Bytes of keys that are still to come, from which a CPU takes memory as they do."""
MOST = 2**24
"""Tokens that a cache has room for from the first one on."""


class KeyValues(NamedTuple):
    """Keys `[B, Hkv, N, D]`, values `[B, Hkv, N, Dv]`, and which of them count, boolean `[B, N]`.

    Where padding does not count there may be anything finite, and it has no influence; NaN is not kept.
    """

    key: Tensor
    value: Tensor
    valid: Tensor

    def first(self, count: int) -> KeyValues:
        """Select the first columns."""
        return KeyValues(self.key[:, :, :count], self.value[:, :, :count], self.valid[:, :count])

    def columns(self, index: Tensor) -> KeyValues:
        """Select those at these columns, `[K]` of all rows or `[B, K]` of each."""
        if index.ndim == 1:
            key, value = (x.index_select(2, index) for x in self[:2])
            return KeyValues(key, value, self.valid.index_select(1, index))
        key, value = (x.gather(2, spread(index, x)) for x in self[:2])
        return KeyValues(key, value, self.valid.gather(1, index))

    def put(self, index: Tensor, new: KeyValues, in_place: bool) -> KeyValues:
        """Replace those at these columns, `[B, K]`."""
        put = Tensor.scatter_ if in_place else Tensor.scatter
        key, value = (put(old, 2, spread(index, x), x) for old, x in zip(self[:2], new[:2], strict=True))
        return KeyValues(key, value, put(self.valid, 1, index, new.valid))


class WindowState(NamedTuple):
    """The window's tokens, the first tokens ("sinks"), where the next one goes, and what has left.

    The window is a ring: a single token takes the place of the oldest, and nothing else is moved.

    Attributes:
        key, value, valid: of the window, `size` columns, fewer while it grows (`growing`); see `KeyValues`.
        sink_key, sink_value, sink_valid: of the sinks, one column each.
        oldest: column of the oldest token of the window, int64 `[B]`. From there on, columns that do not
            count come before those that do.
        S, z: state of the linear attention; without elements for a window alone, and while the ring grows.
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    sink_key: Tensor
    sink_value: Tensor
    sink_valid: Tensor
    oldest: Tensor
    S: Tensor
    z: Tensor

    @property
    def window(self) -> KeyValues:
        """The window's tokens, in the order of the ring."""
        return KeyValues(*self[:3])

    @property
    def sinks(self) -> KeyValues:
        """The first tokens."""
        return KeyValues(*self[3:6])

    @property
    def linear(self) -> State | None:
        """The state of the linear attention; None at the start, and for a window alone."""
        return State(self.S, self.z) if self.z.numel() else None

    def with_linear(self, state: State | None) -> WindowState:
        """Replace the state of the linear attention; None keeps it."""
        return self if state is None else WindowState(*self[:-2], *state)

    @classmethod
    def empty(cls, like: Tokens, size: int, sinks: int) -> WindowState:
        """Return the state before the first token."""
        batch, heads = like.key.shape[:2]
        nothing = like.key.new_empty(batch, 0)

        def columns(length: int) -> KeyValues:
            return KeyValues(
                like.key.new_zeros(batch, heads, length, like.key.shape[3]),
                like.value.new_zeros(batch, heads, length, like.value.shape[3]),
                like.key.new_zeros(batch, length, dtype=torch.bool),
            )

        oldest = like.key.new_zeros(batch, dtype=torch.int64)
        return cls(*columns(size), *columns(sinks), oldest, nothing, nothing)

    def in_order(self) -> KeyValues:
        """Return the window, the oldest token first."""
        column, size = shared_column(self.oldest), self.valid.shape[1]
        if column == 0:
            return self.window
        index = torch.arange(size, device=self.oldest.device)
        return self.window.columns((index + (self.oldest[:, None] if column is None else column)) % size)


class Seen(NamedTuple):
    """What new queries see.

    Attributes:
        key, value, valid: columns `[B, Hkv, M, D]`; `valid` is None where all count. Behind an earlier state
            M is size + N, and token i sees the columns i < c <= i + size; from the start they are the tokens
            themselves; for a single token the window.
        sinks: the first tokens.
        ranks: place of each token among the visible ones, `[B, N]`, -1 for padding: a query sees sinks up to
            its own. None without sinks, and where all are seen.
    """

    key: Tensor
    value: Tensor
    valid: Tensor | None
    sinks: KeyValues
    ranks: Tensor | None


class Pushed(NamedTuple):
    """New tokens put into a window.

    Attributes:
        seen: by their queries.
        evicted: the tokens that leave the window, one for each new one, or for each of the last new ones;
            None where there is none, or nobody asked.
        after: what is kept; the very state from before where its tensors were written over.
    """

    seen: Seen
    evicted: Tokens | None
    after: WindowState


def refuse_excess(**tokens: int) -> None:
    """Refuse more tokens than a cache could have room for, by the names of their options.

    Raises:
        OptionError: naming the option.
    """
    for name, count in tokens.items():
        if count > MOST:
            raise OptionError(
                f"{name} must be at most {MOST:,} tokens, got {count:,}: a cache has room for all of them "
                "from the first one on"
            )


def to_16_bits(x: Tensor) -> Tensor:
    """Round to 16 bits: what tokens are ranked by differs in its last bits by the cuts of a prefill."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**16).round(), exponent)


def spread(index: Tensor, x: Tensor) -> Tensor:
    """Expand an index of tokens, `[B, K]`, to `[B, H, K, D]` of x."""
    return index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])


def shared_column(oldest: Tensor) -> int | None:
    """Return the column of the oldest token, where all rows share it and it takes no time to ask."""
    if oldest.device.type != "cpu" or torch.compiler.is_compiling() or transforming():
        return None
    columns = set(oldest.tolist())
    return columns.pop() if len(columns) == 1 else None


def places(valid: Tensor | None, begins: bool, keep: bool) -> Tensor | None:
    """Find where tokens go if padding is to stand before them, int64 `[B, N]`; None where it may stay.

    Args:
        valid: boolean `[B, N]`, False for padding; None for none.
        begins: no token is before these; else every padded one stands between tokens.
        keep: others may follow, so that padding behind these tokens would stand between them.
    """
    if valid is None:
        return None
    if not torch.compiler.is_compiling():
        ends = valid[:, :-1] & ~valid[:, 1:]
        if not (ends if begins else ~valid).any():
            return None
        if begins and not keep and not (ends.cumsum(1)[:, :-1].bool() & valid[:, 2:]).any():
            return None
    hidden = (~valid).long().cumsum(1)
    return torch.where(valid, valid.long().cumsum(1) + hidden[:, -1:], hidden) - 1


def without_gaps(tokens: Tokens, place: Tensor) -> Tokens:
    """Move each token to its place."""
    order, count = place.argsort(1), tokens.count
    assert tokens.valid is not None

    def moved(x: Tensor) -> Tensor:
        return x.gather(2, spread(order, x))

    return replace(
        tokens,
        query=None if tokens.query is None else moved(tokens.query),
        key=moved(tokens.key),
        value=moved(tokens.value),
        valid=tokens.valid.gather(1, order),
        count=None if count is None else count.expand_as(order).gather(1, order),
    )


def from_prompt(tokens: Tokens, size: int, sinks: int) -> WindowState:
    """Keep the first tokens of a text, at most `size`: in the first columns, as `push_one` wants them."""
    if tokens.valid is None and tokens.length >= sinks:  # then the first are the sinks
        valid = counted(tokens)
        new = KeyValues(tokens.key, tokens.value, valid)
        first = _copied(new.first(sinks))
        valid[:, :sinks] = False
    else:
        valid, ranks = ranked(tokens, sinks, causal=True)
        new = masked(tokens, valid)
        first = with_sinks(new, ranks, WindowState.empty(tokens, 0, sinks).sinks)
    batch = tokens.key.shape[0]
    oldest = tokens.key.new_full((batch,), tokens.length % size, dtype=torch.int64)
    nothing = tokens.key.new_empty(batch, 0)
    return WindowState(*padded(new, 0, size - tokens.length), *first, oldest, nothing, nothing)


def push_long_prompt(tokens: Tokens, size: int, sinks: int) -> tuple[Seen, Tokens | None, WindowState | None]:
    """Put a text that begins into a window, more than `size` tokens: nothing is before them to be moved.

    Returns:
        As `Pushed` has them; there is no state after where `tokens.keep` does not ask for it.
    """
    valid, ranks = ranked(tokens, sinks, causal=True)
    seen, cut = masked(tokens, valid), tokens.length - size
    evicted = tokens.slice(0, cut)
    evicted = replace(evicted, query=None, count=None, valid=valid[:, :cut] if sinks else evicted.valid)
    if tokens.valid is None and tokens.length >= sinks:  # then the first are the sinks
        first = KeyValues(tokens.key, tokens.value, counted(tokens) if sinks else valid).first(sinks)
        first = _copied(first) if tokens.keep else first
    else:
        first = with_sinks(seen, ranks, WindowState.empty(tokens, 0, sinks).sinks)
    if not tokens.keep:
        return Seen(*seen, first, ranks), evicted, None
    window = _copied(KeyValues(seen.key[:, :, cut:], seen.value[:, :, cut:], seen.valid[:, cut:]))
    batch = tokens.key.shape[0]
    oldest, nothing = tokens.key.new_zeros(batch, dtype=torch.int64), tokens.key.new_empty(batch, 0)
    return Seen(*seen, first, ranks), evicted, WindowState(*window, *first, oldest, nothing, nothing)


def _copied(some: KeyValues) -> KeyValues:
    """Bring columns to memory of their own, which may be written over."""
    return KeyValues(*(x.clone(memory_format=torch.contiguous_format) for x in some))


def counted(tokens: Tokens) -> Tensor:
    """Tell which tokens are no padding, boolean `[B, N]`."""
    if tokens.valid is not None:
        return tokens.valid
    return torch.ones(tokens.key.shape[0], tokens.length, dtype=torch.bool, device=tokens.key.device)


def ranked(tokens: Tokens, sinks: int, causal: bool) -> tuple[Tensor, Tensor | None]:
    """Find the tokens that are neither padding nor sinks, and ranks among the visible ones: `[B, N]` each.

    Without sinks nobody wants ranks. Layers that count the same tokens share both.
    """
    if not sinks:
        return counted(tokens), None
    if not causal:
        return _ranked(tokens, sinks, causal)
    about = tokens.valid, sinks, tokens.key.shape[0]
    return once(tokens.count, "ranks", about, lambda: _ranked(tokens, sinks, causal))


def _ranked(tokens: Tokens, sinks: int, causal: bool) -> tuple[Tensor, Tensor]:
    batch, valid = tokens.key.shape[0], counted(tokens)
    count = tokens.count if causal else valid.cumsum(1)
    assert count is not None
    rank = with_notes(torch.where(valid, count.expand(batch, -1).long() - 1, -1))
    return valid & (rank >= sinks), rank


def masked(tokens: Tokens, valid: Tensor) -> KeyValues:
    """Return the tokens with zeros in place of padding."""
    return KeyValues(tokens.hide(tokens.key), tokens.hide(tokens.value), valid)


def with_sinks(new: KeyValues, rank: Tensor | None, before: KeyValues) -> KeyValues:
    """Put those of the new tokens that are sinks in their places."""
    if rank is None:
        return before
    slots = before.valid.shape[1]
    hit = rank[:, None] == torch.arange(slots, device=rank.device)[:, None]  # [B, slots, N]
    index, is_new = hit.int().argmax(-1)[:, None, :, None], hit.any(-1)

    def put(x: Tensor, old: Tensor) -> Tensor:
        first = x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
        return torch.where(is_new[:, None, :, None], first, old)

    return KeyValues(put(new.key, before.key), put(new.value, before.value), before.valid | is_new)


def push(tokens: Tokens, before: WindowState, begins: bool) -> Pushed:
    """Move the window over new tokens; every one of them evicts one.

    Args:
        tokens: padding stands before all others, or anywhere if they begin the text, as `places` says.
        before: the window before them.
        begins: it is empty.
    """
    valid, ranks = ranked(tokens, before.sink_valid.shape[1], causal=True)
    new, old = masked(tokens, valid), before.in_order()
    seen = KeyValues(
        torch.cat([old.key, new.key], 2),
        torch.cat([old.value, new.value], 2),
        torch.cat([old.valid, valid], 1),
    )
    cut = tokens.length
    if not begins and tokens.valid is not None and (torch.compiler.is_compiling() or not tokens.valid.all()):
        # padding goes before the old tokens too
        hidden, size = (~tokens.valid).sum(1, keepdim=True), old.valid.shape[1]
        column = torch.arange(size + cut, device=hidden.device)
        behind = torch.where(column < hidden + size, column - hidden, column)
        seen = seen.columns(torch.where(column < hidden, column + size, behind))
    evicted = KeyValues(seen.key[:, :, :cut], seen.value[:, :, :cut], seen.valid[:, :cut])
    window = KeyValues(seen.key[:, :, cut:], seen.value[:, :, cut:], seen.valid[:, cut:])
    sinks = with_sinks(new, ranks, before.sinks)
    after = WindowState(*window, *sinks, torch.zeros_like(before.oldest), before.S, before.z)
    return Pushed(Seen(*seen, sinks, ranks), _as_tokens(evicted, tokens), after)


def is_step(tokens: Tokens, before: WindowState) -> bool:
    """Whether `push_one` can take them: one token, of the dtype that is kept, and no gradients."""
    alike = tokens.key.dtype == before.key.dtype and tokens.value.dtype == before.value.dtype
    return tokens.length == 1 and alike and not torch.is_grad_enabled()


def push_one(tokens: Tokens, before: WindowState, wants_evicted: bool) -> Pushed:
    """Put one token in the place of the oldest; where it is padding, nothing."""
    column = shared_column(before.oldest)
    if column is not None and (tokens.valid is None or tokens.valid.all()):
        tokens = tokens if tokens.valid is None else replace(tokens, valid=None)
        count = _leading_columns(column, before)
        if count is not None:
            return _push_behind(count, column, tokens, before, wants_evicted)
    valid, rank = ranked(tokens, before.sink_valid.shape[1], causal=True)
    new, index = masked(tokens, valid), before.oldest[:, None]
    sinks, step = (
        with_sinks(new, rank, before.sinks),
        1 if tokens.valid is None else tokens.valid[:, 0].long(),
    )
    old, evicted = before.window.columns(index), None
    if wants_evicted:
        gone = old.valid if tokens.valid is None else old.valid & tokens.valid
        evicted = _as_tokens(old._replace(valid=gone), tokens)
    if tokens.valid is not None:
        counts = tokens.valid[:, :, None, None]
        key, value = (torch.where(counts, x, y) for x, y in zip(new[:2], old[:2], strict=True))
        new = KeyValues(key, value, torch.where(tokens.valid, new.valid, old.valid))
    window = before.window.put(index, new, tokens.in_place)
    oldest = (before.oldest + step) % before.valid.shape[1]
    after = WindowState(*window, *sinks, oldest, before.S, before.z)
    return Pushed(Seen(*window, sinks, rank), evicted, after)


def _leading_columns(column: int, before: WindowState) -> int | None:
    """Count the columns that count, where these are the first ones or all.

    Args:
        column: of the oldest token.
        before: the window.
    """
    valid = before.valid
    if valid.all():
        return valid.shape[1]
    first = valid[:, :column].all() and not valid[:, column:].any()
    return column if first and not before.sink_valid.shape[1] else None


def _push_behind(count: int, column: int, tokens: Tokens, before: WindowState, wants_evicted: bool) -> Pushed:
    """Put one token behind `count` columns: sinks are full, and `valid` changes in its own column alone."""
    size = before.valid.shape[1]
    slots, evicted = before.sink_valid.shape[1], None
    rank = ranked(tokens, slots, causal=True)[1] if slots else None
    if wants_evicted and count == size:
        old_key, old_value = (x.narrow(2, column, 1).clone() for x in (before.key, before.value))
        evicted = Tokens(None, old_key, old_value, tokens.scaling, in_place=tokens.in_place)
    after = before
    if not tokens.in_place:
        key, value, valid, oldest = (x.clone() for x in (*before[:3], before.oldest))
        after = WindowState(key, value, valid, *before.sinks, oldest, before.S, before.z)
    key, value = after.key, after.value
    key.narrow(2, column, 1).copy_(tokens.key)
    value.narrow(2, column, 1).copy_(tokens.value)
    after.oldest.fill_((column + 1) % size)
    if count < size:
        after.valid.narrow(1, column, 1).fill_(True)
        key, value = key.narrow(2, 0, count + 1), value.narrow(2, 0, count + 1)
    return Pushed(Seen(key, value, None, after.sinks, rank), evicted, after)


def _as_tokens(kept: KeyValues, like: Tokens) -> Tokens:
    return Tokens(None, kept.key, kept.value, like.scaling, kept.valid, in_place=like.in_place)


def padded(kept: KeyValues, before: int, behind: int) -> KeyValues:
    """Add columns that do not count on both sides."""
    valid, sides = F.pad(kept.valid, (before, behind)), (0, 0, before, behind)
    if not before:
        return KeyValues(lengthened(kept.key, behind), lengthened(kept.value, behind), valid)
    return KeyValues(F.pad(kept.key, sides), F.pad(kept.value, sides), valid)


def lengthened(x: Tensor, behind: int) -> Tensor:
    """Copy tokens `[B, H, N, D]` to memory of their own, with zeros for so many behind them, if any."""
    if behind <= 0:  # F.pad would keep the order of tokens and heads in memory
        return x.clone(memory_format=torch.contiguous_format)
    return _with_room(x, behind) if _takes_pages_late(x, behind) else F.pad(x, (0, 0, 0, behind))


def _takes_pages_late(x: Tensor, behind: int) -> bool:
    """Whether zeros behind these tokens are so many that memory should not be written before tokens come."""
    if x.device.type != "cpu" or x.requires_grad or type(x) is not Tensor or torch.compiler.is_compiling():
        return False
    batch, heads, _, width = x.shape
    return batch * heads * behind * width * x.element_size() >= LARGE


def _with_room(x: Tensor, behind: int) -> Tensor:
    """Put zeros behind tokens, in memory of which the system gives a page when it is written to."""
    shape = (*x.shape[:2], x.shape[2] + behind, x.shape[3])
    memory = numpy.zeros(math.prod(shape) * x.element_size(), numpy.uint8)  # torch.zeros would write it
    new = torch.from_numpy(memory).view(x.dtype).view(shape)
    new[:, :, : x.shape[2]] = x
    return new


def nobody(tokens: Tokens) -> Tokens:
    """Return a single one of these tokens, which does not count."""
    unseen = torch.zeros(tokens.key.shape[0], 1, dtype=torch.bool, device=tokens.key.device)
    return replace(tokens.slice(0, 1), query=None, valid=unseen)


def pairs(valid: Tensor, causal: bool) -> Tensor:
    """Spread `[B, N]` to `[B, 1, N, N]`; a query that sees nothing sees itself, whose value is 0."""
    length = valid.shape[1]
    seen = valid[:, None, None].expand(-1, 1, length, -1)
    seen = seen.tril() if causal else seen
    alone = ~seen.any(-1, keepdim=True)
    return seen | (alone & torch.eye(length, dtype=torch.bool, device=valid.device))
