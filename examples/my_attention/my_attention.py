"""sparsemax: weights that are exactly zero for most keys."""

import torch
from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, AttentionSite, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("sparsemax")
class Sparsemax(ScoreAttention):
    """The nearest point of the simplex in place of softmax: most weights are exactly 0.

    w_i = argmin_p ||p - scale s_i||^2 over p >= 0, sum_j p_j = 1;  w_ij = max(scale s_ij - tau_i, 0)

    Options:
        scale: factor of the scores, above 0, default 1; the larger, the fewer keys.

    Use: to see how few keys each query needs; fine-tune it, gradients reach the chosen keys alone.

    Source: "From Softmax to Sparsemax", Martins and Astudillo 2016, arXiv:1602.02068, algorithm 1.
    """

    supports = SCORE_EXTRAS  # no sinks: there is no denominator to add one to

    def __init__(self, site: AttentionSite, *, scale: float = 1.0) -> None:
        super().__init__(site)
        if scale <= 0:
            raise OptionError(f"scale must be above 0, got {scale}")
        self.scale = scale

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """`[B, H, N, S]` -> the same; rows that see nothing are 0."""
        scores = scores * self.scale
        hidden = torch.zeros_like(scores, dtype=torch.bool) if mask is None else ~mask
        low = scores.masked_fill(hidden, -1e9)
        ordered = low.sort(-1, descending=True).values
        rank = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
        excess = ordered.cumsum(-1) - 1
        support = (rank * ordered > excess).sum(-1, keepdim=True)
        tau = excess.gather(-1, support - 1) / support
        return (low - tau).clamp_min(0).masked_fill(hidden, 0)
