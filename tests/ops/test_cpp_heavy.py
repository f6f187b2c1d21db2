"""The C++ kernels of a window with heavy hitters, many tokens and one, against torch in float64."""

import shutil

import pytest
import torch
from helpers import tiny_models
from helpers.heavy_checks import CONFIG, OPTIONS, Case, check_case, given, module_of

from hf_linattn import describe, patch_model
from hf_linattn.attention import Tokens
from hf_linattn.ops.cpp import build, heavy

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here"),
    pytest.mark.usefixtures("compiled"),
]

SMALL = {"size": 9, "heavy": 4, "sinks": 0}
MANY = {"size": 24, "heavy": 33, "sinks": 3}
LARGE = {"size": 100, "heavy": 60, "sinks": 17}
ONE_BY_ONE = (30, *[1] * 12)
CASES = {
    "inside the window": Case(cuts=(11,), Dv=24),
    "several choices, grouped heads, turned sinks": Case(heads=3, positions="cache", half_life=20.0),
    "chunks, never fading": Case(cuts=(5, 22, 13), half_life=None),
    "fades within a step": Case(half_life=0.05),
    "left padding in chunks, turned sinks": Case(cuts=(27, 13), hidden="left", positions="cache"),
    "holes": Case(hidden="holes", half_life=20.0),
    "what is too far back goes first": Case(cuts=(57, 13), options=OPTIONS | {"reach": 21}, half_life=None),
    "no sinks, blocks of one token": Case(cuts=(19,), options=SMALL),
    "steps of more tokens than go together": Case(cuts=(400,), options=LARGE, heads=2, positions="cache"),
    "tokens one by one": Case(cuts=ONE_BY_ONE, heads=3, positions="cache", half_life=20.0),
    "tokens from the first on": Case(cuts=(1,) * 40, options=MANY),
    "one by one, padding": Case(cuts=ONE_BY_ONE, hidden="holes", positions="cache"),
    "one by one, no sinks": Case(cuts=(1,) * 20, options=SMALL),
    "bfloat16": Case(cuts=(25, 15), dtype="bfloat16", tolerance=1e-2, positions="cache"),
    "bfloat16 one by one": Case(cuts=ONE_BY_ONE, dtype="bfloat16", tolerance=1e-2, options=MANY),
    "float16": Case(cuts=(25, 15), dtype="float16", tolerance=2e-3),
}


@pytest.mark.parametrize("name", CASES)
def test_all_steps_are_those_of_torch(name):
    check_case(CASES[name], "native_takes_heavy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_says_the_same(dtype, monkeypatch):
    ids, calls = tiny_models.tokens(2, 40), []
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model = tiny_models.build("LlamaForCausalLM", dtype=dtype, **CONFIG)
    patch_model(model, "h2o", options=OPTIONS)
    forward = heavy.forward
    monkeypatch.setattr(heavy, "forward", lambda *args, **named: calls.append(1) or forward(*args, **named))
    found = []
    for wish in ("0", "1"):
        monkeypatch.setenv("HF_LINATTN_CPP", wish)
        how = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
        found.append(model.generate(ids, **how, return_dict_in_generate=True, output_logits=True))
    assert len(calls) == 12
    logits = [torch.stack(x.logits) for x in found]
    assert tiny_models.distance(logits[1], logits[0]) < (1e-5 if dtype == torch.float32 else 6e-2)
    assert "computed by" in str(describe(model))


@torch.no_grad()
def test_the_state_before_stays_unless_nobody_wants_it():
    case = Case(cuts=(30, 1))
    module, (query, key, value, _) = module_of(case), given(case)
    count = torch.arange(1.0, 32.0)[None]
    tokens = Tokens(query, key, value, 0.5, None, count)
    _, state = module.causal(tokens.slice(0, 30), None)
    before = [x.clone() for x in state]
    last = tokens.slice(30, 31)
    want, _ = module.causal(last, state)
    assert all(map(torch.equal, state, before))
    last.in_place = True
    got, after = module.causal(last, state)
    assert after.key.data_ptr() == state.key.data_ptr()
    assert torch.equal(got, want)


def test_what_stays_with_torch(monkeypatch):
    module, (query, key, value, _) = module_of(Case()), given(Case())
    count = torch.arange(1.0, 41.0)[None]
    monkeypatch.setattr(heavy, "forward", lambda *about, **named: pytest.fail("the kernel was called"))
    state = module.causal(Tokens(query.double(), key.double(), value.double(), 0.5, None, count), None)[1]
    state = type(state)(*(x.float() if x.is_floating_point() else x for x in state))
    behind = Tokens(query.clone().requires_grad_(), key, value, 0.5, None, count + 40)
    module.causal(behind, state)  # gradients go back into what was kept
    with torch.no_grad():
        module.causal(Tokens(query, key, value, 0.5, None, count, softcap=5.0), None)
        module.causal(Tokens(query, key, value, 0.5, None, count, sink=torch.zeros(2)), None)
        doubled = Tokens(query.double(), key.double(), value.double(), 0.5, None, count)
        module.causal(doubled, None)
    monkeypatch.setenv("HF_LINATTN_CPP", "0")
    with torch.no_grad():
        module.causal(Tokens(query, key, value, 0.5, None, count), None)


@torch.no_grad()
def test_numbers_that_are_none_end_nothing():
    module, (query, key, value, _) = module_of(Case(cuts=(60,))), given(Case(cuts=(60,)))
    key[:, :, 7] = float("nan")
    key[:, :, 20] = float("inf")
    output, _ = module.causal(Tokens(query, key, value, 0.5, None, torch.arange(1.0, 61.0)[None]), None)
    assert torch.isfinite(output[:, :, :7]).all()
    assert torch.isnan(output[:, :, 7]).any()


def test_several_threads_say_the_same():
    case = Case(cuts=(300,), heads=2)
    module, (query, key, value, _) = module_of(case), given(case)
    rows = [x.expand(3, *x.shape[1:]).contiguous() for x in (query, key, value)]
    tokens = Tokens(*rows, 0.5, None, torch.arange(1.0, 301.0)[None])
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with torch.no_grad():
                found.append(module.causal(tokens, None)[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
