"""scale_invariant: scores stretched and lowered by distance, so that all ranges of it count alike."""

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, Modifier
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("scale_invariant")
class ScaleInvariant(Modifier):
    """Scores stretched and lowered by distance: the last 10 tokens, 100 and 1,000 count alike.

    s'_ij = a_t s_ij + m_t,  t = |i - j|,  a_t^2 = 1 + 2 log(1 + t / tau),  m_t = 1 - a_t^2

    For scores that are normally distributed with variance 1, the attention to the tokens from t to 2 t away,
    and its sparsity, then do not depend on t. At distance 0 nothing changes. t counts visible tokens: padding
    and other documents have no part in it.

    Options:
        tau: tokens within which little changes, any number above 0, default 10.

    Use: for contexts beyond the training length; needs training, as positions do.

    Source: "Scale-invariant attention", Anson, Wang and Aitchison 2025, arXiv:2505.17083, section 3.
    """

    def __init__(self, site: AttentionSite, *, tau: float = 10.0) -> None:
        super().__init__(site)
        if not 0 < tau < float("inf"):
            raise OptionError(f"tau must be a number of tokens above 0, got {tau}")
        self.tau = tau

    def _squares(self, distance: Tensor) -> Tensor:
        return 1 + 2 * torch.log1p(distance.abs() / self.tau)

    def score_factor(self, distance: Tensor) -> Tensor:
        """a_t, `[B or 1, 1, N, S]`."""
        return self._squares(distance).sqrt().unsqueeze(1)

    def score_bias(self, distance: Tensor) -> Tensor:
        """m_t, `[B or 1, 1, N, S]`."""
        return 1 - self._squares(distance).unsqueeze(1)
