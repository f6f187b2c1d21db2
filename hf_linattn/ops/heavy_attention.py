"""A window with heavy hitters that learns: forward by whatever chooses, backward from what it chose.

The forward keeps queries, keys, values and the choices. They are constants to the gradient, so the backward
computes all steps again at once; nothing walks from one choice to the next a second time. Triton kernels
compute it where others computed the forward, else torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.eager import heavy
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.triton import heavy_backward
from hf_linattn.ops.types import HeavyChoices, HeavyColumns, HeavyState, accumulator_dtype

Forward = Callable[[HeavyChoices], tuple[Tensor, HeavyState]]
"""Computes outputs and the cache after; tells its argument what the backward needs."""


def attention(text: heavy.HeavyText, options: heavy.Options, forward: Forward) -> tuple[Tensor, HeavyState]:
    """Attend to sinks, heavy hitters and window; outputs have gradients, the cache has none.

    Args:
        text: in the dtype of the model.
        options: what else it depends on.
        forward: called without gradients.

    Returns:
        Output `[B, H, N, Dv]`, and the cache after.
    """
    output, *state = _Attention.apply(*text, options, forward)  # type: ignore[no-untyped-call]
    return output, HeavyState(*state)


def room_for_choices(key: Tensor, columns: HeavyColumns) -> Tensor:
    """Allocate what a forward writes its choices into, int32 `[B, Hkv, choices, heavy]`, all -1."""
    number = max(columns.left(key.shape[2] - 1), 0)
    return key.new_full((*key.shape[:2], number, columns.heavy), -1, dtype=torch.int32)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        *tensors, options, compute = given
        key, columns = tensors[2], options.columns
        chosen = room_for_choices(key, columns)
        choices = HeavyChoices(chosen)
        output, state = compute(choices)
        by_kernels = choices.log_sum is not None
        told = (chosen, choices.count, choices.log_sum, output if by_kernels else None)
        ctx.save_for_backward(*tensors, *told)
        ctx.options = options
        ctx.mark_non_differentiable(*state)
        ctx.set_materialize_grads(False)
        return output, *state

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *inputs, chosen, count, log_sum, output = ctx.saved_tensors
        if grad is None:
            return *[None] * len(inputs), None, None
        found: Sequence[Tensor | None]
        device = grad.device.type
        # inside autocast a backward is under it, too, and sums are float32
        with nullcontext() if device == "meta" else torch.autocast(device, enabled=False):
            if torch.is_grad_enabled():  # as under create_graph=True
                found = gradients(
                    lambda *x: [torch.cat([*_outputs(x, chosen, ctx.options)], 2)], inputs, [grad]
                )
            elif log_sum is not None:
                choices = HeavyChoices(chosen, count, log_sum)
                found = *by_kernels(heavy.HeavyText(*inputs), grad, output, choices, ctx.options), None
            else:
                found = by_torch(heavy.HeavyText(*inputs), chosen, ctx.options, grad)
        return *found, None, None


def _outputs(inputs: Sequence[Tensor | None], chosen: Tensor, options: heavy.Options) -> Iterator[Tensor]:
    """Compute outputs in the dtype of sums, part after part."""
    text = _wide(inputs)
    for start, stop in heavy.parts_of(text, options.columns):
        yield heavy.attended(text, chosen, options, start, stop)


def by_torch(
    text: heavy.HeavyText, chosen: Tensor, options: heavy.Options, grad: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of the tensors of a text, part after part, so that memory does not grow."""
    wide = _wide(text)
    # dense: rows of all heads are added to as one table
    sums = heavy.HeavyText(*(None if x is None else x.new_zeros(x.shape) for x in wide))  # type: ignore[arg-type]
    grad = grad.to(wide.key.dtype)
    for start, stop in heavy.parts_of(wide, options.columns):
        heavy.add_gradients(sums, grad, wide, chosen, options, start, stop)
    return [x if x is None or y is None else x.to(y.dtype) for x, y in zip(sums, text, strict=True)]


def by_kernels(
    text: heavy.HeavyText, grad: Tensor, output: Tensor, choices: HeavyChoices, options: heavy.Options
) -> heavy_backward.Gradients:
    """Compute the gradients of the tensors of a text by Triton kernels, as its outputs were."""
    near = None if text.near is None else text.near.to(text.query.dtype)
    return heavy_backward.backward(
        grad, text.query, near, text.key, text.value, output, choices, options.columns, options.scaling
    )


def _wide(inputs: Sequence[Tensor | None]) -> heavy.HeavyText:
    """Convert the tensors of a text to the dtype of sums."""
    of = accumulator_dtype(*(x for x in inputs if x is not None))
    return heavy.HeavyText(*(None if x is None else x.to(of) for x in inputs))  # type: ignore[arg-type]
