"""alibi: scores lowered in proportion to the distance."""

import math

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.registry import register


@register("alibi")
class Alibi(Modifier):
    """ALiBi: each head lowers its scores in proportion to the distance, with a slope of its own.

    s'_ij = s_ij - m_h |i - j|,  m_h = 2^(-8 h / H), h = 1..H

    Where H is no power of two: the slopes of the next smaller power P, then every other slope of 2P. In
    encoders both sides fade alike. Distances count visible tokens: padding and other documents do not. The
    slopes are constants.

    Options:
        rope: true (default) leaves the model's rotary embedding in place; false switches it off.

    Use: to make a model look at what is near, so that longer texts do not confuse it: closer to a soft window
        than to a longer memory. With rope=False the scores lose all they knew of position: fine-tune.

    Source: "Train Short, Test Long", Press et al. 2021, arXiv:2108.12409, section 3, and its code for other
        numbers of heads.
    """

    group = "position"
    takes_own_heads = True

    def __init__(self, site: AttentionSite, *, rope: bool = True) -> None:
        super().__init__(site)
        [self.heads] = site.require("heads", reason="and each has a slope")
        self.rope = rope

    def score_bias(self, distance: Tensor) -> Tensor:
        """Return -m_h |i - j|."""
        return -self.slopes(distance)[self.query_heads, None, None] * distance.abs()[:, None]

    def slopes(self, like: Tensor) -> Tensor:
        """Compute m_h, `[H]`, where they are used: a buffer in bfloat16 would round them."""
        power = 2 ** math.floor(math.log2(self.heads))
        first = torch.arange(1, power + 1, dtype=like.dtype, device=like.device) / power
        others = torch.arange(self.heads - power, dtype=like.dtype, device=like.device)
        return (-8 * torch.cat([first, (2 * others + 1) / (2 * power)])).exp2()
