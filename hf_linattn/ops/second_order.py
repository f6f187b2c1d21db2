"""Gradients of gradients.

Kernels, and the forms with a backward of their own, give gradients that have none themselves. Where torch is
asked for those, by `create_graph=True`, a backward computes its attention again by torch's own operations and
differentiates that, in the time and memory of a graph of single operations. What has no such form refuses:
torch's own mark, `once_differentiable`, is passed by where gradients of some tensors are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError


def gradients(
    function: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Any],
    output_grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Compute gradients that have gradients.

    Args:
        function: computes the outputs of `inputs` by torch's own operations.
        inputs: as a backward has saved them: tensors and others.
        output_grads: one for each output; None where nothing depends on it.

    Returns:
        One for each input, None where none is wanted.
    """
    # views: one input may be made of another, as sinks are of keys, whose gradient is not to hold its own
    inputs = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
    with torch.enable_grad():
        outputs = function(*inputs)
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, output_grads, strict=False)
        if output is not None and grad is not None and output.requires_grad
    ]
    wanted = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad]
    found: list[Tensor | None] = [None] * len(inputs)
    if not pairs or not wanted:
        return found
    results = torch.autograd.grad(
        [output for output, _ in pairs],
        [inputs[i] for i in wanted],
        [grad.to(output.dtype) for output, grad in pairs],
        create_graph=True,
        allow_unused=True,
    )
    for i, result in zip(wanted, results, strict=True):
        found[i] = result
    return found


def only_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse gradients that shall have gradients, before they are computed: a decorator of a backward."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *output_grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            where = backward.__qualname__.partition(".")[0].strip("_")
            raise UnsupportedCallError(f"{where} has no gradients of gradients: leave create_graph=True out")
        return backward(ctx, *output_grads)

    return refusing
