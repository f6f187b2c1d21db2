"""Gradients of weights that a result does not depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_zero_gradients(output: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return a result that some weights have no part in, though they are asked for a gradient: zeros.

    Without one, processes that train together wait for each other's in vain.
    """
    output_of_all: Tensor = _ZeroGradients.apply(output, *weights)  # type: ignore[no-untyped-call]
    return output_of_all


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)
