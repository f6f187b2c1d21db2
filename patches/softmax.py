"""softmax: the attention that pretrained models come with."""

from hf_linattn.attention import ScoreAttention
from hf_linattn.registry import register


@register("softmax")
class Softmax(ScoreAttention):
    """The model's own attention, untouched: the identity, for plans per layer and as the base of modifiers.

    o_i = sum_j exp(s_ij) v_j / sum_j exp(s_ij),  s_ij = scaling q_i . k_j

    Use: in plans per layer, for layers that stay, and as the base of modifiers.

    Source: "Attention Is All You Need", Vaswani et al. 2017, arXiv:1706.03762, equation 1.
    """

    identity = True
