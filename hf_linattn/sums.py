"""The sums of a linear attention: by kernels where there are any, with their own maps or ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.ops import kernels, linear, native
from hf_linattn.ops.chunks import How
from hf_linattn.ops.dispatch import has_kernels, steps
from hf_linattn.ops.linear import State
from hf_linattn.ops.loop import Inputs
from hf_linattn.tokens import Tokens, upcast


def causal(attention: Any, tokens: Tokens, state: State | None, divide: bool) -> tuple[Tensor, Tensor, State]:
    """As `LinearAttention.sums`."""
    query, documents, fused = tokens.query, tokens.documents, attention.fused
    assert query is not None
    linked = documents is not None or attention.fades
    if not has_kernels(query, tokens.key, tokens.value, fused, linked):
        phi_q, (phi_k, value, decay) = attention.query_map(upcast(query)), attention.mapped(tokens)
        numerator, total, after = linear.causal(
            phi_q, phi_k, value, state, documents, decay, in_place=tokens.in_place
        )
        return linear.normalised(numerator, total) if divide else numerator, total, after
    inputs, how = _inputs(attention, tokens, divide, state), How(fused, attention.eps, divide)
    if tokens.in_place and tokens.length == 1 and steps(inputs, how):
        found = native.step(inputs, how)
    else:
        found = kernels.attention(inputs, how, tokens.keep)
    if state is not None and found.S is state.S:
        return found.output, found.total, state
    return found.output, found.total, State(found.S, found.z)  # type: ignore[arg-type]


def both_ways(attention: Any, tokens: Tokens, divide: bool) -> tuple[Tensor, Tensor]:
    """Numerator, or output where `divide`, `[B, H, N, Dv]`, and total `[B, H, N]`, over all keys."""
    query, fused = tokens.query, attention.fused
    assert query is not None
    if not has_kernels(query, tokens.key, tokens.value, fused, linked=False):
        phi_q, (phi_k, value, _) = attention.query_map(upcast(query)), attention.mapped(tokens)
        numerator, total = linear.read(phi_q, linear.state_of(phi_k, value))
        return linear.normalised(numerator, total) if divide else numerator, total
    inputs = _inputs(attention, tokens, divide)._replace(log_decay=None)  # decay is for what comes before
    found = kernels.attention(inputs, How(fused, attention.eps, divide, causal=False), keep=False)
    return found.output, found.total


def decays(attention: Any, tokens: Tokens) -> Tensor | None:
    """Logarithm of the decay `[B, Hkv, N]`, 0 at padded tokens; None where there is none."""
    if not attention.fades:
        return None
    decay = attention.log_decay(upcast(tokens.key), upcast(tokens.value))
    return None if decay is None else tokens.hide(decay.expand(*tokens.key.shape[:2], -1))


def _inputs(attention: Any, tokens: Tokens, divide: bool, state: State | None = None) -> Inputs:
    """Of kernels: as they come where the map is in the kernel, else features."""
    assert tokens.query is not None
    S, z = state or (None, None)
    if attention.fused == "none":
        phi_q, (phi_k, value, decay) = attention.query_map(upcast(tokens.query)), attention.mapped(tokens)
        return Inputs(phi_q, phi_k, value, None, S, z, decay, tokens.documents)
    value = tokens.value if divide else upcast(tokens.value)  # numerators are not rounded to 16 bits
    hidden = None if tokens.valid is None else ~tokens.valid
    return Inputs(tokens.query, tokens.key, value, hidden, S, z, decays(attention, tokens), tokens.documents)
