"""The attention of what has left a window: sums of features, or a state that is read without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import LinearAttention, StatefulAttention, Tokens, upcast
from hf_linattn.ops.types import ScaledSums, State

from .ring import nobody


def with_gates(tokens: Tokens) -> Tokens:
    """Keep the gates of tokens behind their values, so that they stay together in the window's ring."""
    if tokens.gates is None:
        return tokens
    value = torch.cat([tokens.value, tokens.gates.to(tokens.value.dtype)], -1)
    return replace(tokens, value=value, gates=None)


def without_gates(tokens: Tokens, count: int) -> Tokens:
    """Take so many gates from behind the values again."""
    if not count:
        return tokens
    return replace(tokens, value=tokens.value[..., :-count], gates=upcast(tokens.value[..., -count:]))


def sums(rest: StatefulAttention, tokens: Tokens, before: State | None) -> tuple[Tensor, Tensor, State]:
    """Read the state and write tokens into it.

    A state without sums has its output in place of a numerator, and a total of 1 once a token was written, 0
    before; its z is that total.

    Args:
        rest: of what has left the window.
        tokens: queries, and the tokens that leave as each of them comes.
        before: the state of those that have left; None for nothing.

    Returns:
        Numerator `[B, H, N, Dv]`, total `[B, H, N]`, and the state after.
    """
    if isinstance(rest, LinearAttention):
        return rest.sums(tokens, before)
    assert tokens.query is not None
    batch, heads, keys = *tokens.query.shape[:2], tokens.length
    written = tokens.key.new_ones(batch, keys, dtype=torch.bool) if tokens.valid is None else tokens.valid
    some = written.cumsum(1) > 0 if before is None else (written.cumsum(1) > 0) | (before.z > 0)
    state: Any = None if before is None else rest.state_of(before.S)
    output, after = rest.causal(replace(tokens, keep=True), state)
    total = some[:, None].expand(-1, heads, -1).to(output.dtype)
    return output, total, State(after[0], some[:, -1:].to(after[0].dtype))


def scaled(rest: Any, query: Tensor, numerator: Tensor, total: Tensor) -> ScaledSums:
    """Add to sums of the rest their scale, what its map divided the last of these queries by."""
    scale = rest.log_scale_of(query[:, :, query.shape[2] - total.shape[2] :])
    return ScaledSums(numerator, total, torch.zeros_like(total) if scale is None else scale)


def absorb(rest: StatefulAttention, tokens: Tokens, before: State | None) -> State:
    """Write tokens of which no queries are known."""
    if isinstance(rest, LinearAttention):
        return rest.absorb(tokens, before)
    written = tokens.key.new_ones(tokens.key.shape[0], 1, dtype=torch.bool)
    written = written if tokens.valid is None else tokens.valid.any(1, keepdim=True)
    some = written if before is None else written | (before.z > 0)
    after = rest.absorb(tokens, None if before is None else rest.state_of(before.S))
    return State(after[0], some.to(after[0].dtype))


def before_first(rest: StatefulAttention, tokens: Tokens) -> State:
    """Return the state before the first of these tokens."""
    if not isinstance(rest, LinearAttention):
        return absorb(rest, nobody(tokens), None)
    batch, heads, _, width = tokens.key.shape
    dtype = torch.promote_types(tokens.key.dtype, torch.float32)
    z = tokens.key.new_zeros(batch, heads, rest.features or width, dtype=dtype)
    return State(z.new_zeros(*z.shape, tokens.value.shape[3]), z)


def of_all_queries(length: int, *sums: Tensor) -> tuple[Tensor, ...]:
    """Put zeros before sums `[B, H, N, ...]` that only the last of so many queries have."""
    missing = length - sums[0].shape[2]
    if not missing:
        return sums
    return tuple(F.pad(x, (*(0, 0) * (x.ndim - 3), missing, 0)) for x in sums)
