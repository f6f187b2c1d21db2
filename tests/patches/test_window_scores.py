"""Windows in models that do more to their scores: sinks of their own (gpt-oss), a cap (Gemma 2)."""

import pytest
import torch
from helpers import tiny_models
from helpers.family_checks import in_chunks
from helpers.family_models import causal_model, token_batch
from helpers.oracle import as_oracle
from helpers.properties import learned

from hf_linattn import patch_model, unpatch_model
from hf_linattn.patches.window.rotary import rotary_of
from hf_linattn.patching.discovery import find_sites

CASES = {
    "window": {"size": 16},
    "window+elu1": {"size": 16, "sinks": 3, "positions": "text"},
    "window+gated": {"size": 16, "sinks": 3, "positions": "text"},
    "window+hedgehog": {"size": 16, "mix": "learned"},
    "window+delta": {"size": 16},
}


def gpt_oss():
    model = causal_model("gpt_oss")
    for site in find_sites(model):
        torch.nn.init.uniform_(site.module.sinks, 1, 4)
    return model


def gemma2(cap=1.5):
    model = causal_model("gemma2")
    for site in find_sites(model):
        site.module.attn_logit_softcapping = cap
    return model


def batch():
    return {**token_batch(), "use_cache": False}


def plain(model):
    """Take from the scores again what the model does to them."""
    for site in find_sites(model):
        if hasattr(site.module, "sinks"):
            site.module.sinks.fill_(-100)
        else:
            site.module.attn_logit_softcapping = 1e6


@pytest.mark.parametrize("spec", CASES)
@pytest.mark.parametrize("make", [gpt_oss, gemma2])
def test_windows_do_it_too(make, spec):
    model, inputs, options = make(), batch(), CASES[spec]
    live = inputs["attention_mask"].bool()
    with torch.no_grad():
        base = model(**inputs).logits
        patch_model(model, spec, options=options, sliding="global")
        got, weights = model(**inputs).logits, learned(model)
        chunks = in_chunks(model, inputs, (0, 30, 31, 32, 60, 70))
        unpatch_model(model)
        with as_oracle(model, spec, learned=weights, windows=False, **options):
            want = model(**inputs).logits
        plain(model)
        with as_oracle(model, spec, learned=weights, windows=False, **options):
            without = model(**inputs).logits
    assert tiny_models.distance(got[live], want[live]) < 1e-6
    assert tiny_models.distance(chunks[live], want[live]) < 1e-6
    assert tiny_models.distance(want[live], without[live]) > 1e-2
    finite = base[live].isfinite()  # eager attention makes NaN of padded rows
    assert tiny_models.distance(want[live][finite], base[live][finite]) > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("spec", ["window", "window+elu1", "window+gated", "window+delta"])
@pytest.mark.parametrize("make", [gpt_oss, gemma2])
def test_padded_rows_are_rows_alone(make, spec, size, side):
    """Of texts that stay inside the window, and of longer ones."""
    model, ids = make(), tiny_models.tokens(2, 20)
    patch_model(model, spec, options={"size": size}, sliding="global")
    mask = torch.ones_like(ids)
    mask[0, -7:] = 0
    if side == "left":
        mask = mask.flip(1)
    places = mask.cumsum(1) - 1
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got = model(input_ids=ids, attention_mask=mask, position_ids=places.clamp(min=0), use_cache=False)
            for row in range(2):
                live = mask[row].bool()
                want = model(input_ids=ids[row, live][None], use_cache=False).logits[0]
                assert tiny_models.distance(got.logits[row, live], want) < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_they_learn(dtype):
    """In float32 by the kernels in C++, where there is a library."""
    model, inputs, options = gpt_oss().to(dtype), batch(), CASES["window+elu1"]
    patch_model(model, "window+elu1", options=options, sliding="global")
    model(**inputs).logits[inputs["attention_mask"].bool()].square().mean().backward()
    got = [site.module.sinks.grad for site in find_sites(model)]
    model.zero_grad()
    unpatch_model(model)
    with as_oracle(model, "window+elu1", windows=False, **options):
        model(**inputs).logits[inputs["attention_mask"].bool()].square().mean().backward()
    for gradient, site in zip(got, find_sites(model), strict=True):
        assert gradient.abs().max() > 1e-6
        assert tiny_models.distance(gradient, site.module.sinks.grad) < 1e-4 * gradient.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [gpt_oss, gemma2])
def test_tokens_one_by_one_equal_the_whole_in_narrow_types(make, dtype):
    """With sinks at positions inside the cache, whose angles gpt-oss gives by halves."""
    model, ids = make().to(dtype), token_batch()["input_ids"]
    patch_model(model, "window+gated", options={"size": 12, "sinks": 3}, sliding="global")
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        got = in_chunks(model, inputs, (0, *range(20, 31)))
    error = tiny_models.distance(got.float(), whole[:, :30].float())
    assert error < (1e-4 if dtype == torch.float32 else 0.1)


def test_angles_of_one_half_turn_the_whole():
    site = find_sites(gpt_oss())[0]
    rotary, query = rotary_of(site, "auto"), torch.randn(1, 4, 1, site.head_dim, dtype=torch.float64)
    places = torch.arange(1, 4)[:, None]
    there = [rotary.back(query, -at[None]) for at in places]  # forward
    assert tiny_models.distance(rotary.back(there[2], torch.tensor([[1]])), there[1]) < 1e-6
    assert tiny_models.distance(there[2], there[1]) > 0.1


def test_layers_share_the_angles_of_a_long_prompt():
    """Kernels in C++ take a table of them, which the first layer makes."""
    rotaries = [rotary_of(site, "auto") for site in find_sites(gpt_oss().float())]
    query, steps = torch.randn(1, 4, 9, rotaries[0].width), torch.arange(9)[None]
    first, second = (rotary.turns(query, steps) for rotary in rotaries)
    assert first is not None
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
