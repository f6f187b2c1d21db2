"""One decoded token behind a window, and the linear attention of the rest, in one call of C++."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention, Tokens, upcast
from hf_linattn.ops.cpp import takes, window_decode
from hf_linattn.ops.types import State

from . import ring
from .ring import WindowState


def fused_step(
    rest: LinearAttention | None,
    tokens: Tokens,
    state: WindowState,
    turned: Callable[[Tensor, Tensor], Tensor] | None = None,
    mix: Tensor | None = None,
) -> tuple[Tensor, WindowState] | None:
    """Compute one token behind a window, its sinks and the rest, in one call of C++.

    Args:
        rest: for what has left the window; None for a window alone.
        tokens: one token, as `ring.is_step` has it.
        state: written over where `tokens.in_place`.
        turned: makes the query that meets the sinks of the query and its rank `[B, 1]`; None for the same.
        mix: the window's share `[H]` where it and the rest have normalisers of their own; None for one.

    Returns:
        Output `[B, H, 1, Dv]` and the state after; None where the kernel does not take these.
    """
    query = tokens.query
    assert query is not None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not takes.linear(query, tokens.key, tokens.value, None if rest is None else state.linear):
        return None
    sinks = None
    if state.sink_key.shape[2]:
        ranks = ring.ranked(tokens, state.sink_key.shape[2], causal=True)[1]
        assert ranks is not None
        if int(ranks.min()) < state.sink_key.shape[2]:  # a sink itself, or padding
            return None
        met = query if turned is None else turned(upcast(query), ranks)
        sinks = window_decode.Sinks(met, state.sink_key, state.sink_value)
    if not (tokens.in_place and all(x.is_contiguous() for x in state)):
        state = WindowState(*(x.clone(memory_format=torch.contiguous_format) for x in state))
    buffer = window_decode.RingBuffer(state.key, state.value, state.valid, state.oldest)
    outside = None if rest is None else _evicting(rest, query, state)
    if outside is not None and mix is not None:
        outside = outside._replace(mix=mix.float().contiguous())
    output = window_decode.decode(
        query, tokens.key, tokens.value, tokens.valid, buffer, tokens.scaling, outside, sinks
    )
    return output, state


def _evicting(rest: LinearAttention, query: Tensor, state: WindowState) -> window_decode.LinearTail | None:
    """Have the linear attention's state take in the window's oldest token; None where both are empty."""
    kind, eps, gate = rest.fused, rest.eps, rest.gate()
    before = State(state.S, state.z)
    if kind != "none" and (gate is not None or not rest.has_decay):
        return window_decode.LinearTail(query, None, *before, gate=gate, kind=kind, eps=eps)
    column = ring.shared_column(state.oldest)
    if column is None:
        key, value = state.window.columns(state.oldest[:, None])[:2]
    elif not state.valid[:, column].any() and not before.z.any():
        return None
    else:
        key, value = state.key.narrow(2, column, 1), state.value.narrow(2, column, 1)
    phi_q, phi_k, value, *_, decay, _ = rest.kernel_inputs(Tokens(query, key, value, 1.0), True, before, gate)
    query_log_scale = rest.query_log_scale(upcast(query)) if kind == "none" else None
    return window_decode.LinearTail(phi_q, (phi_k, value), *before, decay, gate, kind, eps, query_log_scale)
