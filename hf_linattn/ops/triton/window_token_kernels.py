# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""One decoded token behind a window, with a linear attention for what leaves it: what runs on the device.

`window_step` reads the ring of keys as it was, with the token in the place of the oldest; the oldest goes
over into the state, S in place, and the queries see ring, sinks, token and state under one normaliser, or
under two that a share joins. `window_push` then writes what all programs of the first had to read: the
token's column, the mask, z, and where the next token goes. A token that does not count changes nothing; one
that is a sink itself takes a column that does not count, and its place among the sinks.

Names and numbers are as in `kernel_functions`. Memory-bound, so products are for a key head's queries
together, 16 rows or more, and the state is read in float32.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import (
    exponential,
    head_pointer,
    key_features,
    load_state,
    load_tile,
    log_sigmoid,
    operand,
    query_features,
    reciprocal,
    row_and_block,
    row_shift,
    store_state,
)
from hf_linattn.ops.triton.window_kernels import add_weights, hidden_where_not, plain_dot


@triton.jit
def window_step(
    Q, K, V, VALID, RING_K, RING_V, RING_VALID, OLDEST, COLUMN, RANKS, SINK_Q, SINK_K, SINK_V, SINK_VALID,
    TAIL_Q, EVICTED, S, Z, NEW_Z, DECAY, GATE, GATE_BIAS, LOG_SCALE, MIX, OUT,
    q_strides, k_strides, v_strides, valid_stride, sink_q_strides, tail_q_strides, kv_heads, size, sinks,
    scale, temperature,
    D: tl.constexpr, DV: tl.constexpr, FEATURES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SINKS: tl.constexpr, FEATURE_MAP: tl.constexpr, EPS: tl.constexpr, LOGIT: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute outputs of a token, and the state after. Grid: batch_heads x blocks of DV.

    RING_K `[B, Hkv, size, D]`, RING_V, SINK_K `[B, Hkv, sinks, D]`, SINK_V, S `[B, Hkv, FEATURES, DV]` and Z
    dense; TAIL_Q None: the map is of Q. EVICTED `[B, Hkv, FEATURES]`, None for the key in the ring. OUT
    `[B, H, DV]`.
    """
    batch_head, block = row_and_block(DV, BLOCK)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    rows = tl.arange(0, BLOCK_D)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    members = tl.arange(0, ROWS)
    inside = members < GROUP
    one = tl.full([1], 1, tl.int1)
    column = tl.load(OLDEST + batch)
    if (head == 0) & (block == 0):
        tl.store(COLUMN + batch, column)
    counts = column >= 0
    if VALID is not None:
        counts = tl.load(VALID + batch * valid_stride) != 0
    q = load_tile(head_pointer(Q, q_strides, batch, head * GROUP), 0, inside, q_strides[1], rows, D)
    k = load_tile(head_pointer(K, k_strides, batch, head), 0, one, 0, rows, D).to(tl.float32)
    v = load_tile(head_pointer(V, v_strides, batch, head), 0, one, 0, columns, DV).to(tl.float32)
    top = tl.where(counts, tl.sum(q.to(tl.float32) * k, 1) * scale, float("-inf"))
    total = tl.zeros([ROWS], tl.float32) + tl.where(counts, 1.0, 0.0)
    sums = tl.zeros([ROWS, BLOCK], tl.float32) + tl.where(counts, v, 0.0)
    if SINKS > 0:
        met = q
        if SINK_Q is not None:
            met = load_tile(
                head_pointer(SINK_Q, sink_q_strides, batch, head * GROUP),
                0,
                inside,
                sink_q_strides[1],
                rows,
                D,
            )
        index = tl.arange(0, SINKS)
        seen = tl.load(SINK_VALID + batch * sinks + index, mask=index < sinks, other=0) != 0
        seen = seen & (index <= tl.load(RANKS + batch))
        sink_k = load_tile(SINK_K + batch_head * sinks * D, 0, index < sinks, D, rows, D)
        sink_v = load_tile(SINK_V + batch_head * sinks * DV, 0, index < sinks, DV, columns, DV)
        of_sinks = hidden_where_not(seen[None, :], plain_dot(met, tl.trans(sink_k), OPERAND) * scale)
        top, total, sums = add_weights(of_sinks, sink_v, top, total, sums, OPERAND)
    keys = RING_K + batch_head * size * D
    values = RING_V + batch_head * size * DV
    for first in range(0, size, CHUNK):
        places = first + tl.arange(0, CHUNK)
        counted = tl.load(RING_VALID + batch * size + places, mask=places < size, other=0) != 0
        counted = counted & ((places != column) | (counts == 0))
        ring_k = load_tile(keys, first, places < size, D, rows, D)
        ring_v = load_tile(values, first, places < size, DV, columns, DV)
        scores = hidden_where_not(counted[None, :], plain_dot(q, tl.trans(ring_k), OPERAND) * scale)
        top, total, sums = add_weights(scores, ring_v, top, total, sums, OPERAND)
    if S is not None:
        features = tl.arange(0, BLOCK_F)
        leaves = counts & (tl.load(RING_VALID + batch * size + column) != 0)
        if EVICTED is not None:
            old = load_tile(EVICTED + batch_head * FEATURES, 0, one, 0, features, FEATURES)
        else:
            old = load_tile(keys, column, one, D, features, FEATURES)
        old = operand(key_features(old, one, features, FEATURES, False, FEATURE_MAP, EPS), OPERAND)
        phi_k = tl.where(leaves, tl.sum(old.to(tl.float32), 0), 0.0)
        left = load_tile(values, column, one, DV, columns, DV).to(tl.float32)
        left = tl.where(leaves, tl.sum(left, 0), 0.0)
        kept = 1.0
        if DECAY is not None:
            kept = exponential(tl.load(DECAY + batch_head))
        if GATE is not None:
            every = tl.arange(0, BLOCK_V)
            whole = load_tile(values, column, one, DV, every, DV).to(tl.float32)
            weight = load_tile(GATE + head * DV, 0, one, 0, every, DV).to(tl.float32)
            logit = tl.sum(tl.sum(whole * weight, 1), 0) + tl.load(GATE_BIAS + head).to(tl.float32)
            kept = exponential(log_sigmoid(logit)[0] / temperature)
        kept = tl.where(leaves, kept, 1.0)
        s, z = load_state(None, None, S, Z, batch_head, -1, 0, features, columns, FEATURES, DV, True)
        s = s * kept + phi_k[:, None] * left[None, :]
        z = z * kept + phi_k
        # programs share z: `window_push` writes it when all have read it
        of_head = S + batch_head * FEATURES * DV
        store_state(of_head, NEW_Z + batch_head * FEATURES, s, z, features, columns, FEATURES, DV, block == 0)
        tail = tl.zeros([ROWS, BLOCK], tl.float32)
        beside = tl.zeros([ROWS], tl.float32)
        log = tl.zeros([ROWS], tl.float32)
        for member in range(GROUP):
            if TAIL_Q is not None:
                of_query = head_pointer(TAIL_Q, tail_q_strides, batch, head * GROUP + member)
            else:
                of_query = head_pointer(Q, q_strides, batch, head * GROUP + member)
            x = load_tile(of_query, 0, one, 0, features, FEATURES)
            shift = row_shift(x, features, FEATURES)
            phi_q = query_features(x, shift, features, FEATURES, FEATURE_MAP, EPS)
            phi_q = tl.sum(operand(phi_q, OPERAND).to(tl.float32), 0)
            mine = members == member
            tail = tl.where(mine[:, None], tl.sum(phi_q[:, None] * s, 0)[None, :], tail)
            beside = tl.where(mine, tl.sum(phi_q * z, 0), beside)
            if FEATURE_MAP == "elu1":
                log = tl.where(mine, tl.sum(shift, 0), log)
        there = beside != 0  # NaN is
        if MIX is not None:
            share = tl.load(MIX + head * GROUP + members, mask=inside, other=0.0)
            if LOGIT:
                share = 1.0 / (1.0 + exponential(-share))
            share = tl.where(there, share, 1.0)
            sums *= (reciprocal(total) * share)[:, None]
            sums += tail * (reciprocal(beside) * (1.0 - share))[:, None]
        else:
            if LOG_SCALE is not None:
                log += tl.load(LOG_SCALE + batch_head * GROUP + members, mask=inside, other=0.0)
            log = log * 1.4426950408889634
            log_total = tl.where(there, log + tl.log2(tl.where(there, beside, 1.0)), float("-inf"))
            higher = tl.maximum(top, log_total)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            factor = tl.exp2(top - base)
            of_tail = tl.where(there, tl.exp2(log - base), 0.0)
            total = total * factor + beside * of_tail
            sums = (sums * factor[:, None] + tail * of_tail[:, None]) * reciprocal(total)[:, None]
    else:
        sums *= reciprocal(total)[:, None]
    to = OUT + (batch_head * GROUP + members)[:, None] * DV + columns[None, :]
    tl.store(to, sums.to(OUT.dtype.element_ty), mask=inside[:, None] & (columns < DV)[None, :])


@triton.jit
def window_push(
    K, V, VALID, RING_K, RING_V, RING_VALID, OLDEST, COLUMN, RANKS, SINK_K, SINK_V, SINK_VALID, Z, NEW_Z,
    k_strides, v_strides, valid_stride, kv_heads, size, sinks,
    D: tl.constexpr, DV: tl.constexpr, FEATURES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_F: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write a token into the ring, and where it is a sink, there too. Grid: batch_heads."""
    batch_head = tl.program_id(0).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    column = tl.load(COLUMN + batch)  # OLDEST is written here
    counts = column >= 0
    if VALID is not None:
        counts = tl.load(VALID + batch * valid_stride) != 0
    k = tl.load(head_pointer(K, k_strides, batch, head) + rows, mask=rows < D)
    v = tl.load(head_pointer(V, v_strides, batch, head) + columns, mask=columns < DV)
    place = batch_head * size + column
    tl.store(RING_K + place * D + rows, k.to(RING_K.dtype.element_ty), mask=(rows < D) & counts)
    tl.store(RING_V + place * DV + columns, v.to(RING_V.dtype.element_ty), mask=(columns < DV) & counts)
    in_window = 1
    if SINKS > 0:
        rank = tl.load(RANKS + batch)
        is_sink = counts & (rank < sinks) & (rank >= 0)
        place = batch_head * sinks + tl.maximum(rank, 0)
        tl.store(SINK_K + place * D + rows, k.to(SINK_K.dtype.element_ty), mask=(rows < D) & is_sink)
        tl.store(SINK_V + place * DV + columns, v.to(SINK_V.dtype.element_ty), mask=(columns < DV) & is_sink)
        tl.store(SINK_VALID + batch * sinks + tl.maximum(rank, 0), 1, mask=is_sink & (head == 0))
        in_window = tl.where(is_sink, 0, 1)
    tl.store(RING_VALID + batch * size + column, in_window, mask=counts & (head == 0))
    tl.store(OLDEST + batch, (column + 1) % size, mask=counts & (head == 0))
    if Z is not None:
        features = tl.arange(0, BLOCK_F)
        z = tl.load(NEW_Z + batch_head * FEATURES + features, mask=features < FEATURES)
        tl.store(Z + batch_head * FEATURES + features, z, mask=features < FEATURES)
