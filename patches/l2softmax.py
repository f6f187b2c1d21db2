"""l2softmax: exponentials of the scores over their L2 norm."""

import torch
from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, ScoreAttention
from hf_linattn.registry import register


@register("l2softmax")
class L2Softmax(ScoreAttention):
    """Softmax with the L2 norm in place of the L1 norm: squared weights sum to 1.

    o_i = sum_j exp(s_ij) v_j / sqrt(sum_j exp(2 s_ij)), that is w_ij = sqrt(softmax(2 s)_ij)

    Uncorrelated values keep their variance at every length. Where all scores are equal the weights sum to
    sqrt(n): outputs of diffuse heads come out larger than softmax's.

    Use: a model with relative positions alone can then count positions, which rows that sum to 1 forbid. In
        Su's pretraining it was slightly worse than softmax in the standard block and slightly better in GAU.

    Source: Su 2022, kexue.fm/archives/9105.
    """

    supports = SCORE_EXTRAS

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """exp(s) over its norm; 0 where not visible."""
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        top = scores.amax(-1, keepdim=True).detach().clamp_min(torch.finfo(scores.dtype).min)
        weights = (scores - top).exp()
        norm = weights.square().sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny).sqrt()
        return weights / norm
