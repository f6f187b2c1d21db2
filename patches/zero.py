"""zero: no attention at all."""

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention
from hf_linattn.registry import register


@register("zero")
class Zero(LinearAttention):
    """No attention: every head gives zeros, so a token knows only itself.

    o_i = 0

    Use: as a floor in comparisons. What a converted model does better than the same model converted to this
        is what its attention carries; where it does no better, the rest of the model does the work.

    Source: arXiv:2510.05901, table 4, where the floor of converted models is their attention put to zero.
    """

    group = "floor"
    features = 1
    sum_normalised = False

    def feature_map(self, x: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(x[..., :1])

    def denominator(self, total: Tensor, count: Tensor | None) -> Tensor:
        """Infinity."""
        return torch.full_like(total, torch.inf)
