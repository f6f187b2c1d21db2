"""gated: linear attention whose state forgets as much as the text says."""

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Tokens
from hf_linattn.attention.call import Call
from hf_linattn.ops.types import Gate
from hf_linattn.registry import register

from ._feature_maps import NamedMapAttention
from ._gates import (
    TEMPERATURE,
    Source,
    gate_bias,
    half_lives,
    log_gate,
    missing_hidden,
    per_head,
    source_of,
    source_width,
)


@register("gated")
class Gated(NamedMapAttention):
    """Linear attention with a learned gate on its state, open at the start.

    o_i = sum_{j<=i} a_ij (phi(q_i) . phi(k_j)) v_j / sum_{j<=i} a_ij phi(q_i) . phi(k_j)
    a_ij = g_{j+1} ... g_i,  g_t = sigmoid(w_h . x_t + b_h)^(1/16)

    One gate per key head and token. x_t is the value (of what a head is given, that alone carries no rotary
    position), or the hidden state that the module gets. At the start w = 0, and b is such that a token counts
    half after `half_life` tokens. Padding does not close the gate.

    Options:
        feature_map: phi, the map of another linear patch with its learned weights, such as "hedgehog" or
            "taylor2(features=8)"; default "elu1".
        front: True puts a learned linear layer before the map, x -> W x with W_q `[H, D, D]` and W_k
            `[Hkv, D, D]`, the identity at the start; default False.
        source: x_t, "value" (default), or "hidden", the module's input.
        half_life: tokens, at the start; any number of at least 1, default 16384.
        shortest: tokens; heads then start with different half-lives, from this one to `half_life` in equal
            ratios; at least 1, default None for the same in all heads.

    Use: as decay, where training can find out what to forget: at the start it is close to its feature map.
        To convert a model, let heads start near and far (`shortest` 4, `half_life` 256): what is near is what
        a sharp map blurs first, and a state that forgets meets no distance that training did not show it.

    Source: "Gated Linear Attention Transformers with Hardware-Efficient Training", Yang et al. 2023,
        arXiv:2312.06635, section 4.4 (temperature 16); scalar gates as in "Transformers are SSMs", Dao and Gu
        2024, arXiv:2405.21060.
    """

    group = "state that forgets"
    directions = "causal"
    direction_reason = "a state that forgets has one direction, from past to future"

    def __init__(
        self,
        site: AttentionSite,
        *,
        feature_map: str = "elu1",
        front: bool = False,
        source: Source = "value",
        half_life: float = 16384.0,
        shortest: float | None = None,
    ) -> None:
        super().__init__(site)
        [heads] = site.require("kv_heads", reason="so it can have no gates")
        bias = gate_bias(half_lives(heads, shortest, half_life))
        self.needs_hidden = source == "hidden"
        self.gates_by_value = source == "value"
        self.gate_count = int(self.needs_hidden)
        self.width = source_width(site, source)
        self.use_map(feature_map, front, site)
        self.weight = nn.Parameter(torch.zeros(heads, self.width))
        self.bias = nn.Parameter(bias)

    def gates(self, call: Call) -> Tensor | None:
        """Compute the logarithm of g_t from the hidden state, `[B, Hkv, N, 1]`."""
        return self._gates(source_of(call, "hidden", self.width)) if self.needs_hidden else None

    def _gates(self, x: Tensor) -> Tensor:
        return log_gate(per_head(x, self.weight.unsqueeze(1), self.bias.unsqueeze(1)))

    def log_decay(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the logarithm of g_t, `[B, Hkv, N]`."""
        return self._gates(value)[..., 0]

    def past_gates(self, tokens: Tokens) -> Tensor | None:
        """Refuse tokens whose hidden state is not known, where that is read."""
        if self.needs_hidden:
            raise missing_hidden(self.name)
        return None

    def gate(self) -> Gate | None:
        """Return the weights of g_t for kernels, which read values."""
        if self.needs_hidden:
            return None
        # kernels on a GPU convert them where they read them
        weight, bias = (x if x.is_cuda else x.float().contiguous() for x in (self.weight, self.bias))
        return Gate(weight, bias, TEMPERATURE)
