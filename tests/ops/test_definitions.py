"""Attention arithmetic against the N x N definition in float64."""

from itertools import pairwise

import pytest
import torch
from helpers import definitions
from helpers.random_inputs import random_qkv, relative_error

from hf_linattn.ops.eager import linear
from hf_linattn.ops.softmax import capped, scores_of, softmax_attention, softmax_weights
from hf_linattn.patches.elu1 import Elu1

SHAPES = [
    (1, 1, 1, 1, 8, 8),
    (2, 4, 2, 63, 16, 16),
    (2, 4, 1, 64, 7, 5),
    (1, 2, 2, 65, 8, 24),
    (1, 6, 2, 200, 12, 12),
]


def definition(query, key, value):
    """Output, total, S and z of "elu1" with all pairs at once."""
    phi_q, phi_k = (definitions.feature_map(x.double(), "elu1", is_query=False) for x in (query, key))
    return definitions.linear(phi_q, phi_k, value.double())


def phi(x):
    return definitions.feature_map(x, "elu1", is_query=False)


def causal(phi_q, phi_k, value, *others):
    """Output and state."""
    numerator, total, state = linear.causal(phi_q, phi_k, value, *others)
    return linear.normalised(numerator, total), state


def features(query, key):
    module = Elu1(None)
    return module.query_map(query.float()), module.key_map(key.float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_causal_matches_definition(shape, dtype, tolerance):
    query, key, value = random_qkv(shape, dtype)
    got, state = causal(phi(query).to(dtype), phi(key).to(dtype), value)
    output, _, S, z = definition(query, key, value)
    assert relative_error(got, output) < tolerance
    assert relative_error(state.S, S) < tolerance
    assert relative_error(state.z, z) < tolerance


@pytest.mark.parametrize("cuts", [(0, 1, 200), (0, 63, 64, 65, 200), (0, 130, 131, 132, 200)])
def test_split_and_resume(cuts):
    query, key, value = (phi(x) if i < 2 else x for i, x in enumerate(random_qkv(SHAPES[4])))
    want, final = causal(query, key, value)
    state, parts = None, []
    for first, last in pairwise(cuts):
        part = slice(first, last)
        output, state = causal(query[:, :, part], key[:, :, part], value[:, :, part], state)
        parts.append(output)
    assert relative_error(torch.cat(parts, 2), want) < 1e-14
    assert relative_error(state.S, final.S) < 1e-14


def test_documents_are_independent_and_the_state_belongs_to_the_first():
    query, key, value = (phi(x) if i < 2 else x for i, x in enumerate(random_qkv((2, 4, 2, 200, 8, 8))))
    _, state = causal(query[:, :, :40], key[:, :, :40], value[:, :, :40])
    borders = [40, 41, 90, 128, 129, 200]
    labels = torch.zeros(160, dtype=torch.long)
    for i, border in enumerate(borders[:-1]):
        labels[border - 40 :] = i + 1
    got, _ = causal(query[:, :, 40:], key[:, :, 40:], value[:, :, 40:], state, labels[None].expand(2, -1))
    parts = []
    for i, (first, last) in enumerate(pairwise(borders)):
        part = slice(first, last)
        parts.append(
            causal(query[:, :, part], key[:, :, part], value[:, :, part], state if i == 0 else None)[0]
        )
    assert relative_error(got, torch.cat(parts, 2)) < 1e-13


def test_gradients():
    shape = (1, 2, 1, 70, 3, 2)
    inputs = [x.requires_grad_() for x in random_qkv(shape)]
    weight = torch.randn(1, 2, 70, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module = Elu1(None)
    maps = module.query_map(inputs[0]), module.key_map(inputs[1])
    got = torch.autograd.grad((causal(*maps, inputs[2])[0] * weight).sum(), inputs)
    want = torch.autograd.grad((definition(*inputs)[0] * weight).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("mean", [-2.0, -20.0, -60.0, -120.0])
def test_elu1_queries_never_underflow(mean):
    query, key, value = random_qkv((1, 2, 2, 100, 16, 16), torch.float32)
    query = query + mean
    got, _ = causal(*features(query, key), value)
    shifted = query.double() - query.double().amax(-1, keepdim=True).clamp(max=0)
    want = definition(shifted, key, value)[0]
    assert relative_error(got, want) < 1e-6


def test_small_keys_before_a_large_one_keep_their_weight():
    query, key, value = random_qkv((1, 1, 1, 256, 8, 8), torch.float32)
    key = torch.cat([key[:, :, :192] - 20, key[:, :, 192:] + 5], 2)
    got, _ = causal(*features(query, key), value)
    want = definition(query, key, value)[0]
    assert relative_error(got[:, :, :192], want[:, :, :192]) < 1e-6
    assert relative_error(got, want) < 1e-6


def test_the_state_stays_exact_over_many_steps():
    query, key, value = random_qkv((1, 1, 1, 3000, 4, 4), torch.bfloat16)
    phi_q, phi_k = features(query, key)
    state = None
    for i in range(3000):
        _, state = causal(
            phi_q[:, :, i : i + 1], phi_k[:, :, i : i + 1], value[:, :, i : i + 1].float(), state
        )
    assert (
        relative_error(state.z, phi(key.double()).sum(2)) < 1e-5
    )  # a bfloat16 sum would be at a quarter of it


def test_rows_that_see_nothing_are_zero():
    query, key, value = random_qkv((1, 1, 1, 70, 4, 4), torch.float32)
    phi_q, phi_k = features(query, key)
    hidden = torch.arange(70)[None, None, :, None] < 30
    got, _ = causal(phi_q, phi_k.masked_fill(hidden, 0), value.masked_fill(hidden, 0))
    assert torch.equal(got[:, :, :30], torch.zeros_like(got[:, :, :30]))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("sink", [None, 0.0, "per head"])
@pytest.mark.parametrize("kind", ["causal", "mask", "none", "bias"])
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_softmax_forms_agree_with_the_definition(shape, kind, sink):
    query, key, value = random_qkv(shape)
    heads, length = shape[1], shape[3]
    logit = {"per head": torch.linspace(-1, 2, heads).double(), None: None}.get(
        sink, torch.zeros((), dtype=torch.float64)
    )
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    mask = {"causal": lower, "mask": lower.tril(-3)}.get(kind)
    bias = torch.randn(1, heads, length, length, dtype=torch.float64) if kind == "bias" else None
    scores = query @ definitions.repeated(key, heads).mT * 0.3 + (0 if bias is None else bias)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    others = None
    if logit is not None:  # a key of value 0
        ones = torch.ones(shape[0], heads, length, dtype=torch.float64)
        others = torch.zeros_like(query[..., :1]), ones, ones * logit.reshape(-1, 1)
    want = definitions.softmax(scores, value, others)
    got = softmax_attention(
        query,
        key,
        value,
        mask=mask if kind == "mask" else None,
        bias=bias,
        is_causal=kind == "causal",
        scaling=0.3,
        sink=logit,
    )
    assert relative_error(got, want) < 1e-13
    weights = softmax_weights(capped(scores_of(query, key, 0.3), None, bias), mask, logit)
    assert relative_error(weights @ definitions.repeated(value, heads), want) < 1e-13
