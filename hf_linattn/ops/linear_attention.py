"""Linear attention with a backward of its own, as an operator that torch.compile takes whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops import dispatch
from hf_linattn.ops.cpp import linear
from hf_linattn.ops.dispatch import Backend
from hf_linattn.ops.eager import bidirectional, chunked, chunked_backward, quadratic
from hf_linattn.ops.eager import linear as linear_form
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.triton import launch
from hf_linattn.ops.triton.problem import Segments, Slots, apart
from hf_linattn.ops.types import InputGrads, Inputs, OpConfig, OutputGrads, Outputs, accumulator_dtype

INPUTS, HOW = len(Inputs._fields), len(OpConfig._fields)
KEPT = INPUTS + len(Outputs._fields)
DEVICES = ("cpu", "cuda")


def attention(inputs: Inputs, config: OpConfig, keep: bool, backend: Backend | None = None) -> Outputs:
    """Compute linear attention, causal or over all keys, with gradients.

    Args:
        inputs: queries, keys, values, and what came before.
        config: which features, over which keys, and whether to divide.
        keep: the state after is wanted; causal only.
        backend: who computes, forward and backward; None decides by `dispatch.kernel_backend`.
    """
    if backend is None:
        backend = dispatch.kernel_backend(inputs)
    if torch.compiler.is_compiling():
        arguments = (*inputs, *config, keep or not config.causal, backend)
        outputs = Outputs(*torch.ops.hf_linattn.linear_attention(*arguments))
        return outputs if keep else Outputs(*outputs[:2])
    if not torch.is_grad_enabled():
        return _forward(inputs, config, keep, backend)
    # the backward of forms over all keys reads the sums, that of all scores at once does not
    keep = keep or not (
        config.causal or (backend == "eager" and dispatch.form(inputs, config) == "quadratic")
    )
    # an operator would cost more
    return Outputs(*_Attention.apply(*inputs, config, keep, backend))  # type: ignore[no-untyped-call]


def _forward(inputs: Inputs, config: OpConfig, keep: bool, backend: str) -> Outputs:
    if backend == "triton":
        return _triton(inputs, config, keep)[0]
    if backend == "cpp":
        return linear.forward(inputs, config, keep, dispatch.CHUNK)
    form = dispatch.form(inputs, config)
    if form == "quadratic":
        return quadratic.forward(inputs, config, keep)
    if form == "bidirectional":
        return bidirectional.forward(inputs, config, keep, dispatch.NUMBERS)
    return chunked.forward(inputs, config, keep, dispatch.chunk(inputs))


def _backward(
    inputs: Inputs,
    outputs: Outputs,
    output_grads: OutputGrads,
    config: OpConfig,
    backend: str,
    segments: Segments | None = None,
) -> InputGrads:
    if backend == "triton":
        return _triton_backward(inputs, outputs, output_grads, config, segments)
    if backend == "cpp":
        results = linear.backward(inputs, outputs, output_grads, config, dispatch.CHUNK)
        return chunked_backward.through_running_sum(results, outputs, output_grads)
    form = dispatch.form(inputs, config)
    if form == "quadratic":
        return quadratic.backward(inputs, outputs, output_grads, config)
    if form == "bidirectional":
        return bidirectional.backward(inputs, outputs, output_grads, config, dispatch.NUMBERS)
    return chunked_backward.backward(inputs, outputs, output_grads, config, dispatch.chunk(inputs))


def _triton(inputs: Inputs, config: OpConfig, keep: bool) -> tuple[Outputs, Segments | None]:
    """Compute the outputs, and what stands before the segments, which a backward may read again."""
    query, key, value, valid, S, z, log_decay, documents = inputs
    given, how = (query, key, value, valid, S, z), (config.kind, config.normalise)
    if not config.causal:
        return Outputs(*launch.global_forward(*given, *how, eps=config.eps)), None
    links: Any = {"log_decay": log_decay, "documents": documents}
    results, segments = launch.forward_and_segments(*given, *how, eps=config.eps, **links)
    return Outputs(*results) if keep else Outputs(*results[:2]), segments


def _triton_backward(
    inputs: Inputs,
    outputs: Outputs,
    output_grads: OutputGrads,
    config: OpConfig,
    segments: Segments | None,
) -> InputGrads:
    query, key, value, valid, S, z, log_decay, documents = inputs
    operands, kind = (*output_grads, query, key, value, valid), (config.kind, config.normalise)
    if config.causal:
        links: Any = {"log_decay": log_decay, "documents": documents, "segments": segments}
        last = None if log_decay is None else chunked_backward.of_state_after(outputs, output_grads)
        return launch.backward(*operands, S, z, *outputs[:2], *kind, eps=config.eps, **links, last=last)
    results = launch.global_backward(*operands, *outputs[:2], *outputs.state, *kind, eps=config.eps)
    return InputGrads(*results[:3])


def _remember(
    ctx: Any,
    inputs: Inputs,
    config: OpConfig,
    backend: str,
    outputs: Outputs,
    segments: Segments | None = None,
) -> None:
    """Keep what the backward needs; the state after only where decay has gradients, or all keys are seen."""
    ctx.config, ctx.backend = config, backend
    after = (None, None) if inputs.log_decay is None and config.causal else outputs[2:]
    slots, ctx.segments = apart(segments)
    ctx.save_for_backward(*inputs, *outputs[:2], *after, *slots)


def _output_grads(
    ctx: Any, output: Tensor | None, total: Tensor | None, S: Tensor | None = None, z: Tensor | None = None
) -> tuple[Inputs, Outputs, OutputGrads]:
    """Take gradients of the outputs, zeros filled in: S and z come together, where they were kept."""
    saved = ctx.saved_tensors
    inputs, outputs = Inputs(*saved[:INPUTS]), Outputs(*saved[INPUTS:KEPT])
    output = torch.zeros_like(outputs.output) if output is None else output
    if (S is None or not S.numel()) and (z is None or not z.numel()):
        return inputs, outputs, OutputGrads(output, total)
    (batch, heads, _, size), wide = inputs.key.shape, inputs.value.shape[3]
    S = outputs.total.new_zeros(batch, heads, size, wide) if S is None else S
    z = outputs.total.new_zeros(batch, heads, size) if z is None else z
    return inputs, outputs, OutputGrads(output, total, S, z)


def _by_inputs(results: InputGrads) -> tuple[Tensor | None, ...]:
    """Bring gradients to the order of the operator's first arguments, documents among them."""
    query, key, value, *rest = results
    return query, key, value, None, *rest, None


def _backward_once(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    segments = ctx.segments and ctx.segments._replace(slots=Slots(*ctx.saved_tensors[KEPT:]))
    results = _backward(*_output_grads(ctx, *grads), ctx.config, ctx.backend, segments)
    return (*_by_inputs(results), None, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        *output_grads, config, keep, backend = args
        inputs = Inputs(*output_grads)
        how = inputs, config, keep
        outputs, segments = _triton(*how) if backend == "triton" else (_forward(*how, backend), None)
        ctx.set_materialize_grads(False)
        _remember(ctx, inputs, config, backend, outputs, segments)
        return outputs if keep else outputs[:2]  # type: ignore[return-value]  # every result costs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as under create_graph=True
            config, inputs = ctx.config, ctx.saved_tensors[:INPUTS]
            found = gradients(lambda *x: linear_form.plain(Inputs(*x), config), inputs, grads)
            return *found, None, None, None
        return _backward_once(ctx, *grads)


@torch.library.custom_op("hf_linattn::linear_attention", mutates_args=(), device_types=DEVICES)
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    log_decay: Tensor | None,
    documents: Tensor | None,
    kind: str,
    eps: float,
    normalise: bool,
    causal: bool,
    keep: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = Inputs(query, key, value, valid, S, z, log_decay, documents)
    output, total, *after = _forward(inputs, OpConfig(kind, eps, normalise, causal), keep, backend)
    return output, total, *(total.new_empty(0) if x is None else x for x in after)  # type: ignore[return-value]


@_operator.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    query, key, value = args[:3]
    (batch, heads, length, size), (_, kv_heads, _, wide) = query.shape, value.shape
    sums = accumulator_dtype(query, key, value)
    dtype = value.dtype if args[INPUTS + 2] else sums  # normalise
    output = value.new_empty(batch, length, heads, wide, dtype=dtype).transpose(1, 2)
    total = output.new_empty(batch, heads, length, dtype=sums)
    if not args[-2]:  # keep
        return output, total, total.new_empty(0), total.new_empty(0)
    state = total.new_empty(batch, kv_heads, size, wide), total.new_empty(batch, kv_heads, size)
    return output, total, *state


@torch.library.custom_op("hf_linattn::linear_attention_backward", mutates_args=(), device_types=DEVICES)
def _backward_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    log_decay: Tensor | None,
    documents: Tensor | None,
    output: Tensor,
    total: Tensor,
    S_after: Tensor | None,
    z_after: Tensor | None,
    d_output: Tensor,
    d_total: Tensor | None,
    d_S: Tensor | None,
    d_z: Tensor | None,
    kind: str,
    eps: float,
    normalise: bool,
    causal: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute gradients, without elements where there are none: an operator has no optional results."""
    inputs = Inputs(query, key, value, valid, S, z, log_decay, documents)
    outputs: Any = (output, total, S_after, z_after)
    output_grads = OutputGrads(d_output, d_total, d_S, d_z)
    results = _backward(
        inputs, Outputs(*outputs), output_grads, OpConfig(kind, eps, normalise, causal), backend
    )
    # laid out as the graph of a compiler was told, whoever computed them
    return tuple(total.new_empty(0) if x is None else x.contiguous() for x in results)  # type: ignore[return-value]


@_backward_operator.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    total = args[INPUTS + 1]
    differentiable = Inputs(*args[:INPUTS]).differentiable
    return tuple(total.new_empty(0) if x is None else x.new_empty(x.shape) for x in differentiable)


def _autograd_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    inputs, outputs, output_grads = _output_grads(ctx, *grads)
    arguments = (*inputs, *outputs, *output_grads, *ctx.config, ctx.backend)
    results = torch.ops.hf_linattn.linear_attention_backward(*arguments)
    parts: Any = (None if x is None else y for x, y in zip(inputs.differentiable, results, strict=True))
    return (*_by_inputs(InputGrads(*parts)), *(None,) * (HOW + 2))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *config, _, backend = inputs[INPUTS:]
    _remember(ctx, Inputs(*inputs[:INPUTS]), OpConfig(*config), backend, Outputs(*output))


_operator.register_autograd(_autograd_backward, setup_context=_setup)
