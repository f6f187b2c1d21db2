"""gated: linear attention whose state forgets as much as the text says."""

import math

import torch
from torch import Tensor, nn

from hf_linattn.attention import LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register
from hf_linattn.sites import Site

TEMPERATURE = 16.0


@register("gated")
class Gated(LinearAttention):
    """Linear attention with elu(x) + 1 and a learned gate on its state, open at the start.

    o_i = sum_{j<=i} a_ij (phi(q_i) . phi(k_j)) v_j / sum_{j<=i} a_ij phi(q_i) . phi(k_j)
    a_ij = g_{j+1} ... g_i,  g_t = sigmoid(w_h . v_t + b_h)^(1/16)

    One gate per key head and token, from the value: of what a head is given, that alone carries no rotary
    position. At the start w = 0 and b is such that a token counts half after `half_life` tokens. Padding does
    not close the gate.

    Options:
        half_life: tokens, at the start; any number of at least 1, default 16384.

    Use: as decay, where training can find out what to forget: fine-tune it, at the start it is close to elu1.

    Source: "Gated Linear Attention Transformers with Hardware-Efficient Training", Yang et al. 2023,
        arXiv:2312.06635, section 4.4 (temperature 16); scalar gates as in "Transformers are SSMs", Dao and Gu
        2024, arXiv:2405.21060.
    """

    group = "state that forgets"
    directions = "causal"
    why = "a state that forgets has one direction, from past to future"

    def __init__(self, site: Site, *, half_life: float = 16384.0) -> None:
        super().__init__(site)
        if not 1 <= half_life < math.inf:
            raise OptionError(f"half_life must be at least 1 token, got {half_life}")
        if site.kv_heads is None or site.value_dim is None:
            raise OptionError(f"{site.name}: its sizes cannot be told, so it can have no gates")
        gate = TEMPERATURE * math.log(0.5) / half_life  # log sigmoid(b)
        self.weight = nn.Parameter(torch.zeros(site.kv_heads, site.value_dim))
        self.bias = nn.Parameter(torch.full((site.kv_heads,), gate - math.log(-math.expm1(gate))))

    def feature_map(self, x: Tensor) -> Tensor:
        """elu(x) + 1, as exp below 0."""
        return x.clamp(max=0).exp() + x.clamp(min=0)

    def log_decay(self, key: Tensor, value: Tensor) -> Tensor:
        """The logarithm of g_t, `[B, Hkv, N]`."""
        weight, bias = self.weight.to(value.dtype), self.bias.to(value.dtype)
        logit = torch.einsum("bhnd,hd->bhn", value, weight) + bias[:, None]
        return nn.functional.logsigmoid(logit) / TEMPERATURE
