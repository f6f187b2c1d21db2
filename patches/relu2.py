"""relu2: squared ReLU of the scores over the number of visible keys."""

import math
from typing import Literal

from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, AttentionSite, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.ops.softmax import visible_count
from hf_linattn.registry import register


@register("relu2")
class Relu2(ScoreAttention):
    """Squared ReLU of the scores over the number of visible keys: no exponential, no row sum, exact zeros.

    o_i = sum_j relu(s_ij)^2 v_j / n_i,  n_i the number of keys that query i sees

    The weights of a row need not sum to 1, and scores that are all negative give 0. Weights grow with the
    square of the scores, so scaling matters here more than in softmax.

    Options:
        over: "n" (default) divides by n_i; "n2" by n_i^2, which is relu(s / n)^2 as in the code of FLASH; a
            number above 0 by that number at every length (1.0 leaves the squares as they are).

    Use: to ask what softmax is good for, after fine-tuning. Su measured that it carries over to other lengths
        worse than softmax, and that a fixed divisor (512) then does better than n_i.

    Source: "Transformer Quality in Linear Time" (GAU, FLASH), Hua et al. 2022, arXiv:2202.10447; Su 2022,
        kexue.fm/archives/9019.
    """

    supports = SCORE_EXTRAS

    def __init__(self, site: AttentionSite, *, over: float | Literal["n", "n2"] = "n") -> None:
        super().__init__(site)
        if not isinstance(over, str) and not 0 < over < math.inf:
            raise OptionError(f'over must be "n", "n2" or a number above 0, got {over}')
        self.over = over

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """relu(s)^2 over the divisor; 0 where not visible."""
        root: Tensor | float
        if self.over == "n2":
            root = visible_count(scores, mask)
        elif self.over == "n":
            root = visible_count(scores, mask).sqrt()
        else:
            root = math.sqrt(float(self.over))
        if mask is not None:
            scores = scores.masked_fill(~mask, 0)
        return (scores.relu() / root).square()  # squared last: large squares would overflow
