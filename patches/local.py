"""local: softmax inside blocks of tokens and the blocks beside them."""

from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, SINKS, AttentionSite, Call, ScoreAttention
from hf_linattn.errors import OptionError
from hf_linattn.registry import register


@register("local")
class Local(ScoreAttention):
    """Block-local softmax: a token sees its own block of tokens and the one before.

    o_i = sum_{j in V(i)} exp(s_ij) v_j / sum_{j in V(i)} exp(s_ij)
    V(i) = {j visible: |floor(i / size) - floor(j / size)| <= before}

    i and j count visible tokens. Encoders also see the blocks after. How far a token sees depends on its
    place in its block. This implementation masks: the pattern can be studied, its speed is not gained.

    Options:
        size: tokens in a block; at least 1, default 128.
        before: blocks seen before the own one, in encoders also after it; at least 0, default 1.

    Use: to measure how much of a model's quality is local, or as the cheap layers of a hybrid. Text is blind
        beyond the blocks: `before` = 0 cuts it into pieces that never meet.

    Source: "Image Transformer", Parmar et al. 2018, arXiv:1802.05751, "Local Self-Attention" (query blocks
        that see memory blocks); `before` = 0: the local attention of Liu et al. 2018, arXiv:1801.10198,
        section 4.2.4.
    """

    group = "sparse"
    cross = False
    windowed = False
    supports = (SCORE_EXTRAS | SINKS) - {"indices", "attention_mask"}

    def __init__(self, site: AttentionSite, *, size: int = 128, before: int = 1) -> None:
        super().__init__(site)
        if size < 1:
            raise OptionError(f"size must be at least 1 token, got {size}")
        if before < 0:
            raise OptionError(f"before must be at least 0 blocks, got {before}")
        self.size, self.before = size, before

    def select(self, call: Call) -> Tensor:
        """Choose the keys of near blocks, `[B or 1, 1, N, S]`."""
        query, key = (rank // self.size for rank in call.ranks())
        return ((query[:, :, None] - key[:, None]).abs() <= self.before)[:, None]
