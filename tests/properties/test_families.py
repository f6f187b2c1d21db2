"""A fast part of docs/families.md, the models that are not causal language models, and every kind of refusal.

All types: `python tests/families.py`.
"""

import pytest
import torch
import transformers
from helpers import family_checks, family_configs, family_models
from helpers.family_checks import check, check_causal
from helpers.family_configs import TINY, WINDOWS, fields
from helpers.family_models import build, token_batch

from hf_linattn import LinattnError, patch_model
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patches.elu1 import Elu1

CAUSAL = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma3_text",
    "gemma4_text",
    "phi3",
    "olmo2",
    "mixtral",
    "deepseek_v3",
    "gpt2",
    "gpt_neox",
    "opt",
    "biogpt",
    "cohere2",
    "granite",
    "stablelm",
    "starcoder2",
    "llama4_text",
    "bart",
    "bert",
    "whisper",
    "ctrl",
    "glm4",
    "modernbert-decoder",
    "lfm2",
    "mllama",
    "falcon",
    "gptj",
    "codegen",
    "gpt_neo",
    "roformer",
]
GENERATOR = torch.Generator().manual_seed(0)
DECODER = {"decoder_input_ids": torch.randint(3, 120, (2, 20), generator=GENERATOR)}
PIXELS = {"pixel_values": torch.randn(2, 3, 32, 32, generator=GENERATOR)}
SOUND = {"input_features": torch.randn(2, 80, 40, generator=GENERATOR)}
OTHERS = {
    "BertModel": {},
    "RobertaModel": {},
    "DistilBertModel": {},
    "ElectraModel": {},
    "ModernBertModel": {},
    "ViTModel": PIXELS,
    "BartModel": DECODER,
    "MarianModel": DECODER,
    "PegasusModel": DECODER,
    "T5Model": DECODER,
    "WhisperModel": {**SOUND, **DECODER},
    "LlavaForConditionalGeneration": {},
    "Qwen2VLForConditionalGeneration": {},
}


def other_batch(name):
    batch = dict(OTHERS[name])
    if not batch or name in ("BartModel", "MarianModel", "PegasusModel", "T5Model"):
        batch.update(token_batch())
        batch["attention_mask"][1, 60:] = 0
    return batch


def other_config(cls):
    if cls.sub_configs:
        text = {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        if "Qwen" in cls.__name__:
            text["rope_parameters"]["mrope_section"] = [1, 1, 2]
        return family_configs.nested(cls, text_config=text)
    sizes = {name: value for name, value in TINY.items() if name not in ("is_decoder", *WINDOWS)}
    sizes = {**sizes, "image_size": 32, "patch_size": 8, "local_attention": 16, "max_source_positions": 20}
    names = {*fields(cls), *cls.attribute_map}
    return cls(**{name: value for name, value in sizes.items() if name in names})


def problems(result):
    return f"{result.status} {result.reason} {result.patches} {result.cache}"


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_types_equal_the_oracle(name):
    result = check_causal(name)
    assert result.status == "right", problems(result)
    assert set(result.patches) >= set(family_checks.PATCHES) - {family_checks.HYBRID}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_equal_the_oracle(name):
    cls = getattr(transformers, name)
    model = build(name, cls, cls.config_class, other_batch(name), [other_config])
    result = check(name, model, other_batch(name), cached=False)
    if name == "T5Model":
        assert all("position_bias" in result.patches.pop(patch) for patch in family_checks.LINEAR)
        result.status = {"refused": "right"}.get(result.status, result.status)
    assert result.status == "right", problems(result)


def test_a_wrong_feature_map_is_noticed(monkeypatch):
    monkeypatch.setattr(Elu1, "fused", "none")  # the kernels' own map is not this one
    monkeypatch.setattr(Elu1, "query_map", lambda self, x: torch.nn.functional.elu(x) + 1.01)
    monkeypatch.setattr(Elu1, "feature_map", lambda self, x: torch.nn.functional.elu(x) + 1.01)
    for name in ("llama", "gpt2", "mistral", "deepseek_v3", "gpt_neox", "bart"):
        result = check_causal(name, ("elu1",), cached=False)
        assert result.status == "wrong", name
        assert "elu1 differs" in result.reason


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gemma2", "caps its scores"),
        ("vaultgemma", "caps its scores"),
        ("gpt_oss", "attention sinks"),
        ("diffllama", "combines 2 attentions"),
        ("deepseek_v32", "an indexer selects"),
        ("qwen4_exp_text", "a mask of its own"),
        ("doge", "a mask of its own"),
        ("gemma3n_text", "shares keys and values"),
        ("inkling_text", "position bias"),
        ("bloom", "position bias"),
        ("mpt", "position bias"),
    ],
)
def test_what_elu1_cannot_express_is_refused_at_once_and_softmax_patches_are_right(name, what):
    result = check_causal(name)
    assert result.status == "refused", problems(result)
    assert what in result.patches["elu1"]
    assert not result.patches["elu1"].startswith("at the first call")
    assert all(isinstance(result.patches[patch], float) for patch in ("softmax1", "logn"))


def test_indexers_choose_keys_in_layers_that_keep_their_attention():
    model = family_models.causal_model("deepseek_v32")
    batch = {**token_batch(), "use_cache": False}
    live = batch["attention_mask"].bool()
    with torch.no_grad():
        base = model(**batch).logits[live]
        patch_model(model, {0: "softmax1"})
        patched = model(**batch).logits[live]
        model.model.layers[0].self_attn.linattn.get_submodule("softmax1").sink_logit = lambda query: None
        again = model(**batch).logits[live]  # softmax in the one layer, the model's own in the other
    assert family_checks.relative(patched, base) > 1e-3
    assert family_checks.relative(again, base) < 1e-6


@pytest.mark.parametrize(
    ("name", "classes"),
    [("prophetnet", "one stream of queries"), ("reformer", "LSHSelfAttention.*by hashing")],
)
def test_types_that_do_not_route_are_refused_by_name(name, classes):
    with pytest.raises(UnsupportedModelError, match=f"attention interface.*{classes}"):
        patch_model(family_models.causal_model(name), "elu1")


def test_types_without_attention_are_refused():
    with pytest.raises(LinattnError, match="it has none"):
        patch_model(family_models.causal_model("mamba2"), "softmax1")


def test_attention_by_torchs_function_of_many_heads_is_named():
    cls = transformers.WavLMModel
    with torch.device("meta"), pytest.raises(UnsupportedModelError, match=r"knows WavLMAttention \(2\)"):
        patch_model(cls(cls.config_class(num_hidden_layers=2)), "elu1")
