"""Learned maps [softmax(W x), softmax(-W x)] in C++, against float64."""

import shutil

import pytest
import torch
from helpers import tiny_models
from helpers.random_inputs import relative_error

from hf_linattn import patch_model
from hf_linattn.ops import softmax_map
from hf_linattn.ops.cpp import build
from hf_linattn.ops.cpp import softmax_map as native

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
FLOOR = 0.02
SHAPES = {  # rows, heads, tokens, D, F / 2
    "whole vectors": (2, 3, 96, 64, 64),
    "several blocks": (1, 2, 250, 32, 32),
    "sizes of no whole vectors": (2, 2, 75, 10, 7),
    "one token": (3, 2, 1, 24, 40),
    "wide": (1, 1, 100, 128, 128),
}


def given(shape, dtype=torch.float32):
    """x as projections leave it, and W; with a gradient of the features."""
    rows, heads, length, size, half = shape
    make = torch.Generator().manual_seed(length)
    x = torch.randn(rows, length, heads, size, generator=make).to(dtype).transpose(1, 2)
    weight = (torch.randn(heads, half, size, generator=make) / size**0.5).to(dtype)
    return x, weight, torch.randn(rows, heads, length, 2 * half, generator=make)


def definition(x, weight, floor=FLOOR):
    y = torch.einsum("bhnd,hfd->bhnf", x, weight)
    features = torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
    return torch.where(features > floor, features, floor)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("dtype", "made", "tolerance"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 1e-5),
        (torch.bfloat16, torch.bfloat16, 8e-3),
        (torch.float16, torch.float32, 1e-5),
    ],
    ids=str,
)
def test_features_and_gradients_are_the_formula(shape, dtype, made, tolerance, compiled):
    x, weight, grad = given(shape, dtype)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    assert softmax_map.kernels_take(x, weight)
    got = softmax_map.features(x, weight, FLOOR, made)
    exact = [each.detach().double().requires_grad_() for each in leaves]
    want = definition(*exact)
    assert got.dtype == made
    assert relative_error(got.double(), want) < tolerance
    found = torch.autograd.grad(got, leaves, grad.to(made))
    for mine, its, like in zip(
        found, torch.autograd.grad(want, exact, grad.to(made).double()), leaves, strict=True
    ):
        assert mine.dtype == like.dtype
        # products of bfloat16 round the gradient of W x once
        assert relative_error(mine.double(), its) < (1e-5 if dtype == torch.float32 else 1.5e-2)


def test_bfloat16_loses_no_more_than_its_last_bits(compiled):
    """Features of 16 bits are exact ones, rounded; gradients as near as torch's in bfloat16."""
    x, weight, grad = given((1, 2, 200, 64, 64), torch.bfloat16)
    want = definition(x.double(), weight.double(), 1e-12)
    got = softmax_map.features(x, weight, 1e-12, torch.bfloat16)
    assert ((got.double() - want).abs() <= 2**-8 * want).all()
    found = native.backward(grad.bfloat16(), x, weight, 1e-12)
    every = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [each.to(dtype).requires_grad_() for each in (x.detach(), weight.detach())]
        made = definition(*leaves, 1e-12)
        every.append(torch.autograd.grad(made, leaves, grad.bfloat16().to(dtype)))
    for mine, exact, torchs in zip(found, *every, strict=True):
        assert (mine - exact).norm() < 1.1 * (torchs - exact).norm()


def test_large_numbers_underflow_to_the_floor_and_nan_is_seen(compiled):
    x, weight, _ = given((1, 1, 20, 16, 16))
    x = x.clone() * 1e4
    got = softmax_map.features(x, weight, 1e-12)
    assert relative_error(got.double(), definition(x.double(), weight.double(), 1e-12)) < 1e-3
    x[0, 0, 3, 5] = torch.nan
    assert softmax_map.features(x, weight, 1e-12).isnan().any(-1)[0, 0].nonzero().flatten().tolist() == [3]


def test_threads_change_nothing(compiled):
    x, weight, grad = given((2, 3, 150, 32, 32))
    before, found = torch.get_num_threads(), []
    try:
        for count in (2, 1):
            torch.set_num_threads(count)
            found.append(
                [native.forward(x, weight, FLOOR, torch.float32), *native.backward(grad, x, weight, FLOOR)]
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_makes_its_features_in_the_kernel_and_its_maps_learn(dtype, compiled, monkeypatch):
    """Keys of padding too; the maps are those of a patch that names hedgehog's."""
    calls, made = [], native.forward
    monkeypatch.setattr(native, "forward", lambda *given: (calls.append(given[3]), made(*given))[1])
    ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 40), 5)
    for spec, options in (("hedgehog", {}), ("gated", {"feature_map": "hedgehog"})):
        found = []
        for asked, kind in (("1", dtype), ("0", torch.float64)):
            monkeypatch.setenv(build.CPP, asked)
            model = patch_model(tiny_models.llama(dtype=dtype), spec, options=options).to(kind)
            logits = model(ids, attention_mask=mask).logits * mask[..., None]
            logits.double().square().mean().backward()
            maps = {name: p.grad for name, p in model.named_parameters() if "linattn" in name}
            found.append([logits.detach(), *maps.values()])
            assert sum("query_weight" in name or "key_weight" in name for name in maps) == 4
        for mine, exact in zip(*found, strict=True):
            assert relative_error(mine.double(), exact) < (1e-4 if dtype == torch.float32 else 5e-2)
    assert len(calls) == 2 * 2 * 2
