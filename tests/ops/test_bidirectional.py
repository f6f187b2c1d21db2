"""Linear attention over all keys: forms with a backward of their own, against the formula in float64."""

import itertools

import pytest
import torch
from helpers.linear_inputs import CONFIGS, EPS, definition, fewer_queries, random_inputs
from helpers.random_inputs import relative_error
from helpers.selection import rest_full
from helpers.tiny_models import build, distance

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.ops import dispatch
from hf_linattn.ops import linear_attention as kernels
from hf_linattn.ops.eager import bidirectional, linear, quadratic
from hf_linattn.ops.types import FEATURE_MAPS, Inputs, OpConfig
from hf_linattn.patches.elu1 import Elu1

SHAPES = {  # rows, heads, key heads, tokens, D, Dv
    "shared keys": (2, 4, 2, 200, 8, 6),
    "short": (2, 6, 2, 33, 5, 4),
    "more pairs than go together": (2, 40, 40, 150, 3, 3),
}
ALL = pytest.mark.parametrize(
    "config",
    [config._replace(causal=False) for config in CONFIGS],
    ids=lambda config: f"{config.kind}-{'output' if config.normalise else 'sums'}",
)


def compare(given, config, tolerance=1e-11):
    got, want = kernels.attention(given, config, keep=False)[:2], definition(given, config)[:2]
    weights = [torch.randn_like(x) for x in want]
    runs = []
    for found in (got, want):
        loss = sum((x * w).sum() for x, w in zip(found, weights, strict=True))
        runs.append([*found, *(x.nan_to_num(0) for x in torch.autograd.grad(loss, given[:3]))])
    for place, (a, b) in enumerate(zip(*runs, strict=True)):
        assert a.shape == b.shape
        assert relative_error(a, b) < tolerance, place


@ALL
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("numbers", [64, dispatch.NUMBERS], ids=["small chunks", "as measured"])
def test_forms_and_their_gradients_are_the_formula(config, shape, numbers, monkeypatch):
    monkeypatch.setattr(dispatch, "NUMBERS", numbers)
    for hidden, dense, few in itertools.product((False, True), repeat=3):
        given = random_inputs(shape, config, hidden=hidden, dense=dense)
        compare(fewer_queries(given, 21) if few else given, config)


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_the_quadratic_form_is_the_sum(kind):
    config = OpConfig(kind, EPS, causal=False)
    given = fewer_queries(random_inputs((2, 4, 2, 90, 8, 6), config, hidden=True), 40)
    with torch.no_grad():
        short, long = quadratic.forward(given, config, True), bidirectional.forward(given, config, True, 128)
    for a, b in zip(short, long, strict=True):
        assert relative_error(a, b) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [60, 300])
def test_sums_of_rounded_inputs_are_not_rounded(length, dtype):
    config = OpConfig("elu1", causal=False)
    given = random_inputs((2, 4, 2, length, 16, 16), config)
    rounded = Inputs(*(x.detach().to(dtype).requires_grad_() for x in given[:3]))
    exact = Inputs(*(x.detach().double() for x in rounded[:3]))
    got, want = kernels.attention(rounded, config, keep=False), definition(exact, config)
    assert got.output.dtype == dtype
    assert relative_error(got.output, want[0]) < 2 * torch.finfo(dtype).eps
    assert relative_error(got.total, want[1]) < 1e-6
    grads = torch.autograd.grad(got.output.float().square().sum(), rounded[:3])
    assert all(x.dtype == dtype and x.isfinite().all() for x in grads)


def test_where_nothing_is_seen_the_output_is_0():
    config = OpConfig("elu1", causal=False)
    for length in (20, 200):
        given = random_inputs((2, 2, 2, length, 4, 4), config)
        valid = torch.ones(2, length, dtype=torch.bool)
        valid[0] = False
        output = kernels.attention(given._replace(valid=valid), config, keep=False).output
        assert torch.equal(output[0], torch.zeros_like(output[0]))
        grads = torch.autograd.grad(output.sum(), given[:3])
        assert all(x.isfinite().all() for x in grads)


def test_no_queries_and_no_keys():
    config = OpConfig("elu1", causal=False)
    given = random_inputs((1, 2, 2, 200, 4, 4), config)
    nothing = given._replace(query=given.query[:, :, :0])
    assert kernels.attention(nothing, config, keep=False).output.shape == (1, 2, 0, 4)
    nothing = given._replace(key=given.key[:, :, :0], value=given.value[:, :, :0])
    output = kernels.attention(nothing, config, keep=False).output
    assert torch.equal(output, torch.zeros_like(given.query))


@pytest.mark.parametrize("length", [6, 200])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_operator_keeps_the_rules_of_torch(length):
    config = OpConfig("none", causal=False)
    given = random_inputs((1, 4, 2, length, 3, 2), config)._replace(valid=torch.rand(1, length) >= 0.2)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.hf_linattn.linear_attention.default, (*given, *config, True, "eager"), test_utils=utils
    )


def test_gradcheck():
    config = OpConfig("elu1", causal=False)
    for length in (5, 140):
        given = random_inputs((1, 2, 1, length, 2, 2), config)

        def output(query, key, value):
            return kernels.attention(Inputs(query, key, value), config, keep=False).output

        assert torch.autograd.gradcheck(output, given[:3])


@pytest.mark.parametrize("name", rest_full(["elu1", "hedgehog"], ["elu1"]))
def test_an_encoder_is_one_graph(name):
    torch._dynamo.reset()
    model = patch_model(build("BertModel", num_hidden_layers=1), name)
    ids = torch.randint(5, 60, (2, 150))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got, want = compiled(ids).last_hidden_state, model(ids).last_hidden_state
    assert distance(got, want) < 1e-6
    parameters = [*model.encoder.parameters()]
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), parameters) for x in (got, want)), strict=True):
        assert distance(a, b) < 1e-5
    torch._dynamo.reset()


def test_other_devices_take_torch_operations(monkeypatch):
    query, key, value = (
        x.detach().float() for x in random_inputs((2, 4, 2, 200, 8, 6), OpConfig("elu1"))[:3]
    )
    attention, tokens = Elu1(None), Tokens(query, key, value, 1.0)
    wanted, called = attention.bidirectional(tokens), []
    plain = linear.read
    monkeypatch.setattr(linear, "read", lambda *inputs: called.append(1) or plain(*inputs))
    assert not called
    monkeypatch.setattr("hf_linattn.attention.linear.choose_backend", lambda *inputs, **linked: "vectorised")
    assert distance(attention.bidirectional(tokens), wanted) < 1e-6
    assert called
