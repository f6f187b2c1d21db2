"""Softmax over a window, its sinks and other tokens by Triton, as an operator that torch.compile takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.eager import window as blocks
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.triton import window as kernels
from hf_linattn.ops.triton.window import Sinks, WindowGrads
from hf_linattn.ops.types import Elu1Sums, OtherSums, ScaledSums, Window, WindowSinks

TENSORS = 4 + len(Sinks._fields) + len(ScaledSums._fields)
DEVICES = ("cpu", "cuda")


def attention(window: Window, sinks: Sinks | None, other: OtherSums | None) -> Tensor:
    """Attend to a window, to sinks and to other tokens, with gradients: `[B, H, N, Dv]`.

    Args:
        window: as `window.forward` takes it, like all that follow.
        sinks: None for none.
        other: None for none.
    """
    sums = (None,) * 3 if other is None else other if isinstance(other, ScaledSums) else (*other, None)
    arguments = (*window[:4], *(sinks or (None,) * 5), *sums, window.span, window.scaling)
    if torch.compiler.is_compiling():
        return torch.ops.hf_linattn.window_on_gpu(*arguments)[0]  # type: ignore[no-any-return]
    if not torch.is_grad_enabled():
        return _forward(*arguments)[0]
    output: Tensor = _Attention.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def _parts(*inputs: Any) -> tuple[Window, Sinks | None, OtherSums | None]:
    """Take the operator's arguments apart."""
    query, key, value, valid, *rest, span, scaling = inputs
    sinks, (values, total, log_scale) = rest[:5], rest[5:]
    sums: OtherSums | None = None
    if values is not None:
        sums = Elu1Sums(values, total) if log_scale is None else ScaledSums(values, total, log_scale)
    window = Window(query, key, value, valid, span, scaling)
    return window, None if sinks[1] is None else Sinks(*sinks), sums


def _forward(*inputs: Any) -> tuple[Tensor, Tensor]:
    return kernels.forward(*_parts(*inputs))


def _backward(grad: Tensor, *inputs: Any) -> WindowGrads:
    *tensors, output, lse, span, scaling = inputs
    return kernels.backward(grad, *_parts(*tensors, span, scaling), output, lse)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.options = inputs[TENSORS:]


def _by_inputs(found: WindowGrads) -> tuple[Tensor | None, ...]:
    """Bring gradients to the order of the operator's arguments."""
    others = (*(found.others or ()), None, None, None)[:3]
    return (*found[:3], None, *found[3:6], None, None, *others, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output, lse = _forward(*inputs)
        _remember(ctx, inputs, (output, lse))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as under create_graph=True
            inputs = *ctx.saved_tensors[:TENSORS], *ctx.options
            return tuple(gradients(_plain, inputs, [grad]))
        return _by_inputs(_backward(grad, *ctx.saved_tensors, *ctx.options))


_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor valid, Tensor? sink_query, Tensor? sink_key, "
    "Tensor? sink_value, Tensor? sink_valid, Tensor? ranks, Tensor? values, Tensor? total, Tensor? log_scale"
)
_operator = torch.library.custom_op(
    "hf_linattn::window_on_gpu",
    _forward,
    mutates_args=(),
    device_types=DEVICES,
    schema=f"({_ARGUMENTS}, int span, float scaling) -> (Tensor, Tensor)",
)


def _plain(*inputs: Any) -> list[Tensor]:
    window, sinks, other = _parts(*inputs)
    if isinstance(other, Elu1Sums):
        other = other.scaled(window.query)
    beside = None if sinks is None else WindowSinks(*sinks[1:])
    return [blocks.plain(window, other, beside, None if sinks is None else sinks.query)]


def _some(found: WindowGrads) -> list[Tensor]:
    """List the gradients that there are, laid out as the graph of a compiler was told."""
    tensors = (*found[:6], *(found.others or ()))
    return [x.contiguous() for x in tensors if x is not None]


_backward_operator = torch.library.custom_op(
    "hf_linattn::window_on_gpu_backward",
    lambda *inputs: _some(_backward(*inputs)),
    mutates_args=(),
    device_types=DEVICES,
    schema=f"(Tensor grad, {_ARGUMENTS}, Tensor output, Tensor lse, int span, float scaling) -> Tensor[]",
)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    (batch, heads, length, _), width = query.shape, value.shape[-1]
    output = value.new_empty(batch, length, heads, width).transpose(1, 2)
    return output, query.new_empty(batch, heads, length, dtype=torch.float32)


@_backward_operator.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, *inputs: Any) -> list[Tensor]:
    sink_query, sink_key, sink_value, _, _, *others = inputs[: TENSORS - 4]
    like = (query, key, value, sink_query, sink_key, sink_value, *others)
    return [x.new_empty(x.shape) for x in like if x is not None]


def _autograd_backward(ctx: Any, grad: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    found = iter(torch.ops.hf_linattn.window_on_gpu_backward(grad, *tensors, *ctx.options))
    of = (*tensors[:3], None, *tensors[4:7], None, None, *tensors[9:TENSORS])
    return (*(None if x is None else next(found) for x in of), None, None)


_operator.register_autograd(_autograd_backward, setup_context=_remember)
