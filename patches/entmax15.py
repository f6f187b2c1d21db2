"""entmax15: weights that are exactly 0 for keys that score low."""

from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, ScoreAttention
from hf_linattn.ops.softmax import sink_column, visible_count
from hf_linattn.registry import register


@register("entmax15")
class Entmax15(ScoreAttention):
    """1.5-entmax in place of softmax: sparse weights, exactly 0 below a threshold that the scores set.

    w_ij = max(0, s_ij / 2 - tau_i)^2, tau_i such that they sum to 1

    As the context grows, softmax gives a share to every key; here keys that score low get none, however many
    they are. A model's own sink is one more key of value 0.

    Options:
        scale: "none" (default), or "learned": scores times d_h + b_h log n_i, with n_i the keys that query i
            sees, d = 1 and b = 0 at the start (ASEntmax, with its exponent of log n held at 1).

    Use: to find single tokens in long contexts; a pretrained model needs fine-tuning. All keys are sorted for
        each query: quadratic, and slower than softmax.

    Source: "Sparse Sequence-to-Sequence Models", Peters, Niculae and Martins 2019, arXiv:1905.05702, section
        3.3; "Long-Context Generalization with Sparse Attention", Vasylenko et al. 2025, arXiv:2506.16640,
        section 4 (learned).
    """

    def __init__(self, site: AttentionSite, *, scale: Literal["none", "learned"] = "none") -> None:
        super().__init__(site)
        self.learned = scale == "learned"
        if self.learned:
            [heads] = site.require("heads", reason="and each has a scale")
            self.factor = nn.Parameter(torch.ones(heads))
            self.log_factor = nn.Parameter(torch.zeros(heads))

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """Weights `[B, H, N, S]`; 0 where not visible."""
        if self.learned:
            factor, slope = (x.to(scores)[:, None, None] for x in (self.factor, self.log_factor))
            scores = scores * (factor + slope * visible_count(scores, mask).log())
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sink is None:
            return entmax15(scores)
        column = sink_column(sink, scores).expand(*scores.shape[:3], 1)
        return entmax15(torch.cat([scores, column], -1))[..., :-1]


def entmax15(scores: Tensor) -> Tensor:
    """Compute 1.5-entmax over the last axis, `[..., S]`; 0 where a score is -inf, and in rows of such alone.

    The threshold comes from the keys above it (arXiv:1905.05702, algorithm 2): those are found in sorted
    order, without gradients, and the threshold is computed of them again, with gradients.
    """
    top = scores.amax(-1, keepdim=True).detach()
    half = (scores - top.clamp_min(torch.finfo(scores.dtype).min)) / 2
    with torch.no_grad():
        ordered = half.sort(-1, descending=True).values.clamp_min(-2)  # of which none is above: tau >= -1
        count = torch.arange(1, half.shape[-1] + 1, device=half.device, dtype=half.dtype)
        mean, spread = _moments(ordered.cumsum(-1), ordered.square().cumsum(-1), count)
        threshold = mean - ((1 - spread) / count).clamp_min(0).sqrt()
        support = (threshold <= ordered).sum(-1, keepdim=True)
        above = half >= ordered.gather(-1, (support - 1).clamp_min(0))
        count = above.sum(-1, keepdim=True).to(half.dtype).clamp_min(1)
    seen = torch.where(above, half, 0.0)
    mean, spread = _moments(seen.sum(-1, keepdim=True), seen.square().sum(-1, keepdim=True), count)
    threshold = mean - ((1 - spread) / count).sqrt()
    return torch.where(above, (half - threshold).clamp_min(0), 0.0).square()


def _moments(total: Tensor, squares: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean, and the sum of squares about it."""
    mean = total / count
    return mean, squares - total * mean
