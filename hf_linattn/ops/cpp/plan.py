"""Texts with nothing before them, of one layout: the call is packed once, and then given other addresses.

For short texts: deciding who computes, and packing a call, take as long as the arithmetic of 16 tokens.
"""

from __future__ import annotations

import operator
import struct
from typing import Any

from torch import Tensor

from hf_linattn.ops.cpp import build, layout, takes
from hf_linattn.ops.cpp.layout import threads
from hf_linattn.ops.cpp.linear import SUMS, dense, problem_of
from hf_linattn.ops.switches import said
from hf_linattn.ops.types import Gate, Inputs, OpConfig, Outputs

_GATE = layout.LinearProblem.offset("gate")
ADDRESSES = "query", "key", "value", "output", "valid", "log_decay", "total", "S_after", "z_after"
OFFSETS = [_GATE + layout.Gate.offset("weight"), _GATE + layout.Gate.offset("bias")]
OFFSETS += map(layout.LinearProblem.offset, ADDRESSES)
"""Where the addresses lie in a packed call that differ from one to the next, in ascending order."""
GAPS = list(zip([0, *(at + 8 for at in OFFSETS)], [*OFFSETS, layout.LinearProblem.size], strict=True))
FORM = struct.Struct("q".join(f"{end - start}s" for start, end in GAPS))
MOST = 256
"""Layouts that are kept."""

UNKNOWN = object()
_plans: dict[Any, Any] = {}  # by layout; None for one that the kernels do not take


def find(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    gate: Gate | None,
    feature_map: str,
    eps: float,
    causal: bool,
    keep: bool,
    chunk: int,
) -> Plan | None:
    """Find or make the plan of a text with nothing before it; None where `ops.dispatch` must decide.

    For calls without gradients, which nothing compiles, exports or transforms.

    Args:
        query: `[B, H, N, D]`, as the model gives it.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        valid: bool `[B, S]`, False at keys that do not count; None where all do.
        gate: makes the decay; None for none, or for one that `Plan.run` is given.
        feature_map: one of `FEATURE_MAPS`; queries and keys are not features yet.
        eps: added to the features of "relu".
        causal: a query sees the keys up to its own; False for all keys.
        keep: the state after is wanted.
        chunk: tokens per step.
    """
    if not type(query) is type(key) is type(value) is Tensor:
        return None
    layout_of = (
        query.shape, query.stride(), query.dtype, key.shape, key.stride(), key.dtype,
        value.shape, value.stride(), value.dtype, valid is None or valid.stride(),
        None if gate is None else gate.temperature, feature_map, eps, causal, keep, chunk,
        threads(), said(build.CPP),
    )  # fmt: skip
    plan = _plans.get(layout_of, UNKNOWN)
    if plan is UNKNOWN:
        if len(_plans) >= MOST:
            _plans.clear()
        config = OpConfig(feature_map, eps, True, causal)
        inputs = Inputs(query, key, value, valid, None, None, None, None)
        fits = takes.linear(query, key, value) and all(map(operator.is_, dense(inputs), inputs))
        plan = _plans[layout_of] = Plan(inputs, config, keep, chunk, gate) if fits else None
    return plan  # type: ignore[no-any-return]


class Plan:
    """A call, packed.

    Args:
        inputs: as all calls will have them in memory.
        config: as in `forward`.
        keep: likewise.
        chunk: likewise.
        gate: likewise.
    """

    def __init__(self, inputs: Inputs, config: OpConfig, keep: bool, chunk: int, gate: Gate | None) -> None:
        outputs = Outputs.empty(inputs, keep, SUMS)
        packed = problem_of(inputs, outputs, config, keep, chunk, gate, layout.NO_LINEAR_GRADS)
        self.gaps = [packed[start:end] for start, end in GAPS]
        self.output = tuple(outputs.output.shape), outputs.output.stride()
        self.total = tuple(outputs.total.shape)
        self.after = tuple(tuple(x.shape) for x in outputs[2:] if x is not None)
        self.eps = config.eps

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        valid: Tensor | None,
        gate: Gate | None,
        log_decay: Tensor | None,
    ) -> tuple[Any, ...] | None:
        """Compute output, total, S and z after; None where numbers do not lie in memory.

        Args:
            query: as `find` was given it, and so are the others.
            key: likewise.
            value: likewise.
            valid: likewise.
            gate: likewise.
            log_decay: float32 `[B, Hkv, N]`; None for none, or where a gate makes it.
        """
        query_at, key_at, value_at = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if not (query_at and key_at and value_at):
            return None
        output, total = value.new_empty_strided(*self.output), value.new_empty(self.total, dtype=SUMS)
        S = z = None
        valid_at = decay_at = S_at = z_at = weight_at = bias_at = 0
        if self.after:
            S, z = map(total.new_empty, self.after)
            S_at, z_at = S.data_ptr(), z.data_ptr()
        if valid is not None:
            valid_at = valid.data_ptr()
        if gate is not None:
            weight_at, bias_at = layout.address(gate.weight), layout.address(gate.bias)
        if log_decay is not None:
            log_decay = log_decay.contiguous()
            decay_at = layout.address(log_decay)
        gap = self.gaps
        problem = FORM.pack(
            gap[0], weight_at, gap[1], bias_at, gap[2], query_at, gap[3], key_at, gap[4], value_at,
            gap[5], output.data_ptr(), gap[6], valid_at, gap[7], decay_at, gap[8], total.data_ptr(),
            gap[9], S_at, gap[10], z_at, gap[11],
        )  # fmt: skip
        build.library().linattn_forward(problem, self.eps)
        return output, total, S, z
