# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Learned maps [softmax(W x), softmax(-W x)], held above a floor: what runs on the device.

    l = W x,    p = softmax(l),  n = softmax(-l),    features [max(p, floor), max(n, floor)]
    dl = p (g_p - p . g_p) - n (g_n - n . g_n),    dx = W^T dl,  dW = sum over tokens of dl x^T

g_p and g_n are gradients of the features, 0 where the floor holds one. Backward computes l again: of a token
it reads x and as many gradients as there are features. Numbers and names are as in `kernel_functions`; HALF
is the number of rows of W, half of that of features.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import dot, exponential, head_pointer, load_tile, store_tile


@triton.jit
def softmax_rows(x, columns, HALF: tl.constexpr):
    """Compute the softmax of rows, 0 behind HALF columns."""
    x = tl.where((columns < HALF)[None, :], x, float("-inf"))
    x = exponential(x - tl.max(x, 1)[:, None])
    return x * (1.0 / tl.sum(x, 1))[:, None]


@triton.jit
def held_above(x, floor):
    """Compute max(x, floor); a GPU's own would lose a NaN."""
    return tl.maximum(x, floor, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_map(W, head, columns, rows, HALF: tl.constexpr, D: tl.constexpr):
    """Load W of a head, `[HALF, D]`."""
    return load_tile(W + head * HALF * D, 0, columns < HALF, D, rows, D)


@triton.jit
def logits_of(x, weight, OPERAND: tl.constexpr):
    """Compute x W^T `[tokens, HALF]`; weights in float32 beside x in bfloat16 are two of that each.

    A softmax shows an error of a logit as such, and weights rounded once make those of large logits tenths.
    """
    if (OPERAND == "bf16") and (weight.dtype == tl.float32):
        high = weight.to(tl.bfloat16)
        low = (weight - high.to(tl.float32)).to(tl.bfloat16)
        return dot(x, tl.trans(high), OPERAND) + dot(x, tl.trans(low), OPERAND)
    else:
        return dot(x, tl.trans(weight), OPERAND)


@triton.jit
def map_features(
    X, W, OUT, x_strides, out_strides, heads, length, floor,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute features of a chunk, OUT `[B, H, N, 2 HALF]`. Grid: B H x chunks; W `[H, HALF, D]` dense."""
    chunks = tl.cdiv(length, CHUNK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.program_id(0) % chunks * CHUNK
    batch, head = row // heads, row % heads
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_F)
    inside = start + tl.arange(0, CHUNK) < length
    x = load_tile(head_pointer(X, x_strides, batch, head), start, inside, x_strides[2], rows, D)
    logits = logits_of(x, load_map(W, head, columns, rows, HALF, D), OPERAND)
    OUT = head_pointer(OUT, out_strides, batch, head)
    above = held_above(softmax_rows(logits, columns, HALF), floor)
    store_tile(OUT, above, start, inside, out_strides[2], columns, HALF)
    below = held_above(softmax_rows(-logits, columns, HALF), floor)
    store_tile(OUT + HALF, below, start, inside, out_strides[2], columns, HALF)


@triton.jit
def through_softmax(G, features, start, inside, stride, columns, floor, HALF: tl.constexpr):
    """Load gradients of features, and compute those of what softmax was taken of."""
    g = load_tile(G, start, inside, stride, columns, HALF).to(tl.float32)
    g = tl.where(features > floor, g, 0.0)
    return features * (g - tl.sum(features * g, 1)[:, None])


@triton.jit
def map_gradients(
    X, W, D_OUT, D_X, D_LOGITS, x_strides, d_out_strides, d_x_strides, d_logits_strides, heads, length, floor,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """Compute gradients of x and of l in a chunk. Grid: B H x chunks.

    D_OUT `[B, H, N, 2 HALF]`, D_LOGITS `[B, H, N, HALF]`: the gradient of W is a product of that and x.
    """
    chunks = tl.cdiv(length, CHUNK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.program_id(0) % chunks * CHUNK
    batch, head = row // heads, row % heads
    rows = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_F)
    inside = start + tl.arange(0, CHUNK) < length
    x = load_tile(head_pointer(X, x_strides, batch, head), start, inside, x_strides[2], rows, D)
    weight = load_map(W, head, columns, rows, HALF, D)
    logits = logits_of(x, weight, OPERAND)
    G = head_pointer(D_OUT, d_out_strides, batch, head)
    stride = d_out_strides[2]
    above = softmax_rows(logits, columns, HALF)
    d_logits = through_softmax(G, above, start, inside, stride, columns, floor, HALF)
    below = softmax_rows(-logits, columns, HALF)
    d_logits -= through_softmax(G + HALF, below, start, inside, stride, columns, floor, HALF)
    D_LOGITS = head_pointer(D_LOGITS, d_logits_strides, batch, head)
    store_tile(D_LOGITS, d_logits, start, inside, d_logits_strides[2], columns, HALF)
    D_X = head_pointer(D_X, d_x_strides, batch, head)
    store_tile(D_X, dot(d_logits, weight, OPERAND), start, inside, d_x_strides[2], rows, D)
