"""Layers in front of the first patch are not run again for an input that was there before."""

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from helpers import tiny_models
from helpers.multimodal import multimodal
from helpers.properties import FAMILIES, model_of

from hf_linattn import bypassed, describe, patch_model
from hf_linattn.patching.reuse import reusing_layers

ARRANGEMENTS = [(0, 1, 2, 3), (0, 1, 2), (0, 1), (1, 2, 3), (0, 1, 2), (), (0, 2, 3)]
"""Layers that are bypassed."""


@torch.no_grad()
def run(model, inputs, arrangements=ARRANGEMENTS, **keywords):
    """Logits of every arrangement and input, the inputs one after the other."""
    names, logits = [row.module for row in describe(model)], []
    for own in arrangements:
        chosen = [names[layer] for layer in own]
        with bypassed(model, chosen) if chosen else nullcontext():
            for ids in inputs:
                logits.append(model(input_ids=ids, use_cache=False, **keywords).logits)
    return logits


def counting(model):
    """Count the calls of attention modules."""
    calls = Counter()
    for number, row in enumerate(describe(model)):
        module = model.get_submodule(row.module)
        module.register_forward_hook(lambda *_, number=number: calls.update([number]))
    return calls


@pytest.mark.parametrize("family", list(FAMILIES))
def test_the_same_bits_whatever_the_family(family):
    model = model_of(family)
    layers = len(describe(model))
    arrangements = [tuple(range(layers)), (), *(tuple(range(n)) for n in range(1, layers))]
    patch_model(model, "elu1", sliding="global")
    inputs = [tiny_models.tokens(2, 30), tiny_models.tokens(1, 20, seed=1)]
    want = run(model, inputs, arrangements)
    with reusing_layers(model):
        got = run(model, inputs, arrangements)
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, run(model, inputs, arrangements), want))


@pytest.mark.parametrize("spec", ["elu1", "h2o", "softmax1+logn", "window+gated"])
def test_layers_in_front_run_once(spec):
    model = patch_model(tiny_models.llama(4), spec)
    inputs = [tiny_models.tokens(2, 30), tiny_models.tokens(1, 20, seed=1), tiny_models.tokens(1, 20, seed=2)]
    want = run(model, inputs)
    calls = counting(model)
    with reusing_layers(model):
        got = run(model, inputs)
    assert all(map(torch.equal, got, want))
    # once with their own attention for each input, and where a layer in front or they are patched; the
    # last one in all passes, and in the trial
    assert calls == {0: 3 * 3, 1: 3 * 4, 2: 3 * 5, 3: 3 * 7 + 1}


def test_masks_and_positions_tell_inputs_apart():
    model, ids = patch_model(tiny_models.llama(4), "elu1"), tiny_models.tokens(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cases = [
        {"attention_mask": mask},
        {},
        {"position_ids": torch.arange(30)[None] + 3},
        {"logits_to_keep": 5},
    ]
    want = [run(model, [ids], **case) for case in cases]
    with reusing_layers(model):
        got = [run(model, [ids], **case) for case in cases]
    for case, one in zip(want, got, strict=True):
        assert all(map(torch.equal, one, case))


def test_what_does_not_fit_into_memory_runs_again():
    model, inputs = (
        patch_model(tiny_models.llama(4), "elu1"),
        [tiny_models.tokens(1, 30, seed) for seed in (0, 1)],
    )
    want, calls = run(model, inputs), counting(model)
    with reusing_layers(model, memory=5 * 30 * 32 * 8):  # all four layers of the first, and one of the other
        got = run(model, inputs)
    assert all(map(torch.equal, got, want))
    assert calls[0] == 2 * 3
    assert calls[2] > 2 * 5


def test_gradients_caches_and_training_run_every_layer():
    model, ids = patch_model(tiny_models.llama(3), "elu1"), tiny_models.tokens(1, 30)
    calls = counting(model)
    with reusing_layers(model), bypassed(model):
        for _ in range(2):
            model(input_ids=ids, use_cache=False).logits.sum().backward()
            with torch.no_grad():
                model(input_ids=ids)
                model.train()
                model(input_ids=ids, use_cache=False)
                model.eval()
        assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0
        text = model.generate(ids, max_new_tokens=4, do_sample=False)
    with bypassed(model):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), text)
    assert calls[0] == calls[2] == 6 + 8


@torch.no_grad()
def test_what_is_inside_layers_is_given_as_always():
    model, ids = patch_model(tiny_models.llama(4), "elu1"), tiny_models.tokens(1, 30)
    names = [row.module for row in describe(model)]
    shown = {"use_cache": False, "output_hidden_states": True}
    with bypassed(model, names[:3]):
        want = model(ids, **shown).hidden_states
    with reusing_layers(model):
        for own in (names, names[:3], names[:3]):
            with bypassed(model, own):
                model(ids, use_cache=False)
                got = model(ids, **shown).hidden_states
        model.config.output_hidden_states = True
        with bypassed(model, names[:3]):
            by_config = model(ids, use_cache=False).hidden_states
    assert len(got) == len(by_config) == len(want) == 5
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, by_config, want))


def test_autocast_tells_inputs_apart():
    model, ids = patch_model(tiny_models.llama(4).float(), "elu1"), tiny_models.tokens(1, 30)
    want = {}
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            want[dtype] = run(model, [ids])
    with reusing_layers(model):
        run(model, [ids])
        for dtype in want:
            with torch.autocast("cpu", dtype):
                assert all(map(torch.equal, run(model, [ids]), want[dtype]))


@pytest.mark.parametrize("loses", ["gives other logits", "raises"])
def test_layers_that_pass_on_more_than_their_output_all_run(loses):
    model, inputs = patch_model(tiny_models.llama(4), "elu1"), [tiny_models.tokens(1, 30)]
    first, last = model.model.layers[0].mlp, model.model.layers[3].mlp
    left = {}
    first.register_forward_hook(lambda _, __, output: left.update(x=output))

    def use(_, __, output):
        return output + (left.pop("x") if loses == "raises" else left.pop("x", 0))

    last.register_forward_hook(use)
    want, calls = run(model, inputs), counting(model)
    with reusing_layers(model):
        got = run(model, inputs)
    assert all(map(torch.equal, got, want))
    assert calls[0] == calls[1] == len(ARRANGEMENTS)


def test_a_layer_that_runs_twice_stops_it():
    model, inputs = tiny_models.llama(4), [tiny_models.tokens(1, 30)]
    layers = model.model.layers
    layers[2].register_forward_pre_hook(
        lambda _, args, kwargs: ((layers[1](*args, **kwargs),), kwargs), with_kwargs=True
    )
    patch_model(model, "elu1")
    want, calls = run(model, inputs), counting(model)
    with reusing_layers(model):
        got = run(model, inputs)
    assert all(map(torch.equal, got, want))
    assert calls[1] == 2 * len(ARRANGEMENTS)


def test_the_model_is_left_as_it_was():
    model, ids = tiny_models.llama(3), tiny_models.tokens(1, 30)
    patch_model(model, "elu1")
    modules = [model.model, *model.model.layers]
    with pytest.raises(ValueError, match="input_ids"), reusing_layers(model):
        _ = all("forward" in vars(module) for module in modules) and model()
    assert not any("forward" in vars(module) for module in modules)
    own = vars(model.model)["forward"] = model.model.forward  # as accelerate wraps it
    with reusing_layers(model):
        run(model, [ids], [(0, 1, 2), (0,)])
    assert vars(model.model)["forward"] is own


def test_models_of_a_single_layer_have_none_to_leave_out():
    model, ids = patch_model(tiny_models.llama(1), "elu1"), tiny_models.tokens(1, 30)
    with reusing_layers(model), torch.no_grad():
        assert "forward" not in vars(model.model)
        assert model(ids, use_cache=False).logits.isfinite().all()


def test_layers_of_a_tower_run_as_always():
    model, inputs = multimodal("LlavaForConditionalGeneration")
    patch_model(model, "softmax1")
    names = [row.module for row in describe(model) if not row.tower]
    calls, logits = Counter(), []
    model.model.vision_tower.register_forward_hook(lambda *_: calls.update(["tower"]))
    model.get_submodule(names[0]).register_forward_hook(lambda *_: calls.update(["text"]))
    for reusing in (nullcontext(), reusing_layers(model)):
        with reusing, torch.no_grad():
            for bypass in (names, names[:1], names[:1]):
                with bypassed(model, bypass):
                    logits.append(model(**inputs, use_cache=False).logits)
    assert all(map(torch.equal, logits[:3], logits[3:]))
    assert calls["text"] == 3 + 1
    assert calls["tower"] == 3 + 3
