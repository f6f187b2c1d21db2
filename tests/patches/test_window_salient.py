"""Salient tokens beside a window: what is kept, that nothing moves it, and what is refused."""

from itertools import pairwise

import pytest
import torch
from helpers import bounded, exports, tiny_models
from helpers.holes import CUTS, HOLES, alone, rows, run
from helpers.oracle import as_oracle
from helpers.properties import close, learned, logits, model_of, oracle_of, patch
from transformers import DynamicCache

from hf_linattn import patch_model, unpatch_model, use_branches
from hf_linattn.errors import OptionError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patches.window import salient

OPTIONS = {"size": 6, "sinks": 2, "salient": 5, "positions": "text"}


def patched(spec="window+elu1", dtype=torch.float64, family="llama", **options):
    return patch_model(model_of(family, dtype), spec, options={"window": {**OPTIONS, **options}})


@torch.no_grad()
@pytest.mark.parametrize("spec", ["window+elu1", "window+hedgehog", "window+taylor2", "window+performer"])
def test_padding_inside_a_row_and_cuts_move_nothing(spec):
    model = patched(spec)
    want = alone(model, rows())
    for cuts in CUTS.values():
        close(run(model, rows(), cuts)[HOLES == 1], want, 1e-9)


@torch.no_grad()
def test_rows_with_holes_are_the_formula():
    model = patched(salient=3)
    got = run(model, rows(), CUTS["chunks"])
    unpatch_model(model)
    with as_oracle(model, "window+elu1", **{**OPTIONS, "salient": 3}):
        close(got[HOLES == 1], alone(model, rows()), 1e-6)


@torch.no_grad()
def test_long_texts_are_cut_into_segments():
    """Behind the first one; one of another size changes nothing."""
    model, ids = model_of("llama"), tiny_models.tokens(1, salient.SEGMENT + 70)
    with oracle_of(model, "window+hedgehog, salient"):
        want = logits(model, ids)
    patch(model, "window+hedgehog, salient")
    close(logits(model, ids), want, 1e-6)


def test_gradients_do_not_depend_on_segments(monkeypatch):
    model, ids = patched("window+hedgehog"), tiny_models.tokens(2, 90)

    def gradients():
        model.zero_grad()
        logits(model, ids).square().sum().backward()
        return {name: x.grad.clone() for name, x in model.named_parameters()}

    whole = gradients()
    monkeypatch.setattr(salient, "SEGMENT", 21)
    for name, found in gradients().items():
        close(found, whole[name], 1e-9)
        assert found.abs().sum() > 0, name


@torch.no_grad()
def test_room_for_all_tokens_is_softmax():
    model, ids = model_of("llama"), tiny_models.tokens(2, 120)
    want = model(ids).logits
    for count, same in ((120, True), (60, False)):
        patch_model(model, "window+elu1", options={"size": 8, "salient": count})
        assert (tiny_models.distance(model(ids).logits, want) < 1e-6) == same


@torch.no_grad()
def test_a_pair_that_the_state_contradicts_is_kept():
    """The same pair again and again is predicted; one with an odd value is not."""
    module = patched(sinks=0, size=4, salient=1).model.layers[0].self_attn.linattn.window
    key, value = (torch.randn(1, 2, 1, 8, dtype=torch.float64).expand(-1, -1, 60, -1).clone() for _ in "kv")
    key += 0.01 * torch.randn_like(key)
    value[:, :, 30] += 5
    query = torch.randn(1, 4, 60, 8, dtype=torch.float64)
    from hf_linattn.attention import Tokens

    state = module.causal(Tokens(query, key, value, 1.0), None)[1]
    assert torch.equal(state.kept_key[:, :, 0], key[:, :, 30])


def test_memory_is_flat_and_told():
    bounded.check_memory_is_flat_and_told(patched(dtype=torch.float32))


def test_rows_change_places_and_tokens_are_taken_back():
    bounded.check_rows_change_places_and_tokens_are_taken_back(patched())


@torch.no_grad()
def test_a_cache_of_the_unpatched_model_is_taken_in():
    model, ids, cache = model_of("llama"), tiny_models.tokens(2, 60), DynamicCache()
    model(ids[:, :50], past_key_values=cache)
    keys = [layer.keys.clone() for layer in cache.layers[:1]]
    patch_model(model, "window+elu1", options={"window": OPTIONS})
    model(ids[:, 50:], past_key_values=cache)
    own = DynamicCache()
    model(ids, past_key_values=own)
    assert torch.equal(keys[0][:, :, :2], cache.layers[0].state.sink_key)
    for mine, other in zip(own.layers[0].state, cache.layers[0].state, strict=True):
        close(mine, other, 1e-9)  # the first layer's keys are those of both


@torch.no_grad()
def test_branches():
    model, ids = patched(sinks=0), tiny_models.tokens(2, 70)
    found = {}
    for branches in ("both", "window", "rest", "linear", "none"):
        with use_branches(model, branches):
            found[branches] = logits(model, ids)
            cache = DynamicCache()
            parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in pairwise((0, 31, 32, 70))]
            close(torch.cat(parts, 1), found[branches], 1e-9)
    close(found["linear"], logits(patch_model(model, "elu1"), ids), 1e-9)
    assert tiny_models.distance(found["both"], found["window"]) > 1e-3


# tests/patches/test_h2o.py holds the tokens that are chosen to the same in every run
@pytest.mark.full
def test_static_caches_and_compiled_code():
    model = patch_model(tiny_models.llama(1), "window+elu1", options={"window": OPTIONS})
    bounded.check_static_caches_and_compiled_code(model)


def test_exporting_is_refused():
    with pytest.raises(UnsupportedCallError, match="export with salient=0"):
        exports.exported(exports.patched("window+elu1", salient=4))


@pytest.mark.parametrize(
    ("spec", "count", "message"),
    [
        ("window+elu1", -1, "salient must be at least 0 tokens, got -1"),
        ("window", 4, "salient=4 needs a linear attention"),
        ("window+gated", 4, "'gated' forgets"),
        ("window+delta", 4, "'delta' forgets"),
        ("window+decay", 4, "'decay' forgets"),
    ],
)
def test_what_is_refused(spec, count, message):
    model = model_of("llama")
    with pytest.raises(OptionError, match=message):
        patch_model(model, spec, options={"window": {"salient": count}})
    assert not learned(model)


@torch.no_grad()
def test_vmap_computes_texts_of_its_own():
    model = patched()
    texts = model.get_input_embeddings()(tiny_models.tokens(3, 40))[:, None]

    def outputs(x):
        return model(inputs_embeds=x, use_cache=False).logits

    close(torch.func.vmap(outputs)(texts), torch.stack([outputs(x) for x in texts]), 1e-12)


def test_encoders_are_refused():
    with pytest.raises(UnsupportedModelError, match="causal only: salient tokens"):
        patched(family="bert")
