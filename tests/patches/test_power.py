"""power: what stays is what it would be with the other tokens taken out, in every order of calls."""

import math
import threading

import pytest
import torch
import transformers
from helpers.properties import close, model_of
from helpers.tiny_models import build, left_padded, llama, tokens

from hf_linattn import patch_model, unpatch_model
from hf_linattn.errors import LinattnError, OptionError, UnsupportedCallError, UnsupportedModelError

PLAN = {0: ("power", {"keep": 0.6}), 1: ("power", {"tokens": 9})}


def bert():
    return model_of("bert").bert


def taken_out(model, ids, counts):
    """The last states `[1, kept, M]` of a model that runs its layers on what is left, and its places."""
    states, places = model.embeddings(input_ids=ids), torch.arange(ids.shape[1])
    for layer, count in zip(model.encoder.layer, counts, strict=True):
        weights = layer.attention.self(states)[1]
        received = weights.sum((0, 1, 2))
        received[0] = math.inf
        kept = received.argsort(descending=True)[: count(len(places))].sort().values
        states, places = layer(states)[:, kept], places[kept]
    return states, places


@torch.no_grad()
def test_what_stays_equals_the_model_without_the_others():
    model, ids = bert(), tokens(1, 30)
    model.set_attn_implementation("eager")
    want, places = taken_out(model, ids, [lambda n: math.ceil(0.6 * n), lambda n: 9])
    assert len(places) == 9
    got = patch_model(model, PLAN)(ids).last_hidden_state
    close(got[:, places], want, 1e-9)


@torch.no_grad()
def test_keeping_all_is_softmax():
    model = bert()
    ids, mask = left_padded(tokens(2, 30), 7)
    want = model(ids, attention_mask=mask).last_hidden_state
    got = patch_model(model, "power", options={"keep": 1.0})(ids, attention_mask=mask).last_hidden_state
    close(got[mask.bool()], want[mask.bool()], 1e-9)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradients_are_the_same_with_checkpointing():
    model, ids = patch_model(bert(), PLAN).train(), tokens(2, 30)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = []
    for on in (False, True):
        if on:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids).last_hidden_state[:, 0].sin().sum().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_threads_and_masks_used_twice_do_not_meet():
    model = patch_model(bert(), PLAN)
    texts = [tokens(1, 20 + 5 * seed, seed) for seed in range(4)]
    with torch.no_grad():
        alone = [model(ids).last_hidden_state for ids in texts]
        visible = torch.ones(1, 1, 25, 25, dtype=torch.bool)
        for seed in (1, 7, 1):  # one mask tensor of the caller's, three texts
            ids = tokens(1, 25, seed)
            want = model(ids).last_hidden_state
            close(model(ids, attention_mask=visible).last_hidden_state, want, 1e-9)
    wrong = []

    def work(number):
        with torch.no_grad():
            for _ in range(10):
                if not torch.equal(model(texts[number]).last_hidden_state, alone[number]):
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_schedule_is_saved_and_loaded(tmp_path):
    model, ids = patch_model(model_of("bert", torch.float32), PLAN), tokens(1, 30)
    want = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)(ids).logits, want)


def test_refusals():
    with pytest.raises(UnsupportedModelError, match="'power' is bidirectional only"):
        patch_model(llama(), "power")
    for options in ({"keep": 0.0}, {"keep": 1.5}, {"tokens": 0}):
        with pytest.raises(OptionError, match=r"keep must|tokens must"):
            patch_model(bert(), "power", options=options)
    model = patch_model(bert(), {1: "power"})
    with pytest.raises(UnsupportedCallError, match="give every layer from 0 on"):
        model(tokens(1, 10))
    unpatch_model(model)
    image = build(
        "ViTModel", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    with pytest.raises(LinattnError, match=r"power|layer cannot be told"):
        patch_model(image, "power")(torch.zeros(1, 3, 16, 16, dtype=torch.float64))
