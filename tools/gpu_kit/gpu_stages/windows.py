"""Windows for stage `kernels`: softmax over the last tokens, sinks and what lies behind, by our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton import window_operator, window_token
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import Gate, ScaledSums, Window

from .work import Context, needs_triton

SPAN, SINKS = 256, 4
TINY_SPAN = 9


def span_of(context: Context) -> int:
    """Return the tokens of a window."""
    return TINY_SPAN if context.dry else SPAN


def beside(q: Tensor, k: Tensor, v: Tensor) -> tuple[Sinks, ScaledSums]:
    """Make the sinks, which every query behind them sees, and sums as a linear attention hands them over."""
    length = q.shape[2]
    ranks = torch.arange(length, device=q.device).expand(q.shape[0], -1)
    sinks = Sinks(
        None,
        *(x[:, :, :SINKS].detach().contiguous() for x in (k, v)),
        torch.ones(q.shape[0], min(SINKS, length), dtype=torch.bool, device=q.device),
        ranks.contiguous(),
    )
    total = torch.ones(*q.shape[:3], device=q.device)
    values = torch.zeros(q.shape[0], length, q.shape[1], v.shape[3], device=q.device).transpose(1, 2)
    return sinks, ScaledSums(values, total, torch.zeros_like(total))


def attend(
    q: Tensor, k: Tensor, v: Tensor, span: int, sinks: Sinks | None = None, others: ScaledSums | None = None
) -> Tensor:
    """Attend to the last `span` tokens of each query, and to what else there is, with gradients."""
    valid = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    window = Window(q, k, v, valid, span, q.shape[3] ** -0.5)
    return window_operator.attention(window, sinks, others)


def ours(joined: bool, context: Context, shape: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Make the kernels' call; `joined` with sinks and sums under the same normaliser."""
    needs_triton(context)
    kept: list[Any] = []

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if joined and not kept:
            kept.extend(beside(q, k, v))
        return attend(q, k, v, span_of(context), *kept)

    return call


def token_of(
    one: tuple[Tensor, Tensor, Tensor], span: int, gated: bool
) -> tuple[Callable[[], Tensor], tuple[Tensor, ...]]:
    """Make a call that decodes a token in place, and list the tensors that it reads.

    Args:
        one: query `[B, H, 1, D]`, key and value `[B, Hkv, 1, D]`.
        span: tokens of the window.
        gated: with sinks, and a state of elu1 behind the window that forgets by gates of its values.
    """
    query, key, value = one
    (batch, kv_heads, _, D), Dv, device = key.shape, value.shape[3], key.device

    def new(*size: int, like: Tensor) -> Tensor:
        return torch.randn(size, device=device).to(like.dtype)

    ring = window_token.Ring(
        new(batch, kv_heads, span, D, like=key),
        new(batch, kv_heads, span, Dv, like=value),
        torch.ones(batch, span, dtype=torch.bool, device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )
    moved: tuple[Tensor, ...] = (ring.key, ring.value)
    tail = sinks = None
    if gated:
        S, z = (torch.rand(batch, kv_heads, D, *more, device=device) for more in ((Dv,), ()))
        gate = Gate(
            torch.randn(kv_heads, Dv, device=device), torch.full((kv_heads,), 3.0, device=device), 16.0
        )
        tail = window_token.Tail(S, z, gate=gate, kind="elu1")
        sinks = Sinks(
            None,
            new(batch, kv_heads, SINKS, D, like=key),
            new(batch, kv_heads, SINKS, Dv, like=value),
            torch.ones(batch, SINKS, dtype=torch.bool, device=device),
            torch.full((batch, 1), span + SINKS, device=device),
        )
        moved += (S, S, z, z)  # read and written

    def call() -> Tensor:
        return window_token.decode(query, key, value, None, ring, D**-0.5, tail, sinks)

    return call, moved


def ours_token(gated: bool, context: Context, one: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, int]:
    """Make the kernels' call of one token in place, and count the bytes that it must move."""
    needs_triton(context)
    call, moved = token_of(one, span_of(context), gated)
    return call, sum(x.nbytes for x in moved)


def once(q: Tensor, k: Tensor, v: Tensor, span: int) -> None:
    """Run all kernels of windows: forward, backward, and a token."""
    output = attend(q, k, v, span, *beside(q, k, v))
    torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
    token_of((q[:, :, :1].detach(), k[:, :, :1].detach(), v[:, :, :1].detach()), span, True)[0]()
