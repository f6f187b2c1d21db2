"""hedgehog: linear attention with a learned map [softmax(W x), softmax(-W x)]."""

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.ops.types import SoftmaxMap
from hf_linattn.registry import register

from ._feature_maps import clamp_floor

FLOOR = 1e-12
"""Least feature, as in LoLCATs' code, so that every query meets every key."""


@register("hedgehog")
class Hedgehog(LinearAttention):
    """Linear attention with a learned map phi(x) = [softmax(W x), softmax(-W x)] per head: 2 D features.

    o_i = sum_j (phi_q(q_i) . phi_k(k_j)) v_j / sum_j phi_q(q_i) . phi_k(k_j)

    Softmax is over the features of a token. W_q `[H, D, D]` and W_k `[Hkv, D, D]` start as the identity.
    Features are held above 1e-12.

    Use: to imitate softmax attention: spiky weights that grow with q . k. Made for training the maps against
        the attention of the unpatched model first, and fine-tuning after that.

    Source: "The Hedgehog & the Porcupine", Zhang et al. 2024, arXiv:2402.04347; in the form of "LoLCATs",
        Zhang et al. 2024, arXiv:2410.10254, and its code.
    """

    default_for = "conversion"

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site)
        sizes = ("head_dim", "heads", "kv_heads")
        head_dim, heads, kv_heads = site.require(*sizes, reason="so it can have no learned map")
        self.features = 2 * head_dim
        identity = torch.eye(head_dim)
        self.query_weight = nn.Parameter(identity.repeat(heads, 1, 1))
        self.key_weight = nn.Parameter(identity.repeat(kv_heads, 1, 1))

    def query_map(self, query: Tensor) -> Tensor:
        """Map queries by phi_q."""
        return self._mapped(query, self.query_weight)

    def key_map(self, key: Tensor) -> Tensor:
        """Map keys by phi_k."""
        return self._mapped(key, self.key_weight)

    def softmax_map(self) -> SoftmaxMap:
        """Return the weights of the maps for kernels."""
        return SoftmaxMap(self.query_weight, self.key_weight, FLOOR)

    def _mapped(self, x: Tensor, weight: Tensor) -> Tensor:
        x = torch.einsum("bhnd,hfd->bhnf", x, weight.to(x.dtype))
        return clamp_floor(torch.stack([x, -x], -2).softmax(-1).flatten(-2), FLOOR)
