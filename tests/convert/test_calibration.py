"""Calibration of a delta state: what is chosen is the best that was tried, and conversions begin with it."""

import pytest
import torch
from helpers import tiny_models
from helpers.properties import model_of

from hf_linattn import patch_model
from hf_linattn.convert.calibration import calibrate
from hf_linattn.convert.resolve import with_learned_front
from hf_linattn.patching.contexts import bypassed
from hf_linattn.patching.interface import NAME

IDS = tiny_models.tokens(4, 60)


def delta_of(model, layer=0):
    return model.model.layers[layer].self_attn.linattn.delta


def error_of(model, ids):
    """Squared error of the first layer's attention over the square, before its output projection."""
    outputs = []
    projection = model.model.layers[0].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    with torch.no_grad():
        with bypassed(model):
            model(ids)
        model(ids)
    handle.remove()
    target, output = outputs
    return float((output - target).square().sum() / target.square().sum())


@pytest.mark.parametrize("options", [{}, {"decay": "none"}, {"decay": "channel"}, {"feature_map": "elu1"}])
@pytest.mark.parametrize("family", ["llama", "mqa, odd head_dim", "qwen3"])
def test_the_error_that_is_told_is_the_one_there_is(family, options):
    model = patch_model(model_of(family), "delta", options=options)
    before = error_of(model, IDS)
    errors = calibrate(model, IDS)
    assert list(errors) == [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert errors["model.layers.0.self_attn"] == pytest.approx(error_of(model, IDS), rel=1e-4)
    assert errors["model.layers.0.self_attn"] < min(before, 1)


def test_no_other_scale_or_gate_near_by_is_better():
    model = patch_model(model_of("llama"), "delta")
    least = calibrate(model, IDS)["model.layers.0.self_attn"]
    delta = delta_of(model)
    for parameter, change in (
        (delta.scale, 0.1),
        (delta.scale, -0.1),
        (delta.gate_bias, 3.0),
        (delta.gate_bias, -3.0),
    ):
        with torch.no_grad():
            parameter.add_(change)
            assert error_of(model, IDS) > least
            parameter.sub_(change)


def test_a_layer_can_stand_in_front_of_it():
    assert with_learned_front("window+delta") == ("window+delta", {"delta": {"front": True}})


def test_half_lives_that_were_asked_for_stay():
    model = patch_model(model_of("llama"), "delta", options={"half_life": 50.0, "shortest": 5.0})
    before = delta_of(model).gate_bias.detach().clone()
    calibrate(model, IDS)
    assert torch.equal(delta_of(model).gate_bias[:, 1], before[:, 1])
    assert not torch.equal(delta_of(model).gate_bias[:, 0], before[:, 0])


def test_in_a_hybrid_the_state_is_calibrated_alone():
    model = patch_model(model_of("llama"), "window+delta", options={"size": 8})
    assert len(calibrate(model, IDS)) == 2
    want = patch_model(model_of("llama"), "delta")
    calibrate(want, IDS)
    rest = model.model.layers[0].self_attn.linattn.window.rest
    assert torch.equal(rest.gate_bias, delta_of(want).gate_bias)
    assert torch.equal(rest.scale, delta_of(want).scale)


def test_the_model_computes_by_its_patch_afterwards_and_others_are_left_alone():
    model = patch_model(model_of("llama"), {"0": "delta", "1": "hedgehog"})
    own = {name: x.clone() for name, x in model.state_dict().items() if f"{NAME}.delta" not in name}
    assert list(calibrate(model, IDS)) == ["model.layers.0.self_attn"]
    assert all(torch.equal(model.state_dict()[name], x) for name, x in own.items())
    assert not model.model.layers[0].self_attn._forward_hooks
    with bypassed(model):
        unpatched = model(IDS).logits
    assert tiny_models.distance(model(IDS).logits, unpatched) > 1e-3
    assert calibrate(patch_model(model_of("llama"), "elu1"), IDS) == {}
