"""taylor2: linear attention with exp to second order, on few dimensions per head."""

import math

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("taylor2")
class Taylor2(LinearAttention):
    """Linear attention with weights 1 + s + s^2 / 2: exp to second order, on a reduced head dimension.

    o_i = sum_j w_ij v_j / sum_j w_ij,  w_ij = 1 + s_ij + s_ij^2 / 2,  s_ij = (P_q q_i) . (P_k k_j) / sqrt(d)

    With x = P k / d^(1/4): phi = [1, x_a, x_a^2 / sqrt(2), x_a x_b for a < b], 1 + d + d (d + 1) / 2
    features, half as many as all products. Weights are at least 1/2. P_q `[H, d, D]` and P_k `[Hkv, d, D]`
    are learned; they start orthogonal, equal for queries and keys, and scaled so that on average s_ij is
    q_i . k_j / sqrt(D). Where D <= d there is no projection.

    Options:
        features: d, dimensions per head after the projection; at least 1, default 16 as in Based.

    Use: where recall matters more than the size of the state: with 16 it holds 153 features per head. The
        projection wants fine-tuning.

    Source: "Simple linear attention language models balance the recall-throughput tradeoff" (Based), Arora et
        al. 2024, arXiv:2402.18668.
    """

    def __init__(self, site: AttentionSite, *, features: int = 16) -> None:
        super().__init__(site)
        if features < 1:
            raise OptionError(f"features must be at least 1, got {features}")
        [head_dim] = site.require("head_dim", reason="so it can have no features")
        size = min(features, head_dim)
        self.features = 1 + size + size * (size + 1) // 2
        self.query_weight: nn.Parameter | None = None
        self.key_weight: nn.Parameter | None = None
        if head_dim > features:
            self._project(site, features, head_dim)

    def _project(self, site: AttentionSite, size: int, head_dim: int) -> None:
        heads, kv_heads = site.require("heads", "kv_heads", reason="so it can have no projections")
        weight = torch.empty(kv_heads, size, head_dim, dtype=torch.float32, device="cpu")
        generator = site.generator()
        for head in weight:
            # orthogonal rows shrink dot products by d / D
            nn.init.orthogonal_(head, (head_dim / size) ** 0.25, generator)
        self.key_weight = nn.Parameter(weight)
        self.query_weight = nn.Parameter(weight.repeat_interleave(heads // kv_heads, 0))

    def query_map(self, query: Tensor) -> Tensor:
        """Map queries to phi(P_q q)."""
        return self._mapped(query, self.query_weight)

    def key_map(self, key: Tensor) -> Tensor:
        """Map keys to phi(P_k k)."""
        return self._mapped(key, self.key_weight)

    def _mapped(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is not None:
            x = torch.einsum("bhnd,hfd->bhnf", x, weight.to(x.dtype))
        x = x * x.shape[-1] ** -0.25
        first, second = torch.triu_indices(x.shape[-1], x.shape[-1], 1, device=x.device)
        squares, products = x * x / math.sqrt(2), x[..., first] * x[..., second]
        return torch.cat([torch.ones_like(x[..., :1]), x, squares, products], -1)
