"""Quadratic float64 definitions, one formula a function, for readers and for users' own checks.

The tests keep an oracle of their own and hold this page to it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _repeat(x: Tensor, heads: int) -> Tensor:
    return x.double().repeat_interleave(heads // x.shape[1], 1)


def linear(phi_q: Tensor, phi_k: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """sum_j (phi_q . phi_k) v_j / sum_j phi_q . phi_k over the visible keys; `[B, H, N, Dv]` in float64.

    Args:
        phi_q: `[B, H, N, D]`.
        phi_k: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        visible: boolean, broadcast to `[B, H, N, S]`.
    """
    heads = phi_q.shape[1]
    weights = (phi_q.double() @ _repeat(phi_k, heads).mT).masked_fill(~visible, 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0) @ _repeat(value, heads)


def softmax(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float, sink: bool = False
) -> Tensor:
    """Weights exp(s_j) / sum_j exp(s_j), with `sink` exp(s_j) / (1 + sum_j exp(s_j)); `[B, H, N, Dv]`."""
    heads = query.shape[1]
    scores = (query.double() @ _repeat(key, heads).mT * scaling).masked_fill(~visible, float("-inf"))
    if sink:
        scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights[..., :-1] if sink else weights) @ _repeat(value, heads)
