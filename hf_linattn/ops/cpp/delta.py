"""The delta rule by the C++ kernels: what `eager.delta_rule` computes, in a call."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout
from hf_linattn.ops.cpp.layout import NO_ARRAY, NO_DELTA_GATE, NO_DELTA_GRADS, address, array
from hf_linattn.ops.cpp.linear import SUMS, rows
from hf_linattn.ops.types import DeltaConfig, DeltaGate, DeltaGrads, DeltaInputs, token_major

CHUNK = 64
EPS = 1e-12
"""Least length that a key or query is divided by, as in `torch.nn.functional.normalize`."""


def forward(
    inputs: DeltaInputs,
    config: DeltaConfig,
    keep: bool,
    scale: Tensor | None = None,
    in_place: bool = False,
    gate: DeltaGate | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the output `[B, H, N, Dv]`, in the dtype of the values, and the state after where it is kept.

    Args:
        inputs: what it is computed from.
        config: which rule.
        keep: the state after is wanted.
        scale: factors of the output `[H]`, float32; None for 1.
        in_place: of one token, the state may be written over.
        gate: of one token behind a state, what its gates are made of.
    """
    inputs = _dense(inputs)
    query, key, value, _, state, *_ = inputs
    step = query is not None and state is not None and key.shape[2] == 1 and keep
    after: Tensor | None = None
    if keep:
        shape = (*key.shape[:2], key.shape[3], value.shape[3])
        after = state if step and in_place else key.new_empty(shape, dtype=SUMS)
    output = None
    if query is not None:
        output = token_major(value, query.shape[0], query.shape[1], query.shape[2], value.shape[3])
    problem = _problem(inputs, config, output, after, step, scale, NO_DELTA_GRADS, gate)
    build.library().linattn_delta_forward(problem, EPS)
    return output, after


def backward(
    inputs: DeltaInputs, config: DeltaConfig, d_output: Tensor, d_after: Tensor | None
) -> DeltaGrads:
    """Compute the gradients of `forward` without a scale.

    Args:
        inputs: of the forward, with queries.
        config: of the forward.
        d_output: `[B, H, N, Dv]`.
        d_after: gradient of the state after, `[B, Hkv, D, Dv]`; None for none.
    """
    inputs = _dense(inputs)
    assert inputs.query is not None
    assert inputs.gates is not None
    d_output = rows(d_output)
    d_after = None if d_after is None else d_after.contiguous()
    given = (inputs.query, inputs.key, inputs.value, inputs.gates)
    query, key, value, gates = map(torch.empty_like, given)
    state = None if inputs.state is None else torch.empty_like(inputs.state)
    grads = layout.DeltaGrads.pack(
        d_output=array(d_output),
        d_query=array(query),
        d_key=array(key),
        d_value=array(value),
        d_gates=array(gates),
        d_S_after=address(d_after),
        d_S=address(state),
    )
    problem = _problem(inputs, config, None, None, False, None, grads)
    build.library().linattn_delta_backward(problem, EPS)
    return DeltaGrads(query, key, value, gates, state)


def _problem(
    inputs: DeltaInputs,
    config: DeltaConfig,
    output: Tensor | None,
    after: Tensor | None,
    step: bool,
    scale: Tensor | None,
    grads: bytes,
    gate: DeltaGate | None = None,
) -> bytes:
    query, key, value, gates, state, valid, documents = inputs
    return layout.DeltaProblem.pack(
        sizes=layout.sizes((key if query is None else query).shape[1], key.shape[2], key, value),
        grads=grads,
        gate=NO_DELTA_GATE if gate is None else _packed(gate),
        step=step,
        chunk=CHUNK,
        decays={"none": 0, "head": 1, "channel": key.shape[3]}[config.decay],
        query=NO_ARRAY if query is None else array(query),
        key=array(key),
        value=array(value),
        output=NO_ARRAY if output is None else array(output),
        gates=NO_ARRAY if gates is None else array(gates),
        valid=address(valid),
        valid_row=0 if valid is None else valid.stride(0),
        documents=address(documents),
        S=address(state),
        S_after=address(after),
        scale=address(scale),
        beta=config.beta,
        temperature=config.temperature,
    )


def _packed(gate: DeltaGate) -> bytes:
    return layout.DeltaGate.pack(
        weight=address(gate.weight),
        bias=address(gate.bias),
        rank=0 if gate.down is None else gate.down.shape[1],
        down=address(gate.down),
        up=address(gate.up),
        up_bias=address(gate.up_bias),
    )


def _dense(inputs: DeltaInputs) -> DeltaInputs:
    """Bring inputs to the layout that the kernels read: tokens dense along D, the rest whole."""
    query, key, value, gates, state, valid, documents = inputs
    return DeltaInputs(
        None if query is None else rows(query),
        rows(key),
        rows(value),
        None if gates is None else rows(gates),
        None if state is None else state.contiguous(),
        None if valid is None else rows(valid),
        None if documents is None else documents.contiguous(),
    )
