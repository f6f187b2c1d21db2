# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""What the kernels of linear attention share on the device: operands, tiles, features, links, states.

Numbers. Sums, S, z and totals are float32. A tensor core takes operands of fewer bits; `OPERAND` says which:

    "bf16"    for bfloat16 inputs; "bf16 by bits" in the interpreter, which cannot multiply those
    "fp16"    for float16 inputs: rows and columns are brought to a largest number of 1 to 2 by powers of two,
              so that scores, S and tiny features stay in its range
    "tf32x3"  float32 in three products, nearly exact;  "ieee": float32 without tensor cores

A feature is rounded once, before its first use. z is kept as 16 rows that add up to it, as many as a product
takes, so that phi_q . z is one, and sums over rows stay within a thread. S is kept transposed, so that
features of keys are computed once and both products that want them read them from shared memory.

Two numbers of bfloat16 lie in one register. `PAIRS`, the major capability of a CUDA device or 0, lets `wide`
and `seen` take them together, in PTX; it is 0 where products are in another type.

A text of whole chunks has no token behind its end: `WHOLE` says so, and rows are loaded and stored without a
mask, those of keys (`KEYS`) unless a caller's hides some. Masks of tokens are then constants, too (`ALL`),
except where `MASKED` needs them to keep the compiler from computing features twice.

Names in shapes: batch_head = one row of the batch and one key head. Tensors `[B, H, N, D]` may lie anyhow in
memory as long as D is contiguous; `*_strides` are those of B, H, N in elements. D and DV are the true widths,
BLOCK_D and BLOCK_V the next powers of two, BLOCK the columns that one program answers for.
"""

import triton
import triton.language as tl


@triton.jit
def operand(x, OPERAND: tl.constexpr):
    """Round x to what a product takes; the type is float32 but for bfloat16's."""
    if OPERAND == "bf16":
        return x.to(tl.bfloat16)
    else:
        return rounded(x.to(tl.float32), OPERAND)


@triton.jit
def rounded(x, OPERAND: tl.constexpr):
    """Round float32 x to the bits that an operand keeps, still float32."""
    if OPERAND == "bf16 by bits":
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    elif OPERAND == "fp16":
        # in float32's range: `dot` brings it into float16's
        bits = (x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def power_of_two(x, AXIS: tl.constexpr):
    """Find the power of two at or below the largest |x| along an axis, and its reciprocal, exactly."""
    bits = tl.max(tl.abs(x), AXIS).to(tl.uint32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 0x00800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, OPERAND: tl.constexpr):
    """Multiply `[M, K]` by `[K, N]` to float32 `[M, N]`."""
    if OPERAND == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif OPERAND == "fp16":
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        of_row, row = power_of_two(a, 1)
        of_column, column = power_of_two(b, 0)
        a = (a * row[:, None]).to(tl.float16)
        b = (b * column[None, :]).to(tl.float16)
        return tl.dot(a, b) * of_row[:, None] * of_column[None, :]
    elif OPERAND == "bf16 by bits":
        a = operand(a.to(tl.float32), OPERAND)
        b = operand(b.to(tl.float32), OPERAND)
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=OPERAND)


@triton.jit
def row_and_block(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Take axis 0 of the grid apart. Blocks of one row run side by side: they read the same cached data."""
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    return (program // blocks).to(tl.int64), program % blocks


@triton.jit
def tile_pointers(X, start, stride, columns, ROWS: tl.constexpr):
    """Point to rows from `start` on and `columns` of X `[N, WIDTH]`."""
    # 64 bits to the first row, for B * H * N * D passes 2^31 at a million tokens; 32 from there
    offsets = tl.arange(0, ROWS)[:, None] * stride + columns[None, :]
    return X + tl.cast(start, tl.int64) * stride + offsets


@triton.jit
def tile_mask(keep, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Tell which numbers of a tile are there: rows where `keep`, WHOLE: all, and columns below WIDTH."""
    if WHOLE:
        return (columns < WIDTH)[None, :]
    elif WIDTH // columns.shape[0] * columns.shape[0] == WIDTH:
        return keep[:, None]
    else:
        return keep[:, None] & (columns < WIDTH)[None, :]


@triton.jit
def load_tile(X, start, keep, stride, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr = False):
    """Load rows from `start` on and `columns` of X `[N, WIDTH]`; 0, and not touched, where not `keep`.

    WHOLE: all are kept, and nobody looks.
    """
    pointers = tile_pointers(X, start, stride, columns, keep.shape[0])
    if WHOLE and WIDTH // columns.shape[0] * columns.shape[0] == WIDTH:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=tile_mask(keep, columns, WIDTH, WHOLE), other=0.0)


@triton.jit
def store_tile(X, x, start, keep, stride, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr = False):
    """Store rows from `start` on and `columns` of X `[N, WIDTH]`, in its dtype, where `keep`; WHOLE: all."""
    pointers, x = tile_pointers(X, start, stride, columns, keep.shape[0]), x.to(X.dtype.element_ty)
    if WHOLE and WIDTH // columns.shape[0] * columns.shape[0] == WIDTH:
        tl.store(pointers, x)
    else:
        tl.store(pointers, x, mask=tile_mask(keep, columns, WIDTH, WHOLE))


@triton.jit
def head_pointer(X, strides, batch, head):
    """Point to the first token of one head of X `[B, H, N, WIDTH]`."""
    return X + batch * strides[0] + head * strides[1]


@triton.jit
def locate_program(WIDTH: tl.constexpr, BLOCK: tl.constexpr, heads, GROUP: tl.constexpr):
    """Tell what a program of axis 0 works on: batch_head, its block of columns, its batch, its key head."""
    batch_head, block = row_and_block(WIDTH, BLOCK)
    kv_heads = heads // GROUP
    return batch_head, block, batch_head // kv_heads, batch_head % kv_heads


@triton.jit
def within(tokens, length, WHOLE: tl.constexpr):
    """Tell which tokens are there: those before the end; WHOLE: all."""
    if WHOLE:
        return tl.full(tokens.shape, 1, tl.int1)
    else:
        return tokens < length


@triton.jit
def visible(VALID, batch, tokens, strides, length, WHOLE: tl.constexpr = False):
    """Tell which keys count: before the end, and not masked. VALID `[B, N]` bytes or None."""
    keep = within(tokens, length, WHOLE)
    if VALID is not None:
        pointers = VALID + batch * strides[0] + tokens.to(tl.int64) * strides[1]
        keep = keep & (tl.load(pointers, mask=keep, other=0) != 0)
    return keep


@triton.jit
def exponential(x):
    """Compute exp(x); below 2^-126 it may be 0."""
    return tl.exp2(x * 1.4426950408889634)  # one instruction on GPUs, where exp takes six


@triton.jit
def log_sigmoid(x):
    """Compute log sigmoid(x), relatively exact where it is near 0; and sigmoid(-x), its slope."""
    small = exponential(-tl.abs(x))
    # log(1 + y) = 2 artanh(y / (2 + y)) by its series: the quotient is at most 1/3
    s = small / (2 + small)
    t = s * s
    series = 1 + t * (1 / 3 + t * (1 / 5 + t * (1 / 7 + t * (1 / 9 + t * (1 / 11 + t * (1 / 13))))))
    return tl.minimum(x, 0.0) - 2 * s * series, tl.where(x > 0, small, 1.0) / (1 + small)


@triton.jit
def key_features(
    x,
    keep,
    columns,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr,
    PAIRS: tl.constexpr = 0,
):
    """Compute phi_k of a tile, not rounded yet; 0 behind WIDTH, and where not `keep` if MASKED.

    Not MASKED: `keep` hides what is behind the last token, whose features are finite and nobody's. (Where
    products scale their columns by the largest, it must not be that.)
    """
    if FEATURE_MAP == "none":  # what is hidden was loaded as 0
        return x
    else:
        positive, x = above_zero(x, PAIRS)
        # where, not minimum and maximum: those lose a NaN
        if FEATURE_MAP == "elu1":
            x = tl.where(positive, x + 1, exponential(x))
        else:
            x = tl.where(x < 0, 0.0, x) + EPS
        if MASKED:
            x = tl.where(keep[:, None], x, 0.0)
        if WIDTH // x.shape[1] * x.shape[1] != WIDTH:
            x = tl.where((columns < WIDTH)[None, :], x, 0.0)
        return x


@triton.jit
def row_shift(x, columns, WIDTH: tl.constexpr):
    """Compute m = min(max_d x_d, 0) of rows: exp(x - m) does not underflow, the output ignores it."""
    x = x.to(tl.float32)
    if WIDTH // x.shape[1] * x.shape[1] != WIDTH:
        x = tl.where((columns < WIDTH)[None, :], x, float("-inf"))
    return tl.minimum(tl.max(x, 1), 0.0)


@triton.jit
def query_features(
    x,
    shift,
    columns,
    WIDTH: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    EPS: tl.constexpr,
    PAIRS: tl.constexpr = 0,
):
    """Compute phi_q of a tile; `shift` `[rows]` is for elu1. Rows behind the last token are finite."""
    if FEATURE_MAP == "elu1":
        positive, x = above_zero(x, PAIRS)
        x = tl.where(positive, x + 1, exponential_after(x, shift[:, None]))
        if WIDTH // x.shape[1] * x.shape[1] != WIDTH:
            x = tl.where((columns < WIDTH)[None, :], x, 0.0)
        return x
    else:
        return key_features(x, shift, columns, WIDTH, False, FEATURE_MAP, EPS, PAIRS)


@triton.jit
def added(a, b, scale, WHOLE: tl.constexpr):
    """Compute (a + b) scale for products a, b `[rows, columns]` and `scale`, of each number or of each row.

    Apart where WHOLE, the width that a program has whole, gives it eight warps: four of them would compute
    what the others do, were one product to feed the other.
    """
    if WHOLE > 64:
        return a * scale + b * scale
    else:
        return (a + b) * scale


@triton.jit
def reciprocal(total):
    """Compute 1 / total, 0 for 0: a row that sees nothing is 0, and all others are exact."""
    return tl.where(total != 0, 1.0 / tl.where(total != 0, total, 1.0), 0.0)


@triton.jit
def repeated(x, OPERAND: tl.constexpr):
    """Repeat numbers of rows in 16 columns, as many as a product takes at the least."""
    return operand(tl.broadcast_to(x[:, None], [x.shape[0], 16]), OPERAND)


@triton.jit
def partial_sums(x, weight, PAIRS: tl.constexpr = 0):
    """Sum up rows of x `[R, W]`, weighted, to the 16 rows that a product takes: their sum is meant."""
    x = wide(x, PAIRS) * weight[:, None]
    return tl.sum(tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]]), 0)


@triton.jit
def link(DECAY, LABELS, batch_head, batch, start, length, CHUNK: tl.constexpr):
    """Tell how the tokens of a chunk are linked to each other and to what lies around it.

    DECAY `[B, Hkv, N]` is log g, LABELS `[B, N]` the documents, either None. Returns, for each token, the
    running sum of log g and the label; the factors of the state before for a query, and of a key for the
    state after; and that of the state before for the state after. A state belongs to the document of the
    token before, the first one to that of the first token.
    """
    tokens = start + tl.arange(0, CHUNK)
    inside = tokens < length
    decay = tl.zeros([CHUNK], tl.float32)
    label = tl.zeros([CHUNK], tl.int32)
    before = tl.sum(label, 0)
    last = before
    if DECAY is not None:
        decay += tl.load(DECAY + batch_head * length + tokens, mask=inside, other=0.0)
    if LABELS is not None:
        row = LABELS + batch * length
        label += tl.load(row + tokens, mask=inside, other=-1)
        before += tl.load(row + tl.maximum(start - 1, 0))
        last += tl.load(row + tl.minimum(start + CHUNK, length) - 1)
    running = tl.cumsum(decay, 0)
    end = tl.sum(decay, 0)
    of_state = tl.where(label == before, exponential(running), 0.0)
    of_key = tl.where(label == last, exponential(end - running), 0.0)
    left = tl.where(before == last, exponential(end), 0.0)
    return running, label, of_state, of_key, left


@triton.jit
def linked_pairs(pairs, running, label, KEYS_FIRST: tl.constexpr):
    """Weight numbers of queries and keys, `[queries, keys]` or the other way round, 0 where none is seen."""
    difference = running[:, None] - running[None, :]
    if KEYS_FIRST:
        difference = -difference
    # pairs that the order of tokens hides are 0 already, and would be large here
    factor = exponential(tl.minimum(difference, 0.0))
    return tl.where(label[:, None] == label[None, :], pairs * factor, 0.0)


@triton.jit
def load_state(
    STATES, FACTORS, S0, Z0, batch_head, slot, slots, rows, columns,
    D: tl.constexpr, DV: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Load S `[rows, columns]` and z `[rows]` after `slot` of STATES `[batch_heads, slots, D DV + D]`.

    Below 0, and where STATES is None, S0 and Z0. SUMMED: each slot has what came before in it already; else
    they are summed up here, each with what it leaves of those before, FACTORS `[batch_heads, slots]` or None.
    """
    inside = (rows < D)[:, None] & (columns < DV)[None, :]
    offsets = rows[:, None] * DV + columns[None, :]
    s = tl.zeros(offsets.shape, tl.float32)
    z = tl.zeros(rows.shape, tl.float32)
    before = True
    if (STATES is not None) and SUMMED:
        before = slot < 0
    if S0 is not None:
        s += tl.load(S0 + batch_head * D * DV + offsets, mask=inside & before, other=0.0)
    if Z0 is not None:
        z += tl.load(Z0 + batch_head * D + rows, mask=(rows < D) & before, other=0.0)
    if STATES is not None:
        first = 0
        if SUMMED:
            first = tl.maximum(slot, 0)
        for one in range(first, slot + 1):
            base = STATES + (batch_head * slots + one) * (D * DV + D)
            if (FACTORS is not None) and not SUMMED:
                factor = tl.load(FACTORS + batch_head * slots + one)
                s *= factor
                z *= factor
            s += tl.load(base + offsets, mask=inside, other=0.0)
            z += tl.load(base + D * DV + rows, mask=rows < D, other=0.0)
    return s, z


@triton.jit
def store_state(S, Z, s, z, rows, columns, D: tl.constexpr, DV: tl.constexpr, ALL_Z):
    """Store S `[D, DV]` and z `[D]`; z only where ALL_Z, for several programs share its rows."""
    inside = (rows < D)[:, None] & (columns < DV)[None, :]
    tl.store(S + rows[:, None] * DV + columns[None, :], s, mask=inside)
    tl.store(Z + rows, z, mask=(rows < D) & ALL_Z)


@triton.jit
def exponential_after(x, shift):
    """Compute exp(x - shift) of a tile, in one multiplication and addition; `shift` of its rows."""
    return tl.exp2(x * 1.4426950408889634 - shift * 1.4426950408889634)


@triton.jit
def wide(x, PAIRS: tl.constexpr):
    """Convert to float32; PAIRS: two of bfloat16 in one instruction each, where the compiler takes three."""
    if (PAIRS > 0) and (x.dtype == tl.bfloat16):
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def above_zero(x, PAIRS: tl.constexpr):
    """Tell where x is above 0, and convert it to float32; in this order where bfloat16 can be compared."""
    if PAIRS > 8:
        positive = x > 0
        x = wide(x, PAIRS)
    else:
        x = wide(x, PAIRS)
        positive = x > 0
    return positive, x


@triton.jit
def order_of_pairs(order, KEYS_FIRST: tl.constexpr, PAIRS: tl.constexpr):
    """Tell which tokens of a chunk see which, `[queries, keys]` or the other way round, for `seen`.

    PAIRS: as numbers below 0. They are a register and constants; the compiler makes a comparison and a
    choice for each score of any mask that it understands.
    """
    row, column = order[:, None], order[None, :]
    if PAIRS > 0:
        return (row - column if KEYS_FIRST else column - row) - 1
    else:
        return row <= column if KEYS_FIRST else row >= column


@triton.jit
def seen(scores, order, PAIRS: tl.constexpr):
    """Hide scores of keys behind their query, by `order_of_pairs`; PAIRS: and round them to bfloat16."""
    if PAIRS > 0:
        return tl.inline_asm_elementwise(  # the mask of two scores: the signs of two numbers, repeated
            "{ .reg .b32 mask; prmt.b32 mask, $2, $3, 0xFFBB; and.b32 $0, $1, mask; }",
            "=r,r,r,r",
            [scores.to(tl.bfloat16), order],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.where(order, scores, 0.0)
