# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Softmax over a sliding window and its sinks, joined with sums over other tokens: what runs on the device.

Query i sees the keys j with i + offset - span < j <= i + offset, and sinks up to its own rank. With l, t, f_j
from the other tokens (a linear attention behind the window: its numerators and totals),

    o_i = (sum_j exp(s_ij) v_j + e^l sum f_j v_j) / (sum_j exp(s_ij) + e^l t),    lse_i = log of that divisor

tile by tile over the largest score so far. Backward, with p_ij = exp(s_ij - lse_i) and t_i = g_i . o_i, which
is where all other tokens enter:

    ds_ij = p_ij (g_i . v_j - t_i),  dq_i = sum_j ds_ij k_j,  dk_j = sum_i ds_ij q_i,  dv_j = sum_i p_ij g_i

Scores and logarithms are to base 2, one instruction less each. Names and numbers are as in
`kernel_functions`; inputs go to products as they lie in memory, weights of at most 1 too, so float16 is
scaled for `ds` alone. A program answers for the rows it writes, but for gradients of sinks: those are one
part a program, added up in order by torch. So no atomics, and the same bits every time.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import (
    dot,
    head_pointer,
    load_tile,
    power_of_two,
    reciprocal,
    row_shift,
    store_tile,
    visible,
)


@triton.jit
def plain_dot(a, b, OPERAND: tl.constexpr):
    """Multiply inputs as they are, or weights of at most 1, in float16 too without scaling."""
    if OPERAND == "fp16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return dot(a, b, OPERAND)


@triton.jit
def rows_dot(a, b, OPERAND: tl.constexpr):
    """Multiply numbers of any size by inputs as they are: rows of float16 are scaled, not columns."""
    if OPERAND == "fp16":
        of_row, row = power_of_two(a, 1)
        return tl.dot((a * row[:, None]).to(tl.float16), b.to(tl.float16)) * of_row[:, None]
    else:
        return dot(a, b, OPERAND)


@triton.jit
def hidden_where_not(seen, scores):
    """Hide scores of keys that a query does not see."""
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def meet_keys(
    q, K, V, VALID, first, tokens, batch, k_strides, v_strides, valid_strides, keys, offset, span, scale,
    rows, columns, D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load a block of the window from `first` on: keys, values and scores `[queries, keys]`."""
    places = first + tl.arange(0, BLOCK)
    k = load_tile(K, first, places < keys, k_strides[2], rows, D)
    v = load_tile(V, first, places < keys, v_strides[2], columns, DV)
    counted = visible(VALID, batch, places, valid_strides, keys)
    distance = (tokens + offset)[:, None] - places[None, :]
    seen = (distance >= 0) & (distance < span) & counted[None, :]
    return k, v, hidden_where_not(seen, plain_dot(q, tl.trans(k), OPERAND) * scale)


@triton.jit
def meet_sinks(
    q, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, start, tokens, inside, batch, head, batch_head,
    sink_q_strides, length, sinks, scale, rows, columns,
    D: tl.constexpr, DV: tl.constexpr, SINKS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Load the sinks: queries as they meet them, keys, values, and scores up to a query's own rank."""
    met = q
    if SINK_Q is not None:
        met = load_tile(
            head_pointer(SINK_Q, sink_q_strides, batch, head), start, inside, sink_q_strides[2], rows, D
        )
    index = tl.arange(0, SINKS)
    there = index < sinks
    k = load_tile(SINK_K + batch_head * sinks * D, 0, there, D, rows, D)
    v = load_tile(SINK_V + batch_head * sinks * DV, 0, there, DV, columns, DV)
    counted = tl.load(SINK_VALID + batch * sinks + index, mask=there, other=0) != 0
    seen = counted[None, :] & inside[:, None]
    if RANKS is not None:
        rank = tl.load(RANKS + batch * length + tokens, mask=inside, other=-1)
        seen = seen & (index[None, :] <= rank[:, None])
    return met, k, v, hidden_where_not(seen, plain_dot(met, tl.trans(k), OPERAND) * scale)


@triton.jit
def add_weights(scores, v, top, total, sums, OPERAND: tl.constexpr):
    """Add exp(scores) and with them v to sums over e^top: the new top, total and sums."""
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(top - base)
    sums = sums * factor[:, None] + plain_dot(weights, v, OPERAND)
    return higher, total * factor + tl.sum(weights, 1), sums


@triton.jit
def add_window(
    q, K, V, VALID, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, start, tokens, inside, batch, head, batch_head,
    k_strides, v_strides, valid_strides, sink_q_strides, length, keys, span, offset, sinks, scale, rows,
    columns, top, total, sums,
    D: tl.constexpr, DV: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Add the sinks and the window of a chunk of queries to sums over e^top, as `add_weights`."""
    if SINKS > 0:
        _met, _sink_k, sink_v, of_sinks = meet_sinks(
            q, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, start, tokens, inside, batch, head, batch_head,
            sink_q_strides, length, sinks, scale, rows, columns, D, DV, SINKS, OPERAND,
        )  # fmt: skip
        top, total, sums = add_weights(of_sinks, sink_v, top, total, sums, OPERAND)
    low = tl.maximum(start + offset - span + 1, 0)
    for first in range(low, tl.minimum(start + CHUNK + offset, keys), BLOCK):
        _k, v, scores = meet_keys(
            q, K, V, VALID, first, tokens, batch, k_strides, v_strides, valid_strides, keys, offset, span,
            scale, rows, columns, D, DV, BLOCK, OPERAND,
        )  # fmt: skip
        top, total, sums = add_weights(scores, v, top, total, sums, OPERAND)
    return top, total, sums


@triton.jit
def window_outputs(
    Q, K, V, VALID, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, OTHER, TOTAL, LOG_SCALE, OUT, LSE,
    q_strides, k_strides, v_strides, valid_strides, sink_q_strides, other_strides, out_strides,
    heads, length, keys, span, offset, alone, sinks, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute outputs of a chunk of queries, and the logarithm of what they were divided by.

    Grid: B H x chunks. SINK_K and SINK_V `[B, Hkv, sinks, D]` dense; SINK_Q None: the queries meet them as
    they are. OTHER `[B, H, N - alone, DV]` of the last queries, with TOTAL and LOG_SCALE, or None. LOG_SCALE
    None: what elu1's map divided queries by.
    """
    chunks = tl.cdiv(length, CHUNK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.program_id(0) % chunks * CHUNK
    batch, head = row // heads, row % heads
    batch_head = row // GROUP
    Q = head_pointer(Q, q_strides, batch, head)
    K = head_pointer(K, k_strides, batch, head // GROUP)
    V = head_pointer(V, v_strides, batch, head // GROUP)
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    tokens = start + tl.arange(0, CHUNK)
    inside = tokens < length
    q = load_tile(Q, start, inside, q_strides[2], rows, D)
    if LOG_SCALE is None:  # before the loop, which then need not keep queries as they were loaded
        log = row_shift(q, rows, D) * 1.4426950408889634
    top = tl.full([CHUNK], float("-inf"), tl.float32)
    total = tl.zeros([CHUNK], tl.float32)
    sums = tl.zeros([CHUNK, BLOCK_V], tl.float32)
    top, total, sums = add_window(
        q, K, V, VALID, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, start, tokens, inside, batch, head,
        batch_head, k_strides, v_strides, valid_strides, sink_q_strides, length, keys, span, offset, sinks,
        scale, rows, columns, top, total, sums, D, DV, CHUNK, BLOCK, SINKS, OPERAND,
    )  # fmt: skip
    if OTHER is not None:
        behind = inside & (tokens >= alone)
        place = row * (length - alone) + tokens - alone
        beside = tl.load(TOTAL + place, mask=behind, other=0.0)
        if LOG_SCALE is not None:
            log = tl.load(LOG_SCALE + place, mask=behind, other=0.0) * 1.4426950408889634
        there = beside != 0  # NaN is
        log_total = tl.where(there, log + tl.log2(tl.where(there, beside, 1.0)), float("-inf"))
        higher = tl.maximum(top, log_total)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(top - base)
        of_others = tl.where(there, tl.exp2(log - base), 0.0)
        other = head_pointer(OTHER, other_strides, batch, head)
        x = load_tile(other, start - alone, behind & there, other_strides[2], columns, DV)
        sums = sums * factor[:, None] + x.to(tl.float32) * of_others[:, None]
        total = total * factor + beside * of_others
        top = higher
    log = tl.where(total != 0, top + tl.log2(tl.where(total != 0, total, 1.0)), 0.0)
    tl.store(LSE + row * length + tokens, log, mask=inside)
    OUT = head_pointer(OUT, out_strides, batch, head)
    store_tile(OUT, sums * reciprocal(total)[:, None], start, inside, out_strides[2], columns, DV)


@triton.jit
def window_query_gradients(
    Q, K, V, VALID, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, OTHER, TOTAL, LOG_SCALE, OUT, LSE, D_OUT,
    T, D_Q, D_SINK_Q, D_SINK_K, D_SINK_V, D_OTHER, D_TOTAL, D_LOG_SCALE,
    q_strides, k_strides, v_strides, valid_strides, sink_q_strides, other_strides, out_strides, d_out_strides,
    d_q_strides, d_sink_q_strides, d_other_strides, heads, length, keys, span, offset, alone, sinks, scale,
    scaling,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SINKS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a chunk of queries, of other sums, a part of those of sinks; and t `[B, H, N]`.

    Grid: B H x chunks. D_SINK_K `[B, H, chunks, sinks, D]`, D_SINK_V likewise, float32.
    """
    chunks = tl.cdiv(length, CHUNK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    start = chunk * CHUNK
    batch, head = row // heads, row % heads
    batch_head = row // GROUP
    Q = head_pointer(Q, q_strides, batch, head)
    K = head_pointer(K, k_strides, batch, head // GROUP)
    V = head_pointer(V, v_strides, batch, head // GROUP)
    OUT = head_pointer(OUT, out_strides, batch, head)
    D_OUT = head_pointer(D_OUT, d_out_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    tokens = start + tl.arange(0, CHUNK)
    inside = tokens < length
    g = load_tile(D_OUT, start, inside, d_out_strides[2], columns, DV)
    out = load_tile(OUT, start, inside, out_strides[2], columns, DV)
    t = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(T + row * length + tokens, t, mask=inside)
    lse = tl.load(LSE + row * length + tokens, mask=inside, other=0.0)
    q = load_tile(Q, start, inside, q_strides[2], rows, D)
    if OTHER is not None:
        behind = inside & (tokens >= alone)
        place = row * (length - alone) + tokens - alone
        beside = tl.load(TOTAL + place, mask=behind, other=0.0)
        if LOG_SCALE is None:
            log = row_shift(q, rows, D) * 1.4426950408889634
        else:
            log = tl.load(LOG_SCALE + place, mask=behind, other=0.0) * 1.4426950408889634
        factor = tl.where(beside != 0, tl.exp2(log - lse), 0.0)
        tl.store(D_TOTAL + place, -t * factor, mask=behind)
        if D_LOG_SCALE is not None:
            other = head_pointer(OTHER, other_strides, batch, head)
            x = load_tile(other, start - alone, behind, other_strides[2], columns, DV)
            along = tl.sum(g.to(tl.float32) * x.to(tl.float32), 1)
            tl.store(D_LOG_SCALE + place, factor * (along - t * beside), mask=behind)
        d_other = head_pointer(D_OTHER, d_other_strides, batch, head)
        d_x = g.to(tl.float32) * factor[:, None]
        store_tile(d_other, d_x, start - alone, behind, d_other_strides[2], columns, DV)
    d_q = tl.zeros([CHUNK, BLOCK_D], tl.float32)
    low = tl.maximum(start + offset - span + 1, 0)
    for first in range(low, tl.minimum(start + CHUNK + offset, keys), BLOCK):
        k, v, scores = meet_keys(
            q, K, V, VALID, first, tokens, batch, k_strides, v_strides, valid_strides, keys, offset, span,
            scale, rows, columns, D, DV, BLOCK, OPERAND,
        )  # fmt: skip
        weights = tl.exp2(scores - lse[:, None])
        d_scores = weights * (plain_dot(g, tl.trans(v), OPERAND) - t[:, None])
        d_q += rows_dot(d_scores, k, OPERAND)
    if SINKS > 0:
        met, sink_k, sink_v, of_sinks = meet_sinks(
            q, SINK_Q, SINK_K, SINK_V, SINK_VALID, RANKS, start, tokens, inside, batch, head, batch_head,
            sink_q_strides, length, sinks, scale, rows, columns, D, DV, SINKS, OPERAND,
        )  # fmt: skip
        weight = tl.exp2(of_sinks - lse[:, None])
        d_of_sinks = weight * (plain_dot(g, tl.trans(sink_v), OPERAND) - t[:, None])
        there = tl.arange(0, SINKS) < sinks
        part = (row * chunks + chunk) * sinks
        d_sink_k = rows_dot(tl.trans(d_of_sinks), met, OPERAND) * scaling
        store_tile(D_SINK_K + part * D, d_sink_k, 0, there, D, rows, D)
        d_sink_v = plain_dot(tl.trans(weight), g, OPERAND)
        store_tile(D_SINK_V + part * DV, d_sink_v, 0, there, DV, columns, DV)
        d_met = rows_dot(d_of_sinks, sink_k, OPERAND)
        if SINK_Q is None:
            d_q += d_met
        else:
            D_SINK_Q = head_pointer(D_SINK_Q, d_sink_q_strides, batch, head)
            store_tile(D_SINK_Q, d_met * scaling, start, inside, d_sink_q_strides[2], rows, D)
    D_Q = head_pointer(D_Q, d_q_strides, batch, head)
    store_tile(D_Q, d_q * scaling, start, inside, d_q_strides[2], rows, D)


@triton.jit
def window_key_gradients(
    Q, K, V, VALID, LSE, D_OUT, T, D_K, D_V,
    q_strides, k_strides, v_strides, valid_strides, d_out_strides, d_k_strides, d_v_strides,
    heads, length, keys, span, offset, scale, scaling,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a block of keys and of their values. Grid: batch_heads x blocks of keys."""
    blocks = tl.cdiv(keys, BLOCK)
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * BLOCK
    kv_heads = heads // GROUP
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    places = first + tl.arange(0, BLOCK)
    k = load_tile(head_pointer(K, k_strides, batch, kv_head), first, places < keys, k_strides[2], rows, D)
    v = load_tile(head_pointer(V, v_strides, batch, kv_head), first, places < keys, v_strides[2], columns, DV)
    counted = visible(VALID, batch, places, valid_strides, keys)
    d_k = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    d_v = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    low = tl.maximum(first - offset, 0)
    high = tl.minimum(first + BLOCK - 1 - offset + span, length)
    # one loop over heads and chunks: the next head's first loads are under way with the last of this one
    chunks = tl.maximum(tl.cdiv(high - low, CHUNK), 0)
    for index in range(GROUP * chunks):
        start = low + index % chunks * CHUNK
        head = kv_head * GROUP + index // chunks
        row = batch * heads + head
        tokens = start + tl.arange(0, CHUNK)
        inside = tokens < length
        q = load_tile(head_pointer(Q, q_strides, batch, head), start, inside, q_strides[2], rows, D)
        g = load_tile(
            head_pointer(D_OUT, d_out_strides, batch, head), start, inside, d_out_strides[2], columns, DV
        )
        lse = tl.load(LSE + row * length + tokens, mask=inside, other=0.0)
        t = tl.load(T + row * length + tokens, mask=inside, other=0.0)
        distance = (tokens + offset)[None, :] - places[:, None]
        seen = (distance >= 0) & (distance < span) & counted[:, None] & inside[None, :]
        scores = hidden_where_not(seen, plain_dot(k, tl.trans(q), OPERAND) * scale)  # [keys, queries]
        weights = tl.exp2(scores - lse[None, :])
        d_v += plain_dot(weights, g, OPERAND)
        d_scores = weights * (plain_dot(v, tl.trans(g), OPERAND) - t[None, :])
        d_k += rows_dot(d_scores, q, OPERAND)
    D_K = head_pointer(D_K, d_k_strides, batch, kv_head)
    D_V = head_pointer(D_V, d_v_strides, batch, kv_head)
    store_tile(D_K, d_k * scaling, first, places < keys, d_k_strides[2], rows, D)
    store_tile(D_V, d_v, first, places < keys, d_v_strides[2], columns, DV)
