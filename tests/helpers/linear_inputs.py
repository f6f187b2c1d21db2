"""Random inputs of the kernels of linear attention, and their definition in float64."""

from __future__ import annotations

import itertools

import torch

from hf_linattn.ops.types import FEATURE_MAPS, Inputs, OpConfig

from . import definitions

EPS = 1e-3


SHAPES = {  # rows, heads, key heads, tokens, D, Dv
    "shared keys": (2, 4, 2, 200, 8, 6),
    "short": (2, 6, 2, 33, 5, 4),
    "one chunk and one token": (1, 2, 2, 129, 4, 4),
    "more pairs than go together": (2, 40, 40, 70, 3, 3),
}


def definition(inputs, config):
    """All pairs at once: output, total, S, z."""
    return definitions.linear(
        definitions.feature_map(inputs.query, config.kind, True, config.eps),
        definitions.feature_map(inputs.key, config.kind, False, config.eps),
        inputs.value,
        causal=config.causal,
        normalise=config.normalise,
        hidden=None if inputs.valid is None else ~inputs.valid,
        S=inputs.S,
        z=inputs.z,
        log_decay=inputs.log_decay,
        documents=inputs.documents,
    )


def random_inputs(shape, config, *, hidden=False, state=False, decay=False, packed=False, dense=True, seed=0):
    batch, heads, kv_heads, length, size, wide = shape
    make = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64)

    def tokens(heads, size):
        return (
            normal(batch, heads, length, size)
            if dense
            else normal(batch, length, heads, size).transpose(1, 2)
        )

    query, key, value = tokens(heads, size), tokens(kv_heads, size), tokens(kv_heads, wide)
    if config.kind == "none":
        query, key = query.abs() + 0.1, key.abs() + 0.1
    valid = torch.rand(batch, length, generator=make) >= 0.2 if hidden else None
    if hidden:
        key, value = (x.masked_fill(~valid[:, None, :, None], torch.nan) for x in (key, value))
    labels = (torch.rand(batch, length, generator=make) < 0.03).long().cumsum(1) if packed else None
    S = normal(batch, kv_heads, size, wide).abs() if state else None
    z = normal(batch, kv_heads, size).abs() if state else None
    log_decay = -0.3 * torch.rand(batch, kv_heads, length, generator=make).double() if decay else None
    found = Inputs(query, key, value, valid, S, z, log_decay, labels)
    return found._replace(
        **{
            name: x.requires_grad_()
            for name, x in found._asdict().items()
            if x is not None and x.is_floating_point()
        }
    )


def every_input(shape, config):
    """With and without padding, a state before, decay and documents; dense and strided."""
    for number, (hidden, state, decay, packed) in enumerate(itertools.product((False, True), repeat=4)):
        yield random_inputs(
            shape, config, hidden=hidden, state=state, decay=decay, packed=packed, dense=number % 2 == 0
        )


CONFIGS = [
    OpConfig(kind, EPS if kind == "relu" else 0.0, divide)
    for kind in FEATURE_MAPS
    for divide in (True, False)
]


def forgetful(state, packed):
    """Chunks that forget all, e^-60 and less, between chunks that forget little, some e^-10."""
    given = random_inputs((2, 4, 2, 400, 24, 16), OpConfig("elu1"), decay=True, state=state, packed=packed)
    strong = (torch.arange(400) // 100 % 2).bool()
    with torch.no_grad():
        given.log_decay[..., strong] *= 20
    return given


def fewer_queries(given, count):
    return given._replace(query=given.query.detach()[:, :, :count].requires_grad_())
