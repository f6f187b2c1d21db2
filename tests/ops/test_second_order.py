"""Gradients of gradients, and torch.func, which sees through torch's own operations alone."""

import itertools

import pytest
import torch
from helpers import tiny_models
from helpers.linear_inputs import random_inputs
from helpers.selection import rest_full
from helpers.window_inputs import inputs as window_inputs
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, jvp, vmap

import hf_linattn
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import linear_attention, softmax_sink, window_attention
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.triton import window_operator
from hf_linattn.ops.types import Inputs, OpConfig
from hf_linattn.patches.window.ring import KeyValues
from hf_linattn.patches.window.sinks import sink_sums
from hf_linattn.training.divergence import token_divergence

SMALL = {"size": 6, "sinks": 2}
PLANS = {
    "softmax1": {},
    "logn": {"train_length": 8},
    "elu1": {},
    "gated": {},
    "hedgehog": {},
    "delta": {},
    "window": SMALL,
    "window+elu1": SMALL,
    "window+gated": {**SMALL, "feature_map": "hedgehog"},
}
SINGLE = [name for name in PLANS if name != "logn"]
"""Those whose second derivatives torch can give: of its own fused softmax it has none, and says so."""
pytestmark = [  # of torch's own code
    pytest.mark.filterwarnings("ignore:There is a performance drop because:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
]
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("kind", "given", "causal"),
    rest_full(
        itertools.product(("none", "elu1"), ("plain", "all"), (True, False)),
        [("elu1", "all", True), ("none", "plain", True), ("none", "all", False), ("elu1", "plain", False)],
    ),
)
def test_linear_attention(kind, given, causal):
    config = OpConfig(kind, 0.0, True, causal)
    more = {"state": causal, "decay": causal, "hidden": True, "packed": causal} if given == "all" else {}
    inputs = random_inputs((1, 2, 1, 7, 2, 2), config, **more)
    at = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]

    def output(*tensors):
        changed = list(inputs)
        for i, x in zip(at, tensors, strict=True):
            changed[i] = x
        return linear_attention.attention(Inputs(*changed), config, keep=False).output

    tensors = [inputs[i].detach().nan_to_num(0.3).requires_grad_() for i in at]
    assert gradcheck(output, tensors)
    assert gradgradcheck(output, tensors)


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_with_a_sink(masked):
    torch.manual_seed(1)
    query, key, value, sink = (
        torch.randn(1, heads, length, 2, dtype=torch.float64, requires_grad=True)
        for heads, length in ((2, 5), (1, 5), (1, 5), (2, 1))
    )
    mask = None
    if masked:
        mask = torch.zeros(1, 1, 5, 5, dtype=torch.float64).masked_fill(torch.rand(5, 5) < 0.3, float("-inf"))

    def output(query, key, value, sink):
        return softmax_sink.attention(query, key, value, mask, not masked, 0.7, sink[..., :1])

    assert gradgradcheck(output, (query, key, value, sink))


@pytest.mark.parametrize("other", ["nothing", "sums"])
def test_window(other):
    leaves, _, _ = window_inputs((1, 2, 1, 7, 3, 2), other, hide=False)

    def output(*leaves):
        _, seen, sums = window_inputs((1, 2, 1, 7, 3, 2), other, hide=False)
        query, key, value, *rest = leaves
        seen = seen._replace(query=query, key=key, value=value)
        return window_attention.attention(seen, type(sums)(*rest) if sums is not None else None)

    assert gradgradcheck(output, leaves)


def test_window_and_sinks_as_kernels_on_a_gpu_are_given_them():
    _, seen, sums = window_inputs((2, 4, 2, 11, 3, 4), "sums", hide=True)
    torch.manual_seed(2)
    key, value = (torch.randn(2, 2, 3, 4, dtype=torch.float64) for _ in "kv")
    query, ranks = torch.randn_like(seen.query), torch.arange(11).expand(2, -1)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    first = sink_sums(query, KeyValues(key, value, valid), ranks, None, seen.scaling)
    want = band.attention(seen, band.add_sums(first, sums))
    sinks = query, key, value, valid, ranks
    (got,) = window_operator._plain(*seen[:4], *sinks, *sums, seen.span, seen.scaling)
    torch.testing.assert_close(got, want)


def patched(spec, dtype):
    torch.manual_seed(0)
    model = hf_linattn.patch_model(
        tiny_models.llama(dtype=torch.float32), spec, options=PLANS.get(spec) or None
    )
    return model.to(dtype).eval()


def loss_of(model, ids):
    return model(ids, use_cache=False).logits.square().mean()


def curvature(model, ids):
    """The gradient of the squared length of a gradient."""
    weight = model.get_parameter(QUERY)
    first = torch.autograd.grad(loss_of(model, ids), weight, create_graph=True)[0]
    return torch.autograd.grad(first.square().sum(), weight)[0]


@pytest.mark.parametrize("spec", SINGLE)
def test_models_on_kernels_have_the_curvature_of_torchs(spec, compiled):
    ids = tiny_models.tokens(2, 24)
    double = patched(spec, torch.float64)  # which no kernel takes
    want = curvature(double, ids)
    got = curvature(patched(spec, torch.float32), ids)
    assert float((got - want).norm()) < 1e-3 * float(want.norm())
    weight, step = double.get_parameter(QUERY), 1e-3  # norms are float32
    along = torch.autograd.grad(loss_of(double, ids), weight)[0]
    unit, ends = along / along.norm(), []
    for size in (step, -step):
        with torch.no_grad():
            weight.add_(size * unit)
        ends.append(torch.autograd.grad(loss_of(double, ids), weight)[0])
        with torch.no_grad():
            weight.sub_(size * unit)
    central = (ends[0] - ends[1]) / (2 * step)  # of the second derivatives along the gradient: half of it
    assert float((2 * along.norm() * central - want).norm()) < 1e-3 * float(want.norm())


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("spec", [*PLANS, "fox"])
def test_gradients_of_each_text_by_vmap(spec, use_cache, compiled):
    model, ids = patched(spec, torch.float32), tiny_models.tokens(3, 24)
    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss(weights, row):
        return functional_call(model, weights, (row[None],), {"use_cache": use_cache}).logits.square().mean()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, ids)[QUERY]
    for row, got in zip(ids, found, strict=True):
        want = torch.autograd.grad(loss_of(model, row[None]), model.get_parameter(QUERY))[0]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6 + 1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("spec", ["elu1", "delta", "window+gated", "fox", "softmax1", "logn"])
def test_forward_derivatives(spec):
    model, ids = patched(spec, torch.float64), tiny_models.tokens(1, 24)
    weight = model.get_parameter(QUERY).detach()

    def loss(weight):
        return functional_call(model, {QUERY: weight}, (ids,), {"use_cache": False}).logits.square().mean()

    along = torch.randn_like(weight)
    want = (grad(loss)(weight) * along).sum()
    torch.testing.assert_close(jvp(loss, (weight,), (along,))[1], want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", ["window", "window+gated"])
def test_texts_inside_the_window_can_be_transformed(spec):
    model, ids = patched(spec, torch.float64), tiny_models.tokens(2, 3)
    weights = {name: x.detach() for name, x in model.named_parameters()}

    def loss(weight, row):
        changed = {**weights, QUERY: weight}
        return functional_call(model, changed, (row[None],), {"use_cache": False}).logits.square().mean()

    # of the weights as they are too, which have no part in such a text
    vmap(lambda row: model(row[None], use_cache=False).logits)(ids)
    weight, along = weights[QUERY], torch.randn_like(weights[QUERY])
    found = vmap(grad(loss), in_dims=(None, 0))(weight, ids)
    for row, got in zip(ids, found, strict=True):
        want = torch.autograd.grad(loss_of(model, row[None]), model.get_parameter(QUERY))[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)
        slope = jvp(lambda x, row=row: loss(x, row), (weight,), (along,))[1]
        torch.testing.assert_close(slope, (want * along).sum(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("spec", ["elu1", "hedgehog", "delta", "window+gated"])
def test_derivatives_that_go_forward_with_the_numbers(spec, mode, compiled):
    """A kernel would give the numbers alone, as if they were constant."""
    model, ids = patched(spec, torch.float32), tiny_models.tokens(1, 24)
    given = model.get_input_embeddings()(ids).detach()
    along = torch.randn_like(given)

    def outputs(x):
        return model(inputs_embeds=x, use_cache=False).logits

    want = jvp(outputs, (given,), (along,))[1]
    with mode(), forward_ad.dual_level():
        got = forward_ad.unpack_dual(outputs(forward_ad.make_dual(given, along))).tangent
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        central = (outputs(given + 1e-3 * along) - outputs(given - 1e-3 * along)) / 2e-3
    assert float((got.detach() - central).norm()) < 2e-2 * float(central.norm())


def test_losses_without_second_derivatives_say_so():
    student = torch.randn(2, 5, requires_grad=True)
    loss = token_divergence(student, torch.randn(2, 5)).sum()
    with pytest.raises(UnsupportedCallError, match="Divergence has no gradients of gradients"):
        torch.autograd.grad(loss, student, create_graph=True)
