"""softmax_features: linear attention whose features are a softmax over the head's dimensions."""

from torch import Tensor

from hf_linattn.attention import LinearAttention
from hf_linattn.registry import register

from ._feature_maps import clamp_floor

FLOOR = 1e-12
"""Least feature, so that a query and a key that point to different dimensions still meet in float32."""


@register("softmax_features")
class SoftmaxFeatures(LinearAttention):
    """Linear attention with phi(x) = softmax(x) over the features of each token: positive, no parameters.

    o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j),  phi(x)_d = exp(x_d) / sum_c exp(x_c)

    A query picks dimensions, and a key says how much of it lies in each. Features are held above 1e-12. Where
    keys take their softmax over positions instead, see `efficient`.

    Use: as elu1, where features should compete; saturates where a model's queries and keys are large.

    Source: Su 2020, kexue.fm/archives/7546, after "Efficient Attention", Shen et al. 2018, arXiv:1812.01243,
        and "A2-Nets", Chen et al. 2018, arXiv:1810.11579: two softmaxes in place of one.
    """

    def feature_map(self, x: Tensor) -> Tensor:
        """Softmax over D."""
        return clamp_floor(x.softmax(-1), FLOOR)
