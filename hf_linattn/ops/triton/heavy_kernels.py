# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Softmax over sinks, heavy hitters and a window, of few tokens in one kernel. `heavy` launches it.

A program walks the text of a key head, for the choice of what stays waits for the one before. It moves no
keys: it keeps the source of each column, and what it weighs, twice, so that an eviction reads the one and
writes the other. Stores that other threads read lie before a barrier. Scores are to base 2. Names and numbers
are as in `kernel_functions`.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import head_pointer
from hf_linattn.ops.triton.window_kernels import hidden_where_not, plain_dot


@triton.jit
def places_of(ORDER, tokens, keep):
    """Find visible tokens, counted one after the other, among all of the call."""
    if ORDER is not None:
        return tl.load(ORDER + tokens, mask=keep, other=0)
    else:
        return tokens


@triton.jit
def gather_rows(OLD, NEW, ORDER, source, stride, total, columns, WIDTH: tl.constexpr):
    """Load rows of OLD `[total, WIDTH]`, from `total` on of the tokens NEW; 0 where the source is -1."""
    wide = (columns < WIDTH)[None, :]
    token = (
        places_of(ORDER, source - total, source >= total).to(tl.int64)[:, None] * stride + columns[None, :]
    )
    x = tl.load(NEW + token, mask=(source >= total)[:, None] & wide, other=0.0)
    if OLD is not None:
        kept = (source >= 0) & (source < total)
        place = source[:, None] * WIDTH + columns[None, :]
        old = tl.load(OLD + place, mask=kept[:, None] & wide, other=0.0)
        x = tl.where(kept[:, None], old, x)
    return x


@triton.jit
def ranks_of(OLD_RANK, source, seen, total, there):
    """Count the visible tokens of the text before those of some sources."""
    rank = source - total + seen
    if OLD_RANK is not None:
        old = tl.load(OLD_RANK + source, mask=there & (source >= 0) & (source < total), other=0)
        rank = tl.where(source < total, old, rank)
    return rank


@triton.jit
def ranked_by(WEIGHT, SOURCE, OLD_RANK, index, heavy, block, held, seen, oldest, total):
    """Round weights of candidates as `to_16_bits` does, as integers of the same order.

    Tokens before the oldest come behind others, a column that holds none yet behind those; what is no
    candidate, last.
    """
    there = index < heavy + block
    bits = tl.load(WEIGHT + index, mask=there, other=0.0).to(tl.int32, bitcast=True)
    # NaN would come behind what is no candidate, and places stay empty
    found = tl.maximum((bits + 0x7F + ((bits >> 8) & 1)) >> 8, 0)
    source = tl.load(SOURCE + index, mask=index < heavy, other=total)
    rank = ranks_of(OLD_RANK, source, seen, total, index < heavy)
    found = tl.where((index < heavy) & (rank < oldest), -1, found)
    found = tl.where((index < heavy) & (index >= held), -2, found)
    return tl.where(there, found, -3)


@triton.jit
def choose(
    SOURCE, WEIGHT, OLD_RANK, CHOSEN, NEW_SOURCE, NEW_WEIGHT, heavy, block, held, seen, oldest, total,
    OWN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Choose which of `heavy + block` sources stay, by what they weigh: OWN against COLUMNS at a time.

    CHOSEN gets them as tokens of the call; None for nowhere.
    """
    for first in range(0, heavy + block, OWN):
        index = first + tl.arange(0, OWN)
        own = ranked_by(WEIGHT, SOURCE, OLD_RANK, index, heavy, block, held, seen, oldest, total)
        ahead = tl.zeros([OWN], tl.int32)
        for start in range(0, heavy + block, COLUMNS):
            others = start + tl.arange(0, COLUMNS)
            weight = ranked_by(WEIGHT, SOURCE, OLD_RANK, others, heavy, block, held, seen, oldest, total)
            more = weight[None, :] > own[:, None]
            same = (weight[None, :] == own[:, None]) & (others[None, :] < index[:, None])
            ahead += tl.sum((more | same).to(tl.int32), 1)
        there = index < heavy + block
        source = tl.load(SOURCE + index, mask=there, other=-1)
        weight = tl.load(WEIGHT + index, mask=there, other=0.0)
        stays = there & (ahead < heavy)
        tl.store(NEW_SOURCE + ahead, source, mask=stays)
        tl.store(NEW_WEIGHT + ahead, weight, mask=stays)
        if CHOSEN is not None:
            tl.store(CHOSEN + ahead, source - total, mask=stays & (own > -2))


@triton.jit
def evict(
    SOURCE, WEIGHT, OLD_RANK, now, after, heavy, sinks, block, held, seen, oldest, total,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Choose what stays of the heavy hitters and of the oldest block; the window moves up by one."""
    choose(
        SOURCE + now + sinks, WEIGHT + now + sinks, OLD_RANK, None, SOURCE + after + sinks,
        WEIGHT + after + sinks, heavy, block, held, seen, oldest, total, COLUMNS, COLUMNS,
    )  # fmt: skip
    for first in range(0, total, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        moves = (column < total) & ((column < sinks) | (column >= sinks + heavy))
        origin = tl.where(column < sinks, column, tl.minimum(column + block, total - 1))
        source = tl.load(SOURCE + now + origin, mask=moves, other=-1)
        weight = tl.load(WEIGHT + now + origin, mask=moves, other=0.0)
        tl.store(SOURCE + after + column, source, mask=moves)
        tl.store(WEIGHT + after + column, weight, mask=moves)


@triton.jit
def load_queries(Q, strides, ORDER, batch, row_head, token, inside, rows, D: tl.constexpr):
    """Load a row of Q `[B, H, N, D]` for each of some heads and visible tokens; 0 where not `inside`."""
    place = places_of(ORDER, token, inside).to(tl.int64)
    offset = batch * strides[0] + row_head * strides[1] + place * strides[2]
    wide = inside[:, None] & (rows < D)[None, :]
    return tl.load(Q + offset[:, None] + rows[None, :], mask=wide, other=0.0)


@triton.jit
def meet_columns(
    q, k, NEAR, near_offset, inside, first, rank, gone, limit, heavy, sinks, scale, rows,
    D: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute the scores of queries and a tile of columns."""
    column = first + tl.arange(0, COLUMNS)
    k = tl.trans(k)
    scores = plain_dot(q, k, OPERAND)
    if NEAR is not None:  # noqa: SIM102 (decided when compiled; the other when run)
        if first < sinks:
            wide = inside[:, None] & (rows < D)[None, :]
            near = tl.load(NEAR + near_offset[:, None] + rows[None, :], mask=wide, other=0.0)
            scores = tl.where((column < sinks)[None, :], plain_dot(near, k, OPERAND), scores)
    # ranks from which on a column is seen
    seen_from = tl.where(column < sinks, column, column - heavy + gone)
    is_heavy = (column >= sinks) & (column < sinks + heavy)
    seen_from = tl.where(is_heavy & (column - sinks < gone), 0, seen_from)
    there = (column < limit) & ((is_heavy == 0) | (column - sinks < gone))
    seen = there[None, :] & (seen_from[None, :] <= rank[:, None])
    return hidden_where_not(seen, scores * scale)


@triton.jit
def window_and_heavy(
    Q, NEAR, K, V, ORDER, SEEN, COUNT, OLD_K, OLD_V, OLD_WEIGHT, OLD_RANK, SOURCE, WEIGHT, OUT, NEW_K, NEW_V,
    NEW_WEIGHT, NEW_RANK, q_strides, near_strides, k_strides, v_strides, out_strides,
    kv_heads, length, size, heavy, sinks, block, reach, scale, rate,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, GROUP: tl.constexpr,
    MEMBERS: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute outputs of all visible tokens, and the state after. Grid: batch_heads.

    ORDER `[B, length]` lists the visible tokens of each row first, None where all are; SEEN and COUNT `[B]`
    count those before the call and in it. SOURCE and WEIGHT `[B, Hkv, 2, columns]` hold nothing yet. OLD and
    NEW are states, dense; OLD_K None for none.
    """
    batch_head = tl.program_id(0).to(tl.int64)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    total = sinks + heavy + size + block
    K = head_pointer(K, k_strides, batch, head)
    V = head_pointer(V, v_strides, batch, head)
    if OLD_K is not None:
        OLD_K += batch_head * total * D
        OLD_V += batch_head * total * DV
        OLD_RANK += batch_head * total
    SOURCE += batch_head * 2 * total
    WEIGHT += batch_head * 2 * total
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_V)
    for first in range(0, total, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        there = column < total
        source = tl.full([COLUMNS], -1, tl.int32)
        weight = tl.zeros([COLUMNS], tl.float32)
        if OLD_K is not None:
            source = column
            weight = tl.load(OLD_WEIGHT + batch_head * total + column, mask=there, other=0.0)
        tl.store(SOURCE + column, source, mask=there)
        tl.store(WEIGHT + column, weight, mask=there)
        # where weights are NaN, columns may stay as they are here: not just any number
        tl.store(SOURCE + total + column, tl.full([COLUMNS], -1, tl.int32), mask=there)
        tl.store(WEIGHT + total + column, tl.zeros([COLUMNS], tl.float32), mask=there)
    member = tl.arange(0, TOKENS * MEMBERS) % MEMBERS
    of_query = tl.arange(0, TOKENS * MEMBERS) // MEMBERS
    row_head = head * GROUP + member
    if ORDER is not None:
        ORDER += batch * length
    seen = tl.load(SEEN + batch)
    count = tl.load(COUNT + batch)
    now = count * 0
    done = count * 0
    tl.debug_barrier()
    while done < count:
        behind = seen + done - sinks + 1 - size
        left = tl.maximum(behind, 0) // block
        gone = left * block
        begin = gone + size + sinks - 1 - seen  # of the step, among the new tokens
        stop = tl.minimum(tl.minimum(done + TOKENS, count), begin + block)
        if (left > 0) & (done == begin):
            tl.debug_barrier()
            held = gone - block
            oldest = tl.where(reach > 0, seen + done - reach, 0)
            evict(
                SOURCE, WEIGHT, OLD_RANK, now, total - now, heavy, sinks, block, held, seen, oldest, total,
                COLUMNS,
            )  # fmt: skip
            now = total - now
            tl.debug_barrier()
        token = done + tl.arange(0, TOKENS)
        new = token < stop
        target = tl.where(seen + token < sinks, seen + token, seen + token + heavy - gone)
        tl.store(SOURCE + now + target, total + token, mask=new)
        tl.store(WEIGHT + now + target, tl.zeros([TOKENS], tl.float32), mask=new)
        tl.debug_barrier()
        last = seen + stop - 1
        limit = tl.where(last < sinks, last, last + heavy - gone) + 1
        token = done + of_query
        inside = (token < stop) & (member < GROUP)
        place = places_of(ORDER, token, inside).to(tl.int64)
        q = load_queries(Q, q_strides, ORDER, batch, row_head, token, inside, rows, D)
        near = batch * near_strides[0] + row_head * near_strides[1] + place * near_strides[2]
        rank = seen + token
        top = tl.full([TOKENS * MEMBERS], float("-inf"), tl.float32)
        divisor = tl.zeros([TOKENS * MEMBERS], tl.float32)
        for first in range(0, limit, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            source = tl.load(SOURCE + now + column, mask=column < limit, other=-1)
            k = gather_rows(OLD_K, K, ORDER, source, k_strides[2], total, rows, D)
            scores = meet_columns(
                q, k, NEAR, near, inside, first, rank, gone, limit, heavy, sinks, scale, rows, D, COLUMNS,
                OPERAND,
            )  # fmt: skip
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            divisor = divisor * tl.exp2(top - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
            top = higher
        log_sum = top + tl.log2(divisor)
        share = tl.where(inside, tl.exp2((token + 1 - stop).to(tl.float32) * rate), 0.0)
        fade = tl.exp2((done - stop).to(tl.float32) * rate)
        sums = tl.zeros([TOKENS * MEMBERS, BLOCK_V], tl.float32)
        for first in range(0, limit, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            source = tl.load(SOURCE + now + column, mask=column < limit, other=-1)
            k = gather_rows(OLD_K, K, ORDER, source, k_strides[2], total, rows, D)
            scores = meet_columns(
                q, k, NEAR, near, inside, first, rank, gone, limit, heavy, sinks, scale, rows, D, COLUMNS,
                OPERAND,
            )  # fmt: skip
            weights = tl.exp2(scores - log_sum[:, None])
            v = gather_rows(OLD_V, V, ORDER, source, v_strides[2], total, columns, DV)
            sums += plain_dot(weights, v, OPERAND)
            weight = tl.load(WEIGHT + now + column, mask=column < limit, other=0.0)
            weight = weight * fade + tl.sum(weights * share[:, None], 0)
            tl.store(WEIGHT + now + column, weight, mask=column < limit)
        to = batch * out_strides[0] + row_head * out_strides[1] + place * out_strides[2]
        wide = inside[:, None] & (columns < DV)[None, :]
        tl.store(OUT + to[:, None] + columns[None, :], sums.to(OUT.dtype.element_ty), mask=wide)
        done = stop
    tl.debug_barrier()
    for first in range(0, total, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        there = column < total
        source = tl.load(SOURCE + now + column, mask=there, other=-1)
        weight = tl.load(WEIGHT + now + column, mask=there, other=0.0)
        rank = tl.where(source < 0, 0, ranks_of(OLD_RANK, source, seen, total, there))
        tl.store(NEW_WEIGHT + batch_head * total + column, weight, mask=there)
        tl.store(NEW_RANK + batch_head * total + column, rank, mask=there)
        to = (batch_head * total + column)[:, None]
        k = gather_rows(OLD_K, K, ORDER, source, k_strides[2], total, rows, D)
        tl.store(NEW_K + to * D + rows[None, :], k, mask=there[:, None] & (rows < D)[None, :])
        v = gather_rows(OLD_V, V, ORDER, source, v_strides[2], total, columns, DV)
        tl.store(NEW_V + to * DV + columns[None, :], v, mask=there[:, None] & (columns < DV)[None, :])
