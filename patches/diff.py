"""diff: differential attention, which cannot be a patch; the name says why."""

from hf_linattn.attention import Attention
from hf_linattn.registry import register


@register("diff")
class Diff(Attention):
    """Differential attention: the difference of two softmaxes. Not a patch.

    o_i = sum_j (softmax(s1)_ij - lambda softmax(s2)_ij) v_j

    Source: "Differential Transformer", Ye et al. 2024, arXiv:2410.05258.
    """

    refused = (
        "differential attention (arXiv:2410.05258) takes the difference of two softmaxes, and so two query "
        "and two key projections per head that a pretrained model does not have. Models of type diffllama "
        "have them; softmax1 and logn patch both of their softmaxes."
    )
