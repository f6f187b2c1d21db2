"""scaled: scores times another power of the head size."""

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("scaled")
class Scaled(Modifier):
    """Scores times d^-exponent, d the size of a head, in place of the model's own factor.

    s_ij = d^-exponent q_i . k_j

    0.5 is the usual factor and changes nothing in most models; 1 is muP's, under which scores keep their size
    as heads grow wider; 0 is `unscaled`.

    Options:
        exponent: 0 to 2, default 0.5.

    Use: to measure what the size of the scores does. A pretrained model needs fine-tuning for any other value
        than its own.

    Source: "Tensor Programs V" (muP), Yang et al. 2022, arXiv:2203.03466, definition 4.1; Su 2021,
        kexue.fm/archives/8620.
    """

    def __init__(self, site: AttentionSite, *, exponent: float = 0.5) -> None:
        super().__init__(site)
        if not 0 <= exponent <= 2:
            raise OptionError(f"exponent must be from 0 to 2, got {exponent}")
        self.exponent = exponent

    def scaling(self, scaling: float, head_dim: int) -> float:
        """d^-exponent."""
        return float(head_dim**-self.exponent)
