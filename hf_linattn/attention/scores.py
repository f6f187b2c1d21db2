"""Attention over scores: masks, caps, biases and sinks put together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_linattn.attention.base import SCORE_EXTRAS, SINKS, Attention, Output
from hf_linattn.attention.call import Call
from hf_linattn.ops.softmax import (
    capped,
    scores_of,
    sink_column,
    softmax_attention,
    softmax_weights,
    with_decay,
)
from hf_linattn.ops.tracing import exporting

LONG = 128
"""Queries from which on a decay is put into channels of keys and values, not into a bias of each score."""


class ScoreAttention(Attention):
    """o_i = sum_j w_ij v_j with weights from the scores s_ij = scaling q_i . k_j of the visible keys.

    Softmax as it stands. Override `sink_logit` to add a key of value 0, or `select` to see fewer keys (fused
    kernels stay in use); `weights` for any other function of the scores, `scores` for other scores
    (quadratic).
    """

    windowed = True
    supports = SCORE_EXTRAS | SINKS

    def whole_rows(self) -> str:
        """Say nothing: keys and values of the processes before can be fetched."""
        return ""

    def sink_logit(self, query: Tensor) -> Tensor | None:
        """Return the logit b of an extra key with value 0: scalar or `[H]`; None for no such key."""
        return None

    def select(self, call: Call) -> Tensor | None:
        """Choose the keys to see among the visible ones: boolean, broadcast to `[B, H, N, S]`; None for all.

        Patterns are made of `call.ranks()` or `call.distance()`, so that padding does not move them.
        """
        return None

    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """Score `[B, H, N, D]` by `[B, Hkv, S, D]`: `[B, H, N, S]`, float32 (float64 in float64 models)."""
        return scores_of(query, key, scaling)

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """Turn scores `[B, H, N, S]` into weights of the same shape.

        Args:
            scores: scaled, capped and biased, float32 (float64 in float64 models).
            mask: True where visible, broadcast to the scores; None where all is.
            sink: from `sink_logit`, joined with the model's own sinks.
        """
        return softmax_weights(scores, mask, sink)

    def attend(self, call: Call) -> Output:
        """Compute a call, through torch's fused kernels where weights and scores are softmax's.

        Returns:
            Output `[B, H, N, Dv]`, and the weights `[B, H, N, S]` where they were computed.
        """
        cls = type(self)
        query, key, value, visibility = call.query, call.key, call.value, call.visibility
        sink = _joined(self.sink_logit(query), call.sink)
        bias = None if call.bias is None else call.bias[..., : key.shape[2]]
        chosen = self.select(call)
        fused = cls.weights is ScoreAttention.weights and cls.scores is ScoreAttention.scores
        fused = fused and call.softcap is None and call.factor is None and not call.output_attentions
        decay = call.decay
        if decay is not None:
            if fused and not exporting() and query.shape[2] >= LONG:
                query, key, value = with_decay(query, key, value, decay, call.scaling)
            else:
                apart = decay[0].unsqueeze(-1) - decay[1].unsqueeze(-2)
                bias = apart if bias is None else bias + apart
        # in this order: comparing sizes gives a symbol in a graph of any length, which torch's kernels refuse
        causal = query.shape[2] > 1 and visibility.plain and visibility.causal
        mask: Tensor | None = None
        whole = visibility.plain or (visibility.dense is None and visibility.sees_all())
        if not whole or (causal and (bias is not None or chosen is not None or not fused)):
            mask, causal = call.mask(), False
        if chosen is not None:
            mask = chosen if mask is None else mask & chosen
        if fused:
            output = softmax_attention(
                query,
                key,
                value,
                mask=mask,
                bias=bias,
                is_causal=causal,
                scaling=call.scaling,
                sink=sink,
                dropout=call.dropout,
            )
            return output[..., : call.value.shape[-1]], None
        scores = self.scores(query, key, call.scaling)
        if call.factor is not None:
            scores = scores * call.factor[..., : key.shape[2]]
        scores = capped(scores, call.softcap, bias)
        weights = self.weights(scores, mask, sink)
        dropped = nn.functional.dropout(weights, call.dropout) if call.dropout else weights
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return dropped.to(values.dtype) @ values, weights.to(query.dtype)


def _joined(sink: Tensor | None, own: Tensor | None) -> Tensor | None:
    """Join the patch's sink and the model's own into one key."""
    if own is None:
        return sink
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    return own if sink is None else torch.logaddexp(sink_column(own, own), sink_column(sink, own))
