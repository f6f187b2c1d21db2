"""taylor: linear attention with weights 1 + cos(q, k)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.registry import register


@register("taylor")
class Taylor(LinearAttention):
    """Linear attention with weights 1 + cos(q_i, k_j): exp to first order on unit vectors; no parameters.

    o_i = sum_j (1 + cos(q_i, k_j)) v_j / sum_j (1 + cos(q_i, k_j)),  phi(x) = [1, x / |x|]

    Weights lie between 0 and 2, so rows are close to averages. A zero vector has cosine 0.

    Use: as a baseline, or where few keys are visible. It cannot focus: beside n keys that are orthogonal to
        the query, another one gets at most 2 / (n + 2).

    Source: Su 2020, kexue.fm/archives/7546 (Taylor expansion, with normalised queries and keys).
    """

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site)
        self.features = None if site.head_dim is None else site.head_dim + 1

    def feature_map(self, x: Tensor) -> Tensor:
        """[1, x / |x|]."""
        unit = F.normalize(x, dim=-1)
        # a little above 1, so that rounding leaves weights above 0 where a key opposes the query
        one = torch.full_like(unit[..., :1], 1 + 8 * torch.finfo(x.dtype).eps)
        return torch.cat([one, unit], -1)
