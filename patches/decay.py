"""decay: linear attention whose state fades at a fixed rate per head."""

import math
from typing import Literal

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

from ._feature_maps import NamedMapAttention


@register("decay")
class Decay(NamedMapAttention):
    """Linear attention with a fixed decay per head, so that old tokens fade.

    o_i = sum_{j<=i} g_h^(i-j) (phi(q_i) . phi(k_j)) v_j / sum_{j<=i} g_h^(i-j) phi(q_i) . phi(k_j)

    RetNet and Lightning divide by norms instead of the sum; a pretrained output projection expects averages
    of values. Theirs is normalise="none" with "+output_norm", and feature_map="cosine" for keys and queries
    of length 1 (as HALO converts models).
    Heads that share a key share its rate. Padding does not age anything: i - j counts visible tokens.

    Options:
        feature_map: phi, the map of another linear patch with its learned weights, such as "hedgehog" or
            "taylor2(features=8)"; default "elu1".
        front: True puts a learned linear layer before the map, x -> W x with W_q `[H, D, D]` and W_k
            `[Hkv, D, D]`, the identity at the start; default False.
        rates: "retnet" (default), g_h = 1 - 2^(-5 - h), heads spread over 2^-5 .. 2^-12; or "lightning",
            g_h = exp(-2^(-8 (h + 1) / H)), ALiBi's slopes.
        half_life: tokens after which a past token counts half, the same for all heads; any number above 0,
            in place of `rates`.
        normalise: "sum" (default), the denominator above; "none", no denominator: maps may then be negative.

    Use: where recent text matters most and a plain sum blurs it; long contexts then cost nothing, but nothing
        older than a few half-lives is remembered.

    Source: "Retentive Network", Sun et al. 2023, arXiv:2307.08621, equations 5 and 8; "Lightning
        Attention-2", Qin et al. 2024, arXiv:2401.04658; HALO, arXiv:2601.22156 (conversion).
    """

    fixed_decay = True
    takes_own_heads = True
    group = "state that forgets"
    directions = "causal"
    direction_reason = "a state that fades has one direction, from past to future"

    def __init__(
        self,
        site: AttentionSite,
        *,
        feature_map: str = "elu1",
        front: bool = False,
        rates: Literal["retnet", "lightning"] = "retnet",
        half_life: float | None = None,
        normalise: Literal["sum", "none"] = "sum",
    ) -> None:
        super().__init__(site)
        if half_life is not None and not 0 < half_life < math.inf:
            raise OptionError(f"half_life must be a number of tokens above 0, got {half_life}")
        if half_life is not None and rates != "retnet":
            raise OptionError("rates and half_life say the same thing twice: give one of them")
        [heads] = site.require("kv_heads", reason="so there are no rates")
        self.sum_normalised = normalise == "sum"
        self.use_map(feature_map, front, site)
        self.heads, self.rates, self.half_life = heads, rates, half_life

    def denominator(self, total: Tensor, count: Tensor | None) -> Tensor:
        """The sum, or 1."""
        return total if self.sum_normalised else torch.ones_like(total)

    def log_decay(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the logarithm of g_h, the same at every token, in float32 (float64 in float64 models)."""
        dtype = torch.promote_types(key.dtype, torch.float32)
        return self.log_rates(dtype, key.device)[None, self.key_heads, None].expand(1, -1, key.shape[2])

    def log_rates(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Compute the logarithms of g_h, `[Hkv]`, where they are used: to copy them a device would wait."""
        if self.half_life is not None:
            return torch.full((self.heads,), math.log(0.5) / self.half_life, dtype=dtype, device=device)
        head = torch.arange(self.heads, dtype=dtype, device=device)
        if self.rates == "retnet":
            return (-(-5 - 7 * head / max(1, self.heads - 1)).exp2()).log1p()
        return -(-8 * (head + 1) / self.heads).exp2()
