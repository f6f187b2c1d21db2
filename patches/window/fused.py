"""One decoded token behind a window, and the linear attention of the rest, in one call of C++ or Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention, Tokens, upcast
from hf_linattn.attention.call import Call
from hf_linattn.attention.prepared import Weights, dense
from hf_linattn.ops import window_attention
from hf_linattn.ops.cpp import takes, window_decode
from hf_linattn.ops.triton import window_token
from hf_linattn.ops.triton.token_selftest import TokenForm
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import Gate, State

from . import growing, ring
from .ring import WindowState
from .sinks import Turn


class Share(NamedTuple):
    """The window's share of the output, where it and the rest have normalisers of their own.

    Attributes:
        values: `[H]`.
        logit: their sigmoid is the share.
    """

    values: Tensor
    logit: bool


def fused_step(
    rest: LinearAttention | None,
    tokens: Tokens,
    state: WindowState,
    turn: Turn | None = None,
    share: Share | None = None,
) -> tuple[Tensor, WindowState] | None:
    """Compute one token behind a window, its sinks and the rest, in one call of C++ or Triton.

    Args:
        rest: for what has left the window; None for a window alone.
        tokens: one token, as `ring.is_step` has it.
        state: written over where `tokens.in_place`.
        turn: how the query meets the sinks; None for as it is.
        share: the window's where it and the rest have normalisers of their own; None for one normaliser.

    Returns:
        Output `[B, H, 1, Dv]` and the state after; None where the kernel does not take these.
    """
    query = tokens.query
    assert query is not None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    gate = None if rest is None else rest.gate()
    begun = rest is None or state.linear is not None
    if begun and window_attention.kernels_take_token(
        query, tokens.key, tokens.value, _form(rest, state, gate, share), state.sink_key.shape[2]
    ):
        return _on_gpu(rest, tokens, state, gate, turn, share)
    if not takes.linear(query, tokens.key, tokens.value, None if rest is None else state.linear):
        return None
    sinks = None
    if state.sink_key.shape[2]:
        sinks = _sinks(query, tokens, state, turn)
        if sinks is None:
            return None
    state = _to_write(tokens, state)
    buffer = window_decode.RingBuffer(state.key, state.value, state.valid, state.oldest)
    outside = None if rest is None else _evicting(rest, query, state, gate)
    if outside is not None and share is not None:
        outside = outside._replace(mix=share.values.float().contiguous(), mix_logit=share.logit)
    output = window_decode.decode(
        query, tokens.key, tokens.value, tokens.valid, buffer, tokens.scaling, outside, sinks
    )
    return output, state


class PreparedToken:
    """Tokens that come one by one behind one state, none of them padding.

    Args:
        window: the attention, whose weights and branches are looked at before each token.
        rest: of what has left the window; None for a window alone.
        tokens: one token.
        state: written over.
        turn: as `fused_step` takes it.
        share: likewise.
    """

    def __init__(
        self,
        window: Any,
        rest: LinearAttention | None,
        tokens: Tokens,
        state: WindowState,
        turn: Turn | None,
        share: Share | None,
    ) -> None:
        assert tokens.query is not None
        query, self.window, self.turn = tokens.query, window, turn
        columns = state.valid.shape[1]
        self.room = columns if columns < window.size else None  # see `growing`
        self.sinks, sinks, tail = state.sink_key.shape[2], None, None
        if self.sinks:
            sinks = window_decode.Sinks(query, state.sink_key, state.sink_value)
        if rest is not None:
            tail = _evicting(rest, query, state, rest.gate())
            assert tail is not None
            if share is not None:
                tail = tail._replace(mix=share.values.float().contiguous(), mix_logit=share.logit)
        ring_buffer = window_decode.RingBuffer(state.key, state.value, state.valid, state.oldest)
        token = query, tokens.key, tokens.value
        self.prepared = window_decode.Prepared(token, ring_buffer, tokens.scaling, tail, sinks)
        self.weights = Weights(window)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, before: int) -> Tensor | None:
        """Compute a token behind so many: `[B, 1, H, Dv]`; None where something has changed."""
        if self.window.branches not in (None, "both") or self.weights.changed() or before < self.sinks:
            return None
        if self.room is not None and before >= self.room:
            return None
        turned = None
        if self.turn is not None and before > self.turn.last:
            turned = self.turn.rotary.turn(query, [before - self.turn.last])
            if turned is None:
                return None
        return self.prepared.run(query, key, value, turned)


def prepare(
    window: Any, call: Call, state: WindowState, turn: Turn | None, share: Share | None
) -> PreparedToken | None:
    """Prepare the tokens behind this one, as `PreparedToken` takes it; None where each must be looked at."""
    query = call.query
    tokens = Tokens(query, call.key, call.value, call.scaling, sink=call.sink, softcap=call.softcap)
    if not tokens.is_plain or not takes.linear(query, tokens.key, tokens.value, state.linear):
        return None
    rest = growing.rest_of(window, state)
    if rest is not None and (
        (rest.gate() is None and rest.has_decay) or (rest.fused == "none" and rest.softmax_map() is None)
    ):
        return None
    written = all(x.is_contiguous() for x in state) and dense(query, tokens.key, tokens.value)
    kept = tokens.key.dtype == state.key.dtype and tokens.value.dtype == state.value.dtype
    if not written or not kept or any(x.is_inference() for x in window.parameters()):
        return None
    return PreparedToken(window, rest, tokens, state, turn, share)


def _to_write(tokens: Tokens, state: WindowState) -> WindowState:
    """Return a state that may be written over: that of before, or a copy."""
    if tokens.in_place and all(x.is_contiguous() for x in state):
        return state
    return WindowState(*(x.clone(memory_format=torch.contiguous_format) for x in state))


def _form(
    rest: LinearAttention | None, state: WindowState, gate: Gate | None, share: Share | None
) -> TokenForm:
    """Say what the kernels on a GPU are asked for."""
    sinks = state.sink_key.shape[2] > 0
    if rest is None:
        return TokenForm(sinks=sinks)
    decay = "" if not rest.has_decay else "given" if gate is None else "gate"
    mix = "" if share is None else "logit" if share.logit else "share"
    return TokenForm(state.z.shape[-1], rest.fused, sinks, decay, mix)


def _on_gpu(
    rest: LinearAttention | None,
    tokens: Tokens,
    state: WindowState,
    gate: Gate | None,
    turn: Turn | None,
    share: Share | None,
) -> tuple[Tensor, WindowState]:
    """Compute a token by the kernels in Triton; Python asks the device nothing."""
    query = tokens.query
    assert query is not None
    state = _to_write(tokens, state)
    slots, sinks, tail = state.sink_key.shape[2], None, None
    if slots:
        rank, met = ring.ranked(tokens, slots, causal=True)[1], None
        assert rank is not None
        if turn is not None:
            met = turn.of(upcast(query), rank).to(query.dtype)
        sinks = Sinks(met, *state.sinks, rank)
    if rest is not None:
        tail = _tail_on_gpu(rest, query, state, gate)
        if share is not None:
            tail = tail._replace(mix=share.values.float(), mix_logit=share.logit)
    output = window_token.decode(
        query,
        tokens.key,
        tokens.value,
        tokens.valid,
        window_token.Ring(state.key, state.value, state.valid, state.oldest),
        tokens.scaling,
        tail,
        sinks,
    )
    return output, state


def _tail_on_gpu(
    rest: LinearAttention, query: Tensor, state: WindowState, gate: Gate | None
) -> window_token.Tail:
    """Have the linear attention's state take in the window's oldest token."""
    kind = rest.fused
    tail = window_token.Tail(state.S, state.z, gate=gate, kind=kind, eps=rest.eps)
    if kind != "none" and (gate is not None or not rest.has_decay):
        return tail
    column = state.oldest[:, None]
    oldest = state.key.gather(2, ring.spread(column, state.key))
    if gate is not None or not rest.has_decay:  # the value is read by the kernel, where it stands
        maps = rest.maps_by_kernels(query, oldest, torch.float32, "triton")
        if maps is not None:
            return tail._replace(query=maps[0], evicted=maps[1])
    wide = upcast(query)
    if gate is not None:
        maps = rest.query_map(wide), rest.key_map(upcast(oldest))
        return tail._replace(query=maps[0], evicted=maps[1], query_log_scale=rest.query_log_scale(wide))
    value = state.value.gather(2, ring.spread(column, state.value))
    phi_q, phi_k, _, *_, decay, _ = rest.kernel_inputs(Tokens(query, oldest, value, 1.0), True)
    if kind != "none":
        return tail._replace(log_decay=decay)
    return tail._replace(
        query=phi_q, evicted=phi_k, log_decay=decay, query_log_scale=rest.query_log_scale(wide)
    )


def _sinks(
    query: Tensor, tokens: Tokens, state: WindowState, turn: Turn | None
) -> window_decode.Sinks | None:
    """Let the query meet the sinks; None for a sink itself, or padding."""
    if tokens.valid is not None and not tokens.valid.all():
        return None
    assert tokens.count is not None
    ranks = [int(count) - 1 for (count,) in tokens.count.tolist()]
    if min(ranks) < state.sink_key.shape[2]:
        return None
    angles = None
    if turn is not None:
        steps = [max(rank - turn.last, 0) for rank in ranks]
        if any(steps):
            angles = turn.rotary.turn(query, steps)
            if angles is None:
                query = turn.rotary.back(upcast(query), torch.tensor(steps)[:, None])
    return window_decode.Sinks(query, state.sink_key, state.sink_value, angles)


def _evicting(
    rest: LinearAttention, query: Tensor, state: WindowState, gate: Gate | None
) -> window_decode.LinearTail | None:
    """Have the linear attention's state take in the window's oldest token; None where both are empty."""
    kind, eps = rest.fused, rest.eps
    before = State(state.S, state.z)
    if gate is not None or not rest.has_decay:
        if kind != "none":
            return window_decode.LinearTail(query, None, *before, gate=gate, kind=kind, eps=eps)
        learned = rest.softmax_map()
        if learned is not None:
            maps = learned.query, learned.key
            return window_decode.LinearTail(query, None, *before, gate=gate, eps=learned.floor, learned=maps)
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
