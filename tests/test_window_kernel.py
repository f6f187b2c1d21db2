"""The window's softmax through the fused kernel, against plain blocks and against all pairs."""

import itertools

import pytest
import torch
from tiny import distance
from torch import Tensor

from hf_linattn.ops import band, window
from hf_linattn.ops.band import Sums, Window

SHAPES = {  # rows, heads, key heads, queries, reach, head dim
    "whole blocks": (2, 2, 2, 64, 32, 4),
    "ragged": (2, 4, 2, 75, 9, 8),
    "reach beyond the text": (1, 2, 1, 40, 100, 4),
    "one query": (3, 4, 2, 1, 16, 4),
    "many calls": (1, 1, 1, 32 * 65, 5, 2),
}
OTHER = ("nothing", "sums", "none at times")


def inputs(shape, other, hide):
    """Leaves in float64 and what they make: a window, and sums beside it."""
    rows, heads, shared, length, reach, size = shape
    generator = torch.Generator().manual_seed(length)

    def new(*sizes):
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    leaves = [new(rows, heads, length, size)]
    leaves += [new(rows, shared, length + reach, size) for _ in "kv"]
    marks = torch.ones(rows, length + reach, dtype=torch.bool)
    if hide:
        marks = torch.rand(rows, length + reach, generator=generator) > 0.4
        marks[0, : reach + length // 2] = False  # a past that is empty, and queries that see nothing
    if other != "nothing":
        total = new(rows, heads, length).exp()
        if other == "none at times":
            total *= torch.rand(rows, heads, length, generator=generator) > 0.5
        values = new(rows, heads, length, size) * (total > 0).unsqueeze(-1)
        leaves += [values, total, 2 * new(rows, heads, length)]
    leaves = [x.requires_grad_() for x in leaves]
    query, key, value = (leaves[0], *(x * marks[:, None, :, None] for x in leaves[1:3]))
    seen = Window(query, key, value, marks, reach, 0.3)
    return leaves, seen, Sums(*leaves[3:]) if leaves[3:] else None


def definition(seen: Window, other: Sums | None) -> Tensor:
    """All pairs at once."""
    group, length = seen.query.shape[1] // seen.key.shape[1], seen.query.shape[2]
    key, value = (x.repeat_interleave(group, 1) for x in (seen.key, seen.value))
    row, column = torch.arange(length)[:, None], torch.arange(key.shape[2])
    near = (column > row) & (column <= row + seen.reach) & seen.marks[:, None, None]
    weights = (seen.scaling * seen.query @ key.mT).exp() * near
    values, total = weights @ value, weights.sum(-1)
    if other is not None:
        scale = torch.where(other.total > 0, other.log_scale, float("-inf")).exp()
        values, total = values + scale.unsqueeze(-1) * other.values, total + scale * other.total
    return values / torch.where(total > 0, total, 1).unsqueeze(-1)


def agree(got, want, leaves):
    """And their gradients."""
    assert distance(got, want) < 1e-12
    weight = torch.randn_like(want)
    runs = [torch.autograd.grad((x * weight).sum(), leaves, retain_graph=True) for x in (got, want)]
    for a, b in zip(*runs, strict=True):
        assert distance(a, b) < 1e-11


@pytest.mark.parametrize("form", [window.attention, band.attention], ids=["fused", "blocks"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("other", "hide"), [*itertools.product(OTHER, [False, True])])
def test_forms_and_their_gradients_are_the_formula(form, shape, other, hide):
    leaves, seen, beside = inputs(shape, other, hide)
    want, got = definition(seen, beside), form(seen, beside)
    agree(got, want, leaves)


def without_first(seen: Window, count: int) -> tuple[Window, Window]:
    """A window whose first columns do not count, and the same with only those behind them given."""
    marks = seen.marks.clone()
    marks[:, :count] = False
    hidden = seen._replace(marks=marks)
    behind = hidden._replace(
        key=seen.key[:, :, count:], value=seen.value[:, :, count:], marks=marks[:, count:]
    )
    return hidden, behind


@pytest.mark.parametrize("form", [window.attention, band.attention], ids=["fused", "blocks"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_first_columns_may_be_missing(form, shape):
    for other, count in itertools.product(OTHER[:2], {1, shape[4] // 2, shape[4]}):
        leaves, seen, beside = inputs(shape, other, True)
        hidden, behind = without_first(seen, count)
        assert behind.missing == count
        want, got = definition(hidden, beside), form(behind, beside)
        agree(got, want, leaves)


def test_operator_keeps_the_rules_of_torch():
    for other in OTHER[:2]:
        _, seen, beside = inputs((2, 2, 1, 40, 7, 8), other, True)
        tensors = [x.detach() for x in (*seen[:4], *(beside or ()))]
        tensors = [x.requires_grad_(x.dtype.is_floating_point) for x in tensors] + [None] * (7 - len(tensors))
        given = (*tensors, seen.reach, seen.scaling)
        torch.library.opcheck(torch.ops.hf_linattn.softmax_of_window, given)


def test_numbers_far_apart_are_joined():
    """Logarithms near the ends of float32: neither part may overflow."""
    _, seen, beside = inputs((1, 1, 1, 33, 8, 4), "sums", False)
    for shift in (-100.0, 0.0, 100.0):
        sums = beside._replace(log_scale=beside.log_scale + shift)
        small = Window(*(x.float() for x in seen[:3]), *seen[3:])
        got = window.attention(small, Sums(*(x.float() for x in sums)))
        assert distance(got, definition(seen, sums)) < 1e-4
