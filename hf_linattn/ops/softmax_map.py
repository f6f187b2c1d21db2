"""Learned maps [softmax(W x), softmax(-W x)] in one operation of C++ or Triton with a backward of its own.

Its backward keeps x and W alone, and computes the features again.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.cpp import softmax_map as native
from hf_linattn.ops.cpp import takes
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.triton import check
from hf_linattn.ops.triton import softmax_map as triton
from hf_linattn.ops.types import accumulator_dtype


def kernels_take(x: Tensor, weight: Tensor) -> bool:
    """Tell whether the kernels compute a map of `[B, H, N, D]`, not while compiling; on a GPU, checked there.

    Raises:
        UnsupportedCallError: `HF_LINATTN_TRITON` insists on kernels, and they cannot.
    """
    if torch.compiler.is_compiling() or by_torch_alone():
        return False
    return check.takes_map(x, weight) if x.is_cuda else takes.softmax_map(x, weight)


def features(
    x: Tensor,
    weight: Tensor,
    floor: float,
    dtype: torch.dtype = torch.float32,
    backend: Literal["cpp", "triton"] = "cpp",
) -> Tensor:
    """Compute features `[B, H, N, F]` of a dtype, with gradients, where `kernels_take`.

    Where x and weight are bfloat16 the kernels multiply in it, if the processor does. On a GPU x has 16 bits.

    Args:
        x: `[B, H, N, D]`.
        weight: W of each head, `[H, F / 2, D]`.
        floor: the least feature.
        dtype: of the features.
        backend: whose kernels compute them.
    """
    kernels: Any = native if backend == "cpp" else triton
    result: Tensor
    if not torch.is_grad_enabled():
        result = kernels.forward(x, weight, floor, dtype)
        return result
    result = _SoftmaxMap.apply(x, weight, floor, dtype, kernels)  # type: ignore[no-untyped-call]
    return result


class _SoftmaxMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, floor: float, dtype: torch.dtype, kernels: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.floor, ctx.kernels = floor, kernels
        features: Tensor = kernels.forward(x, weight, floor, dtype)
        return features

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # as under create_graph=True
            inputs = x, weight, ctx.floor, grad.dtype
            return *gradients(_plain, inputs, [grad]), None
        d_x, d_weight = ctx.kernels.backward(grad, x, weight, ctx.floor)
        return d_x, d_weight.to(weight.dtype), None, None, None


def _plain(x: Tensor, weight: Tensor, floor: float, dtype: torch.dtype) -> list[Tensor]:
    """Compute the features by operations whose gradients have gradients."""
    sums = accumulator_dtype(x, weight)
    logits = torch.einsum("bhnd,hfd->bhnf", x.to(sums), weight.to(sums))
    features = torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)
    return [F.threshold(features, floor, floor).to(dtype)]
