"""relu_n: ReLU of the scores over a power of the number of visible keys."""

from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, AttentionSite, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.ops.softmax import visible_count
from hf_linattn.registry import register


@register("relu_n")
class ReluN(ScoreAttention):
    """ReLU of the scores over the number of visible keys, point by point: no row sum.

    o_i = sum_j n_i^-power relu(s_ij) v_j,  n_i the number of keys that query i sees

    The weights of a row need not sum to 1, and scores that are all negative give 0. The paper takes the
    sequence's length, which is n_i in an encoder.

    Options:
        power: exponent of n_i; 0 to 2, default 1. The paper found about 1 to be best.

    Use: a cheaper point-wise weight where there is room to fine-tune; published for vision encoders.

    Source: "Replacing softmax with ReLU in Vision Transformers", Wortsman et al. 2023, arXiv:2309.08586.
    """

    supports = SCORE_EXTRAS

    def __init__(self, site: AttentionSite, *, power: float = 1.0) -> None:
        super().__init__(site)
        if not 0 <= power <= 2:
            raise OptionError(f"power must be from 0 to 2, got {power}")
        self.power = power

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """n^-power relu(s); 0 where not visible."""
        count = visible_count(scores, mask)
        if mask is not None:
            scores = scores.masked_fill(~mask, 0)
        return scores.relu() / count**self.power
