"""The least arithmetic and traffic of a call, and what the machine can do of either: the roofline.

Counted is what the maths asks for, not what an implementation does: half a square for causal scores, chunks
of 64 tokens for a linear attention, every input read and every output written once. A backward pass counts
as two forward passes of arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_linattn.attention import LinearAttention

from .candidates import BareModel
from .settings import Setting
from .timing import Clock

CHUNK = 64
GEMM = {"cpu": 512, "cuda": 8192}
COPY = {"cpu": 2**26, "cuda": 2**30}
"""Bytes that are copied: more than caches hold."""
AGAIN = 3
SLOW = 0.5
"""A product that takes longer than this many seconds is not done again."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiply-add is two) and bytes of one call."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Ceiling:
    """What the machine did in this run: flop/s of a square product, bytes/s read and written by a copy."""

    flops: float
    bytes: float


def work(setting: Setting, model: BareModel | None) -> Work | None:
    """Of the reference, or of a linear attention by feature map; None where nobody wrote it down."""
    attention: Any = None if model is None else model.attention._modules.get("linattn")
    if attention is None:
        return _softmax(setting)
    if not isinstance(attention.attention, LinearAttention) or attention.modifiers:
        return None
    features = attention.attention.features or setting.shape.head_dim
    return _linear(setting, features)


def _sizes(setting: Setting) -> tuple[float, float]:
    """Bytes of all keys with values and of all queries with outputs, per token."""
    shape = setting.shape
    wide = getattr(torch, setting.dtype).itemsize * shape.batch * (shape.head_dim + shape.value_dim)
    return wide * shape.kv_heads, wide * shape.heads


def _trained(setting: Setting, flops: float, per_token: float) -> Work:
    """A forward pass; in training also gradients of all that was read, and the output's gradient read."""
    traffic = setting.length * per_token
    return Work(3 * flops, 3 * traffic) if setting.kind == "train" else Work(flops, traffic)


def _softmax(setting: Setting) -> Work:
    shape, n = setting.shape, setting.length
    keys, queries = _sizes(setting)
    pair = 2 * shape.batch * shape.heads * (shape.head_dim + shape.value_dim)
    if setting.kind == "decode":
        return Work(pair * (n + 1), keys * (n + 1) + queries)
    pairs = n * (n + 1) / 2 if setting.causal else n * n
    return _trained(setting, pair * pairs, keys + queries)


def _linear(setting: Setting, features: int) -> Work:
    shape, n = setting.shape, setting.length
    keys, queries = _sizes(setting)
    state = features * (shape.value_dim + 1)
    if setting.kind == "decode":
        flops = 2 * shape.batch * state * (shape.heads + shape.kv_heads)
        number = 8 if setting.dtype == "float64" else 4
        return Work(flops, 2 * number * shape.batch * shape.kv_heads * state + keys + queries)
    inside = shape.heads * min(CHUNK, n) * (features + shape.value_dim) if setting.causal else 0
    flops = shape.batch * n * (inside + 2 * state * (shape.heads + shape.kv_heads))
    return _trained(setting, flops, keys + queries)


def ceilings(dtype: str, device: str) -> Ceiling:
    """Measured now: the best of a few. The product is the better of this dtype's and float32's."""
    clock, kind = Clock(device), torch.device(device).type
    size = GEMM.get(kind, 2048)
    flops = 0.0
    for name in dict.fromkeys((dtype, "float32")):
        a, b = (torch.randn(size, size, device=device).to(getattr(torch, name)) for _ in range(2))
        flops = max(flops, 2 * size**3 / _best(clock, lambda a=a, b=b: a @ b))
    source = torch.empty(COPY.get(kind, 2**28) // 4, dtype=torch.float32, device=device).zero_()
    target = torch.empty_like(source)
    return Ceiling(flops, 2 * source.nbytes / _best(clock, lambda: target.copy_(source)))


def _best(clock: Clock, call: Any) -> float:
    """Seconds of the fastest call, in the time that ratios are made of."""
    seconds = clock.compared(clock.sample(call))
    for _ in range(AGAIN if seconds < SLOW else 0):
        seconds = min(seconds, clock.compared(clock.sample(call, 3)))
    return max(seconds, 1e-9)


def share(done: Work, seconds: float, ceiling: Ceiling) -> tuple[float, str]:
    """Least time that the machine would need / time that was needed; and what bounds it."""
    arithmetic, traffic = done.flops / ceiling.flops, done.bytes / ceiling.bytes
    return max(arithmetic, traffic) / seconds, "arithmetic" if arithmetic > traffic else "memory"
