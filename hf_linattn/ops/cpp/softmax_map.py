"""Learned maps [softmax(W x), softmax(-W x)] by the C++ kernels, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout
from hf_linattn.ops.cpp.layout import array
from hf_linattn.ops.cpp.linear import SUMS, rows


def forward(x: Tensor, weight: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
    """Compute features `[B, H, N, F]`.

    Args:
        x: `[B, H, N, D]`.
        weight: W of each head, `[H, F / 2, D]`.
        floor: the least feature.
        dtype: of the features.

    Raises:
        UnsupportedCallError: the kernels cannot be compiled.
    """
    x, weight = rows(x), weight.contiguous()
    features = x.new_empty(*x.shape[:3], 2 * weight.shape[1], dtype=dtype)
    problem = _problem(x, weight, features, layout.NO_MAP_GRADS)
    build.library().linattn_softmax_map(problem, floor)
    return features


def backward(grad: Tensor, x: Tensor, weight: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Compute gradients of x and of the weight, in their dtypes, from that of the features."""
    grad, x, dense = rows(grad), rows(x), weight.contiguous()
    d_x = torch.empty_like(x)
    d_weight = x.new_empty(x.shape[0], *weight.shape, dtype=SUMS)
    grads = layout.SoftmaxMapGrads.pack(array(grad), array(d_x), d_weight.data_ptr())
    build.library().linattn_softmax_map(_problem(x, dense, grad, grads), floor)
    return d_x, d_weight.sum(0).to(weight.dtype)


def _problem(x: Tensor, weight: Tensor, features: Tensor, grads: bytes) -> bytes:
    batch, heads, length, head_dim = x.shape
    threads = 1 if layout.forked else torch.get_num_threads()
    return layout.SoftmaxMapProblem.pack(
        sizes=layout.Sizes.pack(batch, heads, heads, length, head_dim, weight.shape[1], threads),
        grads=grads,
        input=array(x),
        weight=array(weight[None]),
        features=array(features),
    )
