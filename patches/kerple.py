"""kerple: scores lowered by a learned function of the distance."""

from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.registry import register

LEAST = 0.01


@register("kerple")
class Kerple(Modifier):
    """KERPLE: each head learns how its scores fall with the distance, as a logarithm or a power.

    log:   s'_ij = s_ij - r1_h log(1 + r2_h |i - j|),  r1, r2 > 0
    power: s'_ij = s_ij - r1_h |i - j|^r2_h,           r1 > 0, 0 < r2 < 2

    r1 = exp(a_h); r2 = exp(b_h) for log and 2 sigmoid(b_h) for power, so that no step leaves the range (the
    paper's code clamps). They start as there: for log r1 from U(0, 2) and r2 from U(0, 1), for power r1 from
    U(0, 1) and r2 from U(0, 2), at least 0.01. Distances count visible tokens: padding and other documents do
    not.

    Options:
        kind: "log" (default, the better one in the paper) or "power".
        seed: of the start, from 0 to 2^31 - 1, default 0; each module has its own.
        rope: true (default) leaves the model's rotary embedding in place; false switches it off.

    Use: as alibi, where there is something to train on: the log keeps more of what is far.

    Source: "KERPLE", Chi et al. 2022, arXiv:2205.09921, and its code for the start.
    """

    group = "position"

    def __init__(
        self, site: AttentionSite, *, kind: Literal["log", "power"] = "log", seed: int = 0, rope: bool = True
    ) -> None:
        super().__init__(site)
        [heads] = site.require("heads", reason="and each has r1 and r2")
        self.kind, self.rope = kind, rope
        first, second = torch.rand((2, heads), generator=site.generator(seed), device="cpu")
        if kind == "log":
            self.raw_r1 = nn.Parameter((2 * first).clamp_min(LEAST).log())
            self.raw_r2 = nn.Parameter(second.clamp_min(LEAST).log())
        else:
            self.raw_r1 = nn.Parameter(first.clamp_min(LEAST).log())
            self.raw_r2 = nn.Parameter(second.logit(eps=LEAST / 2))

    def score_bias(self, distance: Tensor) -> Tensor:
        """Return what is below 0 in the formulas."""
        far = distance.abs()[:, None]
        r1, r2 = (x.to(far.dtype)[:, None, None] for x in (self.raw_r1, self.raw_r2))
        if self.kind == "log":
            return -r1.exp() * (r2.exp() * far).log1p()
        return -r1.exp() * far ** (2 * r2.sigmoid())
