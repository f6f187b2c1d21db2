# mypy: ignore-errors
# (the bodies are Triton's language; Python's types do not describe them)
"""Gates of a state, made of the values, and gradients of decays: what runs on the device.

    log g_t = log sigmoid(w_h . v_t + b_h) / temperature,    0 where a token does not count
    d v_t   = d_t sigmoid(-(w_h . v_t + b_h)) / temperature w_h,    dw_h, db_h likewise, of all tokens

With G_t the sum of log g up to t, which is what an attention reads, dL/d log g_t = sum_{s>=t} dL/dG_s.

Torch's own operations take ten launches for the first and the last, each of a few numbers; here they are one
each. Sums over tokens are in order, so the same bits every time.
"""

import triton
import triton.language as tl

from hf_linattn.ops.triton.kernel_functions import (
    head_pointer,
    load_tile,
    log_sigmoid,
    store_tile,
    visible,
)


@triton.jit
def load_logits(
    V, GATE, GATE_BIAS, start, inside, v_strides, batch, head, columns, DV: tl.constexpr
):  # fmt: skip
    """Load values of a chunk and the weights of their head: both float32, and w . v + b."""
    v = load_tile(head_pointer(V, v_strides, batch, head), start, inside, v_strides[2], columns, DV)
    v = v.to(tl.float32)
    weight = tl.load(GATE + head * DV + columns, mask=columns < DV, other=0.0).to(tl.float32)
    return v, weight, tl.sum(v * weight[None, :], 1) + tl.load(GATE_BIAS + head).to(tl.float32)


@triton.jit
def gate_outputs(
    V, VALID, GATE, GATE_BIAS, OUT, v_strides, valid_strides, kv_heads, length, temperature,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute log g of a chunk, OUT `[B, Hkv, N]`. Grid: B Hkv x chunks; GATE `[Hkv, DV]` dense."""
    chunks = tl.cdiv(length, CHUNK)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    start = tl.program_id(0) % chunks * CHUNK
    batch, head = row // kv_heads, row % kv_heads
    tokens = start + tl.arange(0, CHUNK)
    inside = tokens < length
    columns = tl.arange(0, BLOCK_V)
    _v, _weight, logit = load_logits(V, GATE, GATE_BIAS, start, inside, v_strides, batch, head, columns, DV)
    found, _slope = log_sigmoid(logit)
    keep = visible(VALID, batch, tokens, valid_strides, length)
    tl.store(OUT + row * length + tokens, tl.where(keep, found / temperature, 0.0), mask=inside)


@triton.jit
def gate_gradients(
    V, VALID, GATE, GATE_BIAS, D_OUT, D_V, PARTS, v_strides, valid_strides, d_v_strides, kv_heads, length,
    temperature, segment,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the values of a segment, and its part of those of the weights.

    Grid: B Hkv x segments. ADD: to what D_V holds. D_OUT `[B, Hkv, N]` float32;
    PARTS `[B Hkv, segments, DV + 1]`, of w and b.
    """
    segments = tl.cdiv(length, segment)
    row = (tl.program_id(0) // segments).to(tl.int64)
    first = tl.program_id(0) % segments * segment
    batch, head = row // kv_heads, row % kv_heads
    columns = tl.arange(0, BLOCK_V)
    of_weight = tl.zeros([BLOCK_V], tl.float32)
    of_bias = tl.zeros([CHUNK], tl.float32)
    D_V = head_pointer(D_V, d_v_strides, batch, head)
    for start in range(first, tl.minimum(first + segment, length), CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        inside = tokens < length
        v, weight, logit = load_logits(
            V, GATE, GATE_BIAS, start, inside, v_strides, batch, head, columns, DV
        )  # fmt: skip
        _found, slope = log_sigmoid(logit)
        keep = visible(VALID, batch, tokens, valid_strides, length)
        grad = tl.load(D_OUT + row * length + tokens, mask=keep, other=0.0)
        grad = tl.where(keep, grad * slope / temperature, 0.0)
        d_v = grad[:, None] * weight[None, :]
        if ADD:
            d_v += load_tile(D_V, start, inside, d_v_strides[2], columns, DV).to(tl.float32)
        store_tile(D_V, d_v, start, inside, d_v_strides[2], columns, DV)
        # what a hidden token holds may be anything
        of_weight += tl.sum(tl.where(keep[:, None], v, 0.0) * grad[:, None], 0)
        of_bias += grad
    PARTS += tl.program_id(0).to(tl.int64) * (DV + 1)
    tl.store(PARTS + columns, of_weight, mask=columns < DV)
    tl.store(PARTS + DV, tl.sum(of_bias, 0))


@triton.jit
def decay_gradients(
    OF_QUERY, OF_KEY, LAST, OUT, batch_heads, length,
    QUERY_PARTS: tl.constexpr, KEY_PARTS: tl.constexpr, GROUP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of log g `[B, Hkv, N]` from those of its running sums. Grid: B Hkv.

    OF_QUERY `[QUERY_PARTS, B, H, N]` and OF_KEY `[KEY_PARTS, B, Hkv, N]`: their sums, the one less the other,
    are dL/dG. LAST `[B, Hkv]` is what the state after adds to the last, or None. Sums are float64: they
    cancel, over all tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    carry = tl.zeros([1], tl.float64)
    if LAST is not None:
        carry += tl.load(LAST + row).to(tl.float64)
    chunks = tl.cdiv(length, CHUNK)
    for index in range(chunks):
        tokens = (chunks - 1 - index) * CHUNK + tl.arange(0, CHUNK)
        inside = tokens < length
        grad = tl.zeros([CHUNK], tl.float32)
        for part in tl.static_range(QUERY_PARTS):
            for member in tl.static_range(GROUP):
                place = (part * batch_heads + row) * GROUP + member
                grad += tl.load(OF_QUERY + place * length + tokens, mask=inside, other=0.0)
        for part in tl.static_range(KEY_PARTS):
            place = part * batch_heads + row
            grad -= tl.load(OF_KEY + place * length + tokens, mask=inside, other=0.0)
        wide = grad.to(tl.float64)
        tl.store(
            OUT + row * length + tokens,
            (carry + tl.cumsum(wide, 0, reverse=True)).to(tl.float32),
            mask=inside,
        )
        carry += tl.sum(wide, 0)
