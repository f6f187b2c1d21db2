# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Gradients of softmax over sinks, heavy hitters and a window, of a text from its first token on.

What was chosen is known, so nothing walks from choice to choice. `heavy_backward` launches the three, in this
order.

    heavy_query_gradients  of queries: all tokens at once; and delta_i = d_o_i . o_i
    heavy_key_parts        what the sinks and heavy hitters of each step get from its queries
    heavy_key_gradients    of keys and values: what they get in the window, and their parts of all steps

Each sum has one order, so gradients are the same bits twice. Rows hold visible tokens first. lse is to base
2, as `heavy_prompt_kernels` leaves it. Names and numbers are as in `kernel_functions`.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.heavy_kernels import gather_rows, load_queries, meet_columns
from hf_linattn.ops.triton.heavy_prompt_kernels import blocks_left, jit, tokens_of
from hf_linattn.ops.triton.kernel_functions import head_pointer
from hf_linattn.ops.triton.window_kernels import hidden_where_not, plain_dot, rows_dot


@triton.jit
def first_behind(number, size, sinks, block):
    """Return the first query behind so many evictions, at least one."""
    return number * block + size + sinks - 1


@triton.jit
def store_rows(X, strides, batch, row_head, token, inside, columns, x, WIDTH: tl.constexpr):
    """Store rows into X `[B, H, N, WIDTH]`, one for each of some heads and tokens."""
    place = batch * strides[0] + row_head * strides[1] + token.to(tl.int64) * strides[2]
    wide = inside[:, None] & (columns < WIDTH)[None, :]
    tl.store(X + place[:, None] + columns[None, :], x.to(X.dtype.element_ty), mask=wide)


@jit
def heavy_query_gradients(
    Q, NEAR, K, V, OUT, GRAD, LSE, SEEN, COUNT, CHOSEN, DELTA, D_Q, D_NEAR,
    q_strides, near_strides, k_strides, v_strides, out_strides, grad_strides, d_q_strides, d_near_strides,
    kv_heads, length, choices, size, heavy, sinks, block, scale, scaling,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of queries, and of what they are to sinks. Grid: batch_heads x tiles."""
    batch_head, batch, head, seen, start, stop = tokens_of(
        SEEN, COUNT, length, size, sinks, block, kv_heads, TOKENS
    )
    if stop <= tl.maximum(start, 0):
        return
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    token = start + tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    inside = (token >= 0) & (token < stop) & (member < GROUP)
    row_head = head * GROUP + member
    g = load_queries(GRAD, grad_strides, None, batch, row_head, token, inside, columns, DV)
    out = load_queries(OUT, out_strides, None, batch, row_head, token, inside, columns, DV)
    delta = tl.sum(g.to(tl.float32) * out.to(tl.float32), 1)
    at = (batch * kv_heads * GROUP + row_head) * length + token
    tl.store(DELTA + at, delta, mask=inside)
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    begin = 0
    if NEAR is not None:
        begin = sinks
        near = load_queries(NEAR, near_strides, None, batch, row_head, token, inside, rows, D)
        d_near = tl.zeros([TOKENS * MEMBERS, BLOCK_D], tl.float32)
        for first in range(0, tl.minimum(sinks, stop), COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            source = tl.where(column < sinks, column, -1)
            k = gather_rows(None, K, None, source, k_strides[2], 0, rows, D)
            v = gather_rows(None, V, None, source, v_strides[2], 0, columns, DV)
            met = (column < sinks)[None, :] & (column[None, :] <= token[:, None])
            scores = hidden_where_not(met, plain_dot(near, tl.trans(k), OPERAND) * scale)
            d_scores = tl.exp2(scores - lse[:, None]) * (plain_dot(g, tl.trans(v), OPERAND) - delta[:, None])
            d_near += rows_dot(d_scores, k, OPERAND)
        store_rows(D_NEAR, d_near_strides, batch, row_head, token, inside, rows, d_near * scaling, D)
    q = load_queries(Q, q_strides, None, batch, row_head, token, inside, rows, D)
    left = blocks_left(tl.maximum(start, 0), seen, size, sinks, block)
    gone = left * block
    CHOSEN += (batch_head * choices + left - 1) * heavy
    limit = tl.where(stop <= sinks, stop, stop + heavy - gone)
    d_q = tl.zeros([TOKENS * MEMBERS, BLOCK_D], tl.float32)
    for first in range(begin, limit, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        is_heavy = (column >= sinks) & (column < sinks + heavy)
        of_heavy = tl.load(CHOSEN + column - sinks, mask=is_heavy & (left > 0), other=-1)
        source = tl.where(column < sinks, column, column - heavy + gone)
        source = tl.where(is_heavy, of_heavy, tl.where(column < limit, source, -1))
        k = gather_rows(None, K, None, source, k_strides[2], 0, rows, D)
        v = gather_rows(None, V, None, source, v_strides[2], 0, columns, DV)
        scores = meet_columns(
            q, k, None, 0, inside, first, token, gone, limit, heavy, sinks, scale, rows, D, COLUMNS, OPERAND
        )
        d_scores = tl.exp2(scores - lse[:, None]) * (plain_dot(g, tl.trans(v), OPERAND) - delta[:, None])
        d_q += rows_dot(d_scores, k, OPERAND)
    store_rows(D_Q, d_q_strides, batch, row_head, token, inside, rows, d_q * scaling, D)


@triton.jit
def load_looking(
    Q, GRAD, LSE, DELTA, q_strides, grad_strides, batch, row_head, heads, length, token, inside, rows,
    columns, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Load what queries give to keys; lse is infinite where there are none, and weights are 0."""
    q = load_queries(Q, q_strides, None, batch, row_head, token, inside, rows, D)
    g = load_queries(GRAD, grad_strides, None, batch, row_head, token, inside, columns, DV)
    at = (batch * heads + row_head) * length + token
    lse = tl.load(LSE + at, mask=inside, other=float("inf"))
    delta = tl.load(DELTA + at, mask=inside, other=0.0)
    return q, g, lse, delta


@triton.jit
def add_gradients(d_k, d_v, k, v, q, g, lse, delta, seen, scale, OPERAND: tl.constexpr):
    """Add what queries give to keys and values that they have `seen`, `[keys, queries]`."""
    scores = hidden_where_not(seen, plain_dot(k, tl.trans(q), OPERAND) * scale)
    weights = tl.exp2(scores - lse[None, :])
    d_v += plain_dot(weights, g, OPERAND)
    d_scores = weights * (plain_dot(v, tl.trans(g), OPERAND) - delta[None, :])
    return d_k + rows_dot(d_scores, q, OPERAND), d_v


@jit
def heavy_key_parts(
    Q, NEAR, K, V, GRAD, LSE, DELTA, COUNT, CHOSEN, PART_K, PART_V,
    q_strides, near_strides, k_strides, v_strides, grad_strides,
    kv_heads, length, choices, size, heavy, sinks, block, first_head, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute what a step gives to a tile of sinks or of heavy hitters. Grid: batch_heads x steps x tiles.

    PART_K `[batch_heads, choices + 1, sinks + heavy, D]`, float32; where a step has no heavy hitter, nothing
    is written. The batch_heads are those from `first_head` on.
    """
    listed, tiles_of_sinks = sinks + heavy, tl.cdiv(sinks, COLUMNS)
    tiles = tiles_of_sinks + tl.cdiv(heavy, COLUMNS)
    tile = tl.program_id(0) % tiles
    step = tl.program_id(0) // tiles % (choices + 1)
    part_head = (tl.program_id(0) // tiles // (choices + 1)).to(tl.int64)
    of_sinks = tile < tiles_of_sinks
    if (step == 0) & (of_sinks == 0):
        return
    batch_head = first_head + part_head
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    index = tl.where(of_sinks, tile, tile - tiles_of_sinks) * COLUMNS + tl.arange(0, COLUMNS)
    within = index < tl.where(of_sinks, sinks, heavy)
    CHOSEN += (batch_head * choices + step - 1) * heavy
    of_heavy = tl.load(CHOSEN + index, mask=within & (of_sinks == 0), other=-1)
    key = tl.where(of_sinks & within, index, of_heavy)
    if NEAR is not None:
        strides = (
            tl.where(of_sinks, near_strides[0], q_strides[0]),
            tl.where(of_sinks, near_strides[1], q_strides[1]),
            tl.where(of_sinks, near_strides[2], q_strides[2]),
        )
        if of_sinks:
            Q = NEAR
    else:
        strides = q_strides
    k = gather_rows(None, K, None, key, k_strides[2], 0, rows, D)
    v = gather_rows(None, V, None, key, v_strides[2], 0, columns, DV)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    of_query = tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    row_head = head * GROUP + member
    begin = tl.where(step == 0, 0, first_behind(step, size, sinks, block))
    stop = tl.minimum(first_behind(step + 1, size, sinks, block), tl.load(COUNT + batch))
    d_k = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    d_v = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    for start in range(begin, stop, TOKENS):
        token = start + of_query
        inside = (token < stop) & (member < GROUP)
        q, g, lse, delta = load_looking(
            Q, GRAD, LSE, DELTA, strides, grad_strides, batch, row_head, kv_heads * GROUP, length, token,
            inside, rows, columns, D, DV,
        )  # fmt: skip
        seen = (key >= 0)[:, None] & (key[:, None] <= token[None, :])
        d_k, d_v = add_gradients(d_k, d_v, k, v, q, g, lse, delta, seen, scale, OPERAND)
    to = (part_head * (choices + 1) + step) * listed + index + tl.where(of_sinks, 0, sinks)
    wide = within[:, None] & (rows < D)[None, :]
    tl.store(PART_K + to[:, None] * D + rows[None, :], d_k, mask=wide)
    wide = within[:, None] & (columns < DV)[None, :]
    tl.store(PART_V + to[:, None] * DV + columns[None, :], d_v, mask=wide)


@jit
def heavy_key_gradients(
    Q, K, V, GRAD, LSE, DELTA, COUNT, PARTS_OF, FIRST_PART, PART_K, PART_V, D_K, D_V,
    q_strides, k_strides, v_strides, grad_strides, d_k_strides, d_v_strides,
    kv_heads, length, choices, size, heavy, sinks, block, first_head, scale, scaling,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of a tile of keys and of their values. Grid: batch_heads x tiles.

    PARTS_OF `[B, Hkv, (choices + 1) (sinks + heavy)]` lists parts by token, and FIRST_PART `[B, Hkv, N + 1]`
    tells where those of a token begin.
    """
    tiles = tl.cdiv(length, COLUMNS)
    first = tl.program_id(0) % tiles * COLUMNS
    part_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch_head = first_head + part_head
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    key = first + tl.arange(0, COLUMNS)
    there = key < length
    k = gather_rows(None, K, None, tl.where(there, key, -1), k_strides[2], 0, rows, D)
    v = gather_rows(None, V, None, tl.where(there, key, -1), v_strides[2], 0, columns, DV)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    of_query = tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    row_head = head * GROUP + member
    leaves = first_behind(tl.maximum(key - sinks, 0) // block + 1, size, sinks, block)
    stop = first_behind(tl.maximum(first + COLUMNS - 1 - sinks, 0) // block + 1, size, sinks, block)
    stop = tl.minimum(stop, tl.load(COUNT + batch))
    d_k = tl.zeros([COLUMNS, BLOCK_D], tl.float32)
    d_v = tl.zeros([COLUMNS, BLOCK_V], tl.float32)
    for start in range(tl.maximum(first, sinks), stop, TOKENS):
        token = start + of_query
        inside = (token < stop) & (member < GROUP)
        q, g, lse, delta = load_looking(
            Q, GRAD, LSE, DELTA, q_strides, grad_strides, batch, row_head, kv_heads * GROUP, length, token,
            inside, rows, columns, D, DV,
        )  # fmt: skip
        seen = (key[:, None] <= token[None, :]) & (token[None, :] < leaves[:, None])
        seen = seen & (key >= sinks)[:, None]
        d_k, d_v = add_gradients(d_k, d_v, k, v, q, g, lse, delta, seen, scale, OPERAND)
    FIRST_PART += batch_head * (length + 1)
    parts = (choices + 1) * (sinks + heavy)
    PARTS_OF += batch_head * parts
    begin = tl.load(FIRST_PART + key, mask=there, other=0)
    end = tl.load(FIRST_PART + key + 1, mask=there, other=0)
    for index in range(0, tl.max(end - begin, 0)):
        more = begin + index < end
        part = part_head * parts + tl.load(PARTS_OF + begin + index, mask=more, other=0)
        wide = more[:, None] & (rows < D)[None, :]
        d_k += tl.load(PART_K + part[:, None] * D + rows[None, :], mask=wide, other=0.0)
        wide = more[:, None] & (columns < DV)[None, :]
        d_v += tl.load(PART_V + part[:, None] * DV + columns[None, :], mask=wide, other=0.0)
    store_rows(D_K, d_k_strides, batch, head, key, there, rows, d_k * scaling, D)
    store_rows(D_V, d_v_strides, batch, head, key, there, columns, d_v, DV)
