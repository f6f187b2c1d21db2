"""An attention over scores in one call of a model: masks, caps, biases and sinks put together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn.attention.call import Call
from hf_linattn.ops.softmax import capped, sink_column, softmax_attention


def attend(attention: Any, call: Call, fused: bool) -> tuple[Tensor, Tensor | None]:
    """Output `[B, H, N, Dv]`, and the weights `[B, H, N, S]` where they were computed.

    Args:
        attention: a `ScoreAttention`.
        call: what the model asks.
        fused: weights and scores are softmax's, so torch's fused kernels may compute them.
    """
    query, key, value, visibility = call.query, call.key, call.value, call.visibility
    sink = _joined(attention.sink_logit(query), call.sink)
    bias = None if call.bias is None else call.bias[..., : key.shape[2]]
    chosen = attention.select(call)
    fused = fused and call.softcap is None and not call.output_attentions
    causal = visibility.plain and visibility.causal and query.shape[2] > 1
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
        return output, None
    scores = capped(attention.scores(query, key, call.scaling), call.softcap, bias)
    weights = attention.weights(scores, mask, sink)
    dropped = nn.functional.dropout(weights, call.dropout) if call.dropout else weights
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return dropped.to(values.dtype) @ values, weights.to(query.dtype)


def _joined(sink: Tensor | None, own: Tensor | None) -> Tensor | None:
    """The patch's sink and the model's own as one key."""
    if own is None:
        return sink
    own = own.to(torch.promote_types(own.dtype, torch.float32))
    return own if sink is None else torch.logaddexp(sink_column(own, own), sink_column(sink, own))
