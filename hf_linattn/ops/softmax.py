"""Softmax attention with an optional sink: an extra key of logit b and value 0.

    o_i = sum_j exp(s_ij) v_j / (exp(b) + sum_j exp(s_ij))

b = 0 is softmax1 ("Attention is off by one", Miller 2023); b per head is the sink of gpt-oss.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_linattn.ops.softmax_sink import attention, fits
from hf_linattn.ops.tracing import exporting, transforming

WIDEST = 256
"""Of heads that fused kernels of GPUs take in groups."""


def sink_column(sink: Tensor, like: Tensor) -> Tensor:
    """Bring logits of the extra key to `[1, 1 or H, 1, 1]` or `[B, H, N, 1]`, in the dtype of the scores."""
    sink = torch.as_tensor(sink, dtype=like.dtype, device=like.device)
    return sink if sink.ndim == 4 else sink.reshape(1, -1, 1, 1)


def additive(mask: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """Make one mask for SDPA from a boolean mask and a bias: boolean, additive, or None."""
    if bias is None:
        return mask
    bias = bias.to(like.dtype)
    return bias if mask is None else bias.masked_fill(~mask, float("-inf"))


def _additive_4d(mask: Tensor | None, bias: Tensor | None, like: Tensor) -> Tensor | None:
    """Make one additive mask of four axes, or None."""
    joined = additive(mask, bias, like)
    if joined is not None and joined.dtype == torch.bool:
        joined = like.new_zeros(joined.shape).masked_fill_(~joined, float("-inf"))
    return joined if joined is None or joined.ndim == 4 else joined[(None,) * (4 - joined.ndim)]


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attend through torch's fused kernels, `[B, H, N, Dv]`; arguments are as torch has them."""
    shape, grouped = query.shape[:3], query.shape[1] != key.shape[1]
    taken = query.is_cpu or (mask is None and key.shape[-1] == value.shape[-1] <= WIDEST)
    apart = grouped and not taken
    if apart:
        query, key, value, mask = _ungrouped(query, key, value, mask)
    # torch.func and derivatives that go forward find no rule for fused kernels, or none for their mask
    with sdpa_kernel(SDPBackend.MATH) if transforming() else nullcontext():
        output = F.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=grouped and taken
        )
    if mask is not None and exporting():  # ONNX makes NaN of rows that see nothing
        seen = mask if mask.dtype == torch.bool else mask > float("-inf")
        output = output.masked_fill(~seen.any(-1, keepdim=True), 0)
    return output.reshape(*shape, value.shape[-1]) if apart else output


def _ungrouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Bring inputs to a form without grouped heads: fused kernels of GPUs take those without a mask alone.

    The query heads of a single token become tokens of their key head; of more, keys and values are repeated.
    """
    batch, heads, queries, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if queries > 1:
        return query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1), mask
    if mask is not None and mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.reshape(*mask.shape[:-3], kv_heads, group, mask.shape[-1])
    return query.reshape(batch, kv_heads, group, size), key, value, mask


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scaling: float | None = None,
    sink: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend through torch's fused kernels, exact with a sink too.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        mask: boolean, broadcast to `[B, H, N, S]`, True where visible. Rows that see nothing give 0.
        bias: added to the scores, broadcast to `[B, H, N, S]`.
        is_causal: no mask, N == S, query i sees keys up to i.
        scaling: of the scores; None for D^-0.5.
        sink: logit b, `[H]` or `[B, H, N, 1]`, or a scalar, which must be 0 without mask and bias; None for
            plain softmax.
        dropout: probability, applied to the weights.

    Returns:
        `[B, H, N, Dv]`.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if sink is None:
        joined = additive(mask, bias, query)
        return sdpa(query, key, value, joined, dropout, is_causal, scale)
    column = sink_column(sink, query)
    if fits(query, key, value, bias, dropout):
        return attention(query, key, value, _additive_4d(mask, bias, query), is_causal, scale, column)
    if bias is None and mask is None and sink.ndim == 0 and not sink.requires_grad:
        # one zero token in front of everything: its key has logit 0 for all
        key, value = (F.pad(x, (0, 0, 1, 0)) for x in (key, value))
        return _behind_sink_token(query, key, value, dropout, is_causal, scale)
    if bias is None and mask is None and scale > 0 and not exporting():
        return _with_sink_token(query, key, value, sink, dropout, is_causal, scale)
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
        mask = (mask.tril(keys - queries) if is_causal else mask)[None, None]
    scores = additive(mask, bias if bias is not None else torch.zeros_like(column), query)
    assert scores is not None
    shape = torch.broadcast_shapes(scores.shape[:3], column.shape[:3], (1, 1, queries))
    scores = torch.cat([scores.expand(*shape, keys), column.expand(*shape, 1)], -1)
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    return sdpa(query, key, value, scores, dropout, False, scale)


def _parts(c: Tensor) -> Tensor:
    """Write numbers as sums of three of 8 bits, `[..., 3]`: what half precision and autocast keep of them."""
    rest = c.detach()
    high = rest.bfloat16().to(c.dtype)
    middle = (rest - high).bfloat16().to(c.dtype)
    low = rest - high - middle + (c - rest)  # the last carries the gradient
    return torch.stack([high, middle, low], -1)


def _behind_sink_token(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float
) -> Tensor:
    """Attend where a token stands in front of all keys; where it must be a query too, its row is dropped."""
    if not is_causal:
        return sdpa(query, key, value, None, dropout, False, scale)
    return sdpa(F.pad(query, (0, 0, 1, 0)), key, value, None, dropout, True, scale)[:, :, 1:]


def _with_sink_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Attend with a sink in channels of a token in front of everything: no mask of N x (N + 1).

    s_i0 = scale q'_i . k'_0 = b,  q'_i = [q_i, b / a],  k'_0 = [0, p],  k'_j = [k_j, 0],  a = scale p

    with p a power of two that keeps b / a near b.
    """
    batch, heads, tokens, size = query.shape
    power = 2.0 ** -round(math.log2(scale))
    column = sink_column(sink, sink).to(torch.promote_types(sink.dtype, torch.float32))
    parts = _parts(column.squeeze(-1) / (scale * power)).to(query.dtype)
    wide = -(-max(size + parts.shape[-1], value.shape[-1]) // 8) * 8
    behind = (0, wide - size - parts.shape[-1])
    query = torch.cat([query, F.pad(parts, behind).expand(batch, heads, tokens, -1)], -1)
    first = F.pad(key.new_full(parts.shape[-1:], power), (size, behind[1]))
    key = torch.cat([first.expand(*key.shape[:2], 1, -1), F.pad(key, (0, wide - size))], 2)
    padded = F.pad(value, (0, wide - value.shape[-1], 1, 0))
    return _behind_sink_token(query, key, padded, dropout, is_causal, scale)[..., : value.shape[-1]]


def with_decay(
    query: Tensor, key: Tensor, value: Tensor, decay: tuple[Tensor, Tensor], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a decay of the scores into channels of query and key, for kernels that know none.

    scaling q'_i . k'_j = scaling q_i . k_j + c_i - c_j,  q'_i = [q_i, c_i / a, p],  k'_j = [k_j, p, -c_j / a]
    with p a power of two and a = scaling p, so that numbers stay in the range of half precision.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        decay: c_i `[B, H, N]` and c_j `[B, H, S]`.
        scaling: of the scores, above 0.

    Returns:
        Query, key and value of H heads and one size, a multiple of 8; behind Dv the output is 0.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    power = 2.0 ** -round(math.log2(scaling))
    of_query, of_key = (_parts(c / (scaling * power)).to(query.dtype) for c in decay)
    query = torch.cat([query, of_query, torch.full_like(of_query, power)], -1)
    key = torch.cat([key, torch.full_like(of_key, power), -of_key], -1)
    size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
    query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
    return query, key, value


def scores_of(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Compute scores scaling q_i . k_j, `[B, H, N, S]`, in float32 (float64 for float64 inputs)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores: Tensor = query.to(dtype) @ key.to(dtype).mT * scaling
    return scores


def capped(scores: Tensor, softcap: float | None, bias: Tensor | None) -> Tensor:
    """Cap scores to c tanh(s / c), then add a bias; None for neither."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if bias is None else scores + bias.to(scores.dtype)


def visible_count(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Count the keys each query sees, at least 1: `[B or 1, 1 or H, N or 1, 1]`, in the scores' dtype."""
    if mask is None:
        return scores.new_full((1, 1, 1, 1), scores.shape[-1])
    return mask.sum(-1, keepdim=True).clamp_min(1).to(scores.dtype)


def softmax_weights(scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
    """Turn scores into weights `[B, H, N, S]`: rows sum to 1, or less with a sink; 0 where nothing is seen.

    Args:
        scores: `[B, H, N, S]`.
        mask: boolean, True where visible; None for all.
        sink: logit of the extra key, as `softmax_attention` takes it; None for none.
    """
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    top = scores.amax(-1, keepdim=True).detach()
    logit = None if sink is None else sink_column(sink, scores)
    if logit is not None:
        top = torch.maximum(top, logit.detach())
    top = top.clamp_min(torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if logit is not None:
        total = total + (logit - top).exp()
    return weights / total.clamp_min(torch.finfo(scores.dtype).tiny)
