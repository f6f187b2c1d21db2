"""A patched model that computes with its own attention for a while."""

import pytest
import torch
from helpers import tiny_models
from helpers.properties import FAMILIES, model_of

from hf_linattn import bypassed, patch_model, unpatch_model
from hf_linattn.errors import CacheError, NotPatchedError, PlanError, UnsupportedModelError


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(input_ids=ids, **kwargs).logits


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("spec", ["elu1", "softmax1+logn"])
def test_it_is_the_original(family, spec):
    model, ids = model_of(family), tiny_models.tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    want, padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    patch_model(model, spec, sliding="global")
    other = logits(model, ids)
    with bypassed(model):
        assert tiny_models.distance(logits(model, ids), want) < 1e-12
        got = logits(model, ids, attention_mask=mask)
        assert tiny_models.distance(got[mask.bool()], padded[mask.bool()]) < 1e-12
    assert torch.equal(logits(model, ids), other)
    assert tiny_models.distance(other, want) > 1e-3


@pytest.mark.parametrize("plan", ["window", {"0": "elu1"}, "alibi"])
def test_it_generates_as_the_original(plan):
    model, ids = tiny_models.llama(), tiny_models.tokens(2, 20)
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    options = {"size": 8, "sinks": 2} if plan == "window" else {"rope": False} if plan == "alibi" else {}
    patch_model(model, plan, options=options)
    other = model.generate(ids, max_new_tokens=12, do_sample=False)
    with bypassed(model):
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), want)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), other)


def test_chosen_modules_alone():
    model, ids = tiny_models.llama(3), tiny_models.tokens(1, 30)
    patch_model(model, {"1": "elu1"})
    want = logits(model, ids)
    patch_model(model, "elu1")
    with bypassed(model, ["model.layers.0.self_attn", "*.2.self_attn"]):
        assert tiny_models.distance(logits(model, ids), want) < 1e-12
        with bypassed(model):
            original = logits(model, ids)
        assert tiny_models.distance(logits(model, ids), want) < 1e-12
    unpatch_model(model)
    assert tiny_models.distance(original, logits(model, ids)) < 1e-12


def test_it_ends_with_an_error_too():
    model, ids = patch_model(tiny_models.llama(), "elu1"), tiny_models.tokens(1, 30)
    want = logits(model, ids)
    with pytest.raises(RuntimeError, match="stop"), bypassed(model):
        raise RuntimeError("stop")
    assert torch.equal(logits(model, ids), want)


def test_gradients_flow_through_the_original():
    model, ids = tiny_models.llama(), tiny_models.tokens(1, 30)
    model(input_ids=ids).logits.sum().backward()
    want = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    patch_model(model, "elu1")
    with bypassed(model):
        model(input_ids=ids).logits.sum().backward()
    assert tiny_models.distance(model.model.layers[0].self_attn.q_proj.weight.grad, want) < 1e-12


def test_a_state_cannot_be_continued_by_the_original():
    model, ids = patch_model(tiny_models.llama(), "elu1"), tiny_models.tokens(1, 30)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with bypassed(model), pytest.raises(CacheError):
        model(input_ids=ids, past_key_values=cache)


def test_refused():
    model = tiny_models.llama()
    with pytest.raises(NotPatchedError, match="nothing to bypass"), bypassed(model):
        pass
    patch_model(model, {"0": "elu1"})
    with pytest.raises(PlanError, match=r"'\*\.1\.self_attn' is no patched module.*layers\.0"):  # noqa: SIM117
        with bypassed(model, ["*.1.self_attn"]):
            pass
    other = tiny_models.llama()
    other.config._attn_implementation_internal = "flex_attention"
    patch_model(other, "elu1")
    with pytest.raises(UnsupportedModelError, match="flex_attention"), bypassed(other):
        pass
