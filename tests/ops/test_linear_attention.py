"""Forms of causal linear attention with a backward of their own, against the formula in float64."""

import itertools

import pytest
import torch
from helpers.linear_inputs import CONFIGS, EPS, SHAPES, definition, every_input, forgetful, random_inputs
from helpers.random_inputs import relative_error

from hf_linattn.attention import Tokens
from hf_linattn.ops import dispatch
from hf_linattn.ops import linear_attention as kernels
from hf_linattn.ops.eager import chunked, chunked_backward, quadratic
from hf_linattn.ops.types import FEATURE_MAPS, Inputs, OpConfig, OutputGrads
from hf_linattn.patches.elu1 import Elu1


def compare(inputs, config, tolerance=1e-11):
    got, want = kernels.attention(inputs, config, keep=True), definition(inputs, config)
    weights = [torch.randn_like(x) for x in want]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    shown = [
        *got,
        *torch.autograd.grad(sum((x * w).sum() for x, w in zip(got, weights, strict=True)), leaves),
    ]
    loss = sum((x * w).sum() for x, w in zip(want, weights, strict=True))
    expected = [*want, *(x.nan_to_num(0) for x in torch.autograd.grad(loss, leaves))]
    for place, (a, b) in enumerate(zip(shown, expected, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < tolerance, place


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.kind}-{'output' if config.normalise else 'sums'}"
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forms_and_their_gradients_are_the_formula(config, shape):
    for given in every_input(shape, config):
        compare(given, config)


@pytest.mark.parametrize(("state", "packed"), [*itertools.product((False, True), repeat=2)])
def test_chunks_that_forget_all_and_chunks_that_forget_little_follow_each_other(state, packed):
    compare(forgetful(state, packed), OpConfig("elu1"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [100, 300])
def test_half_precision_is_summed_in_float32(dtype, length):
    """What is left is the rounding of inputs, output and gradients themselves."""
    exact = random_inputs((2, 4, 2, length, 16, 16), OpConfig("elu1"))
    rounded = [x.detach().to(dtype).requires_grad_() for x in exact[:3]]
    exact = Inputs(*(x.detach().double().requires_grad_() for x in rounded))
    weight = torch.randn(2, 4, length, 16, dtype=torch.float64)
    got, want = (
        kernels.attention(Inputs(*rounded), OpConfig("elu1"), keep=True),
        definition(exact, OpConfig("elu1")),
    )
    limit = 4 * torch.finfo(dtype).eps
    assert got.output.dtype == dtype
    assert {x.dtype for x in got[1:]} == {torch.float32}
    assert relative_error(got.output, want[0]) < limit
    for a, b in zip(got[1:], want[1:], strict=True):
        assert relative_error(a, b) < 1e-5  # sums are not rounded
    found = torch.autograd.grad((got.output * weight.to(dtype)).sum(), rounded)
    expected = torch.autograd.grad((want[0] * weight.to(dtype)).sum(), exact[:3])
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < limit


def test_queries_never_underflow_and_no_key_is_no_output():
    query, key, value = (torch.randn(1, 2, 300, 8) for _ in range(3))
    valid = torch.arange(300)[None] >= 20
    got = kernels.attention(Inputs(query - 120, key, value, valid), OpConfig("elu1"), keep=False)
    shifted = (query - 120).double() - (query - 120).double().amax(-1, keepdim=True)
    want = definition(Inputs(shifted, key.double(), value.double(), valid), OpConfig("elu1"))
    assert torch.equal(got.output[:, :, :20], torch.zeros(1, 2, 20, 8))
    assert relative_error(got.output, want[0]) < 1e-5
    assert got.S is got.z is None  # not asked for


@pytest.mark.parametrize("length", [60, 260])
def test_both_forms_twice_are_bit_for_bit_the_same(length):
    given = random_inputs((1, 4, 2, length, 8, 8), OpConfig("elu1"))
    given = Inputs(*(x.detach().float().requires_grad_() for x in given[:3]))
    runs = []
    for _ in range(2):
        output = kernels.attention(given, OpConfig("elu1"), keep=False).output
        runs.append((output.detach(), *torch.autograd.grad(output.square().sum(), given[:3])))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("hidden", [False, True])
def test_the_quadratic_form_is_the_loop(kind, hidden):
    config = OpConfig(kind, EPS)
    given = random_inputs((2, 4, 2, 90, 8, 6), config, hidden=hidden)
    with torch.no_grad():
        short, long = quadratic.forward(given, config, True), chunked.forward(given, config, True, 32)
        grads = OutputGrads(*(torch.randn_like(x) for x in short))
        by_short = quadratic.backward(given, short, grads, config)
        by_long = chunked_backward.backward(given, long, grads, config, 32)
    for a, b in zip([*short, *by_short[:3]], [*long, *by_long[:3]], strict=True):
        assert relative_error(a.nan_to_num(0), b.nan_to_num(0)) < 1e-12


@pytest.mark.parametrize("linked", [False, True])
def test_gradients_in_spans_are_those_at_once(monkeypatch, linked):
    config = OpConfig("elu1")
    given = random_inputs((2, 4, 2, 90, 8, 6), config, state=linked, decay=linked, packed=linked, hidden=True)
    with torch.no_grad():
        outputs = chunked.forward(given, config, True, 8)
        grads = OutputGrads(*(torch.randn_like(x) for x in outputs))
        runs = []
        for span in (0, 12):  # 12 chunks in spans of 3, and at once
            monkeypatch.setattr(chunked_backward, "SPAN", span)
            runs.append(chunked_backward.backward(given, outputs, grads, config, 8))
    for some, whole in zip(*runs, strict=True):
        assert some is whole is None or torch.equal(some, whole)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("length", [6, 200])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_operator_keeps_the_rules_of_torch(length, linked):
    config = OpConfig("none")
    given = random_inputs((1, 4, 2, length, 3, 2), config, state=linked, decay=linked, packed=linked)
    given = given._replace(valid=torch.rand(1, length) >= 0.2)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.hf_linattn.linear_attention.default, (*given, *config, True, "eager"), test_utils=utils
    )


@pytest.mark.parametrize("config", [OpConfig("elu1"), OpConfig("none", 0.0, False)], ids=str)
def test_gradcheck(config):
    """Totals of elu1 aside: their factor per query divides away, and counts as a constant."""
    for length in (3, 9):
        given = random_inputs((1, 2, 1, length, 2, 2), config, state=True)

        def outputs(query, key, value, S, z):
            found = kernels.attention(Inputs(query, key, value, None, S, z), config, keep=True)
            return tuple(found) if config.kind == "none" else (found.output, found.S, found.z)

        assert torch.autograd.gradcheck(outputs, [x for x in given if x is not None])


def test_a_map_made_from_another_is_its_own():
    class Doubled(Elu1):
        def key_map(self, key):
            return 2 * super().key_map(key)

    class Same(Elu1):
        pass

    assert (Elu1.fused, Same.fused, Doubled.fused) == ("elu1", "elu1", "none")


def test_a_denominator_of_its_own_is_used():
    class Halved(Elu1):
        def denominator(self, total, count):
            return 2 * total

    tokens = Tokens(*(torch.randn(1, 2, 40, 8) for _ in range(3)), scaling=1.0)
    assert not Halved.sum_normalised
    halved, plain = (attention(None).causal(tokens, None)[0] for attention in (Halved, Elu1))
    assert torch.allclose(2 * halved, plain, atol=1e-6)


def test_the_rule_is_told():
    text = dispatch.explain()
    assert str(dispatch.SHORT) in text
    assert all(name in text for name in ("quadratic", "loop", "vectorised"))
