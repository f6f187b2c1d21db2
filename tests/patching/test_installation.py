"""An installation takes back what it did: after a failure on the way, and to the last attribute."""

import copy

import pytest
import torch
from helpers import tiny_models
from helpers.learned_patches import logits, state
from torch import nn

from hf_linattn import is_patched, patch_model, unpatch_model
from hf_linattn.patching.config import OwnConfigs
from hf_linattn.patching.installation import INSTALLATION, Installation, installation_of

IDS = tiny_models.tokens(2, 40)


class Stopped(KeyboardInterrupt):
    """Ctrl-C while a model is being patched."""


def stop_at(monkeypatch, cls, method, count):
    """Let a method of a class raise in place of its `count`-th call."""
    original, calls = getattr(cls, method), []

    def stopped(*args, **kwargs):
        calls.append(method)
        if len(calls) == count:
            raise Stopped
        return original(*args, **kwargs)

    monkeypatch.setattr(cls, method, stopped)


@pytest.mark.parametrize(
    ("cls", "method", "count"),
    [
        (OwnConfigs, "use_copies", 1),
        (nn.Module, "add_module", 4),
        (nn.Module, "register_forward_pre_hook", 1),
        (nn.Module, "register_forward_pre_hook", 2),
        (Installation, "keep_native", 1),
        (Installation, "prepare_caches", 1),
        (Installation, "refuse_saving", 1),
    ],
)
def test_what_was_begun_is_taken_back(cls, method, count, monkeypatch):
    model = tiny_models.llama(3)
    config, before, want = model.config, state(model), logits(model, IDS)
    stop_at(monkeypatch, cls, method, count)
    with pytest.raises(Stopped):
        patch_model(model, {"0,2": "elu1"})
    monkeypatch.undo()
    assert not is_patched(model)
    assert model.config is config
    assert state(model) == before
    assert torch.equal(logits(model, IDS), want)
    patch_model(model, "elu1")
    unpatch_model(model)
    assert state(model) == before


def test_a_step_that_fails_can_be_repeated():
    model = tiny_models.llama(2)
    before = state(model)
    patch_model(model, "elu1")

    def stopped():
        raise Stopped

    installation_of(model)._undo.append(stopped)
    with pytest.raises(Stopped):
        unpatch_model(model)
    assert is_patched(model)
    assert installation_of(model)._undo.pop() is stopped
    unpatch_model(model)
    assert state(model) == before


def test_a_method_of_the_users_own_comes_back():
    model = tiny_models.llama(2)
    model._prepare_cache_for_generation = print
    patch_model(model, "elu1")
    assert model._prepare_cache_for_generation is not print
    unpatch_model(model)
    assert model._prepare_cache_for_generation is print


def test_a_copy_has_an_installation_of_its_own():
    model = patch_model(tiny_models.llama(2), {0: "elu1"})
    twin = copy.deepcopy(model)
    mine, other = installation_of(model), installation_of(twin)
    assert mine is not other
    assert other.configs is not mine.configs
    assert other.options == mine.options
    unpatch_model(twin)
    assert INSTALLATION not in twin.__dict__
    assert is_patched(model)
    assert model.model.layers[0].self_attn._forward_pre_hooks
    assert not twin.model.layers[0].self_attn._forward_pre_hooks
