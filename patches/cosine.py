"""cosine: linear attention with weights cos(q, k) over a power of the number of keys."""

import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("cosine")
class Cosine(LinearAttention):
    """Linear attention with signed weights cos(q_i, k_j), over a power of the number of keys; no parameters.

    o_i = sum_j cos(q_i, k_j) v_j / n_i^power,  n_i = number of keys that query i sees

    Weights may be negative, so that values are subtracted as well, and rows do not sum to 1: there is no sum
    to divide by. With power 1 outputs shrink where keys point everywhere; with 0.5 a sum of unrelated keys
    keeps its size at any length; with 0 it grows.

    Options:
        power: of n_i; between 0 and 1, default 1.

    Use: with fine-tuning only: a pretrained model expects averages of values.

    Source: Su 2020, kexue.fm/archives/7546, without the 1 of its Taylor form; division by n as in "Non-local
        Neural Networks", Wang et al. 2018, arXiv:1711.07971, section 3.2.
    """

    needs_visible_count = True
    sum_normalised = False

    def __init__(self, site: AttentionSite, *, power: float = 1.0) -> None:
        super().__init__(site)
        if not 0 <= power <= 1:
            raise OptionError(f"power must be between 0 and 1, got {power}")
        self.power = power

    def feature_map(self, x: Tensor) -> Tensor:
        """The unit vector, and 0 for 0."""
        return F.normalize(x, dim=-1)

    def denominator(self, total: Tensor, count: Tensor | None) -> Tensor:
        """n_i^power."""
        assert count is not None
        return count.to(total.dtype).clamp_min(1).pow(self.power).expand_as(total)
