"""efficient: softmax over the features of the query, softmax over the positions of the key."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, StatefulAttention, Tokens, upcast
from hf_linattn.ops.eager import gated
from hf_linattn.ops.tracing import exporting
from hf_linattn.registry import register

LOW = -1e30
"""Logarithm of nothing: finite, so that gradients are."""


class Averages(NamedTuple):
    """M `[B, Hkv, D, Dv]`: the mean of the values under each feature; L `[B, Hkv, D]`: log sum_j exp(k_j).

    `some` `[B, 1]` is 1 once any token came: zeros mean that none did.
    """

    M: Tensor
    L: Tensor
    some: Tensor


@register("efficient")
class Efficient(StatefulAttention):
    """Linear attention by two softmaxes, over the query's features and over the keys' positions.

    o_i = sum_d softmax(q_i)_d sum_{j in V(i)} (exp(k_jd) / sum_{t in V(i)} exp(k_td)) v_j

    Rows sum to 1 without a denominator. Published for all positions at once; the causal form takes the keys'
    softmax over the tokens so far, with a running log-sum-exp per feature: safe for any keys and lengths.

    Use: encoders, above all: each feature is a global summary that queries pick from. In causal models its
        summaries move slowly once the context is long.

    Source: "Efficient Attention: Attention with Linear Complexities", Shen et al. 2018, arXiv:1812.01243,
        section 3.2.
    """

    group = "feature map"

    def bidirectional(self, tokens: Tokens) -> Tensor:
        """Compute one summary per feature."""
        assert tokens.query is not None
        key = tokens.hide(upcast(tokens.key), LOW).softmax(2)
        means = torch.einsum("bhnd,bhne->bhde", key, tokens.hide(upcast(tokens.value)))
        query = upcast(tokens.query).softmax(-1).unflatten(1, (key.shape[1], -1))
        return torch.einsum("bhgnd,bhde->bhgne", query, means).flatten(1, 2)

    def causal(self, tokens: Tokens, state: Averages | None) -> tuple[Tensor, Averages]:
        """Compute means as a state that fades by (sum before) / (sum now), feature by feature."""
        key, value = tokens.hide(upcast(tokens.key), LOW), tokens.hide(upcast(tokens.value))
        query = key if tokens.query is None else upcast(tokens.query).softmax(-1)
        if state is None:
            before, means = torch.full_like(key[:, :, 0], LOW), None
        else:
            before, means = torch.where(state.some[:, :, None] > 0, state.L, LOW), state.M
        running = torch.cat([before.unsqueeze(2), key], 2).logcumsumexp(2)
        if exporting():  # to ONNX it subtracts the maximum of all, and may end in log 0
            running = running.clamp_min(LOW)
        now, earlier = running[:, :, 1:], running[:, :, :-1]
        output, means = gated.causal(query, (key - now).exp(), value, earlier - now, means)
        return output, Averages(means, now[:, :, -1], torch.ones_like(now[:, :1, -1, 0]))

    def absorb(self, tokens: Tokens, state: Averages | None) -> Averages:
        """Sum without queries, which do not change the state."""
        return self.causal(tokens, state)[1]

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count M, L and a flag in float32 (float64 in float64 models)."""
        if site.kv_heads is None or site.head_dim is None or site.value_dim is None:
            return None
        return max(size, 4) * (site.kv_heads * site.head_dim * (site.value_dim + 1) + 1)
