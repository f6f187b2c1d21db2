"""softmax1: softmax with 1 added to the denominator."""

import torch
from torch import Tensor

from hf_linattn.attention import ScoreAttention
from hf_linattn.registry import register


@register("softmax1")
class Softmax1(ScoreAttention):
    """Softmax with 1 added to its denominator, so that a head may attend to nothing; no parameters.

    o_i = sum_j exp(s_ij) v_j / (1 + sum_j exp(s_ij)),  s_ij = scaling q_i . k_j

    The same as an extra key of logit 0 and value 0. A model that has sinks b_h of its own keeps them: the
    denominator becomes 1 + exp(b_h) + sum.

    Source: "Attention Is Off By One", Miller 2023, evanmiller.org/attention-is-off-by-one.html.
    """

    def sink_logit(self, query: Tensor) -> Tensor:
        """0."""
        return torch.zeros((), dtype=query.dtype, device=query.device)
