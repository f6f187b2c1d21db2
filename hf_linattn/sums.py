"""The causal sums of a linear attention: by kernels where there are any, with their own maps or ours."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.ops import kernels, linear
from hf_linattn.ops.chunks import How
from hf_linattn.ops.dispatch import has_kernels
from hf_linattn.ops.linear import State
from hf_linattn.ops.loop import Inputs
from hf_linattn.tokens import Tokens, upcast


def causal(attention: Any, tokens: Tokens, state: State | None, divide: bool) -> tuple[Tensor, Tensor, State]:
    """As `LinearAttention.sums`."""
    query, documents = tokens.query, tokens.documents
    assert query is not None
    fused, own = attention.fused, (query, tokens.key, tokens.value)
    if tokens.length == 1 or not has_kernels(*own, fused, documents is not None):
        phi_q, (phi_k, value, decay) = attention.query_map(upcast(query)), attention.mapped(tokens)
        numerator, total, after = linear.causal(phi_q, phi_k, value, state, documents, decay)
        return linear.normalised(numerator, total) if divide else numerator, total, after
    S, z = state or (None, None)
    if fused != "none":
        value = tokens.value if divide else upcast(tokens.value)  # numerators are not rounded to 16 bits
        hidden = None if tokens.valid is None else ~tokens.valid
        inputs = Inputs(query, tokens.key, value, hidden, S, z, None, documents)
    else:
        phi_q, (phi_k, value, decay) = attention.query_map(upcast(query)), attention.mapped(tokens)
        inputs = Inputs(phi_q, phi_k, value, None, S, z, decay, documents)
    found = kernels.causal(inputs, How(fused, attention.eps, divide), tokens.keep)
    return found.output, found.total, State(found.S, found.z)
