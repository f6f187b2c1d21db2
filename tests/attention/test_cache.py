"""The cache of a patched model: in pieces as in one forward, whatever was done to the cache in between."""

import copy
from itertools import pairwise

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.tiny_models import SIZES, build, distance, left_padded, llama, positions, tokens
from transformers import DynamicCache, StaticCache

import hf_linattn
from hf_linattn.attention import Tokens
from hf_linattn.attention.cache import StateLayer
from hf_linattn.errors import CacheError, UnsupportedMaskError
from hf_linattn.patching.cache_layers import put_state_layer

EXACT = 1e-9  # float64; norms of llama are in float32, which rounds most differences away
PATCHES = ["elu1", "softmax1", "logn", "softmax1+logn"]
every_patch = pytest.mark.parametrize("patch", PATCHES)


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def model():
    return hf_linattn.patch_model(llama(), "elu1")


def in_pieces(model, ids, cuts, cache=None, mask=None, **kwargs):
    """Logits of the tokens between the cuts, one call per piece, and the cache."""
    cache, outputs = DynamicCache(config=model.config) if cache is None else cache, []
    for start, end in pairwise(cuts):
        if mask is not None:
            kwargs = {"attention_mask": mask[:, :end], "position_ids": positions(mask)[:, start:end]}
        outputs.append(model(ids[:, start:end], past_key_values=cache, **kwargs).logits)
    return torch.cat(outputs, 1), cache


def full(model, ids, **kwargs):
    return model(ids, use_cache=False, **kwargs).logits


def state(cache):
    return torch.cat([x.flatten(1) for layer in cache.layers for x in layer.state], 1)


@pytest.mark.parametrize("spec", ["elu1", "hedgehog", "gated", "window+elu1", "efficient", "flow"])
def test_a_state_keeps_no_more_memory_than_it_has_bytes(spec):
    options = {"size": 8} if "window" in spec else {}
    model = hf_linattn.patch_model(llama(), spec, options=options)
    cache = DynamicCache(config=model.config)
    for count in (600, 1, 20):
        model(tokens(2, count), past_key_values=cache)
        for layer in cache.layers:
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in layer.state}
            assert sum(storages.values()) <= 1.5 * layer.nbytes + 64


@every_patch
@pytest.mark.parametrize("cuts", [range(101), (0, 7, 71, 72, 100)], ids=["single", "chunks"])
def test_pieces_equal_one_forward(patch, cuts):
    model = hf_linattn.patch_model(llama(), patch)
    ids = tokens(2, 100)
    got, cache = in_pieces(model, ids, cuts)
    assert distance(got, full(model, ids)) < EXACT
    assert cache.get_seq_length() == 100
    if patch == "elu1":
        assert [layer.nbytes for layer in cache.layers] == [
            2 * 2 * 8 * 9 * 8
        ] * 2  # rows, key heads, S and z, float64


@every_patch
@pytest.mark.parametrize("static", [False, True])
def test_padded_row_in_pieces_equals_the_row_alone(patch, static):
    model = hf_linattn.patch_model(llama(), patch)
    ids, mask = left_padded(tokens(2, 90), 33)
    cache = StaticCache(config=model.config, max_cache_len=96) if static else DynamicCache()
    got, _ = in_pieces(model, ids, (0, 20, 60, 61, 90), cache, mask)
    alone = full(model, ids[:1, 33:])
    assert distance(got[:1, 33:], alone) < EXACT
    assert distance(got[1:], full(model, ids[1:])) < EXACT
    assert distance(full(model, ids)[:1, 33:], alone) > 1e-3, "the mask left out would not be noticed"


def test_rows_do_not_see_each_other(model):
    ids = tokens(3, 50)
    got, _ = in_pieces(model, ids, (0, 30, 31, 50))
    other = ids.clone()
    other[1:] = tokens(2, 50, seed=9)
    again, _ = in_pieces(model, other, (0, 30, 31, 50))
    assert torch.equal(got[0], again[0])
    assert distance(got[:1], in_pieces(model, ids[:1], (0, 30, 31, 50))[0]) < EXACT


@pytest.mark.parametrize("hide", ["more", "less", "other"])
def test_changed_past_mask_is_refused(model, hide):
    ids, mask = left_padded(tokens(2, 41), 5)
    _, cache = in_pieces(model, ids, (0, 40), mask=mask)
    now = mask.clone()
    if hide == "more":
        now[1, 3] = 0
    elif hide == "less":
        now[0, 4] = 1
    else:
        now[0, 4], now[0, 5] = 1, 0
    with pytest.raises(UnsupportedMaskError, match="other past tokens"):
        model(ids[:, 40:], attention_mask=now, past_key_values=cache)


@pytest.mark.parametrize("padding", [0, 13])
def test_keys_of_the_unpatched_model_are_absorbed(padding):
    model = llama()
    ids, mask = left_padded(tokens(2, 70), padding)
    _, cache = in_pieces(model, ids, (0, 50), mask=mask)
    keys, values = cache.layers[1].keys.clone(), cache.layers[1].values.clone()
    with as_oracle(model, "elu1") as seen:
        want, _ = in_pieces(model, ids[:, 50:], (0, 20), copy.deepcopy(cache), None, **_from(mask, 50))
    assert seen.calls
    hf_linattn.patch_model(model, "elu1")
    first, _ = in_pieces(model, ids[:, 50:], (0, 8), cache, None, **_from(mask[:, :58], 50))
    assert distance(first, want[:, :8]) < EXACT
    rest, _ = in_pieces(model, ids, (58, 59, 70), cache, mask)
    assert distance(rest, want[:, 8:]) < EXACT
    # and the numbers themselves, had nothing new come: phi(k) v summed over the stored keys
    phi = torch.nn.functional.elu(keys) + 1
    stored = torch.einsum("bhsd,bhse,bs->bhde", phi, values, mask[:, :50].double())
    layer = StateLayer(pending=Tokens(None, keys, values, 1.0), seen=50)
    model.model.layers[1].self_attn.linattn.attention._absorb_pending(layer, mask[:, :50].bool())
    assert distance(layer.state.S, stored) < EXACT


def _from(mask, start):
    return {"attention_mask": mask, "position_ids": positions(mask)[:, start:]}


def test_state_given_to_an_unpatched_model_fails(model):
    ids = tokens(2, 30)
    _, cache = in_pieces(model, ids, (0, 20))
    hf_linattn.unpatch_model(model)
    with pytest.raises(CacheError, match="not patched"):
        model(ids[:, 20:], past_key_values=cache)


def test_state_given_to_an_unpatched_model_after_a_failed_call_fails(model):
    ids = tokens(2, 30)
    _, cache = in_pieces(model, ids, (0, 20))
    bad = torch.ones(2, 25, dtype=torch.long)
    bad[:, :9] = 0
    with pytest.raises(UnsupportedMaskError):
        model(ids[:, 20:25], attention_mask=bad, past_key_values=cache)
    hf_linattn.unpatch_model(model)
    with pytest.raises(CacheError, match="not patched"):
        model(ids[:, 20:], past_key_values=cache)


def test_caches_that_cannot_become_states_are_refused():
    model, ids = llama(), tokens(2, 30)
    static = StaticCache(config=model.config, max_cache_len=64)
    in_pieces(model, ids, (0, 20), static)
    slides = build("MistralForCausalLM", num_hidden_layers=2, **SIZES, sliding_window=16)
    _, dropped = in_pieces(slides, ids, (0, 20))
    hf_linattn.patch_model(model, "elu1")
    hf_linattn.patch_model(slides, "elu1", sliding="global")
    with pytest.raises(CacheError, match="StaticCache that already holds keys"):
        model(ids[:, 20:], past_key_values=static)
    with pytest.raises(CacheError, match="dropped keys"):
        slides(ids[:, 20:], past_key_values=dropped)

    class Quantized(type(DynamicCache(config=model.config).layers[0])):
        pass

    strange = DynamicCache(config=model.config)
    strange.layers[0] = Quantized()
    with pytest.raises(CacheError, match="Quantized"):
        model(ids, past_key_values=strange)


@pytest.mark.parametrize("padding", [0, 13])
def test_crop_is_as_if_the_tokens_had_never_come(model, padding):
    ids, mask = left_padded(tokens(2, 90), padding)
    cache, never = DynamicCache(), DynamicCache()
    in_pieces(model, ids, (0, 50), cache, mask)
    cache.activate_past_recording()
    in_pieces(model, ids, (50, 70, 90), cache, mask)
    cache.crop(-27)
    in_pieces(model, ids, (0, 63), never, mask)
    assert cache.get_seq_length() == 63
    got, want = (in_pieces(model, ids, (63, 64, 90), x, mask)[0] for x in (cache, never))
    assert distance(got, want) < EXACT
    assert distance(state(cache), state(never)) < EXACT
    cache.crop(0)  # accepts the tail: nothing is kept of it
    assert not cache.layers[0].tail
    with pytest.raises(CacheError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)


def test_crop_by_a_tensor_counts_in_whole_numbers(model):
    """As transformers before 5.20 does."""
    cache = DynamicCache()
    in_pieces(model, tokens(1, 20), (0, 8), cache)
    cache.activate_past_recording()
    in_pieces(model, tokens(1, 20), (8, 20), cache)
    for layer in cache.layers:
        layer.crop(torch.tensor(-5))
    assert type(cache.get_seq_length()) is int
    assert cache.get_seq_length() == 15


def test_crop_of_a_first_call_and_of_everything(model):
    ids = tokens(1, 40)
    cache = DynamicCache(config=model.config)
    for layer in range(2):
        put_state_layer(cache, layer, "here", "elu1")
    cache.activate_past_recording()
    in_pieces(model, ids, (0, 30), cache)
    cache.crop(-30)
    got, _ = in_pieces(model, ids, (0, 40), cache)
    assert distance(got, full(model, ids)) < EXACT


def test_crop_without_recording_is_refused_and_a_crop_that_does_nothing_noticed(model, monkeypatch):
    ids = tokens(1, 40)
    _, cache = in_pieces(model, ids, (0, 30))
    with pytest.raises(CacheError, match="activate_past_recording"):
        cache.crop(-3)
    cache.activate_past_recording()
    in_pieces(model, ids, (30, 40), cache)
    want = in_pieces(model, ids, (0, 35, 36))[0][:, -1]
    monkeypatch.setattr(StateLayer, "crop", lambda self, count: None)
    cache.crop(-5)
    got = in_pieces(model, ids, (35, 36), cache, None, position_ids=torch.tensor([[35]]))[0][:, -1]
    assert distance(got, want) > 1e-3


def test_a_cache_that_a_refused_crop_has_cropped_in_part_is_not_continued():
    ids = tokens(1, 40)
    model = hf_linattn.patch_model(llama(3), {"1": "softmax", "0,2": "elu1"})
    cache = in_pieces(model, ids, (0, 30))[1]
    with pytest.raises(CacheError, match="activate_past_recording"):
        cache.layers[0].crop(-3)
    assert distance(in_pieces(model, ids, (30, 35), cache)[0], full(model, ids)[:, 30:35]) < EXACT
    model = hf_linattn.patch_model(llama(3), {"0": "softmax", "1,2": "elu1"})
    cache = in_pieces(model, ids, (0, 30))[1]
    with pytest.raises(CacheError, match="activate_past_recording"):
        cache.crop(-3)
    with pytest.raises(CacheError, match=r"LlamaAttention 1: crop\(\) has taken tokens from layers in front"):
        in_pieces(model, ids, (30, 35), copy.deepcopy(cache))
    cache.reset()
    assert distance(in_pieces(model, ids, (0, 40), cache)[0], full(model, ids)) < EXACT


@pytest.mark.parametrize("static", [False, True])
def test_reset(model, static):
    ids = tokens(2, 90)
    cache = (
        StaticCache(config=model.config, max_cache_len=64) if static else DynamicCache(config=model.config)
    )
    in_pieces(model, ids, (0, 40), cache)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    got, _ = in_pieces(model, ids[:, 50:], (0, 30, 31, 40), cache)
    assert distance(got, full(model, ids[:, 50:])) < EXACT


def test_rows_repeated_selected_and_reordered(model):
    ids, mask = left_padded(tokens(2, 60), 7)
    _, cache = in_pieces(model, ids, (0, 40), mask=mask)
    other = copy.deepcopy(cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2, 1]))
    other.reorder_cache(torch.tensor([1, 0]))
    want, _ = in_pieces(model, ids, (0, 40, 60), mask=mask)
    for swapped in (cache, other):
        got, _ = in_pieces(model, ids.flip(0), (40, 60), swapped, mask.flip(0))
        assert distance(got, want[:, 40:].flip(0)) < EXACT


def test_copy_of_a_cache_is_independent(model):
    ids = tokens(2, 60)
    _, cache = in_pieces(model, ids, (0, 40))
    twin = copy.deepcopy(cache)
    in_pieces(model, tokens(2, 60, seed=5), (40, 50), cache)
    got, _ = in_pieces(model, ids, (40, 60), twin)
    assert distance(got, full(model, ids)[:, 40:]) < EXACT


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.35)])
def test_single_steps_in_low_precision_against_float64(dtype, tolerance):
    """Logits have a standard deviation of 1.1; the bound of bfloat16 is that of its plain softmax model."""
    ids = tokens(2, 200)
    exact = full(hf_linattn.patch_model(llama(), "elu1"), ids)
    model = hf_linattn.patch_model(llama(dtype=dtype), "elu1")
    got, cache = in_pieces(model, ids, range(201))
    assert got.dtype == dtype
    assert cache.layers[0].state.S.dtype == torch.float32
    assert distance(got, exact) < tolerance
