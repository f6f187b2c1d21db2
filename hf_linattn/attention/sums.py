"""The sums of a linear attention: by kernels where there are any, with their own maps or ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.attention.tokens import Tokens, upcast
from hf_linattn.ops import linear_attention
from hf_linattn.ops.cpp import linear as native
from hf_linattn.ops.dispatch import CHUNK, has_kernels
from hf_linattn.ops.eager import linear
from hf_linattn.ops.types import Gate, Inputs, OpConfig, State


def causal(attention: Any, tokens: Tokens, state: State | None, divide: bool) -> tuple[Tensor, Tensor, State]:
    """As `LinearAttention.sums`."""
    query, documents, fused = tokens.query, tokens.documents, attention.fused
    assert query is not None
    how = OpConfig(fused, attention.eps, divide)
    if runs_natively(tokens, state):
        gate = attention.gate()
        given = inputs(attention, tokens, divide, state, gate)
        if tokens.in_place and tokens.length == 1:
            found = native.step(given, how, gate)
        else:
            found = native.forward(given, how, tokens.keep, CHUNK, gate)
    elif has_kernels(query, tokens.key, tokens.value, fused, documents is not None or attention.fades):
        found = linear_attention.attention(inputs(attention, tokens, divide, state), how, tokens.keep)
    else:
        phi_q, (phi_k, value, decay) = attention.query_map(upcast(query)), attention.mapped(tokens)
        numerator, total, after = linear.causal(
            phi_q, phi_k, value, state, documents, decay, in_place=tokens.in_place
        )
        return linear.normalised(numerator, total) if divide else numerator, total, after
    if state is not None and found.S is state.S:
        return found.output, found.total, state
    return found.output, found.total, State(found.S, found.z)  # type: ignore[arg-type]


def runs_natively(tokens: Tokens, state: State | None) -> bool:
    """Whether the kernels in C++ take them as they are: where nobody wants gradients, nor a graph."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    assert tokens.query is not None
    return native.takes(Inputs(tokens.query, tokens.key, tokens.value, None, *(state or (None, None))))


def both_ways(attention: Any, tokens: Tokens, divide: bool) -> tuple[Tensor, Tensor]:
    """Numerator, or output where `divide`, `[B, H, N, Dv]`, and total `[B, H, N]`, over all keys."""
    query, fused = tokens.query, attention.fused
    assert query is not None
    if not has_kernels(query, tokens.key, tokens.value, fused, linked=False):
        phi_q, (phi_k, value, _) = attention.query_map(upcast(query)), attention.mapped(tokens)
        numerator, total = linear.read(phi_q, linear.state_of(phi_k, value))
        return linear.normalised(numerator, total) if divide else numerator, total
    given = inputs(attention, tokens, divide)._replace(log_decay=None)  # decay is for what comes before
    found = linear_attention.attention(
        given, OpConfig(fused, attention.eps, divide, causal=False), keep=False
    )
    return found.output, found.total


def decays(attention: Any, tokens: Tokens) -> Tensor | None:
    """Logarithm of the decay `[B, Hkv, N]`, 0 at padded tokens; None where there is none."""
    if not attention.fades:
        return None
    decay = attention.log_decay(upcast(tokens.key), upcast(tokens.value))
    return None if decay is None else tokens.hide(decay.expand(*tokens.key.shape[:2], -1))


def inputs(
    attention: Any, tokens: Tokens, divide: bool, state: State | None = None, gate: Gate | None = None
) -> Inputs:
    """Of kernels: as they come where the map is in the kernel, else features; no decay beside a gate."""
    assert tokens.query is not None
    S, z = state or (None, None)
    if attention.fused == "none" and gate is None:
        phi_q, (phi_k, value, decay) = attention.query_map(upcast(tokens.query)), attention.mapped(tokens)
        return Inputs(phi_q, phi_k, value, None, S, z, decay, tokens.documents)
    hidden = None if tokens.valid is None else ~tokens.valid
    if attention.fused != "none":
        query, key = tokens.query, tokens.key
        value = tokens.value if divide else upcast(tokens.value)  # numerators are not rounded to 16 bits
        decay = None if gate is not None else decays(attention, tokens)
    else:
        query, key = attention.query_map(upcast(tokens.query)), attention.key_map(upcast(tokens.key))
        value, decay = upcast(tokens.value), None
    return Inputs(query, key, value, hidden, S, z, decay, tokens.documents)
