"""Gates and norms on the output of an attention: where they start, and what they refuse."""

import pytest
import torch
from helpers.properties import model_of
from helpers.tiny_models import build, distance, llama, tokens
from transformers import DynamicCache

from hf_linattn import patch_model, unpatch_model
from hf_linattn.errors import OptionError, UnsupportedCallError


@pytest.mark.parametrize("per", ["head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_open_gate_changes_nothing(per, dtype):
    for spec, without in (("output_gate", None), ("elu1+output_gate", "elu1")):
        model, ids = llama(dtype=torch.float32).to(dtype), tokens(2, 40)
        want = (patch_model(model, without) if without else model)(ids).logits
        got = patch_model(model, spec, options={"output_gate": {"per": per}})(ids).logits
        assert torch.equal(got, want) if without else distance(got.double(), want.double()) < 1e-10


def test_gates_of_an_encoder_and_decoder():
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    model = build("BartForConditionalGeneration", d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes)
    inputs = {"input_ids": tokens(2, 11), "decoder_input_ids": tokens(2, 7, 1)}
    want = model(**inputs).logits
    patch_model(model, "output_gate")
    assert distance(model(**inputs).logits, want) < 1e-10
    for name, parameter in model.named_parameters():
        if name.endswith("output_gate.weight"):
            torch.nn.init.normal_(parameter)
    assert distance(model(**inputs).logits, want) > 1e-3
    unpatch_model(model)
    assert torch.equal(model(**inputs).logits, want)


def test_a_norm_takes_away_the_size_of_values():
    model, ids = patch_model(llama(), "output_norm"), tokens(1, 30)
    want = model(ids).logits
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.data *= 1000
    assert distance(model(ids).logits, want) < 1e-3


def test_a_state_without_denominator_grows_and_its_norm_does_not():
    options = {"normalise": "none", "half_life": 1e6}
    for spec, grows in (("decay", True), ("decay+output_norm", False)):
        model, sizes = patch_model(llama(1), spec, options={"decay": options}), []
        attention = model.model.layers[0].self_attn
        attention.o_proj.register_forward_pre_hook(lambda _, args, sizes=sizes: sizes.append(args[0]))
        model(tokens(1, 300))
        early, late = sizes[0][0, 10].norm(), sizes[0][0, 290].norm()
        assert bool(late > 5 * early) == grows


def test_generation_reads_each_new_hidden_state():
    model, ids = patch_model(llama(), "output_gate"), tokens(1, 30)
    for module in model.modules():
        if "linattn" in module._modules:
            torch.nn.init.normal_(module.linattn.output_gate.weight)
    cache = DynamicCache()
    parts = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 21), (21, 30))]
    assert distance(torch.cat(parts, 1), model(ids).logits) < 1e-10


def test_bad_options():
    with pytest.raises(OptionError, match="eps must be a number above 0, got 0"):
        patch_model(llama(), "output_norm", options={"eps": 0.0})
    with pytest.raises(OptionError, match="per"):
        patch_model(llama(), "output_gate", options={"per": "token"})


def test_a_hidden_state_that_is_not_there(monkeypatch):
    model = patch_model(model_of("bert"), "output_gate")
    attention = model.bert.encoder.layer[0].attention.self
    attention.linattn.output_gate.width = 7
    with pytest.raises(UnsupportedCallError, match=r"reads the hidden state, \[rows, 9, 7\]"):
        model(tokens(1, 9))
