# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Softmax over a window and linear attention behind it in one kernel, forward. `window_rest` launches it.

    o_i = (sum_W exp(s_ij) v_j + sum_rest f_ij v_j) / (sum_W exp(s_ij) + sum_rest f_ij),  f_ij = phi_q . phi_k

A program walks a segment of the tokens behind the window with S and z on chip, as `kernels.outputs` does.
What a chunk of queries reads there, numerators and totals, are the sums that the softmax over their window
begins from. So numerators never leave the chip. Names and numbers are as in `kernel_functions`.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import (
    dot,
    exponential,
    head_pointer,
    key_features,
    load_state,
    load_tile,
    operand,
    partial_sums,
    query_features,
    reciprocal,
    row_shift,
    store_state,
    store_tile,
    visible,
)
from hf_linattn.ops.triton.window_kernels import add_window


@triton.jit
def running_decay(DECAY, batch_head, before, places, keep, length):
    """Sum up log g `[B, Hkv, N]` along a block of tokens, from `before` on: at each of them, and of all."""
    decay = tl.load(DECAY + batch_head * length + places, mask=keep & (places >= 0), other=0.0)
    return before + tl.cumsum(decay, 0), before + tl.sum(decay, 0)


@triton.jit
def as_weights(log_scale, total, sums):
    """Bring sums over e^log_scale (to base 2) to those that `add_weights` adds to, scaled to a total of 1."""
    there = total != 0  # NaN is
    some = tl.where(there, total, 1.0)
    top = tl.where(there, log_scale + tl.log2(some), float("-inf"))
    return top, tl.where(there, 1.0, 0.0), sums * tl.where(there, 1.0 / some, 0.0)[:, None]


@triton.jit
def window_and_rest(
    Q, K, V, VALID, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, PHI_Q, PHI_K, LEFT_V, LEFT_VALID, DECAY,
    LOG_SCALE, STATES, FACTORS, S0, Z0, OUT, S, Z,
    q_strides, k_strides, v_strides, valid_strides, sink_q_strides, phi_q_strides, phi_k_strides,
    left_v_strides, left_valid_strides, out_strides,
    heads, length, keys, span, offset, alone, left, sinks, scale, segment, slots, parts,
    PHI_Q_STRIDE: tl.constexpr, PHI_K_STRIDE: tl.constexpr, LEFT_V_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, F: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr, SUMMED: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute outputs of the queries of a segment, and the state after all.

    Grid: B H, segments of the first `alone` queries, behind which nothing lies, and then of the others. Of
    these, PHI_Q `[B, H, left, F]` reads the tokens PHI_K and LEFT_V up to its own place, and S0 and Z0.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // heads, row % heads
    batch_head = row // GROUP
    Q = head_pointer(Q, q_strides, batch, head)
    K = head_pointer(K, k_strides, batch, head // GROUP)
    V = head_pointer(V, v_strides, batch, head // GROUP)
    PHI_Q = head_pointer(PHI_Q, phi_q_strides, batch, head)
    PHI_K = head_pointer(PHI_K, phi_k_strides, batch, head // GROUP)
    LEFT_V = head_pointer(LEFT_V, left_v_strides, batch, head // GROUP)
    OUT = head_pointer(OUT, out_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    features = tl.arange(0, BLOCK_F)
    columns = tl.arange(0, BLOCK_V)
    order = tl.arange(0, CHUNK)
    own = tl.program_id(1) - tl.cdiv(alone, segment)
    before = own * parts - 1
    s, z = load_state(STATES, FACTORS, S0, Z0, batch_head, before, slots, features, columns, F, DV, SUMMED)
    s = tl.trans(s)
    z = tl.where(tl.arange(0, 16)[:, None] == 0, z[None, :], 0.0)
    first = tl.maximum(own * segment, -tl.cdiv(alone, CHUNK) * CHUNK)
    for place in range(first, tl.minimum(own * segment + segment, left), CHUNK):
        start = place + alone
        tokens = start + order
        inside = (tokens >= 0) & (tokens < length)
        behind = inside & (tokens >= alone)
        x = load_tile(PHI_Q, place, behind, PHI_Q_STRIDE, features, F)
        shift = row_shift(x, features, F)
        phi_q = operand(query_features(x, shift, features, F, FEATURE_MAP, EPS), OPERAND)
        total = tl.sum(dot(phi_q, tl.trans(operand(z, OPERAND)), OPERAND), 1)
        sums = dot(phi_q, tl.trans(operand(s, OPERAND)), OPERAND)
        if DECAY is not None:
            of_query, end = running_decay(DECAY, batch_head, 0.0, place + order, behind, left)
            of_state = exponential(of_query)
            total *= of_state
            sums *= of_state[:, None]
            s *= exponential(end)
            z *= exponential(end)
            so_far = 0.0
        for step in tl.range(0, CHUNK, STEP, num_stages=1):
            places = place + step + tl.arange(0, STEP)
            keep = visible(LEFT_VALID, batch, places, left_valid_strides, left) & (places >= 0)
            k = load_tile(PHI_K, place + step, keep, PHI_K_STRIDE, features, F)
            v = load_tile(LEFT_V, place + step, keep, LEFT_V_STRIDE, columns, DV)
            phi = key_features(k, keep, features, F, MASKED, FEATURE_MAP, EPS)
            phi_k = operand(phi, OPERAND)
            weight = keep.to(tl.float32)
            if DECAY is not None:
                of_key, so_far = running_decay(DECAY, batch_head, so_far, places, places < left, left)
                weight *= exponential(end - of_key)
            z += partial_sums(phi, weight)
            scores = dot(phi_q, tl.trans(phi_k), OPERAND)
            scores = tl.where(order[:, None] >= (step + tl.arange(0, STEP))[None, :], scores, 0.0)
            if DECAY is not None:
                scores *= exponential(tl.minimum(of_query[:, None] - of_key[None, :], 0.0))
            total += tl.sum(scores, 1)
            sums += dot(scores, v, OPERAND)
            if DECAY is not None:
                v = v.to(tl.float32) * weight[:, None]
            s += dot(tl.trans(v), phi_k, OPERAND)
        log = tl.zeros([CHUNK], tl.float32)
        if FEATURE_MAP == "elu1":
            log = shift * 1.4426950408889634
        elif LOG_SCALE is not None:
            log = tl.load(LOG_SCALE + row * left + place + order, mask=behind, other=0.0)
            log *= 1.4426950408889634
        # features of tokens that are not there need not be 0
        top, total, sums = as_weights(log, tl.where(behind, total, 0.0), sums)
        q = load_tile(Q, start, inside, q_strides[2], rows, D)
        top, total, sums = add_window(
            q, K, V, VALID, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, start, tokens, inside, batch, head,
            batch_head, k_strides, v_strides, valid_strides, sink_q_strides, length, keys, span, offset,
            sinks, scale, rows, columns, top, total, sums, D, DV, CHUNK, BLOCK, SINKS, OPERAND,
        )  # fmt: skip
        store_tile(OUT, sums * reciprocal(total)[:, None], start, inside, OUT_STRIDE, columns, DV)
    if (own * segment + segment >= left) & (row % GROUP == 0):
        store_state(
            S + batch_head * F * DV, Z + batch_head * F, tl.trans(s), tl.sum(z, 0), features, columns, F, DV,
            True,
        )  # fmt: skip
