"""topk: softmax over the largest scores of each query."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, SINKS, AttentionSite, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.ops.softmax import softmax_weights
from hf_linattn.ops.tracing import exporting
from hf_linattn.registry import register


@register("topk")
class TopK(ScoreAttention):
    """Explicit sparse attention: softmax over the k largest scores of each query.

    o_i = sum_{j in V(i)} exp(s_ij) v_j / sum_{j in V(i)} exp(s_ij)
    V(i) = {j visible: s_ij >= t_i},  t_i the k-th largest score of query i

    Keys that tie with the k-th are all kept, so a query may see more than k; one that sees k keys or fewer
    keeps all. A model's own sinks stay in the denominator and are none of the k. Every score is computed
    before most are dropped, so nothing gets faster.

    Options:
        k: keys kept; at least 1, default 64.

    Use: to ask how few keys a trained model needs, or against scores that blur over long contexts. The choice
        has no gradient: keys that are not chosen learn nothing from that query.

    Source: "Explicit Sparse Transformer", Zhao et al. 2019, arXiv:1912.11637, the mask M(P, k).
    """

    group = "sparse"
    windowed = False
    supports = SCORE_EXTRAS | SINKS

    def __init__(self, site: AttentionSite, *, k: int = 64) -> None:
        super().__init__(site)
        if k < 1:
            raise OptionError(f"k must be at least 1 key, got {k}")
        self.k = k

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """Compute softmax behind a threshold of each row."""
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        exported = exporting()
        if exported or self.k < scores.shape[-1]:
            # a graph for all lengths has k keys to choose from in each
            ranked = F.pad(scores, (0, self.k), value=float("-inf")) if exported else scores
            kth = torch.topk(ranked.detach(), self.k, sorted=True).values[..., -1:]
            scores = scores.masked_fill(scores < kth, float("-inf"))
        return softmax_weights(scores, None, sink)
