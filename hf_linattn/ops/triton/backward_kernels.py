# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Normalised linear attention for GPUs, backward: what runs on the device. Names as in `kernel_functions`.

Of the forward only inputs, outputs and totals are kept. With c = 1 / total, g = d_out, R = dL/dS, r = dL/dz:

    t_i = total_i d_total_i - g_i . out_i                           (not normalised: c = 1, t = d_total)
    d_phi_q_i = c_i (sum_{j<=i} (g_i . v_j + t_i) phi_k_j + S_{<i} g_i + z_{<i} t_i)       forward in time
    d_phi_k_j = sum_{i>=j} (g_i . v_j + t_i) c_i phi_q_i + R_{>j} v_j + r_{>j}             backward in time
    d_v_j     = sum_{i>=j} (c_i phi_q_i . phi_k_j) g_i + R_{>j}^T phi_k_j

The factor c stands with the queries' features, so that g and v go to the products as they lie in memory.

`gradient_rows` gives t, the sums of R per segment and, where queries are bfloat16, c phi_q as products
take them, which two of the others then read in the place of q. The three others each walk the chunks of
one segment with a state on chip, like `outputs`. Each splits the columns of what it writes over programs
and needs the other width whole, so nothing is added up across programs: no atomics, the same bits every
time. (Keys and values in one walk would read less: at heads of 64 it has room for their registers, at 128
not.)
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import (
    added,
    dot,
    head_pointer,
    key_features,
    link,
    linked_pairs,
    load_state,
    load_tile,
    locate_program,
    operand,
    order_of_pairs,
    partial_sums,
    query_features,
    reciprocal,
    repeated,
    row_and_block,
    row_shift,
    seen,
    store_state,
    store_tile,
    visible,
    wide,
    within,
)


@triton.jit
def load_scale(TOTAL, tokens, inside, NORMALISE: tl.constexpr):
    """Load c of some rows, 0 behind the last one."""
    if NORMALISE:
        return reciprocal(tl.load(TOTAL + tokens, mask=inside, other=0.0))
    else:
        return inside.to(tl.float32)


@triton.jit
def scaled(x, scale, NEEDED: tl.constexpr):
    """Scale rows of features, where there is a scale."""
    if NEEDED:
        return x.to(tl.float32) * scale[:, None]
    else:
        return x


@triton.jit
def once(features, inside, FEATURE_MAP: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr):
    """Hide features behind the last token, where else they would be computed anew for each product."""
    if MASKED and FEATURE_MAP != "none" and (OPERAND == "bf16" or OPERAND == "bf16 by bits"):
        features = tl.where(inside[:, None], features, 0.0)
    return features


@triton.jit
def weighed_features(
    q, SHIFT, TOTAL, tokens, inside, rows, D: tl.constexpr, FEATURE_MAP: tl.constexpr, EPS: tl.constexpr,
    MASKED: tl.constexpr, NORMALISE: tl.constexpr, OPERAND: tl.constexpr, WEIGHED: tl.constexpr,
):  # fmt: skip
    """Compute c phi_q of the queries of one head, of which SHIFT and TOTAL are rows; WEIGHED: q is that."""
    if WEIGHED:
        return q
    else:
        shift = tl.load(SHIFT + tokens, mask=inside, other=0.0)
        features = query_features(q, shift, rows, D, FEATURE_MAP, EPS)
        features = once(features, inside, FEATURE_MAP, MASKED, OPERAND)
        scale = load_scale(TOTAL, tokens, inside, NORMALISE)
        return scaled(features, scale, NORMALISE or (OPERAND == "fp16"))


@triton.jit
def derivative(x, shift, FEATURE_MAP: tl.constexpr):
    """Compute phi'(x); `shift` of the row for queries, 0 for keys. The output ignores it: a constant."""
    x = x.to(tl.float32)
    if FEATURE_MAP == "elu1":  # above 0 the shift is 0, and no number of a row is above its own shift
        exponent = x * 1.4426950408889634 - shift * 1.4426950408889634
        return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))
    else:
        return tl.where(x > 0, 1.0, 0.0)


@triton.jit
def gradient_rows(
    Q, D_OUT, OUT, TOTAL, D_TOTAL, DECAY, LABELS, T, SHIFT, FEATURES, STATES, FACTORS,
    q_strides, d_out_strides, out_strides, features_strides, heads, length, segment, slots,
    D_OUT_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr,
    FEATURES_STRIDE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr, NORMALISE: tl.constexpr, OPERAND: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute t and the queries' shift `[B, H, N]`, and of one segment c phi_q `[B, H, N, D]` and R.

    Grid: batch_heads x blocks of D, segments.

    Slots count from the end of the text, the way in which R runs. FEATURES or STATES None: not these.
    """
    ALL: tl.constexpr = WHOLE and ((not MASKED) or (OPERAND == "fp16"))
    BY_COLUMN: tl.constexpr = (STATES is not None) or (FEATURES is not None)
    # to compare halves takes registers, which are few where products take operands from them
    COMPARED: tl.constexpr = 8 if (MASKED and (PAIRS > 8)) else PAIRS
    # every block has t; where nothing goes by column one block is enough
    batch_head, block, batch, kv_head = locate_program(D, BLOCK if BY_COLUMN else D, heads, GROUP)
    every = tl.arange(0, BLOCK_D)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_V)
    big_r = tl.zeros([BLOCK_V, BLOCK], tl.float32)  # transposed, as S
    small_r = tl.zeros([16, BLOCK], tl.float32)
    first = tl.program_id(1) * segment
    factor = 1.0
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        inside = within(tokens, length, ALL)
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
            g = load_tile(d_out, start, inside, D_OUT_STRIDE, columns, DV, WHOLE)
            t = tl.zeros([CHUNK], tl.float32)
            if D_TOTAL is not None:
                t += tl.load(D_TOTAL + row + tokens, mask=inside, other=0.0)
                if NORMALISE:
                    t *= tl.load(TOTAL + row + tokens, mask=inside, other=0.0)
            if NORMALISE:
                out = head_pointer(OUT, out_strides, batch, head)
                out = load_tile(out, start, inside, OUT_STRIDE, columns, DV, WHOLE)
                t -= tl.sum(wide(g, PAIRS) * wide(out, PAIRS), 1)
            shift = tl.zeros([CHUNK], tl.float32)
            if FEATURE_MAP == "elu1":
                shift = row_shift(load_tile(query, start, inside, Q_STRIDE, every, D, WHOLE), every, D)
            first_block = inside & (block == 0)
            tl.store(T + row + tokens, t, mask=first_block)
            tl.store(SHIFT + row + tokens, shift, mask=first_block)
            if BY_COLUMN:
                q = load_tile(query, start, inside, Q_STRIDE, rows, D, WHOLE)
                scale = load_scale(TOTAL + row, tokens, inside, NORMALISE)
                phi_q = query_features(q, shift, rows, D, FEATURE_MAP, EPS, COMPARED)
                phi_q = once(phi_q, inside, FEATURE_MAP, MASKED, OPERAND)
            if FEATURES is not None:
                phi_q = scaled(phi_q, scale, True)
                features = head_pointer(FEATURES, features_strides, batch, head)
                store_tile(features, operand(phi_q, OPERAND), start, inside, FEATURES_STRIDE, rows, D, WHOLE)
            if STATES is not None:
                if FEATURES is not None:
                    phi_q = scaled(phi_q, of_state, LINKED)
                else:
                    phi_q = scaled(phi_q, scale * of_state, NORMALISE or LINKED or (OPERAND == "fp16"))
                big_r += dot(tl.trans(g), operand(phi_q, OPERAND), OPERAND)
                small_r += partial_sums(phi_q, t)
    if STATES is not None:
        base = STATES + (batch_head * slots + slots - 1 - tl.program_id(1)) * (D * DV + D)
        store_state(base, base + D * DV, tl.trans(big_r), tl.sum(small_r, 0), rows, columns, D, DV, True)
        if LINKED:
            slot = slots - 1 - tl.program_id(1)
            tl.store(FACTORS + batch_head * slots + slot, factor, mask=block == 0)


@triton.jit
def query_gradients(
    Q, K, V, VALID, DECAY, LABELS, D_OUT, TOTAL, T, SHIFT, STATES, FACTORS, S0, Z0, D_Q, ALONG,
    q_strides, k_strides, v_strides, valid_strides, d_out_strides, d_q_strides, heads, length, segment, slots,
    parts,
    D_OUT_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr,
    D_Q_STRIDE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, SUMMED: tl.constexpr, OPERAND: tl.constexpr,
    WEIGHED: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the queries of one segment. Grid: B H x blocks of D, segments.

    WEIGHED: where they go, D_Q, holds c phi_q.
    """
    ALL: tl.constexpr = WHOLE and ((not MASKED) or (OPERAND == "fp16"))
    KEYS: tl.constexpr = WHOLE and (VALID is None)
    # elu1' is the feature itself up to 1: c elu1' is the lesser of c phi_q and c
    BY_FEATURES: tl.constexpr = WEIGHED and (FEATURE_MAP == "elu1") and (ALONG is None)
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
    HALVES: tl.constexpr = 0 if LINKED else PAIRS  # links weigh scores in float32
    order_of_tokens = order_of_pairs(order, False, HALVES)
    s, z = load_state(
        STATES, FACTORS, S0, Z0, batch_head, tl.program_id(1) * parts - 1, slots, rows, columns, D, DV, SUMMED
    )
    s = tl.trans(s)
    z = tl.where(tl.arange(0, 16)[:, None] == 0, z[None, :], 0.0)
    first = tl.program_id(1) * segment
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + order
        inside = within(tokens, length, ALL)
        g = load_tile(D_OUT, start, inside, D_OUT_STRIDE, columns, DV, WHOLE)
        t = tl.load(T + row * length + tokens, mask=inside, other=0.0)
        d_phi = dot(g, operand(s, OPERAND), OPERAND)
        if BLOCK_V > 64:  # rows of 128 have no registers left for z as an operand
            d_phi += t[:, None] * tl.sum(z, 0)[None, :]
        else:
            d_phi += dot(repeated(t, OPERAND), operand(z, OPERAND), OPERAND)
        near = tl.zeros([CHUNK, BLOCK], tl.float32)
        if CAUSAL:
            keep = visible(VALID, batch, tokens, valid_strides, length, ALL)
            k = load_tile(K, start, keep, K_STRIDE, rows, D, KEYS)
            v = load_tile(V, start, keep, V_STRIDE, columns, DV, KEYS)
            features = key_features(k, keep, rows, D, MASKED, FEATURE_MAP, EPS, PAIRS)
            phi_k = operand(features, OPERAND)
            of_z = keep.to(tl.float32)
            d_scores = dot(g, tl.trans(v), OPERAND) + t[:, None]
            d_scores = seen(d_scores, order_of_tokens, HALVES)
            if LINKED:
                running, label, of_state, of_key, left = link(
                    DECAY, LABELS, batch_head, batch, start, length, CHUNK
                )
                d_scores = linked_pairs(d_scores, running, label, False)
                d_phi *= of_state[:, None]
                of_z *= of_key
                v = v.to(tl.float32) * of_key[:, None]
                s *= left
                z *= left
            s += dot(tl.trans(v), phi_k, OPERAND)
            z += partial_sums(features, of_z, PAIRS)
            near = dot(d_scores, phi_k, OPERAND)
        if BY_FEATURES:
            features = load_tile(D_Q, start, inside, D_Q_STRIDE, rows, D, WHOLE)
        elif (FEATURE_MAP != "none") or (ALONG is not None):
            q = load_tile(Q, start, inside, Q_STRIDE, rows, D, WHOLE)
            shift = tl.load(SHIFT + row * length + tokens, mask=inside, other=0.0)
        scale = load_scale(TOTAL + row * length, tokens, inside, NORMALISE)
        if BY_FEATURES:
            weight = tl.minimum(features.to(tl.float32), scale[:, None], propagate_nan=tl.PropagateNan.ALL)
        else:
            weight = scale[:, None]
        d_phi = added(d_phi, near, weight, BLOCK_V)
        if ALONG is not None:
            phi_q = query_features(q, shift, rows, D, FEATURE_MAP, EPS)
            place = (block * (tl.num_programs(0) // ((D + BLOCK - 1) // BLOCK)) + row) * length + tokens
            tl.store(ALONG + place, tl.sum(phi_q * d_phi, 1), mask=inside)
        if (FEATURE_MAP != "none") and not BY_FEATURES:
            d_phi *= derivative(q, shift[:, None], FEATURE_MAP)
        store_tile(D_Q, d_phi, start, inside, D_Q_STRIDE, rows, D, WHOLE)


@triton.jit
def key_gradients(
    Q, K, V, VALID, DECAY, LABELS, D_OUT, TOTAL, T, SHIFT, STATES, FACTORS, D_S, D_Z, D_K, D_S0, D_Z0, ALONG,
    q_strides, k_strides, v_strides, valid_strides, d_out_strides, d_k_strides, heads, length, segment, slots,
    V_STRIDE: tl.constexpr, D_OUT_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr,
    D_K_STRIDE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, SUMMED: tl.constexpr, OPERAND: tl.constexpr,
    WEIGHED: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a segment's keys, and of the state before all.

    Grid: batch_heads x blocks of D, segments. WEIGHED: Q holds c phi_q.
    """
    ALL: tl.constexpr = WHOLE and ((not MASKED) or (OPERAND == "fp16"))
    KEYS: tl.constexpr = WHOLE and (VALID is None)
    # sums are multiplied at once, and apart (see `added`): a product of r would feed the next
    AT_ONCE: tl.constexpr = (BLOCK > 64) and (VALID is None) and (ALONG is None) and (FEATURE_MAP != "none")
    batch_head, block, batch, kv_head = locate_program(D, BLOCK, heads, GROUP)
    K = head_pointer(K, k_strides, batch, kv_head)
    V = head_pointer(V, v_strides, batch, kv_head)
    D_K = head_pointer(D_K, d_k_strides, batch, kv_head)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_V)
    order = tl.arange(0, CHUNK)
    # links weigh scores in float32, and otherwise wide blocks have no registers left for the order
    HALVES: tl.constexpr = 0 if (LINKED or ((BLOCK > 64) and not AT_ONCE)) else PAIRS
    order_of_tokens = order_of_pairs(order, True, HALVES)
    slot = tl.num_programs(1) - 2 - tl.program_id(1)
    big_r, small_r = load_state(
        STATES, FACTORS, D_S, D_Z, batch_head, slot, slots, rows, columns, D, DV, SUMMED
    )
    big_r = tl.trans(big_r)
    small_r = tl.where(tl.arange(0, 16)[:, None] == 0, small_r[None, :], 0.0)
    first = tl.program_id(1) * segment
    chunks = tl.cdiv(tl.minimum(segment, length - first), CHUNK)
    for index in range(chunks):
        start = first + (chunks - 1 - index) * CHUNK
        tokens = start + order
        inside = within(tokens, length, ALL)
        keep = visible(VALID, batch, tokens, valid_strides, length, ALL)
        v = load_tile(V, start, keep, V_STRIDE, columns, DV, KEYS)
        d_phi = dot(v, operand(big_r, OPERAND), OPERAND)
        if AT_ONCE:
            d_phi += tl.sum(small_r, 0)[None, :]
        else:
            ones = repeated(tl.full([CHUNK], 1.0, tl.float32), OPERAND)
            d_phi += dot(ones, operand(small_r, OPERAND), OPERAND)
        if LINKED:
            running, label, of_state, of_key, left = link(
                DECAY, LABELS, batch_head, batch, start, length, CHUNK
            )
            d_phi *= of_key[:, None]
            big_r *= left
            small_r *= left
        near = tl.zeros([CHUNK, BLOCK], tl.float32)
        if CAUSAL:
            for member in range(GROUP):
                head = kv_head * GROUP + member
                row = (batch_head * GROUP + member) * length
                d_out = head_pointer(D_OUT, d_out_strides, batch, head)
                query = head_pointer(Q, q_strides, batch, head)
                g = load_tile(d_out, start, inside, D_OUT_STRIDE, columns, DV, WHOLE)
                t = tl.load(T + row + tokens, mask=inside, other=0.0)
                q = load_tile(query, start, inside, Q_STRIDE, rows, D, WHOLE)
                features = weighed_features(
                    q, SHIFT + row, TOTAL + row, tokens, inside, rows, D, FEATURE_MAP, EPS, MASKED, NORMALISE,
                    OPERAND, WEIGHED,
                )  # fmt: skip
                phi_q = operand(features, OPERAND)
                d_scores = dot(v, tl.trans(g), OPERAND) + t[None, :]  # [keys, queries]
                d_scores = seen(d_scores, order_of_tokens, HALVES)
                if LINKED:
                    d_scores = linked_pairs(d_scores, running, label, True)
                near += dot(d_scores, phi_q, OPERAND)
                features = scaled(features, of_state, True) if LINKED else features
                big_r += dot(tl.trans(g), operand(features, OPERAND), OPERAND)
                small_r += partial_sums(features, t, PAIRS)
        if VALID is not None:
            d_phi = added(d_phi, near, keep.to(tl.float32)[:, None], BLOCK_V)
        elif not AT_ONCE:
            d_phi += near
        if (FEATURE_MAP != "none") or (ALONG is not None):
            k = load_tile(K, start, keep, K_STRIDE, rows, D, KEYS)
        if ALONG is not None:
            phi_k = key_features(k, keep, rows, D, MASKED, FEATURE_MAP, EPS, PAIRS)
            place = (
                block * (tl.num_programs(0) // ((D + BLOCK - 1) // BLOCK)) + batch_head
            ) * length + tokens
            tl.store(ALONG + place, tl.sum(phi_k * d_phi, 1), mask=inside)
        if AT_ONCE:
            d_phi = added(d_phi, near, derivative(k, 0.0, FEATURE_MAP), BLOCK)
        elif FEATURE_MAP != "none":
            d_phi *= derivative(k, 0.0, FEATURE_MAP)
        store_tile(D_K, d_phi, start, inside, D_K_STRIDE, rows, D, WHOLE)
    if D_S0 is not None:  # noqa: SIM102 (decided when compiled; the other when run)
        if tl.program_id(1) == 0:
            D_S0 += batch_head * D * DV
            D_Z0 += batch_head * D
            store_state(D_S0, D_Z0, tl.trans(big_r), tl.sum(small_r, 0), rows, columns, D, DV, True)


@triton.jit
def value_gradients(
    Q, K, VALID, DECAY, LABELS, D_OUT, TOTAL, SHIFT, STATES, FACTORS, D_S, D_V,
    q_strides, k_strides, valid_strides, d_out_strides, d_v_strides, heads, length, segment, slots,
    K_STRIDE: tl.constexpr, D_OUT_STRIDE: tl.constexpr, Q_STRIDE: tl.constexpr, D_V_STRIDE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, SUMMED: tl.constexpr, OPERAND: tl.constexpr,
    WEIGHED: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the values of one segment. Grid: batch_heads x blocks of DV, segments.

    WEIGHED: Q holds c phi_q.
    """
    ALL: tl.constexpr = WHOLE and ((not MASKED) or (OPERAND == "fp16"))
    KEYS: tl.constexpr = WHOLE and (VALID is None)
    # else eight warps would compute features twice, like those of MASKED
    ONCE: tl.constexpr = MASKED or ((PAIRS > 0) and (BLOCK_D > 64))
    batch_head, block, batch, kv_head = locate_program(DV, BLOCK, heads, GROUP)
    K = head_pointer(K, k_strides, batch, kv_head)
    D_V = head_pointer(D_V, d_v_strides, batch, kv_head)
    rows = tl.arange(0, BLOCK_D)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    order = tl.arange(0, CHUNK)
    HALVES: tl.constexpr = 0 if LINKED else PAIRS  # links weigh scores in float32
    order_of_tokens = order_of_pairs(order, True, HALVES)
    slot = tl.num_programs(1) - 2 - tl.program_id(1)
    big_r, _ = load_state(STATES, FACTORS, D_S, None, batch_head, slot, slots, rows, columns, D, DV, SUMMED)
    big_r = tl.trans(big_r)
    first = tl.program_id(1) * segment
    chunks = tl.cdiv(tl.minimum(segment, length - first), CHUNK)
    for index in range(chunks):
        start = first + (chunks - 1 - index) * CHUNK
        tokens = start + order
        inside = within(tokens, length, ALL)
        keep = visible(VALID, batch, tokens, valid_strides, length, ALL and not ONCE)
        k = load_tile(K, start, keep, K_STRIDE, rows, D, KEYS)
        phi_k = operand(key_features(k, keep, rows, D, ONCE, FEATURE_MAP, EPS, PAIRS), OPERAND)
        d_value = dot(phi_k, tl.trans(operand(big_r, OPERAND)), OPERAND)
        if LINKED:
            running, label, of_state, of_key, left = link(
                DECAY, LABELS, batch_head, batch, start, length, CHUNK
            )
            d_value *= of_key[:, None]
            big_r *= left
        near = tl.zeros([CHUNK, BLOCK], tl.float32)
        if CAUSAL:
            for member in range(GROUP):
                head = kv_head * GROUP + member
                row = (batch_head * GROUP + member) * length
                d_out = head_pointer(D_OUT, d_out_strides, batch, head)
                query = head_pointer(Q, q_strides, batch, head)
                g = load_tile(d_out, start, inside, D_OUT_STRIDE, columns, DV, WHOLE)
                q = load_tile(query, start, inside, Q_STRIDE, rows, D, WHOLE)
                features = weighed_features(
                    q, SHIFT + row, TOTAL + row, tokens, inside, rows, D, FEATURE_MAP, EPS, MASKED, NORMALISE,
                    OPERAND, WEIGHED,
                )  # fmt: skip
                phi_q = operand(features, OPERAND)
                scores = dot(phi_k, tl.trans(phi_q), OPERAND)  # [keys, queries]
                scores = seen(scores, order_of_tokens, HALVES)
                if LINKED:
                    scores = linked_pairs(scores, running, label, True)
                near += dot(scores, g, OPERAND)
                features = scaled(features, of_state, True) if LINKED else features
                big_r += dot(tl.trans(g), operand(features, OPERAND), OPERAND)
        if (VALID is not None) or (BLOCK_D > 64):  # see `added`
            d_value = added(d_value, near, keep.to(tl.float32)[:, None], BLOCK_D)
        else:
            d_value += near
        store_tile(D_V, d_value, start, inside, D_V_STRIDE, columns, DV, WHOLE)
