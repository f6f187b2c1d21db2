"""Compare a call with the roofline: its least arithmetic and traffic, and what the machine can do of either.

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
from .config import BenchConfig
from .timing import Clock

CHUNK = 64
GEMM = {"cpu": 512, "cuda": 8192}
COPY = {"cpu": 2**26, "cuda": 2**30}
"""Bytes that are copied: more than caches hold."""
AGAIN = 3
SLOW = 0.5
"""A product that takes longer than this many seconds is not done again."""


@dataclass(frozen=True)
class OperationCount:
    """Floating-point operations (a multiply-add is two) and bytes of one call."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Ceiling:
    """What the machine did in this run: flop/s of a square product, bytes/s read and written by a copy."""

    flops: float
    bytes: float


def count_operations(config: BenchConfig, model: BareModel) -> OperationCount | None:
    """Count the work of softmax or of a linear attention by feature map; None for any other attention."""
    attention: Any = model.attention._modules.get("linattn")
    if attention is None:
        return _softmax(config)
    if not isinstance(attention.attention, LinearAttention) or attention.modifiers:
        return None
    return _linear(config, attention.attention.features or config.shape.head_dim)


def _sizes(config: BenchConfig) -> tuple[float, float]:
    """Return the bytes of all keys with values and of all queries with outputs, per token."""
    shape = config.shape
    per_head = getattr(torch, config.dtype).itemsize * shape.batch * (shape.head_dim + shape.value_dim)
    return per_head * shape.kv_heads, per_head * shape.heads


def _trained(config: BenchConfig, flops: float, per_token: float) -> OperationCount:
    """Count a forward pass; in training also gradients of all inputs, and the output's gradient read."""
    passes = 3 if config.kind == "train" else 1
    return OperationCount(passes * flops, passes * config.length * per_token)


def _softmax(config: BenchConfig) -> OperationCount:
    shape, n = config.shape, config.length
    keys, queries = _sizes(config)
    pair = 2 * shape.batch * shape.heads * (shape.head_dim + shape.value_dim)
    if config.kind == "decode":
        return OperationCount(pair * (n + 1), keys * (n + 1) + queries)
    pairs = n * (n + 1) / 2 if config.causal else n * n
    return _trained(config, pair * pairs, keys + queries)


def _linear(config: BenchConfig, features: int) -> OperationCount:
    shape, n = config.shape, config.length
    keys, queries = _sizes(config)
    state = features * (shape.value_dim + 1)
    if config.kind == "decode":
        flops = 2 * shape.batch * state * (shape.heads + shape.kv_heads)
        number = 8 if config.dtype == "float64" else 4
        return OperationCount(flops, 2 * number * shape.batch * shape.kv_heads * state + keys + queries)
    inside = shape.heads * min(CHUNK, n) * (features + shape.value_dim) if config.causal else 0
    flops = shape.batch * n * (inside + 2 * state * (shape.heads + shape.kv_heads))
    return _trained(config, flops, keys + queries)


def ceilings(dtype: str, device: str) -> Ceiling:
    """Measure now, the best of a few; the product is the better of this dtype's and float32's."""
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
    """Return the seconds of the fastest call, in the time that ratios are made of."""
    seconds = clock.compared(clock.sample(call))
    for _ in range(AGAIN if seconds < SLOW else 0):
        seconds = min(seconds, clock.compared(clock.sample(call, 3)))
    return max(seconds, 1e-9)


def share(count: OperationCount, seconds: float, ceiling: Ceiling) -> tuple[float, str]:
    """Return the least time that the machine would need over the time that was needed, and what bounds it."""
    arithmetic, traffic = count.flops / ceiling.flops, count.bytes / ceiling.bytes
    return max(arithmetic, traffic) / seconds, "arithmetic" if arithmetic > traffic else "memory"
