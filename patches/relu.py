"""relu: linear attention whose feature map is relu(x), held a little above 0."""

from torch import Tensor

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

LEAST, MOST = 1e-12, 1e6
"""Of eps: sums of its square are still far from where float32 ends."""


@register("relu")
class Relu(LinearAttention):
    """Linear attention with phi(x) = relu(x) + eps: features of other signs do not meet; no parameters.

    o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j),  phi(x) = max(x, 0) + eps

    Because of eps every row is an average: a query without positive features weights keys by the sum of
    theirs. With eps = 0 a query that shares none with any visible key would be 0 / 0.

    Options:
        eps: added to every feature; from 1e-12 to 1e6, default 0.001 as in Performer's ReLU kernel.

    Use: as elu1, where sparser and so more selective weights are wanted; the cheapest map there is.

    Source: "Rethinking Attention with Performers", Choromanski et al. 2020, arXiv:2009.14794, and its code
        (ReLU kernel, without a projection).
    """

    fused = "relu"

    def __init__(self, site: AttentionSite, *, eps: float = 1e-3) -> None:
        super().__init__(site)
        if not LEAST <= eps <= MOST:
            raise OptionError(f"eps must be between {LEAST:g} and {MOST:g}, got {eps}")
        self.eps = eps

    def feature_map(self, x: Tensor) -> Tensor:
        """max(x, 0) + eps."""
        return x.relu() + self.eps
