"""The forms of log-n scaling that models ship with: each is what that family's own code does to queries."""

import copy

import pytest
import torch
from helpers.family_models import causal_model
from helpers.tiny_models import distance, llama
from transformers import AttentionInterface, InklingForCausalLM, InklingTextConfig

from hf_linattn import patch_model
from hf_linattn.errors import OptionError
from hf_linattn.patches.logn import Logn
from hf_linattn.patching.discovery import find_sites

LENGTH, TRAINED = 70, 16


def queries_of(model, **changes):
    """The queries of every attention call of a copy of the model with other settings, by module name."""
    model, queries = copy.deepcopy(model), {}
    names = {module: name for name, module in model.named_modules()}

    def note(module, query, key, value, mask, **kwargs):
        queries[names[module]] = query
        return torch.zeros_like(query[..., : value.shape[-1]]).transpose(1, 2), None

    AttentionInterface.register("noting_queries", note)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = "noting_queries"
        for name, value in changes.items():
            for owner in (module, getattr(module, "config", None)):
                if hasattr(owner, name):
                    setattr(owner, name, value)
    with torch.no_grad():
        model(torch.arange(1, LENGTH + 1)[None] % 50, use_cache=False)
    return queries


def inkling():
    config = InklingTextConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["full_attention"] * 2,
        mlp_layer_types=["dense"] * 2,
    )
    return InklingForCausalLM(config).eval()


SHIPPED = {
    "llama4": (
        "llama4_text",
        {"attn_temperature_tuning": True, "floor_scale": TRAINED, "attn_scale": 0.3, "use_rope": False},
        {"attn_temperature_tuning": False, "use_rope": False},
    ),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": TRAINED}},
        {"rope_parameters": {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": TRAINED}},
    ),
    "inkling": (
        "inkling",
        {"log_scaling_n_floor": TRAINED, "log_scaling_alpha": 0.3, "is_sliding": False},
        {"log_scaling_n_floor": None, "is_sliding": False},
    ),
}


@pytest.mark.parametrize("form", SHIPPED)
def test_a_form_is_what_its_family_does(form):
    family, scaled, plain = SHIPPED[form]
    model = inkling() if form == "inkling" else causal_model(family)
    first = min(queries_of(model, **plain))  # behind it, hidden states differ
    got, want = queries_of(model, **scaled)[first], queries_of(model, **plain)[first]
    logn = Logn(find_sites(llama(1))[0], form=form, train_length=TRAINED, slope=0.3)
    factor = logn.query_scale(torch.arange(1.0, LENGTH + 1, dtype=want.dtype)[None, None])[0, 0]
    assert distance(got, want * factor[:, None]) < 1e-5
    assert float(factor.max()) > 1.3
    assert float(factor[: TRAINED - 1].max()) == 1


@pytest.mark.parametrize("options", [*({"form": form} for form in SHIPPED), {"clip": True}], ids=str)
def test_nothing_changes_inside_the_training_length(options):
    model, tokens = llama(), torch.arange(LENGTH)[None] % 50

    def trained():
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters())]

    want = trained()
    patch_model(model, "logn", options={"train_length": 1000, **options})
    assert all(map(torch.equal, trained(), want))


@pytest.mark.parametrize(
    "options",
    [
        {"form": "affine"},
        {"form": "llama4", "slope": 0.0},
        {"form": "inkling", "slope": float("inf")},
        {"form": "sqrt", "slope": 0.1},
        {"slope": 0.1},
        {"form": "llama4", "kappa": "learned"},
        {"form": "sqrt", "clip": True},
    ],
)
def test_options_that_do_not_fit(options):
    with pytest.raises(OptionError, match=r"slope must be|belong to form='log'|inkling"):
        patch_model(llama(), "logn", options=options)
