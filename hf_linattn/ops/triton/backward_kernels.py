# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Normalised linear attention for GPUs, backward: what runs on the device. Names as in `kernels`.

Of the forward only inputs, outputs and totals are kept. With g = d_num, t = d_total, R = dL/dS, r = dL/dz:

    g_i = d_out_i / total_i,    t_i = -g_i . out_i + d_total_i        (not normalised: g = d_out, t = d_total)
    d_phi_q_i = sum_{j<=i} (g_i . v_j + t_i) phi_k_j + S_{<i} g_i + z_{<i} t_i          forward in time
    d_phi_k_j = sum_{i>=j} (g_i . v_j + t_i) phi_q_i + R_{>j} v_j + r_{>j}              backward in time
    d_v_j     = sum_{i>=j} (phi_q_i . phi_k_j) g_i + R_{>j}^T phi_k_j

`gradient_rows` gives t and the sums of R per segment; the three others each walk the chunks of one segment
with a state on chip, like `outputs`. Each splits the columns of what it writes over programs and needs the
other width whole, so nothing is added up across programs: no atomics, the same bits every time.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernels import (
    dot,
    head_pointer,
    key_features,
    link,
    linked_pairs,
    load_state,
    load_tile,
    locate_program,
    query_features,
    rounded,
    row_and_block,
    row_shift,
    store_state,
    store_tile,
    visible,
)


@triton.jit
def load_gradients(
    D_OUT,
    TOTAL,
    tokens,
    inside,
    stride,
    columns,
    DV: tl.constexpr,
    NORMALISE: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Compute g of some rows, `[rows, columns]`, rounded once for all its uses."""
    g = load_tile(D_OUT, tokens, inside, stride, columns, DV).to(tl.float32)
    if NORMALISE:
        total = tl.load(TOTAL + tokens, mask=inside, other=0.0)
        seen = total != 0
        g = tl.where(seen[:, None], g / tl.where(seen, total, 1.0)[:, None], 0.0)
    return rounded(g, OPERAND)


@triton.jit
def derivative(x, shift, FEATURE_MAP: tl.constexpr):
    """Compute phi'(x); `shift` of the row for queries, 0 for keys. The output ignores it: a constant."""
    x = x.to(tl.float32)
    if FEATURE_MAP == "elu1":
        return tl.where(x > 0, 1.0, tl.exp(x - shift))
    elif FEATURE_MAP == "relu":
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def gradient_rows(
    Q, D_OUT, OUT, TOTAL, D_TOTAL, DECAY, LABELS, T, SHIFT, STATES, FACTORS,
    q_strides, d_out_strides, out_strides, heads, length, segment, slots,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, NORMALISE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute t and the queries' shift `[B, H, N]`, and R of one segment.

    Grid: batch_heads x blocks of D, segments.

    Slots count from the end of the text, the way in which R runs. STATES None: t and shift only.
    """
    # every block has t; without a sum one block is enough
    batch_head, block, batch, kv_head = locate_program(D, BLOCK if STATES is not None else D, heads, GROUP)
    every = tl.arange(0, BLOCK_D)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_V)
    big_r = tl.zeros([BLOCK, BLOCK_V], tl.float32)
    small_r = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(1) * segment
    factor = 1.0 + tl.sum(small_r, 0)
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        inside = tokens < length
        of_state = tl.zeros([CHUNK], tl.float32) + 1.0
        if LINKED:
            _, _, of_state, _, left = link(DECAY, LABELS, batch_head, batch, start, length, CHUNK)
            of_state *= factor  # of the state before the segment
            factor *= left
        for member in range(GROUP):
            head = kv_head * GROUP + member
            row = (batch_head * GROUP + member) * length
            d_out = head_pointer(D_OUT, d_out_strides, batch, head)
            query = head_pointer(Q, q_strides, batch, head)
            g = load_gradients(
                d_out, TOTAL + row, tokens, inside, d_out_strides[2], columns, DV, NORMALISE, OPERAND
            )
            t = tl.zeros([CHUNK], tl.float32)
            if D_TOTAL is not None:
                t += tl.load(D_TOTAL + row + tokens, mask=inside, other=0.0)
            if NORMALISE:
                out = head_pointer(OUT, out_strides, batch, head)
                out = load_tile(out, tokens, inside, out_strides[2], columns, DV)
                t -= tl.sum(g * out.to(tl.float32), 1)
            shift = tl.zeros([CHUNK], tl.float32)
            if FEATURE_MAP == "elu1":
                shift = row_shift(load_tile(query, tokens, inside, q_strides[2], every, D), every, D)
            first_block = inside & (block == 0)
            tl.store(T + row + tokens, t, mask=first_block)
            tl.store(SHIFT + row + tokens, shift, mask=first_block)
            if STATES is not None:
                q = load_tile(query, tokens, inside, q_strides[2], rows, D)
                phi_q = query_features(q, shift, inside, rows, D, FEATURE_MAP, EPS, OPERAND)
                if LINKED:
                    g *= of_state[:, None]
                    t *= of_state
                big_r += dot(tl.trans(phi_q), g, OPERAND)
                small_r += tl.sum(t[:, None] * phi_q, 0)
    if STATES is not None:
        base = STATES + (batch_head * slots + slots - 1 - tl.program_id(1)) * (D * DV + D)
        store_state(base, base + D * DV, big_r, small_r, rows, columns, D, DV, True)
        if LINKED:
            slot = slots - 1 - tl.program_id(1)
            tl.store(FACTORS + batch_head * slots + slot, factor, mask=block == 0)


@triton.jit
def query_gradients(
    Q, K, V, VALID, DECAY, LABELS, D_OUT, TOTAL, T, SHIFT, STATES, S0, Z0, D_Q, ALONG,
    q_strides, k_strides, v_strides, valid_strides, d_out_strides, d_q_strides, heads, length, segment, slots,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr, EPS: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the queries of one segment. Grid: B H x blocks of D, segments."""
    row, block = row_and_block(D, BLOCK)
    batch_head = row // GROUP
    batch, head = row // heads, row % heads
    Q = head_pointer(Q, q_strides, batch, head)
    K = head_pointer(K, k_strides, batch, head // GROUP)
    V = head_pointer(V, v_strides, batch, head // GROUP)
    D_OUT = head_pointer(D_OUT, d_out_strides, batch, head)
    D_Q = head_pointer(D_Q, d_q_strides, batch, head)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_V)
    order = tl.arange(0, CHUNK)
    s, z = load_state(STATES, S0, Z0, batch_head, tl.program_id(1) - 1, slots, rows, columns, D, DV)
    first = tl.program_id(1) * segment
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + order
        inside = tokens < length
        g = load_gradients(
            D_OUT, TOTAL + row * length, tokens, inside, d_out_strides[2], columns, DV, NORMALISE, OPERAND
        )
        t = tl.load(T + row * length + tokens, mask=inside, other=0.0)
        d_phi = dot(g, tl.trans(s), OPERAND) + t[:, None] * z[None, :]
        if CAUSAL:
            keep = visible(VALID, batch, tokens, valid_strides, length)
            k = load_tile(K, tokens, keep, k_strides[2], rows, D)
            v = load_tile(V, tokens, keep, v_strides[2], columns, DV)
            phi_k = key_features(k, keep, rows, D, FEATURE_MAP, EPS, OPERAND)
            d_scores = dot(g, tl.trans(v), OPERAND) + t[:, None]
            d_scores = tl.where(order[:, None] >= order[None, :], d_scores, 0.0)
            if LINKED:
                running, label, of_state, of_key, left = link(
                    DECAY, LABELS, batch_head, batch, start, length, CHUNK
                )
                d_scores = linked_pairs(d_scores, running, label, False)
                d_phi *= of_state[:, None]
                s = s * left + dot(tl.trans(phi_k), v.to(tl.float32) * of_key[:, None], OPERAND)
                z = z * left + tl.sum(phi_k * of_key[:, None], 0)
            else:
                s += dot(tl.trans(phi_k), v, OPERAND)
                z += tl.sum(phi_k, 0)
            d_phi += dot(d_scores, phi_k, OPERAND)
        if (FEATURE_MAP != "none") or (ALONG is not None):
            q = load_tile(Q, tokens, inside, q_strides[2], rows, D)
            shift = tl.load(SHIFT + row * length + tokens, mask=inside, other=0.0)
        if ALONG is not None:
            phi_q = query_features(q, shift, inside, rows, D, FEATURE_MAP, EPS, OPERAND)
            place = (block * (tl.num_programs(0) // ((D + BLOCK - 1) // BLOCK)) + row) * length + tokens
            tl.store(ALONG + place, tl.sum(phi_q * d_phi, 1), mask=inside)
        if FEATURE_MAP != "none":
            d_phi *= derivative(q, shift[:, None], FEATURE_MAP)
        store_tile(D_Q, d_phi, tokens, inside, d_q_strides[2], rows, D)


@triton.jit
def key_gradients(
    Q, K, V, VALID, DECAY, LABELS, D_OUT, TOTAL, T, SHIFT, STATES, D_S, D_Z, D_K, D_S0, D_Z0, ALONG,
    q_strides, k_strides, v_strides, valid_strides, d_out_strides, d_k_strides, heads, length, segment, slots,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr, EPS: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a segment's keys, and of the state before all.

    Grid: batch_heads x blocks of D, segments.
    """
    batch_head, block, batch, kv_head = locate_program(D, BLOCK, heads, GROUP)
    K = head_pointer(K, k_strides, batch, kv_head)
    V = head_pointer(V, v_strides, batch, kv_head)
    D_K = head_pointer(D_K, d_k_strides, batch, kv_head)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_V)
    order = tl.arange(0, CHUNK)
    slot = tl.num_programs(1) - 2 - tl.program_id(1)
    big_r, small_r = load_state(STATES, D_S, D_Z, batch_head, slot, slots, rows, columns, D, DV)
    first = tl.program_id(1) * segment
    chunks = tl.cdiv(tl.minimum(segment, length - first), CHUNK)
    for index in range(chunks):
        tokens = first + (chunks - 1 - index) * CHUNK + order
        inside = tokens < length
        keep = visible(VALID, batch, tokens, valid_strides, length)
        v = load_tile(V, tokens, keep, v_strides[2], columns, DV)
        d_phi = dot(v, tl.trans(big_r), OPERAND) + small_r[None, :]
        if LINKED:
            running, label, of_state, of_key, left = link(
                DECAY, LABELS, batch_head, batch, first + (chunks - 1 - index) * CHUNK, length, CHUNK
            )
            d_phi *= of_key[:, None]
            big_r *= left
            small_r *= left
        if CAUSAL:
            for member in range(GROUP):
                head = kv_head * GROUP + member
                row = (batch_head * GROUP + member) * length
                d_out = D_OUT + batch * d_out_strides[0] + head * d_out_strides[1]
                query = Q + batch * q_strides[0] + head * q_strides[1]
                g = load_gradients(
                    d_out, TOTAL + row, tokens, inside, d_out_strides[2], columns, DV, NORMALISE, OPERAND
                )
                t = tl.load(T + row + tokens, mask=inside, other=0.0)
                q = load_tile(query, tokens, inside, q_strides[2], rows, D)
                shift = tl.load(SHIFT + row + tokens, mask=inside, other=0.0)
                phi_q = query_features(q, shift, inside, rows, D, FEATURE_MAP, EPS, OPERAND)
                d_scores = dot(v, tl.trans(g), OPERAND) + t[None, :]  # [keys, queries]
                d_scores = tl.where(order[:, None] <= order[None, :], d_scores, 0.0)
                if LINKED:
                    d_scores = linked_pairs(d_scores, running, label, True)
                    g *= of_state[:, None]
                    t *= of_state
                d_phi += dot(d_scores, phi_q, OPERAND)
                big_r += dot(tl.trans(phi_q), g, OPERAND)
                small_r += tl.sum(t[:, None] * phi_q, 0)
        if (FEATURE_MAP != "none") or (ALONG is not None):
            k = load_tile(K, tokens, keep, k_strides[2], rows, D)
        if ALONG is not None:
            phi_k = key_features(k, keep, rows, D, FEATURE_MAP, EPS, OPERAND)
            place = (
                block * (tl.num_programs(0) // ((D + BLOCK - 1) // BLOCK)) + batch_head
            ) * length + tokens
            tl.store(ALONG + place, tl.sum(phi_k * d_phi, 1), mask=inside)
        if FEATURE_MAP != "none":
            d_phi *= derivative(k, 0.0, FEATURE_MAP)
        store_tile(D_K, tl.where(keep[:, None], d_phi, 0.0), tokens, inside, d_k_strides[2], rows, D)
    if D_S0 is not None:  # noqa: SIM102 (decided when compiled; the other when run)
        if tl.program_id(1) == 0:
            store_state(
                D_S0 + batch_head * D * DV, D_Z0 + batch_head * D, big_r, small_r, rows, columns, D, DV, True
            )


@triton.jit
def value_gradients(
    Q, K, VALID, DECAY, LABELS, D_OUT, TOTAL, STATES, D_S, D_V,
    q_strides, k_strides, valid_strides, d_out_strides, d_v_strides, heads, length, segment, slots,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr, EPS: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the values of one segment. Grid: batch_heads x blocks of DV, segments."""
    batch_head, block, batch, kv_head = locate_program(DV, BLOCK, heads, GROUP)
    K = head_pointer(K, k_strides, batch, kv_head)
    D_V = head_pointer(D_V, d_v_strides, batch, kv_head)
    rows = tl.arange(0, BLOCK_D)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    order = tl.arange(0, CHUNK)
    slot = tl.num_programs(1) - 2 - tl.program_id(1)
    big_r, _ = load_state(STATES, D_S, None, batch_head, slot, slots, rows, columns, D, DV)
    first = tl.program_id(1) * segment
    chunks = tl.cdiv(tl.minimum(segment, length - first), CHUNK)
    for index in range(chunks):
        tokens = first + (chunks - 1 - index) * CHUNK + order
        inside = tokens < length
        keep = visible(VALID, batch, tokens, valid_strides, length)
        k = load_tile(K, tokens, keep, k_strides[2], rows, D)
        phi_k = key_features(k, keep, rows, D, FEATURE_MAP, EPS, OPERAND)
        d_value = dot(phi_k, big_r, OPERAND)
        if LINKED:
            running, label, of_state, of_key, left = link(
                DECAY, LABELS, batch_head, batch, first + (chunks - 1 - index) * CHUNK, length, CHUNK
            )
            d_value *= of_key[:, None]
            big_r *= left
        if CAUSAL:
            for member in range(GROUP):
                head = kv_head * GROUP + member
                row = (batch_head * GROUP + member) * length
                d_out = D_OUT + batch * d_out_strides[0] + head * d_out_strides[1]
                query = Q + batch * q_strides[0] + head * q_strides[1]
                g = load_gradients(
                    d_out, TOTAL + row, tokens, inside, d_out_strides[2], columns, DV, NORMALISE, OPERAND
                )
                q = load_tile(query, tokens, inside, q_strides[2], rows, D)
                phi_q = query_features(q, row_shift(q, rows, D), inside, rows, D, FEATURE_MAP, EPS, OPERAND)
                scores = dot(phi_k, tl.trans(phi_q), OPERAND)  # [keys, queries]
                scores = tl.where(order[:, None] <= order[None, :], scores, 0.0)
                if LINKED:
                    scores = linked_pairs(scores, running, label, True)
                d_value += dot(scores, g, OPERAND)
                if LINKED:
                    g *= of_state[:, None]
                big_r += dot(tl.trans(phi_q), g, OPERAND)
        store_tile(D_V, d_value, tokens, inside, d_v_strides[2], columns, DV)
