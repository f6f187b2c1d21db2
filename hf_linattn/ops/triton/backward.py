"""Gradients of linear attention on GPUs: launches the kernels of `backward_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton import gate
from hf_linattn.ops.triton.problem import (
    GRADIENT_ROWS,
    KEY_GRADIENTS,
    NONE,
    QUERY_GRADIENTS,
    VALUE_GRADIENTS,
    KernelSpec,
    Problem,
    Segments,
    Slots,
    constant_strides,
    last_contiguous,
)
from hf_linattn.ops.types import InputGrads

ROWS_ALONE = 256
"""Tokens per program where `gradient_rows` has no state to sum."""


def backward(
    d_output: Tensor,
    d_total: Tensor | None,
    d_S: Tensor | None,
    d_z: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    output: Tensor,
    total: Tensor,
    feature_map: str,
    normalise: bool,
    *,
    eps: float = 0.0,
    log_decay: Tensor | None = None,
    documents: Tensor | None = None,
    segment: int | None = None,
    segments: Segments | None = None,
    last: Tensor | None = None,
) -> InputGrads:
    """Compute the gradients of causal linear attention, `launch.forward`.

    Args:
        d_output: gradient of the output, `[B, H, N, Dv]`.
        d_total: of the totals, `[B, H, N]`; None for 0.
        d_S: of S after the last token, `[B, Hkv, D, Dv]`; None for 0.
        d_z: of z, `[B, Hkv, D]`; None for 0.
        query: `[B, H, N, D]`, as the forward took it, like all that follow.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        valid: boolean `[B, N]`; None for all.
        S0: `[B, Hkv, D, Dv]`; None for nothing.
        z0: `[B, Hkv, D]`; None for nothing.
        output: what the forward returned, `[B, H, N, Dv]`.
        total: likewise, `[B, H, N]`.
        feature_map: "elu1", "relu" or "none".
        normalise: the output was divided by the total.
        eps: added to the features of "relu".
        log_decay: `[B, Hkv, N]`, at most 0, float32: each token scales all before it by its exponential.
        documents: integers `[B, N]`, ascending: a query sees its own, and the state before belongs to the
            first of each row, that after to the last.
        segment: tokens that one program walks; None chooses.
        segments: what `launch.forward_and_segments` returned beside these; None computes it again.
        last: where there is decay, what the state after adds to its last running sum, d_S . S + d_z . z,
            `[B, Hkv]`; None for 0.

    Returns:
        Gradients of query, key, value, of S and z where there was a state before, and of `log_decay` where
        there is one.
    """
    call = Problem(query, key, value, valid, feature_map, normalise, eps, segment, log_decay, documents)
    S0, z0 = call.dense(S0, z0)
    R, r = _end(call, d_S, d_z)
    if not call.length or not call.batch:
        d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
        S, z = (None, None) if S0 is None else _zeros(call, R, r)
        d_decay = None if log_decay is None else torch.zeros_like(log_decay)
        return InputGrads(d_query, d_key, d_value, S, z, d_decay)
    run = _Run(call, d_output, total, causal=True)
    tokens, count = call.cut(call.length, KEY_GRADIENTS)
    later = run.rows(d_total, output, tokens, count if count > 1 else 0)
    after = call.before(tokens, later, R, r)
    d_value = run.value_gradients(after, R, causal=True)
    d_key, of_key, d_S0, d_z0 = run.key_gradients(after, R, r, causal=True, state=S0 is not None)
    if segments is None:
        segments = call.states_before(tokens, count, S0, z0)
    d_query, of_query = run.query_gradients(segments, S0, z0, causal=True)
    d_decay = None
    if of_query is not None and of_key is not None:
        d_decay = gate.decay_gradients(of_query, of_key, last, call)
    return InputGrads(d_query, d_key, d_value, d_S0, d_z0, d_decay)


def global_backward(
    d_output: Tensor,
    d_total: Tensor | None,
    d_S: Tensor | None,
    d_z: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    output: Tensor,
    total: Tensor,
    S: Tensor,
    z: Tensor,
    feature_map: str,
    normalise: bool,
    *,
    eps: float = 0.0,
    segment: int | None = None,
) -> InputGrads:
    """Compute the gradients of linear attention over all keys, `launch.global_forward`.

    Args:
        d_output: gradient of the output, `[B, H, N, Dv]`.
        d_total: of the totals, `[B, H, N]`; None for 0.
        d_S: of S, the sum over all keys, `[B, Hkv, D, Dv]`; None for 0.
        d_z: of z, `[B, Hkv, D]`; None for 0.
        query: `[B, H, N, D]`, as the forward took it, like all that follow.
        key: `[B, Hkv, M, D]`.
        value: `[B, Hkv, M, Dv]`.
        valid: boolean `[B, M]`; None for all.
        output: what the forward returned, `[B, H, N, Dv]`.
        total: likewise, `[B, H, N]`.
        S: likewise, `[B, Hkv, D, Dv]`.
        z: likewise, `[B, Hkv, D]`.
        feature_map: "elu1", "relu" or "none".
        normalise: the output was divided by the total.
        eps: added to the features of "relu".
        segment: tokens that one program walks; None chooses.

    Returns:
        Gradients of query, key, value, and of S and z before, whether there was a state or not.
    """
    call = Problem(query, key, value, valid, feature_map, normalise, eps, segment)
    S, z = S.contiguous(), z.contiguous()
    R, r = _end(call, d_S, d_z)
    run = _Run(call, d_output, total, causal=False)
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (call.query, call.key, call.value))
    if call.length and call.batch:
        tokens, slots = call.cut(call.length, GRADIENT_ROWS)
        states, factors = run.rows(d_total, output, tokens, slots)
        assert states is not None
        call.accumulate(states, factors, R, r)
        R, r = call.last_slot(states)
        d_query, _ = run.query_gradients(Segments(tokens, NONE, False), S, z, causal=False)
    if call.keys and call.batch:
        tokens, _ = call.cut(call.keys, KEY_GRADIENTS)
        after = Segments(tokens, NONE, False)
        d_value = run.value_gradients(after, R, causal=False)
        d_key, *_ = run.key_gradients(after, R, r, causal=False, state=False)
    return InputGrads(d_query, d_key, d_value, *_zeros(call, R, r))


def _end(call: Problem, d_S: Tensor | None, d_z: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Make R and r behind the last token; unlike a state, one of them may be missing."""
    return (
        None if d_S is None else d_S.to(torch.float32).contiguous(),
        None if d_z is None else d_z.to(torch.float32).contiguous(),
    )


def _zeros(call: Problem, R: Tensor | None, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """Copy R and r to tensors of their own, zeros where they are None."""
    d_S, d_z = call.new_state()
    return d_S.zero_() if R is None else d_S.copy_(R), d_z.zero_() if r is None else d_z.copy_(r)


class _Run:
    """One backward: what its passes share."""

    def __init__(self, call: Problem, d_output: Tensor, total: Tensor, *, causal: bool) -> None:
        from hf_linattn.ops.triton import backward_kernels

        self.kernels = backward_kernels
        self.call, d_output = call, last_contiguous(d_output)
        shape = (call.batch, call.heads, call.length)
        self.t, shift = call.new(*shape), call.new(*shape)
        self.common = {
            "D_OUT": d_output,
            **constant_strides(d_out=d_output),
            "TOTAL": total.contiguous(),
            "SHIFT": shift,
        }
        self.d_query = torch.empty_like(call.query)
        # until its own pass, the last, the gradient's memory holds c phi_q for keys and values
        changed = call.normalise or call.maps["FEATURE_MAP"] != "none"
        self.weighed = causal and changed and call.query.dtype is torch.bfloat16
        rows = self.d_query if self.weighed else call.query
        self.queries = {"Q": rows, **constant_strides(q=rows), "WEIGHED": self.weighed}

    def launch(
        self,
        kernel: Any,
        spec: KernelSpec,
        length: int,
        segment: int,
        own: dict[str, Any],
        programs: int | None = None,
    ) -> None:
        """Launch a pass over `length` tokens with what it takes by itself, and what all passes take."""
        own |= self.common
        own["length"], own["segment"] = length, segment
        self.call.run(kernel, spec, -(-length // segment), own, programs)

    def rows(self, d_total: Tensor | None, output: Tensor, segment: int, slots: int) -> Slots:
        """Compute t and shift of every query, and R and r of each segment, counted from the last one.

        None where `slots` is 0 because no R is wanted.
        """
        features = self.d_query if self.weighed else None
        call, output = self.call, last_contiguous(output)
        found = call.new_slots(slots)
        self.launch(
            self.kernels.gradient_rows,
            GRADIENT_ROWS,
            call.length,
            segment if slots else ROWS_ALONE,
            {
                "T": self.t,
                "FEATURES": features,
                "STATES": found.states,
                "slots": slots,
                "OUT": output,
                **constant_strides(out=output),
                "D_TOTAL": None if d_total is None else d_total.to(torch.float32).contiguous(),
                "FACTORS": found.factors,
            },
            programs=None if slots or self.weighed else call.batch_heads,
        )
        return found

    def query_gradients(
        self, before: Segments, S0: Tensor | None, z0: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Compute dq and, where there is decay, parts of phi_q . dphi_q `[parts, B, H, N]`.

        `before` is what stands before the segments; S0 and z0 before the first, or of all keys.
        """
        along = self.along(QUERY_GRADIENTS, self.call.heads)
        self.launch(
            self.kernels.query_gradients,
            QUERY_GRADIENTS,
            self.call.length,
            before.tokens,
            {
                **before.arguments,
                "T": self.t,
                "S0": S0,
                "Z0": z0,
                "D_Q": self.d_query,
                "ALONG": along,
                "CAUSAL": causal,
                "WEIGHED": self.weighed,
            },
        )
        return self.d_query, along

    def along(self, spec: KernelSpec, heads: int) -> Tensor | None:
        """Allocate products of features and their gradients, `[blocks of columns, B, heads, N]`."""
        if self.call.decay is None:
            return None
        blocks = -(-self.call.D // self.call.tile(spec).block)
        return self.call.new(blocks, self.call.batch, heads, self.call.length)

    def key_gradients(
        self,
        after: Segments,
        R: Tensor | None,
        r: Tensor | None,
        *,
        causal: bool,
        state: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Compute dk; parts of phi_k . dphi_k where there is decay; dS0 and dz0 where there was a state.

        `after` is what stands behind the segments; R and r are behind the last token, or of all queries.
        """
        d_key = torch.empty_like(self.call.key)
        d_S0, d_z0 = self.call.new_state() if state else (None, None)
        along = self.along(KEY_GRADIENTS, self.call.kv_heads)
        self.launch(
            self.kernels.key_gradients,
            KEY_GRADIENTS,
            self.call.keys,
            after.tokens,
            {
                **after.arguments,
                **self.queries,
                "T": self.t,
                "D_S": R,
                "D_Z": r,
                "D_K": d_key,
                "D_S0": d_S0,
                "D_Z0": d_z0,
                "ALONG": along,
                "CAUSAL": causal,
            },
        )
        return d_key, along, d_S0, d_z0

    def value_gradients(self, after: Segments, R: Tensor | None, *, causal: bool) -> Tensor:
        """Compute dv; `after` stands behind the segments, R after the last token, or of all queries."""
        d_value = torch.empty_like(self.call.value)
        self.launch(
            self.kernels.value_gradients,
            VALUE_GRADIENTS,
            self.call.keys,
            after.tokens,
            {
                **after.arguments,
                **self.queries,
                "D_S": R,
                "D_V": d_value,
                "CAUSAL": causal,
            },
        )
        return d_value
