"""Softmax over a sliding window in blocks: O(n w), never N x N. With sums over other tokens beside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.eager import linear
from hf_linattn.ops.types import Sums, Window

BLOCK = 64
"""Least number of queries per block: single ones would be slow."""


def added(one: Sums, other: Sums) -> Sums:
    """Both, over the exponential of the greater."""
    logs = [_log(sums) for sums in (one, other)]
    highest = torch.maximum(*logs)
    highest = torch.where(highest.isfinite(), highest, 0.0)
    one, other = (_over(sums, highest) for sums in (one, other))
    return Sums(one.values + other.values, one.total + other.total, highest)


def _over(sums: Sums, log_scale: Tensor) -> Sums:
    """The same with another scale."""
    factor = torch.where(sums.total > 0, sums.log_scale - log_scale, float("-inf")).exp()
    return Sums(sums.values * factor.unsqueeze(-1), sums.total * factor, log_scale)


def _log(sums: Sums) -> Tensor:
    """Of the scaled total, for comparison: no gradient."""
    found = (sums.log_scale + sums.total.clamp_min(torch.finfo(sums.total.dtype).tiny).log()).detach()
    return found.masked_fill(sums.total <= 0, float("-inf"))


def softmax_sums(scores: Tensor, value: Tensor) -> Sums:
    """Of scores `[B, H, N, K]`, -inf where a key is not visible, and values `[B, Hkv, K, Dv]`."""
    grouped = scores.unflatten(1, (value.shape[1], -1))
    top = grouped.detach().amax(-1).clamp_min(torch.finfo(scores.dtype).min)
    weights = (grouped - top.unsqueeze(-1)).exp()
    values = torch.einsum("bhgnk,bhke->bhgne", weights, value)
    return Sums(values.flatten(1, 2), weights.sum(-1).flatten(1, 2), top.flatten(1, 2))


def attention(window: Window, other: Sums | None) -> Tensor:
    """Window and other tokens under one normaliser: `[B, H, N, Dv]`; 0 where nothing is seen."""
    return joined(_window_sums(window.whole()), other)


def joined(inside: Sums, other: Sums | None) -> Tensor:
    """Both sums under one normaliser: `[B, H, N, Dv]`; 0 where nothing is seen."""
    sums = inside if other is None else added(inside, other)
    return linear.normalised(sums.values, sums.total)


def _window_sums(window: Window) -> Sums:
    query, key, value, marks, reach, scaling = window
    heads, length = key.shape[1], query.shape[2]
    size = min(length, max(BLOCK, reach))
    near = _scores((query * scaling).unflatten(1, (heads, -1)), key, marks, size, reach)
    top = near.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(query.dtype).min)
    near = (near - top).exp()
    values = torch.einsum("bhgnij,bhnje->bhgnie", near, _blocks(value, size, reach))
    found = values, near.sum(-1), top.squeeze(-1)
    return Sums(*(x.flatten(3, 4)[:, :, :, :length].flatten(1, 2) for x in found))


def _blocks(x: Tensor, size: int, reach: int) -> Tensor:
    """`[B, Hkv, N + reach, D]` -> overlapping blocks `[B, Hkv, blocks, size + reach, D]`, padded by zeros."""
    count = -(-(x.shape[2] - reach) // size)
    x = F.pad(x, (0, 0, 0, count * size + reach - x.shape[2]))
    spread: Tensor = x.unfold(2, size + reach, size).mT
    return spread


def _scores(query: Tensor, key: Tensor, marks: Tensor, size: int, reach: int) -> Tensor:
    """`[B, Hkv, G, blocks, size, size + reach]`, -inf where a column is not visible."""
    query = F.pad(query, (0, 0, 0, -query.shape[3] % size)).unflatten(3, (-1, size))
    row = torch.arange(size, device=query.device)[:, None]
    column = torch.arange(size + reach, device=query.device)
    near = (column > row) & (column <= row + reach)
    live = (
        _blocks(marks[:, None, :, None].to(query.dtype), size, reach)[..., 0] > 0
    )  # [B, 1, blocks, columns]
    found = torch.einsum("bhgnid,bhnjd->bhgnij", query, _blocks(key, size, reach))
    return found.masked_fill(~(near & live[:, :, None, :, None]), float("-inf"))
