"""The window's softmax in C++, against all pairs in float64."""

import itertools
import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as functional
from helpers import definitions, tiny_models
from helpers.tiny_models import distance
from helpers.window_inputs import OTHER, SHAPES, definition, inputs, without_first

from hf_linattn import patch_model
from hf_linattn.ops import window_attention
from hf_linattn.ops.cpp import build, takes
from hf_linattn.ops.cpp import linear as native_linear
from hf_linattn.ops.cpp import window as native_window
from hf_linattn.ops.types import Inputs, ScaledSums, Window, WindowSinks

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
MORE = {
    "several tiles": (2, 4, 2, 300, 250, 24),
    "a reach of one": (1, 2, 1, 130, 1, 16),
    "reach and blocks end together": (1, 2, 2, 192, 96, 32),
    "only the start is full": (1, 1, 1, 200, 511, 8),
}


def single(seen, beside, dtype=torch.float32):
    """The same in single precision, as new leaves and what is made of them."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in seen[:3]]
    sums = [x.detach().float().requires_grad_() for x in beside or ()]
    return [*leaves, *sums], Window(*leaves, *seen[3:]), ScaledSums(*sums) if sums else None


def compare(seen, beside, dtype=torch.float32, tolerance=1e-5):
    leaves, fewer, sums = single(seen, beside, dtype)
    assert takes.window(fewer, sums)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = definition(Window(*exact[:3], *seen[3:]), ScaledSums(*exact[3:]) if sums else None)
    got = window_attention.attention(fewer, sums)
    assert got.dtype == dtype
    assert distance(got, want) < tolerance * want.abs().max().clamp_min(1)
    weight = torch.randn_like(want)
    found = torch.autograd.grad((got * weight.to(dtype)).sum(), leaves)
    for a, b in zip(found, torch.autograd.grad((want * weight).sum(), exact), strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 10 * tolerance * b.abs().max().clamp_min(1)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *MORE.values()], ids=[*SHAPES, *MORE])
@pytest.mark.parametrize(("other", "hide"), [*itertools.product(OTHER, [False, True])])
def test_outputs_and_gradients_are_the_formula(shape, other, hide, compiled):
    compare(*inputs(shape, other, hide)[1:])


@pytest.mark.parametrize("shape", [*SHAPES.values(), *MORE.values()], ids=[*SHAPES, *MORE])
def test_first_columns_may_be_missing(shape, compiled):
    for other, count in itertools.product(OTHER[:2], {1, shape[4] // 2, shape[4]}):
        _, seen, beside = inputs(shape, other, True)
        leaves, fewer, sums = single(seen, beside)
        hidden, behind = without_first(fewer, count)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        want = definition(
            hidden._replace(**dict(zip(("query", "key", "value"), exact[:3], strict=True))),
            ScaledSums(*exact[3:]) if sums else None,
        )
        got = window_attention.attention(behind, sums)
        assert distance(got, want) < 1e-5 * want.abs().max().clamp_min(1)
        weight = torch.randn_like(want)
        found = torch.autograd.grad((got * weight.float()).sum(), leaves)
        for a, b in zip(found, torch.autograd.grad((want * weight).sum(), exact), strict=True):
            assert (a - b).abs().max() < 1e-4 * b.abs().max().clamp_min(1)


def test_values_may_have_a_size_of_their_own_and_any_strides(compiled):
    _, seen, _ = inputs((2, 4, 2, 130, 40, 24), "nothing", True)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in seen[:3]]
    given = Window(*(x.float() for x in strided), *seen[3:])
    given = given._replace(value=given.value[..., :10])
    output, _ = native_window.forward(given, None)
    assert distance(output, definition(Window(*(x.double() for x in given[:3]), *seen[3:]), None)) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
def test_half_precision_is_summed_in_float32(dtype, tolerance, compiled):
    compare(*inputs((1, 4, 2, 150, 30, 16), "sums", True)[1:], dtype, tolerance)


@pytest.mark.parametrize("shape", [*SHAPES.values(), *MORE.values()], ids=[*SHAPES, *MORE])
def test_products_of_bfloat16_are_the_formula(shape, compiled):
    for other, hide in itertools.product(OTHER, [False, True]):
        compare(*inputs(shape, other, hide)[1:], torch.bfloat16, 2e-2)


@pytest.mark.parametrize(("size", "length", "span"), [(64, 301, 128), (24, 200, 70), (128, 130, 200)])
def test_bfloat16_is_as_exact_as_factors_rounded_once(size, length, span, compiled):
    """Output: weights rounded, and the output. Gradients: no worse than those of torch's own kernel."""
    given = [torch.randn(1, 2, length, size).bfloat16() for _ in range(4)]
    row, column = torch.arange(length)[:, None], torch.arange(length)
    seen = (column <= row) & (column > row - span)

    def torchs(dtype):
        query, key, value, grad = (x.to(dtype) for x in given)
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        output = functional.scaled_dot_product_attention(*leaves, attn_mask=seen)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    exact, rough = torchs(torch.float64), torchs(torch.bfloat16)
    query, key, value = (x.detach().requires_grad_() for x in given[:3])
    window = Window(query, key, value, torch.ones(1, length, dtype=torch.bool), span, size**-0.5)
    output = window_attention.attention(window, None)
    found = torch.autograd.grad(output, (query, key, value), given[3])
    scores = (query.double() @ key.double().mT * size**-0.5).masked_fill(~seen, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    once = (weights.bfloat16().double() @ value.double() / weights.sum(-1, keepdim=True)).bfloat16()
    assert (output - exact[0]).norm() < 1.1 * (once - exact[0]).norm()
    _, lse = native_window.forward(window, None)
    assert distance(lse, scores.logsumexp(-1)) < 1e-5
    for a, b, want in zip(found, rough[1:], exact[1:], strict=True):
        assert (a - want).norm() < 1.1 * (b - want).norm()


def test_a_model_in_bfloat16_hands_it_to_the_kernels(compiled, monkeypatch):
    """Queries, keys and features of a hybrid; without the kernels all is computed in float32."""
    options = {"size": 8, "sinks": 2, "feature_map": "hedgehog"}
    model = patch_model(tiny_models.llama(dtype=torch.bfloat16), "window+gated", options=options)
    ids, seen, found = tiny_models.tokens(2, 40), [], []
    for module, name in ((native_window, "forward"), (native_linear, "backward")):
        call = getattr(module, name)
        spy = partial(lambda call, first, *rest: seen.append(first) or call(first, *rest), call)
        monkeypatch.setattr(module, name, spy)
    for asked, dtype in (("1", torch.bfloat16), ("0", torch.bfloat16), ("0", torch.float64)):
        monkeypatch.setenv(build.CPP, asked)
        model.to(dtype).zero_grad()  # the same numbers, though in float64
        logits = model(ids).logits.double()
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad.double() for p in model.parameters() if p.grad is not None)])
    sixteen = {torch.bfloat16} if native_linear.rounds() else {torch.bfloat16, torch.float32}
    assert {x.dtype for given in seen for x in (given.query, given.key)} <= sixteen
    assert {type(given) for given in seen} == {Window, Inputs}
    for ours, torchs, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 1.5 * (torchs - exact).norm() + 1e-2 * exact.norm()


def test_a_negative_scaling_is_right_in_bfloat16_too(compiled):
    _, seen, _ = inputs((1, 2, 1, 100, 30, 16), "nothing", True)
    compare(seen._replace(scaling=-0.3), None, torch.bfloat16, 2e-2)


def test_numbers_far_apart_are_joined(compiled):
    _, seen, beside = inputs((1, 1, 1, 133, 8, 4), "sums", False)
    for shift in (-100.0, 0.0, 100.0):
        compare(seen, beside._replace(log_scale=beside.log_scale + shift), tolerance=1e-4)
    compare(seen._replace(query=seen.query * 100), None, tolerance=1e-4)


def test_what_is_no_number_is_not_hidden(compiled):
    _, seen, beside = inputs((1, 1, 1, 120, 8, 4), "sums", False)
    _, seen, beside = single(seen, beside)
    seen.query.data[0, 0, 70, 0] = torch.nan
    beside.total.data[0, 0, 90] = torch.nan
    output = window_attention.attention(seen, beside)
    assert output.isnan().any(-1).flatten().nonzero().flatten().tolist() == [70, 90]


def test_operator_keeps_the_rules_of_torch(compiled):
    for other in OTHER[:2]:
        leaves, seen, _ = single(*inputs((2, 2, 1, 40, 7, 8), other, True)[1:])
        tensors = [*leaves[:3], seen.valid, *(leaves[3:] or [None] * 3)]
        given = (*tensors, seen.span, seen.scaling)
        torch.library.opcheck(torch.ops.hf_linattn.softmax_of_window, given, atol=1e-4, rtol=1e-4)


def test_threads_change_nothing(compiled):
    _, seen, beside = single(*inputs((2, 4, 2, 300, 70, 16), "sums", True)[1:])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = window_attention.attention(seen, beside)
        torch.set_num_threads(1)
        assert torch.equal(two, window_attention.attention(seen, beside))
    finally:
        torch.set_num_threads(before)


FEW = {name: shape for name, shape in SHAPES.items() if name != "many calls"}


def beside(shape, dtype, turned, alone):
    """Sinks that some queries see in part, turned or not, and the sums of the queries behind `alone`."""
    rows, heads, shared, length, span, size = shape
    make = torch.Generator().manual_seed(span)
    key, value = (torch.randn(rows, shared, 3, size, generator=make).to(dtype) for _ in "kv")
    valid = torch.rand(rows, 3, generator=make) > 0.3
    ranks = torch.arange(length).expand(rows, -1) - torch.arange(rows)[:, None] * 2 - 1
    table = torch.randn(2, rows, length, size // 4 * 2, generator=make) if turned and size > 3 else None
    given = WindowSinks(key, value, valid, ranks, None if table is None else tuple(table))
    total = torch.rand(rows, heads, length - alone, generator=make)
    values = torch.randn(rows, heads, length - alone, size, generator=make)
    return given, ScaledSums(values, total, torch.randn(total.shape, generator=make))


def with_sinks(seen, sinks, other):
    """All pairs at once, in float64."""
    query, heads = seen.query, seen.query.shape[1]
    row, column = torch.arange(query.shape[2])[:, None], torch.arange(seen.key.shape[2])
    visible = (column > row) & (column <= row + seen.span) & seen.valid[:, None, None]
    scores = seen.scaling * query @ definitions.repeated(seen.key, heads).mT
    met = query
    if sinks.turn is not None:
        cos, sin = (x.double()[:, None] for x in sinks.turn)
        part, rest = query[..., : cos.shape[-1]], query[..., cos.shape[-1] :]
        first, second = part.chunk(2, -1)
        met = torch.cat([part * cos + torch.cat([-second, first], -1) * sin, rest], -1)
    first = seen.scaling * met @ definitions.repeated(sinks.key, heads).mT
    shown = sinks.valid[:, None] & (torch.arange(sinks.key.shape[2]) <= sinks.ranks[..., None])
    scores = torch.cat(
        [
            scores.masked_fill(~visible, float("-inf")),
            first.masked_fill(~shown[:, None], float("-inf")),
        ],
        -1,
    )
    alone = query.shape[2] - other.total.shape[2]
    whole = [functional.pad(x, (*(0, 0) * (x.ndim - 3), alone, 0)) for x in other]
    return definitions.softmax(scores, torch.cat([seen.value, sinks.value], 2), whole)


@pytest.mark.parametrize("shape", [*FEW.values(), *MORE.values()], ids=[*FEW, *MORE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_sinks_and_sums_of_the_last_queries_are_the_formula(shape, dtype, tolerance, compiled):
    for turned, hide in ((False, False), (True, True)):
        _, seen, _ = inputs(shape, "nothing", hide)
        sinks, other = beside(shape, dtype, turned, alone=shape[3] // 3)
        leaves = [x.detach().to(dtype) for x in seen[:3]] + [*sinks[:2], *other]
        leaves = [x.requires_grad_() for x in leaves]
        exact = [x.detach().double().requires_grad_() for x in leaves]

        def built(given, seen=seen, sinks=sinks):
            window, first = Window(*given[:3], *seen[3:]), sinks._replace(key=given[3], value=given[4])
            return window, first, ScaledSums(*given[5:])

        window, first, sums = built(leaves)
        assert window_attention.native_takes(window, sums)
        got, want = window_attention.native(window, sums, first), with_sinks(*built(exact))
        assert distance(got, want) < tolerance * want.abs().max().clamp_min(1)
        with torch.no_grad():
            assert torch.equal(got, window_attention.native(window, sums, first))
        weight = torch.randn_like(want).to(dtype)
        found = torch.autograd.grad((got * weight).sum(), leaves)
        for a, b in zip(found, torch.autograd.grad((want * weight).sum(), exact), strict=True):
            assert a.shape == b.shape
            assert (a - b).abs().max() < 10 * tolerance * b.abs().max().clamp_min(1)


HYBRIDS = {
    "turned sinks": ("window+gated", {"size": 8, "sinks": 2, "feature_map": "hedgehog"}),
    "sinks where they are": ("window+hedgehog", {"size": 8, "sinks": 3, "positions": "text"}),
    "a share": ("window+hedgehog", {"size": 8, "sinks": 1, "mix": "learned"}),
    "inside the window": ("window+gated", {"size": 128, "sinks": 2, "feature_map": "hedgehog"}),
    "alone": ("window", {"size": 8, "sinks": 4}),
}


@pytest.mark.parametrize(
    ("spec", "padded"),
    [
        *((spec, "left") for spec in HYBRIDS),
        *(("turned sinks", ""), ("turned sinks", "right"), ("inside the window", "right")),
    ],
)
def test_a_hybrid_and_its_gradients_are_those_in_float64(spec, padded, compiled, monkeypatch):
    """Shared keys, two rows, padding, and a second part behind a state; bfloat16 as near as torch's."""
    ids, mask, found = tiny_models.tokens(2, 70), torch.ones(2, 70, dtype=torch.long), []
    if padded:
        mask[0, :7] = padded == "right"
        mask[0, -7:] = padded == "left"
    for asked, dtype in (
        ("1", torch.float32),
        ("0", torch.float64),
        ("1", torch.bfloat16),
        ("0", torch.bfloat16),
    ):
        monkeypatch.setenv(build.CPP, asked)
        name, options = HYBRIDS[spec]
        model = patch_model(tiny_models.llama(dtype=torch.bfloat16), name, options=options).to(dtype)
        logits = model(ids, attention_mask=mask).logits.double() * mask[..., None]
        logits.square().mean().backward()
        with torch.no_grad():
            cache = model(ids[:, :33], attention_mask=mask[:, :33], use_cache=True).past_key_values
            later = model(ids[:, 33:], attention_mask=mask, past_key_values=cache).logits.double()
        parts = [logits.detach(), later * mask[:, 33:, None]]
        for own in (False, True):
            grads = [p.grad.flatten() for name, p in model.named_parameters() if ("linattn" in name) == own]
            parts.append(torch.cat(grads).double() if grads else torch.zeros(1).double())
        found.append(parts)
    for ours, exact, short, torchs in zip(*found, strict=True):
        assert (ours - exact).norm() <= 1e-4 * exact.norm() + 1e-9
        assert (short - exact).norm() <= 1.5 * (torchs - exact).norm() + 2e-2 * exact.norm()


@pytest.mark.full
@torch.no_grad()
def test_a_compiled_hybrid_in_bfloat16_is_as_near_to_float64_as_an_eager_one(compiled):
    name, options = HYBRIDS["turned sinks"]
    model = patch_model(tiny_models.llama(dtype=torch.bfloat16), name, options=options)
    ids = tiny_models.tokens(1, 60)
    eager = model(ids, use_cache=False).logits.double()
    torch._dynamo.reset()
    graph = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits.double()
    torch._dynamo.reset()
    exact = model.double()(ids, use_cache=False).logits
    assert (graph - exact).norm() <= 1.2 * (eager - exact).norm()
