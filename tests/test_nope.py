"""nope: the rotary embedding switched off, alone or beside log-n; the invariance suite has its oracle."""

import pytest
import tiny
import torch
from properties import check_forward

from hf_linattn import describe, patch_model, unpatch_model
from hf_linattn.errors import OptionError
from hf_linattn.patches.nope import Nope


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def test_distance_changes_no_score():
    """The last token of a layer without order sees its keys as a set."""
    model, ids = tiny.llama(1), tiny.tokens(1, 30)
    order = torch.randperm(29, generator=torch.Generator().manual_seed(0))
    shuffled = torch.cat([ids[:, order], ids[:, -1:]], 1)
    assert tiny.distance(model(ids).logits[:, -1], model(shuffled).logits[:, -1]) > 1e-3
    patch_model(model, "nope")
    assert tiny.distance(model(ids).logits[:, -1], model(shuffled).logits[:, -1]) < 1e-12


def test_the_oracle_notices_rope_that_stays(monkeypatch):
    check_forward("llama", "nope", (20,))
    monkeypatch.setattr(Nope, "rope", True)
    with pytest.raises(AssertionError):
        check_forward("llama", "nope", (20,))


def test_in_some_layers_beside_linear_ones():
    model, ids = tiny.llama(3), tiny.tokens(2, 25)
    before = model(ids).logits
    patch_model(model, {"0,2": "elu1", "1": ("nope+logn", {"train_length": 16})})
    assert [row.patch for row in describe(model)] == ["elu1", "nope+logn", "elu1"]
    assert [row.linear for row in describe(model)] == [True, False, True]
    want = model(ids).logits
    parts, cache = [], None
    for part in ids.split([11, 1, 13], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert tiny.distance(torch.cat(parts, 1), want) < 1e-9
    unpatch_model(model)
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_a_model_without_rope_is_refused(cls):
    model = tiny.build(cls, num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=97)
    with pytest.raises(OptionError, match=r"'nope' switches the rotary embedding off, and .* is given none"):
        patch_model(model, "nope")


@pytest.mark.parametrize("other", ["elu1", "window"])
def test_attentions_without_scores_are_refused(other):
    with pytest.raises(OptionError, match=f"'nope' changes the scores .* '{other}' has none"):
        patch_model(tiny.llama(1), f"{other}+nope")
