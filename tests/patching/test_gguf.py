"""Models from GGUF files: patched, saved, loaded and unpatched; damaged files in one line."""

import copy

import numpy as np
import pytest
import torch
from helpers.tiny_models import llama, tokens
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.utils import GgufLinear

import hf_linattn
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.patching import gguf as marks

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
IDS = tokens(2, 20)
FILE = "tiny.gguf"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight, heads):
    """Rows of queries and keys in llama.cpp's order of rotary pairs."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(model, path, kind):
    """The model as a GGUF file, matrices in F32 or Q8_0."""
    config, quantised = model.config, getattr(gguf.GGMLQuantizationType, kind)
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_vocab_size(config.vocab_size)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_block_count(config.num_hidden_layers)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_key_length(config.head_dim)
    out.add_value_length(config.head_dim)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_freq_base(10000.0)
    for name, tensor in model.state_dict().items():
        x, place = tensor.numpy(), name.removesuffix(".weight")
        if place.startswith("model.layers."):
            _, _, layer, place = place.split(".", 3)
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": 2}.get(place)
            x = x if heads is None else interleaved(x, heads)
            place = f"blk.{layer}.{NAMES[place]}"
        else:
            place = NAMES[place]
        if x.ndim == 2:
            packed = gguf.quants.quantize(np.ascontiguousarray(x), quantised)
            out.add_tensor(f"{place}.weight", packed, raw_dtype=quantised)
        else:
            out.add_tensor(f"{place}.weight", x)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.fixture(scope="module", params=["F32", "Q8_0"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    write(llama(dtype=torch.float32), folder / FILE, request.param)
    return folder


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


def state(model):
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    attributes = [model.__dict__.get(name) for name in marks.MODEL_MARKS]
    return attributes, [[config.__dict__[name] for name in marks.CONFIG_MARKS] for config in configs], configs


@pytest.mark.parametrize("spec", ["elu1", "hedgehog", "softmax1+logn", "gated", "window+gated"])
def test_a_patched_model_saves_and_unpatching_brings_the_marks_back(folder, spec, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE)
    before, want = state(model), logits(model)
    patched = hf_linattn.patch_model(model, spec)
    other = copy.deepcopy(patched)
    patched.save_pretrained(tmp_path / "saved")
    loaded = hf_linattn.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(loaded), logits(patched))
    assert "quantization" not in (tmp_path / "saved" / "config.json").read_text()
    for each in (patched, other):
        hf_linattn.patch_model(each, "logn")  # a new patch in place of the old one
        assert not marks.is_marked(each)
        hf_linattn.unpatch_model(each)
        assert marks.is_marked(each)
        assert torch.equal(logits(each), want)
    assert state(model)[:2] == before[:2]
    assert all(now is then for now, then in zip(state(model)[2], before[2], strict=True))


def test_a_file_is_loaded_by_name_and_means_what_was_written(folder):
    model = hf_linattn.from_pretrained(folder, gguf_file=FILE)
    source = llama(dtype=torch.float32)
    near = 1e-6 if "F32" in folder.name else 0.5
    assert not hf_linattn.is_patched(model)
    assert (logits(model) - logits(source)).abs().max() < near


def test_packed_weights_are_not_saved(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE)
    kind = gguf.GGMLQuantizationType.Q8_0
    model.set_submodule("model.layers.0.mlp.up_proj", GgufLinear(32, 64, int(kind)))
    hf_linattn.patch_model(model, "elu1")
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight is still packed.*GgufConfig"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert marks.is_marked(hf_linattn.unpatch_model(model))


@pytest.mark.parametrize("kept", [3, 100, 1000, 5000, -200])
def test_a_file_cut_off_is_one_line(folder, kept, tmp_path):
    (tmp_path / FILE).write_bytes((folder / FILE).read_bytes()[:kept])
    with pytest.raises(CheckpointError, match="not a whole GGUF file") as caught:
        hf_linattn.from_pretrained(tmp_path, gguf_file=FILE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "error"), [("none.gguf", CheckpointError), ("", OptionError), (3, OptionError)]
)
def test_no_such_file(folder, file, error):
    with pytest.raises(error, match=r"gguf"):
        hf_linattn.from_pretrained(folder, gguf_file=file)


def test_without_the_package(folder, monkeypatch):
    monkeypatch.setattr("transformers.modeling_gguf_pytorch_utils.is_gguf_available", lambda: False)
    with pytest.raises(CheckpointError, match=r"needs the packages gguf and accelerate .*hf-linattn\[gguf\]"):
        hf_linattn.from_pretrained(folder, gguf_file=FILE)
