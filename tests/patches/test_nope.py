"""nope: the rotary embedding switched off, alone or beside log-n; the invariance suite has its oracle."""

import pytest
import torch
from helpers import tiny_models
from helpers.properties import check_forward, model_of

from hf_linattn import describe, patch_model, unpatch_model
from hf_linattn.errors import CacheError, OptionError
from hf_linattn.patches.nope import Nope
from hf_linattn.patching.discovery import find_sites


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def in_pieces(model, ids, sizes):
    """Logits of a text that comes in pieces, with a cache."""
    parts, cache = [], None
    for part in ids.split(sizes, 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    return torch.cat(parts, 1)


def test_distance_changes_no_score():
    """The last token of a layer without order sees its keys as a set."""
    model, ids = tiny_models.llama(1), tiny_models.tokens(1, 30)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([ids[:, order], ids[:, -1:]], 1)
    assert tiny_models.distance(model(ids).logits[:, -1], model(shuffled).logits[:, -1]) > 1e-3
    patch_model(model, "nope")
    assert tiny_models.distance(model(ids).logits[:, -1], model(shuffled).logits[:, -1]) < 1e-12


def test_the_oracle_notices_rope_that_stays(monkeypatch):
    check_forward("llama", "nope", (20,))
    monkeypatch.setattr(Nope, "rope", True)
    with pytest.raises(AssertionError):
        check_forward("llama", "nope", (20,))


def test_in_some_layers_beside_linear_ones():
    model, ids = tiny_models.llama(3), tiny_models.tokens(2, 25)
    before = model(ids).logits
    patch_model(model, {"0,2": "elu1", "1": ("nope+logn", {"train_length": 16})})
    assert [row.patch for row in describe(model)] == ["elu1", "nope+logn", "elu1"]
    assert [row.linear for row in describe(model)] == [True, False, True]
    want = model(ids).logits
    assert tiny_models.distance(in_pieces(model, ids, [11, 1, 13]), want) < 1e-9
    unpatch_model(model)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_a_model_without_rope_is_refused(cls):
    model = tiny_models.build(cls, num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=97)
    with pytest.raises(OptionError, match=r"'nope' switches the rotary embedding off, and .* is given none"):
        patch_model(model, "nope")


def test_sinks_that_are_turned_are_refused():
    model = tiny_models.llama(1)
    with pytest.raises(OptionError, match=r"'window' turns queries by .* Give positions='text'"):
        patch_model(model, "nope+window", options={"sinks": 2})
    patch_model(model, "nope+window", options={"sinks": 2, "positions": "text"})


@pytest.mark.parametrize("spec", ["nope", "nope+hedgehog", "nope+window+elu1"])
def test_a_cache_of_turned_keys_is_refused(spec):
    """The model's own keys carry their positions: nothing can take them away again."""
    plain, model, ids = tiny_models.llama(1), tiny_models.llama(1), tiny_models.tokens(2, 20)
    patch_model(model, spec)
    past = plain(ids[:, :9], use_cache=True).past_key_values
    with pytest.raises(CacheError, match=r"turned by a rotary embedding, .* start from a new cache"):
        model(ids[:, 9:], past_key_values=past)
    own = model(ids[:, :9], use_cache=True).past_key_values
    got = model(ids[:, 9:], past_key_values=own).logits
    assert tiny_models.distance(got, model(ids).logits[:, 9:]) < 1e-9


def test_layers_that_lose_their_window_too():
    model, ids = model_of("gemma3"), tiny_models.tokens(2, 40)
    patch_model(model, "nope", sliding="global")
    want = model(ids).logits
    assert tiny_models.distance(in_pieces(model, ids, [11, 1, 28]), want) < 1e-6


def test_sines_may_come_first():
    """As gptj's do, since transformers 5.24: without a rotary embedding, places change nothing."""
    model = model_of("gptj")
    if "position_embeddings" not in find_sites(model)[0].forward_info.parameters:
        pytest.skip("before transformers 5.24, gptj turns queries inside its attention")
    ids = tiny_models.tokens(1, 12)
    places = 3 * torch.arange(12)[None]
    patch_model(model, "nope")
    assert torch.equal(model(ids).logits, model(ids, position_ids=places).logits)
    unpatch_model(model)
    assert not torch.allclose(model(ids).logits, model(ids, position_ids=places).logits)
