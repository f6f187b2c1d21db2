"""Gates of a state, made of the values, in one launch on a GPU, with a backward of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.triton import check
from hf_linattn.ops.triton import gate as kernels
from hf_linattn.ops.triton.gate_selftest import GateForm
from hf_linattn.ops.types import Gate


def kernels_take(value: Tensor) -> bool:
    """Tell whether Triton kernels compute gates of values `[B, Hkv, N, Dv]`: on a GPU, checked there.

    Raises:
        UnsupportedCallError: `HF_LINATTN_TRITON` insists on kernels, and they cannot.
    """
    # a compiler makes one kernel of torch's operations by itself
    if not value.is_cuda or torch.compiler.is_compiling() or by_torch_alone():
        return False
    return check.takes_window(value, value, value, GateForm())


def log_gates(value: Tensor, valid: Tensor | None, gate: Gate) -> Tensor:
    """Compute the logarithm of gates, `[B, Hkv, N]` float32, with gradients, where `kernels_take`.

    Args:
        value: `[B, Hkv, N, Dv]`, in the dtype of the model.
        valid: boolean `[B, N]`, False at tokens that do not count, where it is 0; None for all.
        gate: the weights.
    """
    if not torch.is_grad_enabled():
        return kernels.forward(value, valid, gate)
    result: Tensor = _LogGates.apply(value, valid, *gate)  # type: ignore[no-untyped-call]
    return result


class _LogGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, valid: Tensor | None, weight: Tensor, bias: Tensor, temperature: float
    ) -> Tensor:
        ctx.save_for_backward(value, valid, weight, bias)
        ctx.temperature = temperature
        return kernels.forward(value, valid, Gate(weight, bias, temperature))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, valid, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():  # as under create_graph=True
            return tuple(gradients(plain, (value, valid, weight, bias, ctx.temperature), [grad]))
        gate = Gate(weight, bias, ctx.temperature)
        d_value, d_weight, d_bias = kernels.backward(grad, value, valid, gate)
        return d_value, None, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None


def plain(
    value: Tensor, valid: Tensor | None, weight: Tensor, bias: Tensor, temperature: float
) -> list[Tensor]:
    """Compute gates by operations whose gradients have gradients."""
    logits = (value.float() * weight.float().unsqueeze(1)).sum(-1) + bias.float().unsqueeze(1)
    found = functional.logsigmoid(logits) / temperature
    return [found if valid is None else found.masked_fill(~valid[:, None], 0.0)]
