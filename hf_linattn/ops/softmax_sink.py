"""Softmax with a sink through the fused kernel of the CPU, forward and backward, without an extra key.

The kernel gives o = sum_j exp(s_j) v_j / Z and lse = log Z. A key of logit b and value 0 adds exp(b) to Z:

    lse' = log(exp(lse) + exp(b)),  o' = o exp(lse - lse') = o sigmoid(lse - b)

and with p'_j = exp(s_j - lse') gradients are those of ordinary attention, ds_j = p'_j (do . v_j - do . o'),
from its backward kernel given o' and lse' for output and log-sum-exp. The sink's own is db = -p'_b (do . o').
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.tracing import by_torch_alone

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def fits(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float) -> bool:
    """Tell whether the kernel takes these as they are; autocast would change them first.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        bias: what would be added to the scores; None for nothing.
        dropout: probability.
    """
    return (
        not dropout
        and not by_torch_alone()
        and not torch.is_autocast_enabled("cpu")
        and query.dtype == key.dtype == value.dtype
        and not (bias is not None and bias.requires_grad)
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and query.shape[-1] == value.shape[-1]
        and query.numel() > 0
        and key.numel() > 0
        and value.numel() > 0
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    sink: Tensor,
) -> Tensor:
    """Attend with a sink: `[B, H, N, D]`, with gradients.

    Args:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, D]`.
        mask: added to the scores, broadcast to `[B, H, N, S]`, in the dtype of the query; -inf where a key is
            not visible. None where all are, but for `is_causal`.
        is_causal: query i sees keys up to i; N == S.
        scale: of the scores.
        sink: the logit b, broadcast to `[B, H, N, 1]`.
    """
    if torch.compiler.is_compiling():
        return torch.ops.hf_linattn.softmax_with_sink(query, key, value, mask, sink, is_causal, scale)[0]  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        plain, lse = FORWARD(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        return _with_sink(plain, lse, sink)
    output: Tensor = _Attention.apply(query, key, value, mask, sink, is_causal, scale)  # type: ignore[no-untyped-call]
    return output


def _with_sink(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Scale the kernel's output by what the sink leaves, in place."""
    factor: Tensor = torch.sigmoid(lse - sink.to(lse.dtype).squeeze(-1))
    return output.mul_(factor.unsqueeze(-1))


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sink: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute the output, and lse' `[B, H, N]`."""
    output, lse = FORWARD(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    logit = sink.to(lse.dtype).squeeze(-1)
    return _with_sink(output, lse, sink), torch.logaddexp(lse, logit).contiguous()


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sink: Tensor,
    output: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients of query, key, value and sink."""
    d_tokens = _token_grads(grad, query, key, value, mask, output, lse, is_causal, scale)
    weight = (sink.to(lse.dtype) - lse.unsqueeze(-1)).exp()
    d_sink = -(weight * (grad * output).sum(-1, True)).sum_to_size(sink.shape)
    return (*d_tokens, d_sink.to(sink.dtype))


def _token_grads(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    output: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gradients of query, key and value."""
    gradients: tuple[Tensor, Tensor, Tensor] = BACKWARD(
        grad, query, key, value, output, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return gradients


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output, lse = _forward(*inputs)
        _remember(ctx, inputs, (output, lse))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as under create_graph=True
            inputs = *ctx.saved_tensors[:5], *ctx.options
            return tuple(gradients(_plain, inputs, [grad]))
        if ctx.needs_input_grad[4]:
            *d_inputs, d_sink = _backward(grad, *ctx.saved_tensors, *ctx.options)
            return (*d_inputs, None, d_sink, None, None)
        query, key, value, mask, _, output, lse = ctx.saved_tensors
        d_tokens = _token_grads(grad, query, key, value, mask, output, lse, *ctx.options)
        return (*d_tokens, None, None, None, None)


def _plain(*inputs: Any) -> list[Tensor]:
    """Compute the output by operations whose gradients have gradients."""
    query, key, value, mask, sink, is_causal, scale = inputs
    sums, group = torch.promote_types(query.dtype, torch.float32), query.shape[1] // key.shape[1]
    key, value = (x.to(sums).repeat_interleave(group, 1) for x in (key, value))
    scores = query.to(sums) @ key.mT * scale
    if mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    scores = torch.cat([scores, sink.to(sums).expand(*scores.shape[:3], 1)], -1)
    return [(scores.softmax(-1)[..., :-1] @ value).to(query.dtype)]


def dense(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Make the results contiguous: the kernel's layout may change, and a fake operator must foretell it."""

    @functools.wraps(function)
    def dense(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(x.contiguous() for x in function(*inputs))

    return dense


_operator = torch.library.custom_op(
    "hf_linattn::softmax_with_sink", dense(_forward), mutates_args=(), device_types="cpu"
)
_backward_operator = torch.library.custom_op(
    "hf_linattn::softmax_with_sink_backward", dense(_backward), mutates_args=(), device_types="cpu"
)


@_operator.register_fake
def _(query: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    sums = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=sums)


@_backward_operator.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sink: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value, sink))


def _autograd_backward(ctx: Any, grad: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *d_tokens, d_sink = torch.ops.hf_linattn.softmax_with_sink_backward(
        grad, *ctx.saved_tensors, *ctx.options
    )
    return (*d_tokens, None, d_sink, None, None)


_operator.register_autograd(_autograd_backward, setup_context=_remember)
