"""power: encoders that drop, layer after layer, the tokens that attention looks at least."""

import math

import torch
from torch import Tensor

from hf_linattn.attention import SCORE_EXTRAS, AttentionSite, ScoreAttention
from hf_linattn.attention.base import Output
from hf_linattn.attention.call import Call
from hf_linattn.attention.visibility import Visibility
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.registry import register

KEPT = "_linattn_kept_tokens"
"""Attribute of the mask of a forward, which all its layers get: index of a layer -> tokens kept after it."""


@register("power")
class Power(ScoreAttention):
    """PoWER-BERT: each layer keeps the tokens that receive most attention; the others are no keys any more.

    o_i = sum_{j in T_l} exp(s_ij) v_j / sum_{j in T_l} exp(s_ij) for i in T_l, else 0
    T_{l+1} = the k_l tokens j of T_l with the largest Sig(j) = sum_h sum_{i in T_l} a^h_ij

    T_0 are all tokens beside padding, a^h_ij the weights of head h in layer l, and the first token of a row
    always stays: heads read from it. What a token that stays becomes is what it would be if the others had
    been taken out of the text. Their places in the hidden states remain, with values that mean nothing: read
    the first token, not a mean. So this shows what dropping costs in quality, and saves no time: the saving
    of the paper comes from taking the tokens out, which changes the model around attention.

    A schedule is a plan by layer, from layer 0 on without a gap: {0: ("power", {"keep": 0.8}), 1: ...}.
    keep=1.0 drops none. Layers behind the last one of the plan would see the dropped tokens again. The choice
    has no gradient: fine-tune with the schedule on, as in the paper's last step; its learned schedule (soft
    extract) is not here.

    Options:
        keep: k_l as a fraction of the tokens of T_l; above 0, up to 1, default 0.9, rounded up.
        tokens: k_l as a number, at least 1, in place of keep.

    Use: encoders that classify, to ask how many tokens each layer needs.

    Source: "PoWER-BERT: Accelerating BERT Inference via Progressive Word-vector Elimination", Goyal et al.
        2020, arXiv:2001.08950, section 3.2.
    """

    group = "sparse"
    directions = "bidirectional"
    direction_reason = "a token is dropped by the attention that it receives from later tokens too"
    joins_heads = "drops tokens by the attention of all heads together, and each process has some of them"
    cross = False
    windowed = False
    supports = SCORE_EXTRAS - {"indices"}

    def __init__(self, site: AttentionSite, *, keep: float = 0.9, tokens: int | None = None) -> None:
        super().__init__(site)
        if not 0 < keep <= 1:
            raise OptionError(f"keep must be above 0 and at most 1, got {keep}")
        if tokens is not None and tokens < 1:
            raise OptionError(f"tokens must be at least 1, got {tokens}")
        if site.layer_idx is None:
            raise OptionError(f"{site.name}: its layer cannot be told, and tokens are dropped layer by layer")
        self.keep, self.tokens, self.layer = keep, tokens, site.layer_idx

    def attend(self, call: Call) -> Output:
        """Attend among the tokens that are left, and leave fewer for the next layer."""
        left = self._left(call)
        output, weights = super().attend(call)
        assert weights is not None  # never fused: `select` stands beside `weights`
        wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
        received = torch.where(left[:, None, :, None], wide, 0.0).sum((1, 2))
        self._carrier(call).__dict__[KEPT][self.layer] = self._most(received, left)
        return torch.where(left[:, None, :, None], output, 0.0), weights if call.output_attentions else None

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """Compute softmax; its weights are needed as they are."""
        return super().weights(scores, mask, sink)

    def select(self, call: Call) -> Tensor:
        """See the tokens that are left."""
        return self._left(call)[:, None, None]

    def _carrier(self, call: Call) -> Tensor:
        """The mask, as one forward hands it to all its layers: no other thread or call has it."""
        visibility: Visibility = call.visibility
        masks = (visibility.columns, visibility.bias, visibility.dense)
        mask = next((mask for mask in masks if mask is not None), None)
        if mask is None or torch.compiler.is_compiling():
            raise UnsupportedCallError(
                f"{call.where}: 'power' hands on what is left by the mask that all layers share, and there "
                "is none (a model without masks, or one that is being compiled)"
            )
        mask.__dict__.setdefault(KEPT, {})
        return mask

    def _left(self, call: Call) -> Tensor:
        """T_l, boolean `[B, N]`."""
        batch, tokens = call.query.shape[0], call.query.shape[2]
        if self.layer:
            kept = self._carrier(call).__dict__[KEPT].get(self.layer - 1)
            if kept is None:
                raise UnsupportedCallError(
                    f"{call.where}: 'power' found no choice of layer {self.layer - 1}: give every layer "
                    "from 0 on the patch (keep=1.0 drops none), on one device"
                )
            left: Tensor = kept
            return left
        documents = call.compact(0).documents
        if documents is None:
            return torch.ones(batch, tokens, dtype=torch.bool, device=call.device)
        return (documents > 0).expand(batch, tokens)

    def _most(self, received: Tensor, left: Tensor) -> Tensor:
        """Choose the tokens that receive most, and the first of each row: boolean `[B, N]`."""
        first = left & (left.cumsum(1) == 1)
        order = received.masked_fill(~left, -1.0).masked_fill(first, math.inf)
        rank = order.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        count = left.sum(1, keepdim=True)
        wanted = (count * self.keep).ceil() if self.tokens is None else count.clamp(max=self.tokens)
        return left & (rank < wanted)
