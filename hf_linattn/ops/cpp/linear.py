"""Linear attention by the C++ kernels of `ops/cpp`: what `loop` and `both_ways` compute, in one call."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build
from hf_linattn.ops.types import FEATURE_MAPS, Gate, Given, Gradients, How, Inputs, Outputs, State

SUMS = torch.float32
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORWARD, _BACKWARD = struct.Struct("15qd29q").pack, struct.Struct("15qd55q").pack
"""`Problem` of ops/cpp/head.h; a forward reads the first part of it."""


def reads(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether they were asked for and can read these: on a CPU, of at most 32 bits."""
    if not build.asked() or not query.is_cpu or type(query) is not Tensor:
        return False  # a tensor of another class may have no memory to read
    return query.dtype in DTYPES and key.dtype in DTYPES and value.dtype in DTYPES


def takes(query: Tensor, key: Tensor, value: Tensor, state: State | None = None) -> bool:
    """Whether they were asked for and can: as `reads`, sums in float32, and not of nothing."""
    if not reads(query, key, value):
        return False
    if state is not None and not (state.S.dtype == SUMS and state.z.dtype == SUMS):
        return False
    return bool(query.numel() and key.numel() and value.numel())


def may_overwrite(state: State) -> bool:
    """Whether `step` can write over it: dense as the kernels read it."""
    return state.S.is_contiguous() and state.z.is_contiguous()


def forward(inputs: Inputs, how: How, keep: bool, chunk: int, gate: Gate | None = None) -> Outputs:
    """As `loop.causal` or `both_ways.forward`; with a gate in place of `log_decay`.

    Raises:
        UnsupportedCallError: they cannot be compiled.
    """
    return _run(dense(inputs), Outputs.empty(inputs, keep, SUMS), how, keep, chunk, gate)


def step(inputs: Inputs, how: How, gate: Gate | None = None) -> Outputs:
    """`forward` of one token that writes the state after it over the one before."""
    S, z, inputs = inputs.S, inputs.z, dense(inputs)
    over = (S, z) if S is not None and z is not None and inputs.S is S and inputs.z is z else None
    return _run(inputs, Outputs.empty(inputs, True, SUMS, over), how, True, 1, gate)


def _run(inputs: Inputs, outputs: Outputs, how: How, keep: bool, chunk: int, gate: Gate | None) -> Outputs:
    after = (address(outputs.S), address(outputs.z))
    problem = _FORWARD(*_numbers(inputs, outputs, how, keep, chunk, gate), *after)
    build.library().linattn_forward(problem, how.eps)
    return outputs


def backward(inputs: Inputs, outputs: Outputs, given: Given, how: How, chunk: int) -> Gradients:
    """As `loop_backward.backward`, but for decay: the loss by its running sums; or `both_ways.backward`."""
    if not how.causal:
        inputs = inputs._replace(S=outputs.S, z=outputs.z)
    inputs = dense(inputs)
    loss, d_total, d_S, d_z = given
    loss, d_total, d_S, d_z = rows(loss), _whole(d_total), _whole(d_S), _whole(d_z)
    read = Outputs(rows(outputs.output), outputs.total.contiguous())
    query, key, value = (torch.empty_like(x) for x in inputs[:3])
    S = z = decay = None
    if how.causal:
        S, z = (None if x is None else torch.empty_like(x) for x in (inputs.S, inputs.z))
        decay = None if inputs.log_decay is None else torch.zeros_like(inputs.log_decay)
    numbers = _numbers(inputs, read, how, False, chunk)
    arrays = (*array(loss), *array(query), *array(key), *array(value))
    rest = (address(x) for x in (d_total, d_S, d_z, S, z, decay))
    build.library().linattn_backward(_BACKWARD(*numbers, 0, 0, *arrays, *rest), how.eps)
    return Gradients(query, key, value, S, z, decay)


def _numbers(
    inputs: Inputs, outputs: Outputs, how: How, keep: bool, chunk: int, gate: Gate | None = None
) -> tuple[float, ...]:
    """`Problem` up to `total`."""
    query, key, value, hidden, S, z, log_decay, documents = inputs
    (batch, heads, length, size), (_, kv_heads, keys, wide) = query.shape, value.shape
    kind, threads = FEATURE_MAPS.index(how.kind), torch.get_num_threads()
    by_row = (0, 0) if hidden is None else (hidden.data_ptr(), hidden.stride(0))
    sizes = (batch, heads, kv_heads, length, keys, size, wide)
    options = (kind, how.normalise, how.causal, keep, chunk, threads)
    arrays = (*array(query), *array(key), *array(value), *array(outputs.output))
    rest = (address(S), address(z), address(log_decay), address(documents), address(outputs.total))
    return (*sizes, *options, *gated(gate), *arrays, *by_row, *rest)


def gated(gate: Gate | None) -> tuple[float, ...]:
    """`Gate` of ops/cpp/gate.h."""
    return (0, 0, 1.0) if gate is None else (gate.weight.data_ptr(), gate.bias.data_ptr(), gate.temperature)


def array(x: Tensor) -> tuple[int, ...]:
    """`Array` of ops/cpp/numbers.h."""
    batch, head, token, _ = x.stride()
    return x.data_ptr(), DTYPES[x.dtype], batch, head, token


def address(x: Tensor | None) -> int:
    """Of its numbers; 0 where there are none."""
    return 0 if x is None or not x.numel() else x.data_ptr()


def rows(x: Tensor) -> Tensor:
    """With a dense last axis."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dense(inputs: Inputs) -> Inputs:
    """As the kernels read them."""
    query, key, value, hidden, *rest = inputs
    hidden = None if hidden is None else rows(hidden)
    return Inputs(rows(query), rows(key), rows(value), hidden, *map(_whole, rest))
