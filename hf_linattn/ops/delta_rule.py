"""The delta rule: by C++ kernels on CPUs, by fla's on GPUs, where these may be used, else by torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.cpp import delta, takes
from hf_linattn.ops.eager import delta_rule
from hf_linattn.ops.fla import check, rule
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.types import DeltaConfig, DeltaGate, DeltaInputs, accumulator_dtype


def attention(
    inputs: DeltaInputs, config: DeltaConfig, scale: Tensor, keep: bool, in_place: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the delta rule on keys and queries that are brought to length 1.

    Args:
        inputs: queries, keys, values, gates, and what came before.
        config: which rule.
        scale: factors of the output, `[H]`.
        keep: the state after is wanted.
        in_place: the state before may be written over.

    Returns:
        Output `[B, H, N, Dv]`, None without queries, and the state after, None where it is not wanted.
    """
    tracing = torch.compiler.is_compiling() or by_torch_alone()
    without_output = torch.is_grad_enabled() and inputs.query is None  # with which a backward in C++ begins
    if tracing or without_output or not takes.delta(inputs):
        return _by_fla_or_torch(inputs, config, scale, tracing)
    if not torch.is_grad_enabled():
        return delta.forward(inputs, config, keep, scale.float(), in_place)
    output, after = _Delta.apply(*inputs, config)  # type: ignore[no-untyped-call]
    return _scaled(output, scale), after


def step(
    inputs: DeltaInputs, gate: DeltaGate, config: DeltaConfig, scale: Tensor, in_place: bool
) -> tuple[Tensor, Tensor] | None:
    """Compute one token behind a state, gates and all, in one call of C++.

    Args:
        inputs: with a query and a state, without gates.
        gate: what they are made of.
        config: which rule.
        scale: factors of the output, `[H]`.
        in_place: the state before may be written over.

    Returns:
        Output `[B, H, 1, Dv]` and the state after; None where the kernel does not take these.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or by_torch_alone():
        return None
    if not takes.delta(inputs):
        return None
    output, after = delta.forward(inputs, config, True, scale.float(), in_place, gate)
    assert output is not None
    assert after is not None
    return output, after


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale.to(x)[:, None, None]


def _by_fla_or_torch(
    inputs: DeltaInputs, config: DeltaConfig, scale: Tensor, tracing: bool
) -> tuple[Tensor | None, Tensor]:
    """Make gates of their logits, hide what does not count, bring keys and queries to length 1; compute."""
    query, key, value, logits, state, valid, documents = inputs
    assert logits is not None
    dtype = accumulator_dtype(key, value)
    beta, log_decay = config.beta * logits[..., 0].sigmoid(), None
    if config.decay != "none":
        log_decay = (F.logsigmoid(logits[..., 1:]) / config.temperature).clamp_min(delta_rule.LOWEST)
    if valid is not None:  # neither written nor aged by the others; not by a product: they may hold NaN
        hidden = ~valid[:, None, :]
        beta = beta.masked_fill(hidden, 0)
        key, value = (x.masked_fill(hidden[..., None], 0) for x in (key, value))
        log_decay = None if log_decay is None else log_decay.masked_fill(hidden[..., None], 0)
    query = None if query is None else F.normalize(query.to(dtype), dim=-1, eps=delta.EPS)
    key = F.normalize(key.to(dtype), dim=-1, eps=delta.EPS)
    terms = (beta, log_decay, state, documents)
    if key.is_cuda and not tracing and check.takes(query, key, value, *terms):
        query = None if query is None else _scaled(query, scale)  # whose product is not rounded
        return rule.causal(query, key, value, *terms)
    output, after = delta_rule.causal(query, key, value.to(dtype), *terms)
    return None if output is None else _scaled(output, scale), after


class _Delta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.config = args
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return delta.forward(DeltaInputs(*tensors), ctx.config, keep=True)  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, d_after: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, config = DeltaInputs(*ctx.saved_tensors), ctx.config
        if torch.is_grad_enabled():  # as under create_graph=True
            assert inputs.query is not None
            ones = inputs.query.new_ones(inputs.query.shape[1])
            found = gradients(
                lambda *x: _by_fla_or_torch(DeltaInputs(*x), config, ones, tracing=True),
                *(inputs, (d_output, d_after)),
            )
            return *found, None
        if d_output is None:
            assert inputs.query is not None
            d_output = inputs.value.new_zeros(*inputs.query.shape[:3], inputs.value.shape[3])
        return (*delta.backward(inputs, ctx.config, d_output, d_after), None, None, None)
