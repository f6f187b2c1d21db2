"""Gradients of heavy hitters: choices are constants, and all steps are computed again at once."""

import shutil

import pytest
import torch
from helpers import tiny_models
from helpers.heavy_checks import CONFIG, MANY, OPTIONS, SMALL, Case, given, gradients, module_of
from helpers.properties import close

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.ops.cpp import build
from hf_linattn.ops.cpp import heavy as cpp_heavy
from hf_linattn.ops.eager import heavy
from hf_linattn.patches.h2o import H2O

CASES = {
    "inside the window": Case(cuts=(11,), Dv=24),
    "several choices, grouped heads, turned sinks": Case(heads=3, positions="cache", half_life=20.0),
    "several key heads": Case(cuts=(70,), heads=6, kv_heads=3, positions="cache"),
    "several key heads, padding": Case(cuts=(70,), heads=2, kv_heads=2, hidden="holes"),
    "left padding, turned sinks": Case(hidden="left", positions="cache"),
    "holes": Case(hidden="holes", half_life=20.0),
    "what is too far back goes first": Case(cuts=(70,), options=OPTIONS | {"reach": 21}, half_life=None),
    "no sinks, blocks of one token": Case(cuts=(19,), options=SMALL),
    "heavy hitters are not full": Case(cuts=(37,), options=MANY),
}
OTHERS = ({}, {"softcap": 2.0}, {"sink": torch.tensor([0.5, -1.0], dtype=torch.float64)})


@pytest.mark.parametrize("others", OTHERS, ids=["plain", "softcap", "sink"])
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_walking(name, others, monkeypatch):
    module, numbers = module_of(CASES[name]), given(CASES[name])
    if "sink" in others:
        others = {"sink": others["sink"].new_ones(CASES[name].heads)}
    want = gradients(module, numbers, lambda tokens: module._forward(tokens, None), **others)
    for rows, most in ((heavy.ROWS, heavy.NUMBERS), (5, 1)):
        monkeypatch.setattr(heavy, "ROWS", rows)
        monkeypatch.setattr(heavy, "NUMBERS", most)
        got = gradients(module, numbers, lambda tokens: module.causal(tokens, None), **others)
        for x, y in zip((got[0], *got[1][:2], *got[2]), (want[0], *want[1][:2], *want[2]), strict=True):
            close(x, y, 1e-12)


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
@pytest.mark.parametrize("name", CASES)
def test_the_kernels_choose(name, monkeypatch):
    module, numbers, calls = module_of(CASES[name]), given(CASES[name]), []
    want = gradients(module, numbers, lambda tokens: module._forward(tokens, None))
    forward = cpp_heavy.forward
    monkeypatch.setattr(
        cpp_heavy, "forward", lambda *args, **named: calls.append(1) or forward(*args, **named)
    )
    got = gradients(module, numbers, lambda tokens: module.causal(tokens, None), torch.float32)
    assert calls
    for x, y in zip((got[0], *got[2]), (want[0], *want[2]), strict=True):
        close(x, y, 3e-6)


def test_they_have_gradients_themselves():
    case = Case(cuts=(30,), heads=1, options=SMALL, positions="cache")
    module, (query, key, value, valid) = module_of(case), given(case)
    inputs = [x[..., :3].double().requires_grad_() for x in (query, key, value)]
    count = valid.cumsum(1)
    module.rotary = None

    def output(*tensors):
        return module.causal(Tokens(*tensors, 0.5, None, count), None)[0]

    torch.autograd.gradgradcheck(output, inputs, torch.ones(1, 1, 30, 3, dtype=torch.float64))


def test_a_text_goes_on_with_gradients_of_what_was_kept():
    """A loss on the second half reaches the tokens of the first through the cache."""
    case = Case(cuts=(30, 20), positions="cache")
    module, (query, key, value, valid) = module_of(case), given(case)
    count, found = valid.cumsum(1), []
    for whole in (True, False):
        leaves = [x.double().requires_grad_() for x in (query, key, value)]
        tokens = Tokens(*leaves, 0.5, None, count)
        if whole:
            output = module._forward(tokens, None)[0][:, :, 30:]
        else:
            output = module.causal(tokens.slice(30, 50), module.causal(tokens.slice(0, 30), None)[1])[0]
        found.append(torch.autograd.grad(output.square().sum(), leaves))
    assert found[0][1][:, :, :30].any()
    for x, y in zip(*found, strict=True):
        close(x, y, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_learns(dtype):
    model = tiny_models.build("LlamaForCausalLM", dtype=dtype, **CONFIG)
    patch_model(model, "h2o", options={**OPTIONS, "positions": "auto"})
    ids = tiny_models.tokens(2, 60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(6):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_.*able. is deprecated:FutureWarning")
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_has_the_gradients_of_walking(padded, monkeypatch):
    """Those of all weights, with several key heads, and where activations are computed again."""
    sizes = CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_models.build("LlamaForCausalLM", dtype=torch.float64, **sizes)
    patch_model(model, "h2o", options={**OPTIONS, "positions": "auto"}).train()
    ids = tiny_models.tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, : 9 * padded] = 0
    found = []
    for way in ("at once", "again", "walking"):
        if way == "again":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        elif way == "walking":
            model.gradient_checkpointing_disable()
            monkeypatch.setattr(H2O, "_learns", lambda *given: False)
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        found.append([x.grad for x in model.parameters()])
        model.zero_grad()
    for grads in found[:2]:
        for x, y in zip(grads, found[2], strict=True):
            close(x, y, 1e-12)


def test_a_backward_inside_autocast_is_the_one_outside():
    model = tiny_models.build("LlamaForCausalLM", **CONFIG)
    patch_model(model, "h2o", options={**OPTIONS, "positions": "auto"})
    ids, found = tiny_models.tokens(2, 60), []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        found.append([x.grad for x in model.parameters()])
        model.zero_grad()
    for x, y in zip(*found, strict=True):
        close(x, y, 2e-2)
