"""A short causal convolution: each channel of a token is mixed with those of the few tokens before it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def identity(heads: int, width: int, taps: int) -> nn.Parameter:
    """Return weights `[H, D, taps]` that leave every token as it is; the last tap is of the token itself."""
    weight = torch.zeros(heads, width, taps)
    weight[..., -1] = 1
    return nn.Parameter(weight)


def convolve(
    x: Tensor,
    before: Tensor | None,
    weight: Tensor,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve over the tokens that count.

    Args:
        x: `[B, H, N, D]`.
        before: the tokens before them, `[B, H, taps - 1, D]`; zeros where there are none. None for all zeros.
        weight: `[H, D, taps]`.
        valid: boolean `[B, N]`, False for padding, which is passed over; None when all count.
        documents: `[B, N]` ascending; a new number sees nothing before it. None where nothing is packed.

    Returns:
        `[B, H, N, D]`, and the last tokens, `[B, H, taps - 1, D]`.
    """
    (batch, heads, length, width), past = x.shape, weight.shape[-1] - 1
    order = None
    if valid is not None:  # not by a product: padded rows may hold NaN
        x = x.masked_fill(~valid[:, None, :, None], 0)
        order = F.pad(valid, (past, 0), value=True).int().argsort(dim=1, stable=True)  # padding first
    if before is None:
        before = x.new_zeros(batch, heads, past, width)
    tokens = torch.cat([before.to(x), x], 2)
    if order is not None:
        tokens = tokens.gather(2, order[:, None, :, None].expand(-1, heads, -1, width))
    taps = weight.to(x)[:, None].unbind(-1)  # each [H, 1, D]
    mixed = tokens[:, :, past:] * taps[past]
    for tap in range(past):
        earlier = tokens[:, :, tap : tap + length]
        if documents is not None:
            earlier = earlier * _same(documents, past - tap).to(x)[:, None, :, None]
        mixed = mixed + earlier * taps[tap]
    recent = tokens[:, :, length:]
    if order is not None:
        place = (order.argsort(1)[:, past:] - past).clamp_min(0)
        mixed = mixed.gather(2, place[:, None, :, None].expand(-1, heads, -1, width))
    return mixed, recent


def _same(documents: Tensor, distance: int) -> Tensor:
    """Tell of which tokens the one so far before is of the same document, `[B, N]`."""
    return F.pad(documents, (distance, 0), value=-1)[:, : documents.shape[1]] == documents
