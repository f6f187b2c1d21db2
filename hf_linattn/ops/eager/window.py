"""Softmax over a sliding window in blocks of plain torch: O(N span), never N x N; joined with other sums."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.eager import linear
from hf_linattn.ops.softmax import capped, scores_of
from hf_linattn.ops.types import ScaledSums, Window, WindowSinks, accumulator_dtype

BLOCK = 64
"""Least number of queries per block: single ones would be slow."""


def add_sums(one: ScaledSums, other: ScaledSums) -> ScaledSums:
    """Add sums over different tokens, over the exponential of the larger scale."""
    logs = [_log_total(sums) for sums in (one, other)]
    highest = torch.maximum(*logs)
    highest = torch.where(highest.isfinite(), highest, 0.0)
    one, other = (_rescaled(sums, highest) for sums in (one, other))
    return ScaledSums(one.values + other.values, one.total + other.total, highest)


def _rescaled(sums: ScaledSums, log_scale: Tensor) -> ScaledSums:
    """Bring sums to another scale."""
    factor = torch.where(sums.total > 0, sums.log_scale - log_scale, float("-inf")).exp()
    return ScaledSums(sums.values * factor.unsqueeze(-1), sums.total * factor, log_scale)


def _log_total(sums: ScaledSums) -> Tensor:
    """Take the logarithm of the scaled total, for comparison: no gradient."""
    log_total = (sums.log_scale + sums.total.clamp_min(torch.finfo(sums.total.dtype).tiny).log()).detach()
    return log_total.masked_fill(sums.total <= 0, float("-inf"))


def softmax_sums(scores: Tensor, value: Tensor) -> ScaledSums:
    """Sum up values `[B, Hkv, K, Dv]` by exp(scores), `[B, H, N, K]`, -inf where a key is not visible."""
    grouped = scores.unflatten(1, (value.shape[1], -1))
    top = grouped.detach().amax(-1).clamp_min(torch.finfo(scores.dtype).min)
    weights = (grouped - top.unsqueeze(-1)).exp()
    values = torch.einsum("bhgnk,bhke->bhgne", weights, value)
    return ScaledSums(values.flatten(1, 2), weights.sum(-1).flatten(1, 2), top.flatten(1, 2))


def attention(window: Window, other: ScaledSums | None, softcap: float | None = None) -> Tensor:
    """Attend to a window and to other tokens together: `[B, H, N, Dv]`; 0 where nothing is seen.

    Args:
        window: queries, and what they see.
        other: sums over other tokens; None for none.
        softcap: c of scores c tanh(s / c); None for scores as they are.
    """
    return normalised_sums(_window_sums(window.padded(), softcap), other)


def normalised_sums(window_sums: ScaledSums, other: ScaledSums | None) -> Tensor:
    """Divide sums, joined with others, by their total: `[B, H, N, Dv]`; 0 where nothing is seen."""
    sums = window_sums if other is None else add_sums(window_sums, other)
    return linear.normalised(sums.values, sums.total)


def _window_sums(window: Window, softcap: float | None) -> ScaledSums:
    query, key, value, valid, span, scaling = window
    heads, length, size = key.shape[1], query.shape[2], max(BLOCK, span)
    if not torch.compiler.is_compiling():  # a graph for all lengths cannot choose
        size = min(length, size)
    weights = _scores((query * scaling).unflatten(1, (heads, -1)), key, valid, size, span, softcap)
    top = weights.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(query.dtype).min)
    weights = (weights - top).exp()
    values = torch.einsum("bhgnij,bhnje->bhgnie", weights, linear.blocks(value, size, span))
    parts = (x.flatten(3, 4) for x in (values, weights.sum(-1), top.squeeze(-1)))
    return ScaledSums(*(linear.leading(x, 3, length).flatten(1, 2) for x in parts))


def _scores(query: Tensor, key: Tensor, valid: Tensor, size: int, span: int, softcap: float | None) -> Tensor:
    """Compute scores `[B, Hkv, G, blocks, size, size + span]`, -inf where a column is not visible."""
    query = linear.blocks(query, size)
    row = torch.arange(size, device=query.device)[:, None]
    column = torch.arange(size + span, device=query.device)
    in_window = (column > row) & (column <= row + span)
    # [B, 1, blocks, columns]
    counted = linear.blocks(valid[:, None, :, None].to(query.dtype), size, span)[..., 0] > 0
    scores = capped(
        torch.einsum("bhgnid,bhnjd->bhgnij", query, linear.blocks(key, size, span)), softcap, None
    )
    return scores.masked_fill(~(in_window & counted[:, :, None, :, None]), float("-inf"))


def plain(
    window: Window, other: ScaledSums | None, sinks: WindowSinks | None, turned: Tensor | None = None
) -> Tensor:
    """Compute softmax over a window, sinks and other tokens, by operations whose gradients have gradients.

    `turned` are the queries as they meet the sinks, where `sinks.turn` does not say how they do.
    """
    dtype = accumulator_dtype(*window[:3])
    query, key, value = (x.to(dtype) for x in window[:3])
    if other is not None and (before := query.shape[2] - other.total.shape[2]):  # of the last queries
        values, *rest = other
        other = ScaledSums(F.pad(values, (0, 0, before, 0)), *(F.pad(x, (before, 0)) for x in rest))
    if sinks is not None:
        meets = query if turned is None else turned.to(dtype)
        meets = meets if sinks.turn is None else _turned(query, *sinks.turn)
        first = sink_sums(meets, sinks, window.scaling)
        other = first if other is None else add_sums(first, other)
    wide = window._replace(query=query, key=key, value=value)
    return attention(wide, other).to(window.query.dtype)


def _turned(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    width = cos.shape[-1]
    part = by_halves(query[..., :width], cos[:, None].to(query), sin[:, None].to(query))
    return torch.cat([part, query[..., width:]], -1)


def by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first half of features into the second one, as Llama's rotary embedding does."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def sink_sums(query: Tensor, sinks: WindowSinks, scaling: float, softcap: float | None = None) -> ScaledSums:
    """Sum over the sinks.

    Args:
        query: as they meet the sinks, `[B, H, N, D]`, in the dtype of sums.
        sinks: in any dtype; their `turn` is not looked at.
        scaling: of the scores.
        softcap: c of scores c tanh(s / c); None for scores as they are.
    """
    visible = sinks.valid[:, None].expand(-1, query.shape[2], -1)
    if sinks.ranks is not None:
        slots = torch.arange(sinks.valid.shape[1], device=query.device)
        visible = visible & (slots <= sinks.ranks[:, :, None])
    scores = capped(scores_of(query, sinks.key.to(query.dtype), scaling), softcap, None)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    return softmax_sums(scores, sinks.value.to(query.dtype))
