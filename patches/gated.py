"""gated: linear attention whose state forgets as much as the text says."""

import math

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite
from hf_linattn.errors import OptionError
from hf_linattn.ops.types import Gate
from hf_linattn.registry import register

from ._feature_maps import NamedMapAttention

TEMPERATURE = 16.0


@register("gated")
class Gated(NamedMapAttention):
    """Linear attention with a learned gate on its state, open at the start.

    o_i = sum_{j<=i} a_ij (phi(q_i) . phi(k_j)) v_j / sum_{j<=i} a_ij phi(q_i) . phi(k_j)
    a_ij = g_{j+1} ... g_i,  g_t = sigmoid(w_h . v_t + b_h)^(1/16)

    One gate per key head and token, from the value: of what a head is given, that alone carries no rotary
    position. At the start w = 0 and b is such that a token counts half after `half_life` tokens. Padding does
    not close the gate.

    Options:
        feature_map: phi, the map of another linear patch, such as "hedgehog" or "taylor2", with its default
            options and its learned weights; default "elu1".
        front: True puts a learned linear layer before the map, x -> W x with W_q `[H, D, D]` and W_k
            `[Hkv, D, D]`, the identity at the start; default False.
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
        half_life: float = 16384.0,
        shortest: float | None = None,
    ) -> None:
        super().__init__(site)
        if not 1 <= half_life < math.inf:
            raise OptionError(f"half_life must be at least 1 token, got {half_life}")
        if shortest is not None and not 1 <= shortest <= half_life:
            raise OptionError(
                f"shortest must be from 1 token to half_life, which is {half_life:g}, got {shortest:g}"
            )
        heads, value_dim = site.require("kv_heads", "value_dim", reason="so it can have no gates")
        self.use_map(feature_map, front, site)
        gates = [TEMPERATURE * math.log(0.5) / life for life in _lives(heads, shortest, half_life)]
        self.weight = nn.Parameter(torch.zeros(heads, value_dim))
        # log sigmoid(b) is the gate
        self.bias = nn.Parameter(torch.tensor([gate - math.log(-math.expm1(gate)) for gate in gates]))

    def log_decay(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the logarithm of g_t, `[B, Hkv, N]`."""
        weight, bias = self.weight.to(value.dtype), self.bias.to(value.dtype)
        logit = torch.einsum("bhnd,hd->bhn", value, weight) + bias[:, None]
        return nn.functional.logsigmoid(logit) / TEMPERATURE

    def gate(self) -> Gate:
        """Return the weights of g_t for kernels."""
        return Gate(self.weight.float().contiguous(), self.bias.float().contiguous(), TEMPERATURE)


def _lives(heads: int, shortest: float | None, longest: float) -> list[float]:
    """Spread half-lives from the shortest to the longest in equal ratios."""
    first = longest if shortest is None or heads == 1 else shortest
    return [first * (longest / first) ** (head / max(1, heads - 1)) for head in range(heads)]
