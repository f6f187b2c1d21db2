"""strided: softmax over the nearest tokens and every stride-th one before them."""

from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, SINKS, AttentionSite, Call, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("strided")
class Strided(ScoreAttention):
    """Sparse Transformer's strided pattern: a local window and every stride-th token.

    o_i = sum_{j in V(i)} exp(s_ij) v_j / sum_{j in V(i)} exp(s_ij)
    V(i) = {j visible: |i - j| < window or (i - j) mod stride = 0}

    i - j counts visible tokens. With window = stride, two layers reach every token. All heads see both parts
    (the paper's merged head). This implementation masks: the pattern can be studied, its speed is not gained.

    Options:
        stride: tokens between the far keys; at least 1, default 128.
        window: nearest tokens seen, the own one included; at least 1, default `stride`.

    Use: where text has a period (tables, images, music) or as local attention with a thin view of the past.
        The far keys are chosen by place, not by content: in plain text most are irrelevant.

    Source: "Generating Long Sequences with Sparse Transformers", Child et al. 2019, arXiv:1904.10509, section
        4.3; local and atrous attention in one: Su 2019, kexue.fm/archives/6853.
    """

    group = "sparse"
    cross = False
    windowed = False
    supports = (SCORE_EXTRAS | SINKS) - {"indices", "attention_mask"}

    def __init__(self, site: AttentionSite, *, stride: int = 128, window: int | None = None) -> None:
        super().__init__(site)
        if stride < 1:
            raise OptionError(f"stride must be at least 1 token, got {stride}")
        if window is not None and window < 1:
            raise OptionError(f"window must be at least 1 token, got {window}")
        self.stride, self.window = stride, stride if window is None else window

    def select(self, call: Call) -> Tensor:
        """Choose the keys that are near or a multiple of the stride away, `[B or 1, 1, N, S]`."""
        distance = call.distance()[:, None]
        return (distance.abs() < self.window) | (distance % self.stride == 0)
