"""Backward of `triton_linear`: launches the kernels of `triton_backward_kernels`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.triton.problem import Problem, last_contiguous
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
    segment: int | None = None,
) -> InputGrads:
    """Gradients of `triton_linear.forward`; shapes and remaining arguments as there.

    d_output is `[B, H, N, Dv]`, d_total `[B, H, N]`; d_S `[B, Hkv, D, Dv]` and d_z `[B, Hkv, D]` are of the
    state after the last token; None is 0. output and total are what `forward` returned.

    Returns:
        Of query, key, value, and of S and z where there was a state before.
    """
    call = Problem(query, key, value, valid, feature_map, normalise, segment)
    S0, z0 = call.dense(S0, z0)
    R, r = _end(call, d_S, d_z)
    if not call.length or not call.batch:
        d_query, d_key, d_value = (torch.zeros_like(x) for x in (query, key, value))
        return InputGrads(d_query, d_key, d_value, *(() if S0 is None else _zeros(call, R, r)))
    run = _Run(call, d_output, total)
    tokens, segments = call.cut(call.length, call.pairs * call.blocks(call.D, call.tiles.key_gradients))
    later = run.rows(d_total, output, R, r, tokens, segments if segments > 1 else 0)
    before = call.states(S0, z0, tokens, segments - 1)
    d_query = run.query_gradients(before, S0, z0, tokens, causal=True)
    d_value = run.value_gradients(later, R, tokens, causal=True)
    d_key, *d_state = run.key_gradients(later, R, r, tokens, causal=True, state=S0 is not None)
    return InputGrads(d_query, d_key, d_value, *d_state)


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
    segment: int | None = None,
) -> InputGrads:
    """Gradients of `triton_linear.global_forward`, which returned S and z; of a state before in any case."""
    call = Problem(query, key, value, valid, feature_map, normalise, segment)
    S, z = S.contiguous(), z.contiguous()
    R, r = _end(call, d_S, d_z)
    run = _Run(call, d_output, total)
    d_query, d_key, d_value = (torch.zeros_like(x) for x in (call.query, call.key, call.value))
    if call.length and call.batch:
        tokens, slots = call.cut(call.length, call.pairs * call.blocks(call.D, call.tiles.gradient_rows))
        states = run.rows(d_total, output, R, r, tokens, slots)
        assert states is not None
        R, r = call.last_slot(states)
        d_query = run.query_gradients(None, S, z, tokens, causal=False)
    if call.keys and call.batch:
        tokens, _ = call.cut(call.keys, call.pairs * call.blocks(call.D, call.tiles.key_gradients))
        d_value = run.value_gradients(None, R, tokens, causal=False)
        d_key, _, _ = run.key_gradients(None, R, r, tokens, causal=False, state=False)
    return InputGrads(d_query, d_key, d_value, *_zeros(call, R, r))


def _end(call: Problem, d_S: Tensor | None, d_z: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """R and r behind the last token; unlike a state, one of them may be missing."""
    return (
        None if d_S is None else d_S.to(torch.float32).contiguous(),
        None if d_z is None else d_z.to(torch.float32).contiguous(),
    )


def _zeros(call: Problem, R: Tensor | None, r: Tensor | None) -> tuple[Tensor, Tensor]:
    """R and r as tensors of their own, zeros where they are None."""
    d_S, d_z = call.new_state()
    return d_S.zero_() if R is None else d_S.copy_(R), d_z.zero_() if r is None else d_z.copy_(r)


class _Run:
    """One backward: what its passes share."""

    def __init__(self, call: Problem, d_output: Tensor, total: Tensor) -> None:
        self.call, self.d_output, self.total = call, last_contiguous(d_output), total.contiguous()
        shape = (call.batch, call.heads, call.length)
        self.t, self.shift = call.new(*shape), call.new(*shape)
        self.d_out_strides = self.d_output.stride()[:3]

    def common(self, segment: int, slots: int) -> dict[str, Any]:
        """Arguments that all passes have."""
        call = self.call
        return {
            "D_OUT": self.d_output,
            "d_out_strides": self.d_out_strides,
            "TOTAL": self.total,
            "heads": call.heads,
            "segment": segment,
            "slots": slots,
            "GROUP": call.group,
            "NORMALISE": call.normalise,
            **call.maps,
        }

    def rows(
        self,
        d_total: Tensor | None,
        output: Tensor,
        R: Tensor | None,
        r: Tensor | None,
        segment: int,
        slots: int,
    ) -> Tensor | None:
        """T and shift of every query; R and r per segment, from the last one on, if `slots` is not 0."""
        from hf_linattn.ops.triton import backward_kernels as kernels

        call, tile = self.call, self.call.tiles.gradient_rows
        states = call.new_slots(slots) if slots else None
        segment = segment if slots else ROWS_ALONE
        blocks = call.blocks(call.D, tile) if slots else 1
        output = last_contiguous(output)
        call.launch(
            kernels.gradient_rows,
            (call.pairs * blocks, -(-call.length // segment)),
            tile,
            OUT=output,
            out_strides=output.stride()[:3],
            D_TOTAL=None if d_total is None else d_total.to(torch.float32).contiguous(),
            T=self.t,
            SHIFT=self.shift,
            STATES=states,
            length=call.length,
            **call.inputs("q"),
            **call.sizes(tile, "BLOCK_D", "BLOCK_V"),
            **self.common(segment, slots),
        )
        if states is not None:
            call.accumulate(states, R, r)
        return states

    def query_gradients(
        self, states: Tensor | None, S0: Tensor | None, z0: Tensor | None, segment: int, *, causal: bool
    ) -> Tensor:
        """dq; `states` before each segment but the first."""
        from hf_linattn.ops.triton import backward_kernels as kernels

        call, tile = self.call, self.call.tiles.query_gradients
        d_query = torch.empty_like(call.query)
        call.launch(
            kernels.query_gradients,
            (call.batch * call.heads * call.blocks(call.D, tile), -(-call.length // segment)),
            tile,
            T=self.t,
            SHIFT=self.shift,
            STATES=states,
            S0=S0,
            Z0=z0,
            D_Q=d_query,
            d_q_strides=d_query.stride()[:3],
            length=call.length,
            CAUSAL=causal,
            **call.inputs("qkv"),
            **call.sizes(tile, "BLOCK_V"),
            **self.common(segment, 0 if states is None else states.shape[1]),
        )
        return d_query

    def key_gradients(
        self,
        later: Tensor | None,
        R: Tensor | None,
        r: Tensor | None,
        segment: int,
        *,
        causal: bool,
        state: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Dk and, where `state`, dS0 and dz0; `later` is what `rows` returned."""
        from hf_linattn.ops.triton import backward_kernels as kernels

        call, tile = self.call, self.call.tiles.key_gradients
        d_key = torch.empty_like(call.key)
        d_S0, d_z0 = call.new_state() if state else (None, None)
        call.launch(
            kernels.key_gradients,
            (call.pairs * call.blocks(call.D, tile), -(-call.keys // segment)),
            tile,
            T=self.t,
            SHIFT=self.shift,
            STATES=later,
            D_S=R,
            D_Z=r,
            D_K=d_key,
            d_k_strides=d_key.stride()[:3],
            D_S0=d_S0,
            D_Z0=d_z0,
            length=call.keys,
            CAUSAL=causal,
            **call.inputs("qkv"),
            **call.sizes(tile, "BLOCK_V"),
            **self.common(segment, 0 if later is None else later.shape[1]),
        )
        return d_key, d_S0, d_z0

    def value_gradients(
        self, later: Tensor | None, R: Tensor | None, segment: int, *, causal: bool
    ) -> Tensor:
        """dv; `later` is what `rows` returned."""
        from hf_linattn.ops.triton import backward_kernels as kernels

        call, tile = self.call, self.call.tiles.value_gradients
        d_value = torch.empty_like(call.value)
        call.launch(
            kernels.value_gradients,
            (call.pairs * call.blocks(call.Dv, tile), -(-call.keys // segment)),
            tile,
            STATES=later,
            D_S=R,
            D_V=d_value,
            d_v_strides=d_value.stride()[:3],
            length=call.keys,
            CAUSAL=causal,
            **call.inputs("qk"),
            **call.sizes(tile, "BLOCK_D"),
            **self.common(segment, 0 if later is None else later.shape[1]),
        )
        return d_value
