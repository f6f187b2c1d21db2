"""Random queries, keys and values, and the distance of a result from what it should be."""

from __future__ import annotations

import torch


def random_qkv(shape, dtype=torch.float64, seed=0, scale=1.0):
    batch, heads, kv_heads, length, dim, value_dim = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (batch, heads, length, dim),
        (batch, kv_heads, length, dim),
        (batch, kv_heads, length, value_dim),
    )
    return [(scale * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype) for size in sizes]


def relative_error(got, want):
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm().clamp_min(1e-300))
