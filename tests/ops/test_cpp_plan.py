"""Calls that are packed once for their layout give the same bits as calls that are packed anew."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import tiny_models
from helpers.random_inputs import relative_error
from torch import nn

from hf_linattn import patch_model
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.cpp import build, linear, plan
from hf_linattn.ops.types import Gate, Inputs, OpConfig

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
CHUNK = 64


@pytest.fixture(autouse=True)
def fresh(compiled):
    plan._plans.clear()
    yield
    plan._plans.clear()


def text(length=16, heads=4, kv_heads=2, size=24, seed=0, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, length, h, size, generator=make).to(dtype).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    ]


def find(query, key, value, valid=None, gate=None, kind="elu1", eps=0.0, causal=True, keep=True):
    return plan.find(query, key, value, valid, gate, kind, eps, causal, keep, CHUNK)


@torch.no_grad()
def both(given, valid=None, gate=None, kind="elu1", eps=0.0, causal=True, keep=True, decay=None):
    """By the plan, and by a call that is packed now."""
    got = find(*given, valid, gate, kind, eps, causal, keep).run(*given, valid, gate, decay)
    inputs = Inputs(*given, valid, None, None, decay, None)
    return got, linear.forward(inputs, OpConfig(kind, eps, True, causal), keep, CHUNK, gate)


def same(got, want):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("decays", ["never", "by a gate", "as given"])
@pytest.mark.parametrize("length", [1, 16, 150])
def test_a_causal_text(length, decays, padded, keep, dtype):
    for seed in range(3):  # the first packs, the others find it packed
        given = text(length, seed=seed, dtype=dtype)
        valid = torch.rand(2, length) > 0.3 if padded else None
        gate = Gate(torch.randn(2, 24), torch.randn(2), 16.0) if decays == "by a gate" else None
        decay = -torch.rand(2, length, 2).transpose(1, 2) / 9 if decays == "as given" else None
        assert same(*both(given, valid, gate, keep=keep, decay=decay))
    assert len(plan._plans) == 1


@pytest.mark.parametrize("padded", [False, True])
def test_over_all_keys(padded):
    for seed in range(2):
        query, key, value = text(9, seed=seed)
        key, value = (torch.cat([x, x + 1], 2) for x in (key, value))
        valid = torch.rand(2, 18) > 0.3 if padded else None
        assert same(*both([query, key, value], valid, kind="relu", eps=1e-3, causal=False, keep=False))
    assert len(plan._plans) == 1


def test_what_differs_has_a_plan_of_its_own(monkeypatch):
    query, key, value = text()
    gate = Gate(torch.randn(2, 24), torch.randn(2), 16.0)
    calls = [
        {},
        {"kind": "relu"},
        {"kind": "relu", "eps": 0.5},
        {"causal": False, "keep": False},
        {"keep": False},
        {"valid": torch.ones(2, 16, dtype=torch.bool)},
        {"valid": torch.ones(1, 16, dtype=torch.bool).expand(2, -1)},
        {"gate": gate},
        {"gate": gate._replace(temperature=1.0)},
    ]
    for call in calls:
        assert same(*both([query, key, value], **call))
    assert len(plan._plans) == len(calls)
    laid = [query.contiguous(), key, value], [query, key.contiguous(), value], [query[:1], key[:1], value[:1]]
    for given in laid:
        assert same(*both(given))
    assert len(plan._plans) == len(calls) + len(laid)
    monkeypatch.setattr(plan, "MOST", 12)
    assert same(*both(text(17)))
    assert len(plan._plans) == 1


def test_rows_that_are_not_dense_are_left_to_others():
    query, key, value = text()
    across = query.transpose(2, 3).contiguous().transpose(2, 3)
    with torch.no_grad():
        for given in ([across, key, value], [query.double(), key, value], [nn.Parameter(query), key, value]):
            assert find(*given) is None


def test_weights_kept_elsewhere_are_left_to_the_error_that_says_so():
    given = text()
    same(*both(given))
    with torch.no_grad():
        empty = [x.clone() for x in given]
        empty[1].untyped_storage().resize_(0)
        assert find(*empty).run(*empty, None, None, None) is None
        with pytest.raises(UnsupportedCallError, match="no memory"):
            linear.forward(Inputs(*empty), OpConfig("elu1"), True, CHUNK)


def test_threads_do_not_share_what_a_call_is_packed_into():
    texts = [text(200, seed=seed) for seed in range(4)]
    want = [both(given)[1] for given in texts]

    def right(index):
        return all(same(both(texts[index])[0], want[index]) for _ in range(30))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(4)))
    assert len(plan._plans) == 1


@pytest.mark.parametrize("spec", ["elu1", "relu", "gated", "hedgehog"])
def test_a_model_takes_plans_only_where_they_may_be_taken(spec, monkeypatch):
    model, ids = patch_model(tiny_models.llama().float(), spec).eval(), tiny_models.tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    calls, run = [], plan.Plan.run
    monkeypatch.setattr(plan.Plan, "run", lambda *args: calls.append(args) or run(*args))

    def logits(cache, mask):
        return model(ids, attention_mask=mask, use_cache=cache).logits

    for cache in (False, True):
        for each in (None, mask):
            calls.clear()
            with torch.no_grad():
                got = logits(cache, each)
                assert bool(calls) == (spec != "hedgehog")
                calls.clear()
                monkeypatch.setenv(build.CPP, "0")
                want = logits(cache, each)
                monkeypatch.setenv(build.CPP, "1")
            seen = mask != 0
            assert relative_error(got[seen], want[seen]) < 1e-5
            logits(cache, each).sum().backward()
            assert not calls
    embeds = model.model.embed_tokens(ids)
    with torch.no_grad():
        apart = torch.vmap(lambda x: model(inputs_embeds=x[None], use_cache=False).logits[0])(embeds)
        assert not calls
        assert relative_error(apart, logits(False, None)) < 1e-5
