"""Softmax over a sliding window and some tokens beside it, in blocks: O(n w), never N x N."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Least number of queries per block: single ones would be slow."""


class Sums(NamedTuple):
    """A softmax before its division: sum_j exp(s_j - top) v_j `[B, H, N, Dv]`, that without v, and top."""

    values: Tensor
    total: Tensor
    top: Tensor


def softmax_sums(
    query: Tensor, key: Tensor, value: Tensor, marks: Tensor, reach: int, beside: Tensor, beside_value: Tensor
) -> Sums:
    """Sums over the columns i < c <= i + reach of each query i, and over the tokens beside.

    Args:
        query: `[B, H, N, D]`, scaled.
        key: `[B, Hkv, N + reach, D]`, zero where it does not count.
        value: `[B, Hkv, N + reach, Dv]`, zero where it does not count.
        marks: boolean `[B, N + reach]`, which columns count.
        reach: columns that each query sees.
        beside: scores of K more tokens, `[B, H, N, K]`, -inf where one is not visible.
        beside_value: `[B, Hkv, K, Dv]`.
    """
    heads, length = key.shape[1], query.shape[2]
    size = min(length, max(BLOCK, reach))
    grouped, beside = query.unflatten(1, (heads, -1)), beside.unflatten(1, (heads, -1))
    near = _scores(grouped, key, marks, size, reach)
    top = near.amax(-1).flatten(3, 4)[:, :, :, :length]
    if beside.shape[-1]:
        top = torch.maximum(top, beside.amax(-1))
    top = top.detach().clamp_min(torch.finfo(query.dtype).min)
    in_blocks = F.pad(top, (0, -length % size)).unflatten(3, (-1, size))
    near, far = (near - in_blocks.unsqueeze(-1)).exp(), (beside - top.unsqueeze(-1)).exp()
    total = near.sum(-1).flatten(3, 4)[:, :, :, :length] + far.sum(-1)
    values = torch.einsum("bhgnij,bhnje->bhgnie", near, _blocks(value, size, reach))
    values = values.flatten(3, 4)[:, :, :, :length] + torch.einsum("bhgnk,bhke->bhgne", far, beside_value)
    return Sums(values.flatten(1, 2), total.flatten(1, 2), top.flatten(1, 2))


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
