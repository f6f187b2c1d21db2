"""Softmax over a window, its sinks and the linear attention behind it on a GPU, as one function of autograd.

Both read the same queries, keys and values, cut differently. Autograd by itself brings the gradients of each
cut to the size of the whole text and adds them up: launches and memory traffic like a kernel's. Here they are
added to those of the whole where they belong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops import gate as gates
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager import window as blocks
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.triton import gate as gate_kernels
from hf_linattn.ops.triton import launch, window
from hf_linattn.ops.triton.problem import Slots, apart
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import (
    Elu1Sums,
    Gate,
    Inputs,
    OpConfig,
    OtherSums,
    ScaledSums,
    Window,
    WindowSinks,
)

TENSORS = 13
"""Of the function's arguments, which come first."""


class Rest(NamedTuple):
    """A linear attention over the tokens that leave a window as a text begins.

    Attributes:
        left: how many have left: the first ones, which as many of the last queries read.
        valid: boolean `[B, left]`, False at those that do not count; None for all.
        kind: the map inside the kernels, "elu1" or "relu".
        eps: as in `triton.launch.forward`.
        log_decay: `[B, Hkv, left]`, at most 0; None for no decay.
        gate: in place of `log_decay`.
    """

    left: int
    valid: Tensor | None
    kind: str
    eps: float = 0.0
    log_decay: Tensor | None = None
    gate: Gate | None = None


class _How(NamedTuple):
    """Arguments that are no tensors."""

    span: int
    scaling: float
    left: int
    kind: str
    eps: float
    temperature: float
    first: int


def attention(seen: Window, sinks: Sinks | None, rest: Rest, first: int = 0) -> Tensor:
    """Attend to a window, to sinks and to what has left, under one normaliser: `[B, H, N, Dv]`.

    Args:
        seen: as `triton.window.forward` takes it; nothing is before its first key.
        sinks: likewise; None for none.
        rest: behind the window.
        first: as many of the window's first tokens are the sinks; 0 where these are others.
    """
    how = _How(seen.span, seen.scaling, rest.left, rest.kind, rest.eps, 1.0, first)
    weights: tuple[Tensor | None, Tensor | None] = None, None
    if rest.gate is not None:
        *weights, temperature = rest.gate  # type: ignore[assignment]
        how = how._replace(temperature=temperature)
    of_sinks: tuple[Tensor | None, ...] = sinks or (None,) * 5
    if first:
        of_sinks = (of_sinks[0], None, None, *of_sinks[3:])
    given = *seen[:4], rest.valid, rest.log_decay, *weights, *of_sinks
    output: Tensor = _Attention.apply(*given, how)  # type: ignore[no-untyped-call]
    return output


class _Parts(NamedTuple):
    """What the kernels of each are given."""

    window: Window
    sinks: Sinks | None
    behind: tuple[Tensor, Tensor, Tensor, Tensor | None]
    gate: Gate | None
    log_decay: Tensor | None


def _parts(inputs: tuple[Any, ...], how: _How) -> _Parts:
    """Take the function's arguments apart, and cut them."""
    query, key, value, valid, left_valid, log_decay, weight, bias, *of_sinks = inputs
    if how.first:
        of_sinks[1:3] = key[:, :, : how.first], value[:, :, : how.first]
    behind = query[:, :, query.shape[2] - how.left :], key[:, :, : how.left], value[:, :, : how.left]
    return _Parts(
        Window(query, key, value, valid, how.span, how.scaling),
        None if of_sinks[1] is None else Sinks(*of_sinks),
        (*behind, left_valid),
        None if weight is None else Gate(weight, bias, how.temperature),
        log_decay,
    )


def _sums(values: Tensor, total: Tensor, how: _How) -> OtherSums:
    return (
        Elu1Sums(values, total) if how.kind == "elu1" else ScaledSums(values, total, torch.zeros_like(total))
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *inputs, how = arguments
        seen, sinks, behind, gate, decay = _parts(tuple(inputs), how)
        if gate is not None:
            decay = gate_kernels.forward(*behind[2:], gate)
        (values, total, *_), segments = launch.forward_and_segments(
            *behind, None, None, how.kind, False, eps=how.eps, log_decay=decay
        )
        output, lse = window.forward(seen, sinks, _sums(values, total, how))
        slots, ctx.segments = apart(segments)
        ctx.save_for_backward(*inputs, decay, values, total, output, lse, *slots)
        ctx.how = how
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, how = ctx.saved_tensors, ctx.how
        inputs, (decay, values, total, output, lse, *slots) = saved[:TENSORS], saved[TENSORS:]
        if torch.is_grad_enabled():  # as under create_graph=True
            return tuple(gradients(_plain, (*inputs, how), [grad]))
        seen, sinks, behind, gate, _ = _parts(inputs, how)
        found = window.backward(grad, seen, sinks, _sums(values, total, how), output, lse)
        assert found.others is not None
        segments = ctx.segments and ctx.segments._replace(slots=Slots(*slots))
        of_sums = *found.others[:2], None, None
        given = *of_sums, *behind, None, None, values, total, how.kind, False
        rest = launch.backward(*given, eps=how.eps, log_decay=decay, segments=segments)
        d_weight = d_bias = d_decay = None
        if gate is not None:
            assert rest.log_decay is not None
            of_gate = rest.log_decay, *behind[2:], gate
            _, d_weight, d_bias = gate_kernels.backward(*of_gate, onto=rest.value)
            d_weight, d_bias = d_weight.to(gate.weight.dtype), d_bias.to(gate.bias.dtype)
        else:
            d_decay = rest.log_decay
        alone = grad.shape[2] - how.left
        found.query[:, :, alone:].add_(rest.query)
        found.key[:, :, : how.left].add_(rest.key)
        found.value[:, :, : how.left].add_(rest.value)
        d_turned, *of_sinks = found[3:6]
        if how.first:
            for whole, part in zip(found[1:3], of_sinks, strict=True):
                assert part is not None
                whole[:, :, : how.first].add_(part)
            of_sinks = [None, None]
        return *found[:3], None, None, d_decay, d_weight, d_bias, d_turned, *of_sinks, None, None, None


def _plain(*arguments: Any) -> list[Tensor]:
    """Compute the output by operations whose gradients have gradients."""
    *inputs, how = arguments
    seen, sinks, (query, key, value, valid), gate, decay = _parts(tuple(inputs), how)
    if gate is not None:
        [decay] = gates.plain(value, valid, *gate)
    config = OpConfig(how.kind, how.eps, False)
    sums = linear.plain(Inputs(query, key, value, valid, None, None, decay, None), config)
    other = _sums(sums.output, sums.total, how)
    if isinstance(other, Elu1Sums):
        other = other.scaled(query)
    beside = None if sinks is None else WindowSinks(*sinks[1:])
    turned = None if sinks is None else sinks.query
    return [blocks.plain(seen, other, beside, turned)]
