"""The ring of a text that begins on a CPU: it has room for as many tokens again, and grows with the text.

A short text then neither writes nor reads what it has no tokens for. With the last columns come the state of
what leaves the window, and the sinks, which are among the other columns till then.
"""

from typing import Any

import torch

from hf_linattn.attention import Tokens

from . import ring
from .rest import before_first, without_gates
from .ring import KeyValues, WindowState

LEAST = 32
"""Columns from the start."""


def begun(window: Any, tokens: Tokens) -> WindowState:
    """Keep the first tokens of a text, at most as many as the window has, none of them padding."""
    key, value, batch, length = tokens.key, tokens.value, len(tokens.key), tokens.length
    room = min(window.size, max(LEAST, 2 * length))
    valid, nothing = key.new_zeros(batch, room, dtype=torch.bool), key.new_empty(batch, 0)
    valid[:, :length] = True
    columns = KeyValues(ring.lengthened(key, room - length), ring.lengthened(value, room - length), valid)
    oldest = key.new_full((batch,), length % room, dtype=torch.int64)
    state = WindowState(*columns, *columns.first(0), oldest, nothing, nothing)
    return state if room < window.size else _completed(window, tokens, state)


def with_room(window: Any, tokens: Tokens, state: WindowState | None) -> WindowState | None:
    """Give a ring that grows room for these tokens.

    Args:
        window: the attention.
        tokens: one has a place of its own; for several, or without queries, the ring gets all its columns.
        state: of the tokens before, None for none; returned where there is room.
    """
    if state is None or state.valid.shape[1] == window.size:
        return state
    size, room, one = window.size, state.valid.shape[1], ring.is_step(tokens, state)
    alone = window.branches in (None, "both", "window") and tokens.query is not None
    if one and alone and not torch.compiler.is_compiling():
        if not (state.oldest == 0).any():
            return state
        size = min(size, 2 * room)
    oldest = torch.where(state.oldest == 0, room, state.oldest)  # of full rows
    columns = ring.padded(state.window, 0, size - room)
    state = WindowState(*columns, *columns.first(0), oldest, state.S, state.z)
    return state if size < window.size else _completed(window, tokens, state)


def _completed(window: Any, tokens: Tokens, state: WindowState) -> WindowState:
    """Take the sinks out of a ring that has all its columns, and add the state of what leaves it."""
    count, missing = window.sinks, window.sinks - state.valid.shape[1]
    if count:
        first = ring.padded(state.window.first(count), 0, max(missing, 0))
        columns = state.window._replace(valid=state.valid.clone())
        columns.valid[:, :count] = False
        state = WindowState(*columns, *first, *state[6:])
    return with_rest(window, tokens, state)


def with_rest(window: Any, tokens: Tokens, state: WindowState) -> WindowState:
    """Add the linear attention's state before the first of these tokens, if there is such an attention."""
    if not window.inner:
        return state
    return state.with_linear(before_first(window.rest, without_gates(tokens, window.gate_count)))


def rest_of(window: Any, state: WindowState) -> Any:
    """Return the linear attention; None for a window alone, and while nothing can leave it."""
    return window.rest if window.inner and state.linear is not None else None
