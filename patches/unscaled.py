"""unscaled: scores without 1 / sqrt(d)."""

from hf_linattn.attention import Modifier
from hf_linattn.registry import register


@register("unscaled")
class Unscaled(Modifier):
    """Scores without the factor 1 / sqrt(d): s_ij = q_i . k_j.

    Whatever factor the model has (d^-0.5 in most, another number in granite or gemma) becomes 1. The same as
    `scaled` with exponent 0.

    Use: to see why the factor is there: scores grow by sqrt(d), softmax turns into a maximum, and its
        gradient vanishes. Models trained so, as T5, put the factor into their initialisation.

    Source: Su 2021, kexue.fm/archives/8620; "Attention Is All You Need", Vaswani et al. 2017,
        arXiv:1706.03762, section 3.2.1.
    """

    def scaling(self, scaling: float, head_dim: int) -> float:
        """1."""
        return 1.0
