# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Softmax over sinks, heavy hitters and a window, of a prompt. `heavy` launches the four, in this order.

    prompt_sums     lse_i of sinks and window, which no choice changes: all tokens at once
    prompt_choices  from choice to choice: heavy hitters join lse_i, and what they and a block that leaves got
                    is ranked. It reads no values, and of a window only what leaves
    prompt_outputs  o_i of all columns by lse_i: all tokens at once
    prompt_cache    what is kept after the last token: all columns at once

Between them lie lse `[B, H, N]`, to base 2, by visible token; SOURCE `[B, Hkv, slots, heavy + block]`, the
heavy hitters of each step and the block that leaves after it, the first slot from before the call; and WEIGHT
`[B, Hkv, 2, heavy + block]`, what they got, of this step and of the next in turn. A source is a column of the
cache before the call, or from its `total` columns on a token of the call; -1 is none. Names and numbers are
as in `kernel_functions`.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.heavy_kernels import (
    choose,
    gather_rows,
    load_queries,
    meet_columns,
    places_of,
    ranks_of,
)
from hf_linattn.ops.triton.kernel_functions import head_pointer
from hf_linattn.ops.triton.window_kernels import plain_dot

SIZES = ("length", "choices", "size", "heavy", "sinks", "block", "reach", "slots", "first_head")
"""What differs from layer to layer: no kernel is compiled for numbers that have something in common."""


def jit(kernel):
    """Compile a kernel once for all SIZES."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return triton.jit(kernel, do_not_specialize=[name for name in SIZES if name in names])


@triton.jit
def blocks_left(token, seen, size, sinks, block):
    """Count the blocks that have left the window when a token of the call comes, -1 for the one before."""
    return tl.maximum(seen + token - sinks + 1 - size, 0) // block


@triton.jit
def source_of(rank, seen, before, heavy, sinks, total):
    """Find a sink or a token of the window: in the cache, which `before` tokens had left, or in the call."""
    old = tl.where(rank < sinks, rank, rank + heavy - before)
    return tl.where(rank < seen, old, total + rank - seen)


@triton.jit
def tokens_of(SEEN, COUNT, length, size, sinks, block, kv_heads, TOKENS: tl.constexpr):
    """Tell what a program of tiles works on; none lies in two steps, and the first may begin before the call.

    Returns the key head of all, its row, its head in that, tokens before the call, and the first token and
    the end of its own.
    """
    parts = tl.cdiv(block, TOKENS)
    tiles = (tl.cdiv(length, block) + 1) * parts
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    seen = tl.load(SEEN + batch)
    count = tl.load(COUNT + batch)
    first = (size + sinks - 1) % block - seen % block
    first = tl.where(first < 0, first, first - block)
    begin = first + tile // parts * block
    start = begin + tile % parts * TOKENS
    stop = tl.minimum(tl.minimum(start + TOKENS, begin + block), count)
    return batch_head, batch, head, seen, start, stop


@jit
def prompt_sums(
    Q, NEAR, K, ORDER, SEEN, COUNT, OLD_K, LSE, q_strides, near_strides, k_strides,
    kv_heads, length, size, heavy, sinks, block, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute lse of sinks and window. Grid: batch_heads x tiles."""
    batch_head, batch, head, seen, start, stop = tokens_of(
        SEEN, COUNT, length, size, sinks, block, kv_heads, TOKENS
    )
    if stop <= tl.maximum(start, 0):
        return
    total = sinks + heavy + size + block
    K = head_pointer(K, k_strides, batch, head)
    if OLD_K is not None:
        OLD_K += batch_head * total * D
    if ORDER is not None:
        ORDER += batch * length
    rows = tl.arange(0, BLOCK_D)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    token = start + tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    inside = (token >= 0) & (token < stop) & (member < GROUP)
    row_head = head * GROUP + member
    q = load_queries(Q, q_strides, ORDER, batch, row_head, token, inside, rows, D)
    place = places_of(ORDER, token, inside).to(tl.int64)
    near = batch * near_strides[0] + row_head * near_strides[1] + place * near_strides[2]
    before = blocks_left(-1, seen, size, sinks, block) * block
    gone = blocks_left(tl.maximum(start, 0), seen, size, sinks, block) * block
    # columns as if there were no heavy hitters
    last = seen + stop - 1
    limit = tl.where(last < sinks, last, last - gone) + 1
    rank = seen + token
    top = tl.full([TOKENS * MEMBERS], float("-inf"), tl.float32)
    divisor = tl.zeros([TOKENS * MEMBERS], tl.float32)
    for first in range(0, limit, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        of = tl.where(column < sinks, column, column + gone)
        source = tl.where(column < limit, source_of(of, seen, before, heavy, sinks, total), -1)
        k = gather_rows(OLD_K, K, ORDER, source, k_strides[2], total, rows, D)
        scores = meet_columns(
            q, k, NEAR, near, inside, first, rank, gone, limit, 0, sinks, scale, rows, D, COLUMNS, OPERAND
        )
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        divisor = divisor * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        top = higher
    to = (batch * kv_heads * GROUP + row_head) * length + token
    tl.store(LSE + to, top + tl.log2(divisor), mask=inside)


@triton.jit
def meet_heavy(
    q, K, OLD_K, ORDER, SOURCE, first, held, stride, total, scale, rows,
    D: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute the scores of queries and a tile of heavy hitters."""
    index = first + tl.arange(0, COLUMNS)
    source = tl.load(SOURCE + index, mask=index < held, other=-1)
    k = gather_rows(OLD_K, K, ORDER, source, stride, total, rows, D)
    scores = plain_dot(q, tl.trans(k), OPERAND) * scale
    return tl.where((index < held)[None, :], scores, float("-inf"))


@triton.jit
def add_weights(WEIGHT, got, fade, first, held, COLUMNS: tl.constexpr):
    """Add what a tile of heavy hitters gets to what they got before."""
    index = first + tl.arange(0, COLUMNS)
    before = tl.load(WEIGHT + index, mask=index < held, other=0.0)
    tl.store(WEIGHT + index, before * fade + got, mask=index < held)


@triton.jit
def look_at(
    Q, NEAR, ORDER, LSE, k, start, stop, rate, batch, row_head, row, length, q_strides, near_strides, scale,
    rows, is_sink, D: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TOKENS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute what some tokens pay to keys, from `start` on and up to the token `stop`; return them, too."""
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    token = start + tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    inside = (token < stop) & (member < GROUP)
    q = load_queries(Q, q_strides, ORDER, batch, row_head, token, inside, rows, D)
    scores = plain_dot(q, k, OPERAND)
    if NEAR is not None:
        near = load_queries(NEAR, near_strides, ORDER, batch, row_head, token, inside, rows, D)
        scores = tl.where(is_sink[None, :], plain_dot(near, k, OPERAND), scores)
    lse = tl.load(LSE + (row + member) * length + token, mask=inside, other=float("inf"))
    # what was paid long ago counts less, which is a difference of logarithms
    level = lse + (stop - 1 - token).to(tl.float32) * rate
    return token, tl.exp2(scores * scale - level[:, None])


@triton.jit
def attention_got(
    Q, NEAR, K, OLD_K, OLD_WEIGHT, ORDER, LSE, source, rank, there, is_sink, begin, full, stop, seen, batch,
    head, row, length, q_strides, near_strides, k_stride, total, scale, rate, rows,
    D: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Sum what tokens of the window, or sinks, got up to the token `stop`, from `begin` on and before.

    From the token `full` on each sees all of them.
    """
    row_head = head * GROUP + tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    k = tl.trans(gather_rows(OLD_K, K, ORDER, source, k_stride, total, rows, D))
    # added up over queries at the end, not in each step: that is among threads
    sums = tl.zeros([TOKENS * MEMBERS, COLUMNS], tl.float32)
    some = begin + tl.cdiv(tl.maximum(tl.minimum(full, stop) - begin, 0), TOKENS) * TOKENS
    for start in range(begin, some, TOKENS):
        token, paid = look_at(
            Q, NEAR, ORDER, LSE, k, start, stop, rate, batch, row_head, row, length, q_strides, near_strides,
            scale, rows, is_sink, D, GROUP, MEMBERS, TOKENS, OPERAND,
        )  # fmt: skip
        sums += tl.where(rank[None, :] <= (seen + token)[:, None], paid, 0.0)
    for start in range(some, stop, TOKENS):
        token, paid = look_at(
            Q, NEAR, ORDER, LSE, k, start, stop, rate, batch, row_head, row, length, q_strides, near_strides,
            scale, rows, is_sink, D, GROUP, MEMBERS, TOKENS, OPERAND,
        )  # fmt: skip
        sums += paid
    got = tl.where(there, tl.sum(sums, 0), 0.0)
    if OLD_WEIGHT is not None:
        old = tl.load(OLD_WEIGHT + source, mask=there & (source >= 0) & (source < total), other=0.0)
        got += old * tl.exp2(-stop.to(tl.float32) * rate)
    return got


@jit
def prompt_choices(
    Q, K, ORDER, SEEN, COUNT, OLD_K, OLD_WEIGHT, OLD_RANK, LSE, SOURCE, WEIGHT, CHOSEN, q_strides, k_strides,
    kv_heads, length, choices, size, heavy, sinks, block, reach, slots, scale, rate,
    D: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, MEMBERS: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, LEAVING: tl.constexpr, LOOKING: tl.constexpr, RANKED: tl.constexpr,
    ONE_TILE: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Choose the heavy hitters of each step, and complete LSE. Grid: batch_heads.

    CHOSEN `[B, Hkv, choices, heavy]` gets them as tokens of the call, None for nowhere. TOKENS meet COLUMNS
    of the heavy hitters; ONE_TILE: those are all. LOOKING meet LEAVING of a block that leaves. RANKED are
    ranked together.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    total, width = sinks + heavy + size + block, heavy + block
    K = head_pointer(K, k_strides, batch, head)
    if OLD_K is not None:
        OLD_K += batch_head * total * D
        OLD_WEIGHT += batch_head * total
        OLD_RANK += batch_head * total
    if ORDER is not None:
        ORDER += batch * length
    if CHOSEN is not None:
        CHOSEN += batch_head * choices * heavy
    SOURCE += batch_head * slots * width
    WEIGHT += batch_head * 2 * width
    row = batch * kv_heads * GROUP + head * GROUP
    rows = tl.arange(0, BLOCK_D)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    of_query = tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    for first in range(0, heavy, COLUMNS):
        index = first + tl.arange(0, COLUMNS)
        source = tl.full([COLUMNS], -1, tl.int32)
        got = tl.zeros([COLUMNS], tl.float32)
        if OLD_K is not None:
            source = sinks + index
            got = tl.load(OLD_WEIGHT + sinks + index, mask=index < heavy, other=0.0)
        tl.store(SOURCE + index, source, mask=index < heavy)
        tl.store(WEIGHT + index, got, mask=index < heavy)
    seen = tl.load(SEEN + batch)
    count = tl.load(COUNT + batch)
    before = blocks_left(-1, seen, size, sinks, block) * block
    gone = before
    now = count * 0
    done = count * 0
    while done < count:
        tl.debug_barrier()
        held = tl.minimum(gone, heavy)
        # the first step has no tokens where a block leaves before the first
        stop = tl.minimum(gone + block + size + sinks - 1 - seen, count)
        if held > 0:
            for start in range(done, stop, TOKENS):
                end = tl.minimum(start + TOKENS, stop)
                token = start + of_query
                inside = (token < end) & (member < GROUP)
                q = load_queries(Q, q_strides, ORDER, batch, head * GROUP + member, token, inside, rows, D)
                to = LSE + (row + member) * length + token
                lse = tl.load(to, mask=inside, other=0.0)
                share = tl.where(inside, tl.exp2((token + 1 - end).to(tl.float32) * rate), 0.0)
                fade = tl.exp2((start - end).to(tl.float32) * rate)
                if ONE_TILE:
                    scores = meet_heavy(
                        q, K, OLD_K, ORDER, SOURCE, 0, held, k_strides[2], total, scale, rows, D, COLUMNS,
                        OPERAND,
                    )  # fmt: skip
                    top = tl.maximum(tl.max(scores, 1), lse)
                    paid = tl.exp2(scores - top[:, None])
                    divisor = tl.sum(paid, 1) + tl.exp2(lse - top)
                    lse = top + tl.log2(divisor)
                    got = tl.sum(paid * (share / divisor)[:, None], 0)
                    add_weights(WEIGHT + now * width, got, fade, 0, held, COLUMNS)
                else:
                    top = lse
                    divisor = tl.full([TOKENS * MEMBERS], 1.0, tl.float32)
                    for first in range(0, held, COLUMNS):
                        scores = meet_heavy(
                            q, K, OLD_K, ORDER, SOURCE, first, held, k_strides[2], total, scale, rows, D,
                            COLUMNS, OPERAND,
                        )  # fmt: skip
                        higher = tl.maximum(top, tl.max(scores, 1))
                        divisor = divisor * tl.exp2(top - higher)
                        divisor += tl.sum(tl.exp2(scores - higher[:, None]), 1)
                        top = higher
                    lse = top + tl.log2(divisor)
                    for first in range(0, held, COLUMNS):
                        scores = meet_heavy(
                            q, K, OLD_K, ORDER, SOURCE, first, held, k_strides[2], total, scale, rows, D,
                            COLUMNS, OPERAND,
                        )  # fmt: skip
                        got = tl.sum(tl.exp2(scores - lse[:, None]) * share[:, None], 0)
                        add_weights(WEIGHT + now * width, got, fade, first, held, COLUMNS)
                tl.store(to, lse, mask=inside)
                tl.debug_barrier()
        if stop < count:
            for first in range(0, block, LEAVING):
                index = first + tl.arange(0, LEAVING)
                there = index < block
                rank = sinks + gone + index
                source = tl.where(there, source_of(rank, seen, before, heavy, sinks, total), -1)
                begin = tl.maximum(sinks + gone + first - seen, 0)
                got = attention_got(
                    Q, None, K, OLD_K, OLD_WEIGHT, ORDER, LSE, source, rank, there, there, begin,
                    sinks + gone + first + LEAVING - 1 - seen, stop, seen, batch, head, row, length,
                    q_strides, q_strides, k_strides[2], total, scale, rate, rows, D, GROUP, MEMBERS, LOOKING,
                    LEAVING, OPERAND,
                )  # fmt: skip
                tl.store(WEIGHT + now * width + heavy + index, got, mask=there)
                tl.store(SOURCE + heavy + index, source, mask=there)
            tl.debug_barrier()
            oldest = tl.where(reach > 0, seen + stop - reach, 0)
            choose(
                SOURCE, WEIGHT + now * width, OLD_RANK, CHOSEN, SOURCE + width, WEIGHT + (1 - now) * width,
                heavy, block, gone, seen, oldest, total, RANKED, LEAVING,
            )  # fmt: skip
            SOURCE += width
            if CHOSEN is not None:
                CHOSEN += heavy
            now = 1 - now
            gone += block
        done = stop


@jit
def prompt_outputs(
    Q, NEAR, K, V, ORDER, SEEN, COUNT, OLD_K, OLD_V, LSE, SOURCE, OUT,
    q_strides, near_strides, k_strides, v_strides, out_strides,
    kv_heads, length, size, heavy, sinks, block, slots, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of tokens. Grid: batch_heads x tiles."""
    batch_head, batch, head, seen, start, stop = tokens_of(
        SEEN, COUNT, length, size, sinks, block, kv_heads, TOKENS
    )
    if stop <= tl.maximum(start, 0):
        return
    total = sinks + heavy + size + block
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    if OLD_K is not None:
        OLD_K += batch_head * total * D
        OLD_V += batch_head * total * DV
    if ORDER is not None:
        ORDER += batch * length
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    token = start + tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    inside = (token >= 0) & (token < stop) & (member < GROUP)
    row_head = head * GROUP + member
    q = load_queries(Q, q_strides, ORDER, batch, row_head, token, inside, rows, D)
    lse = tl.load(
        LSE + (batch * kv_heads * GROUP + row_head) * length + token, mask=inside, other=float("inf")
    )
    place = places_of(ORDER, token, inside).to(tl.int64)
    near = batch * near_strides[0] + row_head * near_strides[1] + place * near_strides[2]
    before = blocks_left(-1, seen, size, sinks, block)
    left = blocks_left(tl.maximum(start, 0), seen, size, sinks, block)
    gone = left * block
    SOURCE += (batch_head * slots + left - before) * (heavy + block)
    last = seen + stop - 1
    limit = tl.where(last < sinks, last, last + heavy - gone) + 1
    rank = seen + token
    sums = tl.zeros([TOKENS * MEMBERS, BLOCK_V], tl.float32)
    for first in range(0, limit, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        of = tl.where(column < sinks, column, column - heavy + gone)
        source = source_of(of, seen, before * block, heavy, sinks, total)
        is_heavy = (column >= sinks) & (column < sinks + heavy)
        of_heavy = tl.load(SOURCE + column - sinks, mask=is_heavy, other=-1)
        source = tl.where(is_heavy, of_heavy, tl.where(column < limit, source, -1))
        k = gather_rows(OLD_K, K, ORDER, source, k_strides[2], total, rows, D)
        scores = meet_columns(
            q, k, NEAR, near, inside, first, rank, gone, limit, heavy, sinks, scale, rows, D, COLUMNS, OPERAND
        )
        v = gather_rows(OLD_V, V, ORDER, source, v_strides[2], total, columns, DV)
        sums += plain_dot(tl.exp2(scores - lse[:, None]), v, OPERAND)
    to = batch * out_strides[0] + row_head * out_strides[1] + place * out_strides[2]
    wide = inside[:, None] & (columns < DV)[None, :]
    tl.store(OUT + to[:, None] + columns[None, :], sums.to(OUT.dtype.element_ty), mask=wide)


@jit
def prompt_cache(
    Q, NEAR, K, V, ORDER, SEEN, COUNT, OLD_K, OLD_V, OLD_WEIGHT, OLD_RANK, LSE, SOURCE, WEIGHT, NEW_K, NEW_V,
    NEW_WEIGHT, NEW_RANK, q_strides, near_strides, k_strides, v_strides,
    kv_heads, length, size, heavy, sinks, block, slots, scale, rate,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Fill the cache after the call. Grid: batch_heads x tiles of columns."""
    total, width = sinks + heavy + size + block, heavy + block
    tiles = tl.cdiv(total, COLUMNS)
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * COLUMNS + tl.arange(0, COLUMNS)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    if OLD_K is not None:
        OLD_K += batch_head * total * D
        OLD_V += batch_head * total * DV
        OLD_WEIGHT += batch_head * total
        OLD_RANK += batch_head * total
    if ORDER is not None:
        ORDER += batch * length
    seen = tl.load(SEEN + batch)
    count = tl.load(COUNT + batch)
    before = blocks_left(-1, seen, size, sinks, block)
    made = blocks_left(count - 1, seen, size, sinks, block) - before
    gone = (before + made) * block
    SOURCE += (batch_head * slots + made) * width
    WEIGHT += (batch_head * 2 + made % 2) * width
    rank = tl.where(column < sinks, column, column - heavy + gone)
    is_heavy = (column >= sinks) & (column < sinks + heavy)
    there = (column < total) & (is_heavy == 0) & (rank < seen + count)
    source = tl.where(there, source_of(rank, seen, before * block, heavy, sinks, total), -1)
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    begin = tl.maximum(tl.min(tl.where(there, rank, seen + count), 0) - seen, 0)
    full = tl.max(tl.where(there, rank, 0), 0) - seen
    got = attention_got(
        Q, NEAR, K, OLD_K, OLD_WEIGHT, ORDER, LSE, source, rank, there, column < sinks, begin, full, count,
        seen, batch, head, batch * kv_heads * GROUP + head * GROUP, length, q_strides, near_strides,
        k_strides[2], total, scale, rate, rows, D, GROUP, MEMBERS, TOKENS, COLUMNS, OPERAND,
    )  # fmt: skip
    held = is_heavy & (column - sinks < gone)
    of_heavy = tl.load(SOURCE + column - sinks, mask=held, other=-1)
    source = tl.where(is_heavy, of_heavy, source)
    got = tl.where(is_heavy, tl.load(WEIGHT + column - sinks, mask=held, other=0.0), got)
    rank = tl.where(is_heavy, ranks_of(OLD_RANK, source, seen, total, held), rank)
    within = column < total
    tl.store(NEW_WEIGHT + batch_head * total + column, got, mask=within)
    tl.store(NEW_RANK + batch_head * total + column, tl.where(source < 0, 0, rank), mask=within)
    to = (batch_head * total + column)[:, None]
    k = gather_rows(OLD_K, K, ORDER, source, k_strides[2], total, rows, D)
    tl.store(NEW_K + to * D + rows[None, :], k, mask=within[:, None] & (rows < D)[None, :])
    v = gather_rows(OLD_V, V, ORDER, source, v_strides[2], total, columns, DV)
    tl.store(NEW_V + to * DV + columns[None, :], v, mask=within[:, None] & (columns < DV)[None, :])
