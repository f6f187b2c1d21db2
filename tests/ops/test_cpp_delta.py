"""The delta rule in C++ against the recurrence in float64, forward, backward and for one token."""

import shutil

import pytest
import torch
from helpers.definitions import repeated
from helpers.random_inputs import relative_error
from helpers.selection import chessboard

from hf_linattn.ops import delta_rule
from hf_linattn.ops.cpp import build, takes
from hf_linattn.ops.types import DeltaConfig, DeltaGate, DeltaInputs

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
SHAPES = {
    "one short row": (1, 1, 1, 5, 16, 16),
    "a whole chunk": (1, 1, 1, 64, 32, 32),
    "shared keys, rows": (2, 6, 2, 150, 16, 24),
    "sizes of no whole vectors": (2, 2, 1, 131, 10, 6),
    "sizes of real models": (1, 2, 1, 200, 64, 128),
    "one token": (2, 4, 2, 1, 24, 16),
    "more heads than go together": (1, 5, 5, 70, 128, 128),
}
WITH = ["", "decay", "decay, state", "decay, documents", "state, padding", "decay, state, padding"]
WITH += ["channel", "channel, state", "channel, documents, padding", "channel, state, padding"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setenv("HF_LINATTN_CPP", "1")


def inputs_of(shape, parts, dtype=torch.float32, seed=0):
    (batch, heads, kv_heads, length, size, wide), make = shape, torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(batch, *sizes, generator=make)

    # strided, as models give them
    query, key = normal(length, heads, size).transpose(1, 2), normal(length, kv_heads, size).transpose(1, 2)
    value, valid = normal(length, kv_heads, wide).transpose(1, 2), None
    if "padding" in parts:
        valid = torch.rand(batch, length, generator=make) < 0.7
        key, value = (x.masked_fill(~valid[:, None, :, None], float("nan")) for x in (key, value))
    documents = None
    if "documents" in parts:
        documents = (torch.rand(batch, length, generator=make) < 0.05).long().cumsum(1)
    return DeltaInputs(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        normal(kv_heads, length, 1 + size if "channel" in parts else 2 if "decay" in parts else 1),
        normal(kv_heads, size, wide) if "state" in parts else None,
        valid,
        documents,
    )


def recurrence(inputs, config, scale):
    """o_t = c_h S_t^T q_t, S_t = a_t S_{t-1} + k_t (b_t (v_t - (a_t S_{t-1})^T k_t))^T, in float64."""
    query, key, value, gates, S, valid, documents = inputs
    unit = [x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in (query, key)]
    beta = config.beta * gates[..., 0].sigmoid()
    log_a = torch.zeros_like(gates[..., :1])
    if config.decay != "none":
        log_a = gates[..., 1:].sigmoid().log() / config.temperature
    if S is None:
        S = value.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    outputs = []
    for t in range(key.shape[2]):
        if documents is not None and t:
            S = S * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        faded, k, v = log_a[:, :, t].exp()[..., None] * S, unit[1][:, :, t], value[:, :, t]
        u = beta[:, :, t, None] * (v - (k[:, :, None] @ faded)[:, :, 0])
        new = faded + k[..., None] * u[:, :, None]
        S = new if valid is None else torch.where(valid[:, t, None, None, None], new, S)
        outputs.append((unit[0][:, :, t, None] @ repeated(S, query.shape[1]))[:, :, 0])
    return torch.stack(outputs, 2) * scale.double()[:, None, None], S


def doubled(inputs):
    """The same in float64, with numbers where there is padding, which must not matter."""
    return DeltaInputs(
        *(x if x is None or not x.is_floating_point() else x.double().nan_to_num() for x in inputs)
    )


def config_of(parts):
    decay = "channel" if "channel" in parts else "head" if "decay" in parts else "none"
    return DeltaConfig(decay, 2.0, 16.0)


@pytest.mark.parametrize(("shape", "parts"), chessboard(SHAPES, WITH))
class TestKernels:
    def test_they_are_the_recurrence(self, shape, parts):
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            inputs, scale = inputs_of(SHAPES[shape], parts, dtype), torch.rand(SHAPES[shape][1]) + 0.5
            assert takes.delta(inputs)
            with torch.no_grad():
                got = delta_rule.attention(inputs, config_of(parts), scale, keep=True)
            want = recurrence(doubled(inputs), config_of(parts), scale)
            assert got[0].dtype == dtype
            assert max(relative_error(a, b) for a, b in zip(got, want, strict=True)) < bound

    def test_their_gradients_are(self, shape, parts):
        inputs, scale = inputs_of(SHAPES[shape], parts), torch.rand(SHAPES[shape][1]) + 0.5
        for got, want in zip(*both_gradients(inputs, parts, scale), strict=True):
            assert not got.isnan().any()
            assert relative_error(got, want) < 2e-5


def both_gradients(inputs, parts, scale):
    """Of the kernels and of the recurrence, by the output as a model of that dtype hands them back."""
    make = torch.Generator().manual_seed(2)
    grad = torch.randn(*inputs.query.shape[:3], inputs.value.shape[3], generator=make).to(inputs.query.dtype)
    found = []
    for form, given in ((delta_rule.attention, inputs), (recurrence, doubled(inputs))):
        own = DeltaInputs(
            *(x if x is None or not x.is_floating_point() else x.clone().requires_grad_() for x in given)
        )
        keep = (True,) if form is delta_rule.attention else ()
        output, after = form(own, config_of(parts), scale.to(inputs.query.dtype), *keep)
        of_state = torch.arange(after.shape[-1]).to(after).expand_as(after)
        asked = [x for x in own[:5] if x is not None]
        found.append(torch.autograd.grad((output, after), asked, (grad.to(output.dtype), of_state)))
    return found


@pytest.mark.parametrize(
    ("shape", "parts"),
    chessboard(SHAPES, ["", "decay, state", "decay, documents", "state, padding", "channel, state"]),
)
def test_gradients_in_bfloat16_are_off_by_a_few_roundings(shape, parts):
    inputs, scale = inputs_of(SHAPES[shape], parts, torch.bfloat16), torch.rand(SHAPES[shape][1]) + 0.5
    for got, want in zip(*both_gradients(inputs, parts, scale), strict=True):
        assert relative_error(got, want) < 6 * 2**-9


@pytest.mark.parametrize("parts", ["", "decay"])
def test_errors_of_bfloat16_do_not_grow_with_the_length(parts):
    """Few distinct keys, hardly any decay, and corrections that overshoot."""
    shape = (1, 1, 1, 4096, 16, 16)
    inputs = inputs_of(shape, parts)
    gates = torch.cat([inputs.gates[..., :1], inputs.gates[..., 1:] + 12], -1)
    keys = inputs.key[:, :, :20].repeat(1, 1, 205, 1)[:, :, :4096].bfloat16()
    inputs = inputs._replace(query=inputs.query.bfloat16(), key=keys, gates=gates)
    with torch.no_grad():
        got = delta_rule.attention(inputs, config_of(parts), torch.ones(1), keep=True)
        want = recurrence(doubled(inputs), config_of(parts), torch.ones(1))
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 6 * 2**-9
    late = slice(-512, None)
    assert relative_error(got[0][:, :, late], want[0][:, :, late]) < 6 * 2**-9


@pytest.mark.parametrize("decay", ["decay", "channel"])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_queries_the_state_is_the_same(shape, decay):
    inputs = inputs_of(SHAPES[shape], f"{decay}, state, padding")
    config, scale = config_of(decay), torch.ones(SHAPES[shape][1])
    with torch.no_grad():
        want = delta_rule.attention(inputs, config, scale, keep=True)[1]
        output, got = delta_rule.attention(inputs._replace(query=None), config, scale, keep=True)
        assert output is None
        assert relative_error(got, want) < 1e-6


def test_without_queries_the_state_has_gradients():
    inputs = inputs_of(SHAPES["sizes of real models"], "decay")._replace(query=None)
    key, value = inputs.key.detach().requires_grad_(), inputs.value.detach().requires_grad_()
    grads = []
    for dtype in (torch.float32, torch.float64):
        given = inputs._replace(key=key, value=value)
        given = given if dtype == torch.float32 else doubled(given)
        after = delta_rule.attention(given, config_of("decay"), torch.ones(2), keep=True)[1]
        grads.append(torch.autograd.grad(after.square().sum(), (key, value)))
    for got, want in zip(*grads, strict=True):
        assert relative_error(got, want) < 1e-4


@pytest.mark.parametrize("decay", ["decay", "channel"])
def test_one_token_is_written_into_the_state(decay):
    inputs = inputs_of(SHAPES["one token"], f"{decay}, state")
    config, scale, state = config_of(decay), torch.ones(4), inputs.state.clone()
    with torch.no_grad():
        want = delta_rule.attention(inputs, config, scale, keep=True)
        assert torch.equal(inputs.state, state)
        got = delta_rule.attention(inputs, config, scale, keep=True, in_place=True)
    assert got[1] is inputs.state
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
@pytest.mark.parametrize(("size", "wide"), [(24, 16), (6, 10), (1, 5)])
def test_one_token_with_gates_made_of_values(decay, size, wide):
    inputs = inputs_of((2, 4, 2, 1, size, wide), "state, padding")
    make = torch.Generator().manual_seed(1)
    gate = DeltaGate(
        *(torch.randn(2, *each, generator=make) for each in ((1 + (decay == "head"), wide), (1,)))
    )
    gate = gate._replace(bias=torch.randn(2, 1 + (decay == "head"), generator=make))
    if decay == "channel":
        shapes = (7, wide), (size, 7), (size,)
        gate = DeltaGate(*gate[:2], *(torch.randn(2, *shape, generator=make) for shape in shapes))
    logits = inputs.value @ gate.weight.mT + gate.bias[:, None]
    if decay == "channel":
        logits = torch.cat([logits, inputs.value @ gate.down.mT @ gate.up.mT + gate.up_bias[:, None]], -1)
    config, scale = DeltaConfig(decay, 2.0, 16.0), torch.rand(4)
    with torch.no_grad():
        got = delta_rule.step(inputs._replace(gates=None), gate, config, scale, in_place=False)
        want = recurrence(doubled(inputs._replace(gates=logits)), config, scale)
    assert max(relative_error(a, b) for a, b in zip(got, want, strict=True)) < 1e-5


@pytest.mark.parametrize("decay", ["decay", "channel"])
def test_float32_at_65536_tokens(decay):
    """Few distinct keys, hardly any decay, and corrections that overshoot: against torch in float64."""
    inputs = inputs_of((1, 1, 1, 65536, 16, 16), decay)
    gates = torch.cat([inputs.gates[..., :1], inputs.gates[..., 1:] + 12], -1)
    inputs = inputs._replace(key=inputs.key[:, :, :4].repeat(1, 1, 65536 // 4, 1), gates=gates)
    scale = torch.ones(1)
    with torch.no_grad():
        got = delta_rule.attention(inputs, config_of(decay), scale, keep=False)[0]
        want = delta_rule.attention(doubled(inputs), config_of(decay), scale, keep=False)[0]
    assert float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize("decay", ["decay", "channel"])
@pytest.mark.parametrize("logit", [-1e30, -200.0, 0.0, 200.0, 1e30])
def test_gates_at_their_ends(logit, decay):
    inputs = inputs_of((1, 2, 1, 100, 16, 16), decay)
    config = config_of(decay)
    for gate in (slice(0, 1), slice(1, None), slice(5, 9)):
        gates = inputs.gates.clone()
        gates[:, :, 30:60, gate] = logit
        given = inputs._replace(gates=gates)
        with torch.no_grad():
            got = delta_rule.attention(given, config, torch.ones(2), keep=True)
            want = delta_rule.attention(doubled(given), config, torch.ones(2), keep=True)
        assert max(relative_error(a, b) for a, b in zip(got, want, strict=True)) < 1e-5


def test_channels_that_forget_fast_and_channels_that_keep_all():
    """Decays by e^-12, e^-0.6 and none a token side by side, over many chunks, forward and backward."""
    inputs = inputs_of((1, 2, 1, 300, 16, 16), "channel, state")
    rates = torch.tensor([-200.0, -10.0, 30.0, 3.0]).repeat(4)
    inputs = inputs._replace(gates=torch.cat([inputs.gates[..., :1], inputs.gates[..., 1:] + rates], -1))
    found = []
    for form, given in ((delta_rule.attention, inputs), (recurrence, doubled(inputs))):
        own = [x.clone().requires_grad_() for x in given[:5]]
        keep = (True,) if form is delta_rule.attention else ()
        output, after = form(DeltaInputs(*own), config_of("channel"), torch.ones(2), *keep)
        loss = output.square().sum() + (after * torch.arange(16)).sum()
        found.append([output, after, *torch.autograd.grad(loss, own)])
    assert max(relative_error(a, b) for a, b in zip(*found, strict=True)) < 2e-5


def test_what_the_kernels_do_not_take():
    inputs = inputs_of(SHAPES["one token"], "decay, state")
    assert not takes.delta(doubled(inputs))
    assert not takes.delta(inputs._replace(state=inputs.state.double()))
    assert not takes.delta(inputs._replace(value=inputs.value[..., :0]))
