"""sigmoid_n: sigmoid of the scores, held down by the number of visible keys."""

from typing import Literal

from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, AttentionSite, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.ops.softmax import visible_count
from hf_linattn.registry import register

MOST = 10000
"""Of the bias: a sigmoid that is 0 or 1 everywhere long before, in numbers that no dtype overflows at."""


@register("sigmoid_n")
class SigmoidN(ScoreAttention):
    """Sigmoid attention: each key is weighed by itself, with a bias of -log n so that a row sums to about 1.

    o_i = sum_j sigmoid(s_ij + b) v_j,  b = -log n_i,  n_i the number of keys that query i sees
    with over_n: o_i = sum_j sigmoid(s_ij + b) v_j / n_i

    At s = 0 the weight is 1 / (1 + n_i), as softmax gives. The paper takes the length of the sequence for n.

    Options:
        bias: "-log n" (default), or a number from -10000 to 10000 for b.
        over_n: divide by n_i instead (default false); `bias` must then be a number.

    Use: a drop-in that competes with softmax after training; heads may attend to nothing. A pretrained model
        needs fine-tuning.

    Source: "Theory, Analysis, and Best Practices for Sigmoid Self-Attention", Ramapuram et al. 2024,
        arXiv:2409.04431.
    """

    supports = SCORE_EXTRAS

    def __init__(
        self, site: AttentionSite, *, bias: float | Literal["-log n"] = "-log n", over_n: bool = False
    ) -> None:
        super().__init__(site)
        if not isinstance(bias, str) and not abs(bias) <= MOST:
            raise OptionError(f'bias must be "-log n" or a number between -{MOST} and {MOST}, got {bias}')
        if over_n and isinstance(bias, str):
            raise OptionError(
                "over_n divides by n, and bias '-log n' does so too: give bias a number, e.g. 0.0"
            )
        self.bias, self.over_n = bias, over_n

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """The sigmoid; 0 where not visible."""
        count = visible_count(scores, mask)
        shift = -count.log() if isinstance(self.bias, str) else self.bias
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = (scores + shift).sigmoid()
        return weights / count if self.over_n else weights
