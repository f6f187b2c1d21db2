# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Normalised linear attention for GPUs, forward: what runs on the device. `launch` launches it.

    num_i = sum_{j<=i} (phi_q(q_i) . phi_k(k_j)) v_j + phi_q(q_i)^T S_0,    total_i: with 1, z_0 for v_j, S_0

The sequence is cut into segments, a segment into chunks. `segment_states` sums each segment, `accumulate`
makes of that the state before each where there are many, and `outputs` walks the chunks of one segment with S
and z on chip: quadratic inside a chunk, through S between chunks ("Transformers are RNNs", arXiv:2006.16236,
equations 18 to 20). The feature map, the normaliser, the key mask, grouped heads and the state before are
parts of these three, so each of q, k, v is read from memory at most twice and nothing but the output is
written.

Numbers and names in shapes are as in `kernel_functions`.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import (
    added,
    dot,
    exponential,
    head_pointer,
    key_features,
    link,
    linked_pairs,
    load_state,
    load_tile,
    operand,
    order_of_pairs,
    partial_sums,
    query_features,
    reciprocal,
    row_and_block,
    row_shift,
    seen,
    store_state,
    store_tile,
    visible,
    wide,
)


@triton.jit
def segment_states(
    K, V, VALID, DECAY, LABELS, STATES, FACTORS,
    k_strides, v_strides, valid_strides, kv_heads, length, segment, slots,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr, OPERAND: tl.constexpr, PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum up one segment into its slot. Grid: batch_heads x blocks of DV, segments."""
    ALL: tl.constexpr = WHOLE and ((not MASKED) or (OPERAND == "fp16"))
    KEYS: tl.constexpr = WHOLE and (VALID is None)
    batch_head, block = row_and_block(DV, BLOCK)
    slot = tl.program_id(1)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    s = tl.zeros([BLOCK, BLOCK_D], tl.float32)  # transposed: keys, the costly operand, stay in shared memory
    z = tl.zeros([16, BLOCK_D], tl.float32)
    factor = 1.0
    first = slot * segment
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        keep = visible(VALID, batch, tokens, valid_strides, length, ALL and (BLOCK_D <= 64))
        k = load_tile(K, start, keep, K_STRIDE, rows, D, KEYS)
        v = load_tile(V, start, keep, V_STRIDE, columns, DV, KEYS)
        features = key_features(k, keep, rows, D, MASKED, FEATURE_MAP, EPS, PAIRS)
        phi_k = operand(features, OPERAND)
        weight = keep.to(tl.float32)
        if LINKED:
            _, _, _, of_key, left = link(DECAY, LABELS, batch_head, batch, start, length, CHUNK)
            weight *= of_key
            v = v.to(tl.float32) * of_key[:, None]
            s *= left
            z *= left
            factor *= left
        s += dot(tl.trans(v), phi_k, OPERAND)
        z += partial_sums(features, weight, PAIRS)
    s = tl.trans(s)
    z = tl.sum(z, 0)
    base = STATES + (batch_head * slots + slot) * (D * DV + D)
    store_state(base, base + D * DV, s, z, rows, columns, D, DV, block == 0)
    if LINKED:
        tl.store(FACTORS + batch_head * slots + slot, factor, mask=block == 0)


@triton.jit
def accumulate(
    STATES,
    FACTORS,
    S0,
    Z0,
    slots,
    SIZE_S: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Sum up along the slots, in place, from S0 `[batch_heads, SIZE_S]` and Z0 on.

    Grid: batch_heads, blocks of SIZE.

    SLOTS of them at a time, so that their loads are under way together; one at a time where FACTORS
    `[batch_heads, slots]`, of what comes before in each, is not None.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    carry = tl.zeros([BLOCK], tl.float32)
    if S0 is not None:
        carry += tl.load(S0 + batch_head * SIZE_S + element, mask=element < SIZE_S, other=0.0)
    if Z0 is not None:
        in_z = (element >= SIZE_S) & (element < SIZE)
        carry += tl.load(Z0 + batch_head * (SIZE - SIZE_S) + element - SIZE_S, mask=in_z, other=0.0)
    if FACTORS is not None:
        for slot in range(slots):
            pointers = STATES + (batch_head * slots + slot) * SIZE + element
            x = tl.load(pointers, mask=element < SIZE, other=0.0)
            carry = carry * tl.load(FACTORS + batch_head * slots + slot) + x
            tl.store(pointers, carry, mask=element < SIZE)
    else:
        for first in range(0, slots, SLOTS):
            slot = first + tl.arange(0, SLOTS)
            inside = (slot < slots)[:, None] & (element < SIZE)[None, :]
            pointers = STATES + (batch_head * slots + slot)[:, None] * SIZE + element[None, :]
            x = tl.load(pointers, mask=inside, other=0.0)
            tl.store(pointers, carry[None, :] + tl.cumsum(x, 0), mask=inside)
            carry += tl.sum(x, 0)


@triton.jit
def outputs(
    Q, K, V, VALID, DECAY, LABELS, STATES, FACTORS, S0, Z0, OUT, TOTAL, S, Z,
    q_strides, k_strides, v_strides, valid_strides, out_strides, heads, length, segment, slots, parts,
    Q_STRIDE: tl.constexpr, K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    GROUP: tl.constexpr, LINKED: tl.constexpr, FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr,
    NORMALISE: tl.constexpr, CAUSAL: tl.constexpr, SUMMED: tl.constexpr, OPERAND: tl.constexpr,
    PAIRS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Compute outputs and totals of a segment, and the state after all. Grid: B H x blocks of DV, segments.

    Not CAUSAL: every query reads S0 and Z0, the state of all keys; K and V are not looked at.
    """
    ALL: tl.constexpr = WHOLE and ((not MASKED) or (OPERAND == "fp16"))
    KEYS: tl.constexpr = WHOLE and (VALID is None)
    row, block = row_and_block(DV, BLOCK)
    batch_head = row // GROUP
    batch, head = row // heads, row % heads
    Q = head_pointer(Q, q_strides, batch, head)
    K = head_pointer(K, k_strides, batch, head // GROUP)
    V = head_pointer(V, v_strides, batch, head // GROUP)
    OUT = head_pointer(OUT, out_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    order = tl.arange(0, CHUNK)
    HALVES: tl.constexpr = 0 if LINKED else PAIRS  # links weigh scores in float32
    order_of_tokens = order_of_pairs(order, False, HALVES)
    # scores are summed up by a product, but where programs have no registers left for it
    WIDE: tl.constexpr = (BLOCK > 64) or ((BLOCK_D > 64) and (FEATURE_MAP == "relu"))
    BY_PRODUCT: tl.constexpr = (HALVES > 0) and not WIDE
    ones = tl.where((order >= 0)[:, None] & (tl.arange(0, 16) == 0)[None, :], 1.0, 0.0)
    s, z = load_state(
        STATES, FACTORS, S0, Z0, batch_head, tl.program_id(1) * parts - 1, slots, rows, columns, D, DV, SUMMED
    )
    s = tl.trans(s)
    # 16 rows whose sum is z
    z = tl.where(tl.arange(0, 16)[:, None] == 0, z[None, :], 0.0)
    first = tl.program_id(1) * segment
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + order
        inside = tokens < length
        q = load_tile(Q, start, inside, Q_STRIDE, rows, D, WHOLE)
        phi_q = operand(query_features(q, row_shift(q, rows, D), rows, D, FEATURE_MAP, EPS, PAIRS), OPERAND)
        total = dot(phi_q, tl.trans(operand(z, OPERAND)), OPERAND)
        if not BY_PRODUCT:
            total = tl.sum(total, 1)
        if CAUSAL:
            keep = visible(VALID, batch, tokens, valid_strides, length, ALL)
            k = load_tile(K, start, keep, K_STRIDE, rows, D, KEYS)
            v = load_tile(V, start, keep, V_STRIDE, columns, DV, KEYS)
            features = key_features(k, keep, rows, D, MASKED, FEATURE_MAP, EPS, PAIRS)
            phi_k = operand(features, OPERAND)
            weight = keep.to(tl.float32)
            if LINKED:
                running, label, of_state, of_key, left = link(
                    DECAY, LABELS, batch_head, batch, start, length, CHUNK
                )
                total *= of_state
                weight *= of_key
                z *= left
            z += partial_sums(features, weight, PAIRS)
            scores = dot(phi_q, tl.trans(phi_k), OPERAND)
            scores = seen(scores, order_of_tokens, HALVES)
            if LINKED:
                scores = linked_pairs(scores, running, label, False)
            if BY_PRODUCT:
                total += dot(scores, ones, OPERAND)
            else:
                total += tl.sum(wide(scores, HALVES), 1)
        if BY_PRODUCT:
            total = tl.sum(total, 1)
        # before the products below, which need its registers
        tl.store(TOTAL + row * length + tokens, total, mask=inside & (block == 0))
        near = tl.zeros([CHUNK, BLOCK], tl.float32)
        if BLOCK > 64:  # S goes into the product from the registers in which it lies, a row of it a warp
            numerator = dot(operand(s, OPERAND), tl.trans(phi_q), OPERAND)  # [columns, queries]
            if LINKED and CAUSAL:
                numerator *= of_state[None, :]
            if CAUSAL:
                numerator += dot(tl.trans(v), tl.trans(operand(scores, OPERAND)), OPERAND)
        else:
            if CAUSAL:
                near = dot(scores, v, OPERAND)
            numerator = dot(phi_q, tl.trans(operand(s, OPERAND)), OPERAND)
            if LINKED and CAUSAL:
                numerator *= of_state[:, None]
        if CAUSAL:
            if LINKED:
                v = v.to(tl.float32) * of_key[:, None]
                s *= left
            s += dot(tl.trans(v), phi_k, OPERAND)
        scale = tl.full([CHUNK], 1.0, tl.float32)
        if NORMALISE:
            scale = reciprocal(total)
        if BLOCK > 64:
            numerator = tl.trans(numerator * scale[None, :])
        else:
            numerator = added(numerator, near, scale[:, None], BLOCK_D)
        store_tile(OUT, numerator, start, inside, OUT_STRIDE, columns, DV, WHOLE)
    if CAUSAL:  # noqa: SIM102 (decided when compiled; the other when run)
        if (first + segment >= length) & (row % GROUP == 0):
            store_state(
                S + batch_head * D * DV,
                Z + batch_head * D,
                tl.trans(s),
                tl.sum(z, 0),
                rows,
                columns,
                D,
                DV,
                block == 0,
            )


@triton.jit
def step(
    Q, K, V, VALID, DECAY, S0, Z0, OUT, TOTAL, S, Z,
    q_strides, k_strides, v_strides, valid_strides, kv_heads,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr, MASKED: tl.constexpr, NORMALISE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Decode one token: the state takes its key in, then its queries read. Grid: batch_heads x blocks of DV.

    OUT `[B, H, DV]`, TOTAL `[B, H]`. Memory-bound in S, so sums and no tensor cores.
    """
    batch_head, block = row_and_block(DV, BLOCK)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    rows = tl.arange(0, BLOCK_D)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    keep = tl.full([1], 1, tl.int1)
    if VALID is not None:
        keep = tl.load(VALID + batch * valid_strides[0] + tl.arange(0, 1)) != 0
    token = tl.arange(0, 1)
    k = load_tile(head_pointer(K, k_strides, batch, head), 0, keep, 0, rows, D)
    v = load_tile(head_pointer(V, v_strides, batch, head), 0, keep, 0, columns, DV)
    phi_k = key_features(k, keep, rows, D, MASKED, FEATURE_MAP, EPS)
    phi_k = tl.sum(operand(phi_k, OPERAND).to(tl.float32), 0)
    s, z = load_state(None, None, S0, Z0, batch_head, -1, 0, rows, columns, D, DV, True)
    if DECAY is not None:
        factor = exponential(tl.load(DECAY + batch_head))
        s *= factor
        z *= factor
    s += phi_k[:, None] * v.to(tl.float32)
    z += phi_k
    first = block == 0
    store_state(S + batch_head * D * DV, Z + batch_head * D, s, z, rows, columns, D, DV, first)
    for member in range(GROUP):
        query_head = head * GROUP + member
        row = batch_head * GROUP + member
        q = load_tile(head_pointer(Q, q_strides, batch, query_head), 0, token == 0, 0, rows, D)
        phi_q = query_features(q, row_shift(q, rows, D), rows, D, FEATURE_MAP, EPS)
        phi_q = tl.sum(operand(phi_q, OPERAND).to(tl.float32), 0)
        output = tl.sum(phi_q[:, None] * s, 0)
        total = tl.sum(phi_q * z, 0)
        if NORMALISE:
            output *= reciprocal(total)
        tl.store(OUT + row * DV + columns, output.to(OUT.dtype.element_ty), mask=columns < DV)
        tl.store(TOTAL + row, total, mask=first)
