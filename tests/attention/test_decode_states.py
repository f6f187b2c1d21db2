"""States written over while decoding: where nobody wants the one before, and nowhere else."""

import copy

import pytest
import torch
from helpers import tiny_models

from hf_linattn import patch_model

WINDOW = {"size": 5, "sinks": 2}
PATCHES = {
    "elu1": {},
    "gated": {},
    "window": WINDOW,
    "window+elu1": WINDOW,
    "window+gated": WINDOW,
}


@pytest.fixture(params=PATCHES)
def model(request):
    patched = tiny_models.llama()
    patch_model(patched, request.param, options=PATCHES[request.param])
    return patched


def prefilled(model, ids, length=9):
    """A cache after so many tokens."""
    return model(ids[:, :length], use_cache=True).past_key_values


def decoded(model, ids, cache, places):
    """The logits of these tokens, one after another."""
    rows = [model(ids[:, n : n + 1], past_key_values=cache, use_cache=True).logits for n in places]
    return torch.cat(rows, 1)


def places(cache):
    """Where the states lie in memory; without the sinks, which are small, and marks."""
    states = [
        layer.state[:2] + layer.state[7:] if len(layer.state) > 6 else layer.state for layer in cache.layers
    ]
    return [x.data_ptr() for state in states for x in state]


def wanted(model, ids):
    return model(ids, use_cache=False).logits


@torch.no_grad()
def test_one_token_moves_nothing(model):
    ids = tiny_models.tokens(2, 24)
    cache = prefilled(model, ids)
    decoded(model, ids, cache, [9])
    before = places(cache)
    assert tiny_models.distance(decoded(model, ids, cache, range(10, 24)), wanted(model, ids)[:, 10:]) < 1e-10
    assert places(cache) == before


@torch.no_grad()
def test_pieces_of_any_size_follow_each_other(model):
    ids = tiny_models.tokens(2, 40)
    cache = prefilled(model, ids, 3)
    parts = [decoded(model, ids, cache, range(3, 16))]
    for first, last in ((16, 18), (18, 19), (19, 30)):
        parts.append(model(ids[:, first:last], past_key_values=cache, use_cache=True).logits)
    parts.append(decoded(model, ids, cache, range(30, 40)))
    assert tiny_models.distance(torch.cat(parts, 1), wanted(model, ids)[:, 3:]) < 1e-10


@torch.no_grad()
def test_copies_of_a_cache_go_their_own_ways(model):
    ids, other = tiny_models.tokens(2, 24), tiny_models.tokens(2, 24, seed=1)
    other[:, :12] = ids[:, :12]
    cache = prefilled(model, ids)
    decoded(model, ids, cache, range(9, 12))
    twin = copy.deepcopy(cache)
    for text, past in ((ids, cache), (other, twin)):
        got = decoded(model, text, past, range(12, 24))
        assert tiny_models.distance(got, wanted(model, text)[:, 12:]) < 1e-10


@torch.no_grad()
def test_what_is_taken_back_was_not_written_over(model):
    ids, other = tiny_models.tokens(2, 24), tiny_models.tokens(2, 24, seed=1)
    cache = prefilled(model, ids)
    cache.activate_past_recording()
    cache.crop(0)
    decoded(model, other, cache, range(9, 14))
    cache.crop(-5)
    assert tiny_models.distance(decoded(model, ids, cache, range(9, 24)), wanted(model, ids)[:, 9:]) < 1e-10


def test_gradients_go_through_states(model):
    ids = tiny_models.tokens(1, 12)
    layer = model.base_model.layers[0].self_attn.k_proj.weight
    got = decoded(model, ids, prefilled(model, ids), range(9, 12)).square().sum()
    want = wanted(model, ids)[:, 9:].square().sum()
    pairs = [torch.autograd.grad(loss, layer)[0] for loss in (got, want)]
    assert tiny_models.distance(*pairs) < 1e-9 * float(pairs[1].abs().max())


def test_states_of_inference_mode_serve_outside(model):
    ids = tiny_models.tokens(2, 16)
    with torch.inference_mode():
        cache = prefilled(model, ids)
    with torch.no_grad():
        got = decoded(model, ids, cache, range(9, 16))
        assert tiny_models.distance(got, wanted(model, ids)[:, 9:]) < 1e-10
