"""Linear attention by the C++ kernels: what `eager.chunked` and `eager.bidirectional` compute, in a call."""

from __future__ import annotations

import ctypes
import struct

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout
from hf_linattn.ops.cpp.layout import address, array, threads
from hf_linattn.ops.types import FEATURE_MAPS, Gate, InputGrads, Inputs, OpConfig, OutputGrads, Outputs, State

SUMS = torch.float32
OFFSETS = tuple(layout.LinearProblem.offset(name) for name in ("query", "key", "value", "output"))
ADDRESS = struct.Struct("q")


def may_overwrite(state: State) -> bool:
    """Tell whether one token can be written over it: dense, as the kernels read it."""
    return state.S.is_contiguous() and state.z.is_contiguous()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rounds() -> bool:
    """Tell whether factors of products are rounded to bfloat16 where queries and keys come in it."""
    return bool(build.library().linattn_rounds())


def forward(inputs: Inputs, config: OpConfig, keep: bool, chunk: int, gate: Gate | None = None) -> Outputs:
    """Compute output, totals and the state after, causal or over all keys.

    Args:
        inputs: queries, keys, values, and what came before.
        config: which features, which keys, and whether to divide.
        keep: the state after is wanted.
        chunk: tokens per step.
        gate: makes the decay, in place of `log_decay`; None for none.

    Raises:
        UnsupportedCallError: the kernels cannot be compiled.
    """
    return _run(dense(inputs), Outputs.empty(inputs, keep, SUMS), config, keep, chunk, gate)


def step(inputs: Inputs, config: OpConfig, gate: Gate | None = None) -> Outputs:
    """Compute one token as `forward` does, and write the state over where its memory allows it."""
    S, z, inputs = inputs.S, inputs.z, dense(inputs)
    over = (S, z) if S is not None and z is not None and inputs.S is S and inputs.z is z else None
    return _run(inputs, Outputs.empty(inputs, True, SUMS, over), config, True, 1, gate)


class Prepared:
    """Tokens behind one state, of which the call is packed once: `run` fills in where a token lies.

    Args:
        inputs: a token, in memory as all will be, none of them padding; its state is written over.
        config: as in `forward`.
        gate: likewise.
    """

    def __init__(self, inputs: Inputs, config: OpConfig, gate: Gate | None) -> None:
        S, z = inputs.S, inputs.z
        assert S is not None
        assert z is not None
        outputs = Outputs.empty(inputs, True, SUMS, (S, z))
        batch, heads, _, wide = outputs.output.shape
        self.shape, self.eps, self.threads = (batch, 1, heads, wide), config.eps, threads()
        packed = problem_of(inputs, outputs, config, True, 1, gate, layout.NO_LINEAR_GRADS)
        self.problem = bytearray(packed)
        self.call = (ctypes.c_char * len(packed)).from_buffer(self.problem)
        self.held = S, z, outputs.total, gate

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """Compute a token: `[B, 1, H, Dv]`; None where threads are not as many as they were.

        Args:
            query: `[B, H, 1, D]`.
            key: `[B, Hkv, 1, D]`.
            value: `[B, Hkv, 1, Dv]`.
        """
        if threads() != self.threads:
            return None
        output = value.new_empty(self.shape)
        for offset, x in zip(OFFSETS, (query, key, value, output), strict=True):
            ADDRESS.pack_into(self.problem, offset, x.data_ptr())
        build.library().linattn_forward(self.call, self.eps)
        return output


def _run(
    inputs: Inputs, outputs: Outputs, config: OpConfig, keep: bool, chunk: int, gate: Gate | None
) -> Outputs:
    problem = problem_of(inputs, outputs, config, keep, chunk, gate, layout.NO_LINEAR_GRADS)
    build.library().linattn_forward(problem, config.eps)
    return outputs


def backward(
    inputs: Inputs, outputs: Outputs, output_grads: OutputGrads, config: OpConfig, chunk: int
) -> InputGrads:
    """Compute the gradients of `forward`; that of `log_decay` by its running sums.

    Args:
        inputs: as the forward took them.
        outputs: what it returned; over all keys S and z are read.
        output_grads: gradients of these.
        config: as the forward took it.
        chunk: tokens per step.
    """
    if not config.causal:
        inputs = inputs._replace(S=outputs.S, z=outputs.z)
    inputs = dense(inputs)
    d_output, d_total, d_S, d_z = rows(output_grads.output), *map(_whole, output_grads[1:])
    read = Outputs(rows(outputs.output), outputs.total.contiguous())
    query, key, value = (torch.empty_like(x) for x in inputs[:3])
    S = z = decay = None
    if config.causal:
        S, z = (None if x is None else torch.empty_like(x) for x in (inputs.S, inputs.z))
        decay = None if inputs.log_decay is None else torch.zeros_like(inputs.log_decay)
    grads = layout.LinearGrads.pack(
        d_output=array(d_output),
        d_query=array(query),
        d_key=array(key),
        d_value=array(value),
        d_total=address(d_total),
        d_S_after=address(d_S),
        d_z_after=address(d_z),
        d_S=address(S),
        d_z=address(z),
        d_decay=address(decay),
    )
    build.library().linattn_backward(problem_of(inputs, read, config, False, chunk, None, grads), config.eps)
    return InputGrads(query, key, value, S, z, decay)


def problem_of(
    inputs: Inputs,
    outputs: Outputs,
    config: OpConfig,
    keep: bool,
    chunk: int,
    gate: Gate | None,
    grads: bytes,
) -> bytes:
    """Pack a call, of which the arguments are those of `forward` and `backward`."""
    query, key, value, valid, S, z, log_decay, documents = inputs
    return layout.LinearProblem.pack(
        sizes=layout.sizes(query.shape[1], query.shape[2], query, value),
        options=layout.LinearOptions.pack(
            feature_map=FEATURE_MAPS.index(config.kind),
            normalise=config.normalise,
            causal=config.causal,
            keep_state=keep,
            keys=value.shape[2],
            chunk=chunk,
        ),
        grads=grads,
        gate=layout.gate(gate),
        query=array(query),
        key=array(key),
        value=array(value),
        output=array(outputs.output),
        valid=address(valid),
        valid_row=0 if valid is None else valid.stride(0),
        S=address(S),
        z=address(z),
        log_decay=address(log_decay),
        documents=address(documents),
        total=address(outputs.total),
        S_after=address(outputs.S),
        z_after=address(outputs.z),
    )


def rows(x: Tensor) -> Tensor:
    """Make the last axis dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dense(inputs: Inputs) -> Inputs:
    """Bring inputs to the layout that the kernels read: tokens dense along D, the rest whole."""
    query, key, value, valid, *rest = inputs
    valid = None if valid is None else rows(valid)
    return Inputs(rows(query), rows(key), rows(value), valid, *map(_whole, rest))
