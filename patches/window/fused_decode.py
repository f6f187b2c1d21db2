"""A decoded token behind a window by one call of C++: window, linear attention, and what both keep."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention, Tokens, upcast
from hf_linattn.ops.cpp import linear, window_decode
from hf_linattn.ops.types import State

from . import ring as recent


def step(
    rest: LinearAttention | None, tokens: Tokens, state: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Softmax over the window, and a linear attention for what has left it, under one normaliser.

    Args:
        rest: the `LinearAttention`; None for a window alone.
        tokens: one token, as `recent.steps` takes it.
        state: of `recent.Recent` without sinks, and of the linear attention; written over where it may be.

    Returns:
        Output `[B, H, 1, Dv]` and the state after; None where the kernel does not take these.
    """
    query = tokens.query
    assert query is not None
    inner = None if rest is None else State(*state[recent.TENSORS :])
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    if not linear.takes(query, tokens.key, tokens.value, inner):
        return None
    if not (tokens.in_place and all(x.is_contiguous() for x in state)):
        state = tuple(x.clone(memory_format=torch.contiguous_format) for x in state)
        inner = None if rest is None else State(*state[recent.TENSORS :])
    key, value, marks, *_, turn = state[: recent.TENSORS]
    ring = window_decode.Ring(key, value, marks, turn)
    outside = None if inner is None or rest is None else _outside(rest, query, ring, inner)
    given = query, tokens.key, tokens.value, tokens.valid, ring, tokens.scaling, outside
    return window_decode.step(*given), state


def _outside(
    rest: LinearAttention, query: Tensor, ring: window_decode.Ring, inner: State
) -> window_decode.Rest | None:
    """The state takes in the window's oldest token; None where both are empty."""
    kind, eps, gate = rest.fused, rest.eps, rest.gate()
    if kind != "none" and (gate is not None or not rest.fades):
        return window_decode.Rest(query, None, *inner, gate=gate, kind=kind, eps=eps)
    place = int(ring.turn[0])
    if not ring.marks[:, place].any() and not inner.z.any():
        return None
    oldest = Tokens(query, ring.key.narrow(2, place, 1), ring.value.narrow(2, place, 1), 1.0)
    phi_q, phi_k, value, *_, decay, _ = rest.kernel_inputs(oldest, True, inner, gate)
    left_out = rest.left_out(upcast(query)) if kind == "none" else None
    return window_decode.Rest(phi_q, (phi_k, value), *inner, decay, gate, kind, eps, left_out)
