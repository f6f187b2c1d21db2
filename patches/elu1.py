"""elu1: linear attention whose feature map is elu(x) + 1."""

from torch import Tensor

from hf_linattn.attention import LinearAttention, upcast
from hf_linattn.registry import register


@register("elu1")
class Elu1(LinearAttention):
    """Linear attention with phi(x) = elu(x) + 1: constant-size state, no parameters.

    o_i = phi(q_i)^T S_i / phi(q_i)^T z_i,  S_i = sum_{j<=i} phi(k_j) v_j^T,  z_i = sum_{j<=i} phi(k_j)

    Shapes: query `[B, H, N, D]`, key `[B, Hkv, N, D]`, value `[B, Hkv, N, Dv]`; S `[B, Hkv, D, Dv]` and z
    `[B, Hkv, D]` in float32. Bidirectional and cross-attention sum over all visible keys instead.

    Use: the plainest linear attention, a first try and a baseline; after patching it needs fine-tuning.

    Source: "Transformers are RNNs", Katharopoulos et al. 2020, arXiv:2006.16236, sections 3.2 and 3.3.
    """

    fused = "elu1"

    def feature_map(self, x: Tensor) -> Tensor:
        """elu(x) + 1 = exp(min(x, 0)) + max(x, 0), positive for x > -87."""
        # elu(x) + 1 by that formula rounds to 0 below x = -17 in float32, and the denominator with it
        return x.clamp(max=0).exp() + x.clamp(min=0)

    def query_map(self, query: Tensor) -> Tensor:
        """phi(q) over exp(max_d q_d) where all of q is negative: the same output, no underflow for any q."""
        scale = self.query_log_scale(query).to(query.dtype).unsqueeze(-1)  # one of its numbers
        return (query.clamp(max=0) - scale).exp() + query.clamp(min=0)

    def query_log_scale(self, query: Tensor) -> Tensor:
        """min(max_d q_d, 0), never in 16 bits: exp is taken of differences to it."""
        return upcast(query.detach().amax(-1).clamp(max=0))
