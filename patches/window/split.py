"""The window's state before a part of a row whose other parts other processes hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_linattn.attention import LinearAttention, Tokens
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.types import State
from hf_linattn.parallel import Shard

from .rest import with_gates, without_gates
from .ring import WindowState


def before(
    tokens: Tokens, size: int, sinks: int, rest: Any, gate_count: int, outside: bool, shard: Shard
) -> WindowState:
    """Fetch the last tokens of the processes before, and the sinks; the rest passes its own state on.

    Args:
        tokens: of this process; none of them is padding.
        size: of the window.
        sinks: first tokens of the row.
        rest: the attention of what has left the window; None for a window alone.
        gate_count: numbers behind each value.
        outside: the rest sees what has left the window; False for all tokens.
        shard: which of the processes this is.

    Raises:
        UnsupportedCallError: the sinks are not all in the first process.
    """
    state, evicted = _fetched(with_gates(tokens), size, sinks, shard)
    if rest is None:
        return state
    parts = [without_gates(part, gate_count) for part in evicted] if outside else [tokens]
    linear = rest.before(parts, shard)
    if not isinstance(rest, LinearAttention):
        written = shard.rank * tokens.length > (size + sinks if outside else 0)
        linear = State(linear.S, linear.S.new_full((len(tokens.key), 1), float(written)))
    return state.with_linear(linear)


def _fetched(tokens: Tokens, size: int, sinks: int, shard: Shard) -> tuple[WindowState, list[Tokens]]:
    """Fetch what the processes before this one hold of the window, and of the sinks.

    Args:
        tokens: of this process; none of them is padding.
        size: of the window.
        sinks: first tokens of the row.
        shard: which of the processes this is.

    Returns:
        The state before these tokens, and the tokens that leave the window as these come, in order.

    Raises:
        UnsupportedCallError: the sinks are not all in the first process.
    """
    (batch, _, length, width), device = tokens.key.shape, tokens.key.device
    if sinks > length:
        raise UnsupportedCallError(
            f"sinks={sinks} first tokens are more than the {length} that each process has of a row: take "
            "fewer processes"
        )
    both = torch.cat([tokens.key, tokens.value], -1)
    near, first = shard.tail(both[:, :, -size:], size), both[:, :, :sinks]
    if sinks:
        first = shard.first(first)
    place = torch.arange(shard.rank * length - size, (shard.rank + 1) * length, device=device)
    valid = (place >= sinks).expand(batch, -1)
    state = WindowState.empty(tokens, 0, 0)._replace(
        key=near[..., :width],
        value=near[..., width:],
        valid=valid[:, :size],
        sink_key=first[..., :width],
        sink_value=first[..., width:],
        sink_valid=valid.new_full((batch, sinks), shard.rank > 0),
    )
    left = Tokens(None, *state.window[:2], tokens.scaling, valid[:, :size])
    evicted = [left.slice(0, min(size, length))]
    if length > size:
        own = replace(tokens, query=None, count=None, valid=valid[:, size:])
        evicted.append(own.slice(0, length - size))
    return state, evicted
