"""The window's softmax through the fused kernel, against plain blocks and against all pairs."""

import itertools

import pytest
import torch
from helpers.tiny_models import distance
from helpers.window_inputs import OTHER, SHAPES, definition, inputs, without_first

from hf_linattn.ops import window_attention
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.types import ScaledSums, Window


def agree(got, want, leaves):
    """And their gradients."""
    assert distance(got, want) < 1e-12
    weight = torch.randn_like(want)
    runs = [torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True) for x in (got, want)]
    for a, b in zip(*runs, strict=True):
        assert distance(a, b) < 1e-11


@pytest.mark.parametrize("form", [window_attention.attention, band.attention], ids=["fused", "blocks"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("other", "hide"), [*itertools.product(OTHER, [False, True])])
def test_forms_and_their_gradients_are_the_formula(form, shape, other, hide):
    leaves, seen, beside = inputs(shape, other, hide)
    want, got = definition(seen, beside), form(seen, beside)
    agree(got, want, leaves)


@pytest.mark.parametrize("form", [window_attention.attention, band.attention], ids=["fused", "blocks"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_first_columns_may_be_missing(form, shape):
    for other, count in itertools.product(OTHER[:2], {1, shape[4] // 2, shape[4]}):
        leaves, seen, beside = inputs(shape, other, True)
        hidden, behind = without_first(seen, count)
        assert behind.n_missing == count
        want, got = definition(hidden, beside), form(behind, beside)
        agree(got, want, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_of_another_size_are_summed_in_float32(dtype):
    _, seen, _ = inputs((2, 4, 2, 90, 30, 64), "nothing", False)
    seen = seen._replace(query=10 * seen.query, value=seen.value[..., :5])
    exact = Window(*(x.detach().to(dtype).double() for x in seen[:3]), *seen[3:])
    got = window_attention.attention(Window(*(x.to(dtype) for x in exact[:3]), *seen[3:]), None)
    want = definition(exact, None)
    assert got.dtype == dtype
    assert distance(got, want) <= torch.finfo(dtype).eps * float(want.abs().max())


def test_operator_keeps_the_rules_of_torch():
    for other in OTHER[:2]:
        _, seen, beside = inputs((2, 2, 1, 40, 7, 8), other, True)
        tensors = [x.detach() for x in (*seen[:4], *(beside or ()))]
        tensors = [x.requires_grad_(x.dtype.is_floating_point) for x in tensors] + [None] * (7 - len(tensors))
        given = (*tensors, seen.span, seen.scaling)
        torch.library.opcheck(torch.ops.hf_linattn.softmax_of_window, given)


def test_numbers_far_apart_are_joined():
    """Logarithms near the ends of float32: neither part may overflow."""
    _, seen, beside = inputs((1, 1, 1, 33, 8, 4), "sums", False)
    for shift in (-100.0, 0.0, 100.0):
        sums = beside._replace(log_scale=beside.log_scale + shift)
        small = Window(*(x.float() for x in seen[:3]), *seen[3:])
        got = window_attention.attention(small, ScaledSums(*(x.float() for x in sums)))
        assert distance(got, definition(seen, sums)) < 1e-4
