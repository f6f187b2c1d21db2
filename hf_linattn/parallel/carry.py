"""The state before each part of a row, of what its parts add and keep: one exchange forward, one backward.

    C_0 = 0,   C_{r+1} = A_r C_r + S_r

S_r is the state after part r alone, from nothing; A_r is what part r leaves of a state before it: all of it,
a factor for each head where states fade, or a matrix where they are corrected (the delta rule). Backward,
with g_r the gradient by C_r of what process r computes,

    G_r = g_r + A_r^T G_{r+1},   dS_r = G_{r+1},   dA_r = G_{r+1} C_r^T
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.second_order import only_once
from hf_linattn.parallel.shard import Shard


def carry(S: Tensor, kept: Tensor | None, shard: Shard) -> Tensor:
    """Return the state before this part, C, from the states of all parts.

    Args:
        S: state after this part alone, `[B, H, D, E]`.
        kept: A, `[B, H]` or `[B, H, D, D]`; None for all.
        shard: this part.

    Returns:
        `[B, H, D, E]`, zeros for the first part.
    """
    return _Carry.apply(S, kept, shard)  # type: ignore[no-any-return, no-untyped-call]


def _through(kept: Tensor | None, C: Tensor, transposed: bool = False) -> Tensor:
    if kept is None:
        return C
    if kept.ndim == 2:
        return C * kept[:, :, None, None]
    return (kept.mT if transposed else kept) @ C


class _Carry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, kept: Tensor | None, shard: Shard) -> Tensor:
        factors: list[Tensor | None] = [None] * shard.size
        if kept is None:
            states = shard.gather(S)
        else:  # in one message
            numbers, flat = S.shape[2] * S.shape[3], kept.reshape(*kept.shape[:2], -1)
            both = shard.gather(torch.cat([S.flatten(2), flat], 2))
            states = [x[..., :numbers].reshape(S.shape) for x in both]
            factors = [x[..., numbers:].reshape(kept.shape) for x in both]
        before = torch.zeros_like(S)
        for S_r, kept_r in zip(states[: shard.rank], factors, strict=False):
            before = _through(kept_r, before) + S_r
        ctx.shard, ctx.has_factor = shard, kept is not None
        if kept is not None:
            ctx.matrix = kept.ndim > 2
            ctx.save_for_backward(*(x.clone() for x in factors[shard.rank + 1 :] if x is not None), before)
        return before

    @staticmethod
    @only_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        shard, saved = ctx.shard, ctx.saved_tensors
        later = shard.gather(grad)[shard.rank + 1 :]
        factors = saved[: len(later)] if ctx.has_factor else [None] * len(later)
        total = torch.zeros_like(grad)
        for g, kept in zip(reversed(later), reversed(factors), strict=True):
            total = g + _through(kept, total, transposed=True)
        if not ctx.has_factor:
            return total, None, None
        before = saved[-1]
        d_kept = total @ before.mT if ctx.matrix else (total * before).sum((2, 3))
        return total, d_kept, None
