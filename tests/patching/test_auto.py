"""With the package imported, transformers' own ways to a model give what was saved; without it they stop."""

import pytest
import torch
from helpers import tiny_models
from helpers.fixtures_masked_lm import MASK, bert_config, save_tokenizer
from helpers.kinds import DECODERS, KINDS
from helpers.learned_patches import logits
from helpers.paths import BASE
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForMaskedLM,
    LlamaForCausalLM,
    pipeline,
)

from hf_linattn import describe, from_pretrained, is_patched, patch_model
from hf_linattn.errors import UnsupportedModelError

IDS = tiny_models.tokens(2, 20)
PATCHES = {"elu1": {}, "softmax1+logn": {"train_length": 32}, "window+hedgehog": {"size": 8}}


@pytest.fixture(scope="module", params=PATCHES)
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("patched")
    model = patch_model(tiny_models.llama(2), request.param, options=PATCHES[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder, model, logits(model, IDS)


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, LlamaForCausalLM], ids=lambda cls: cls.__name__)
def test_a_folder_loads_as_it_was_saved(saved, auto):
    folder, model, want = saved
    loaded = auto.from_pretrained(folder, dtype=model.dtype)
    assert type(loaded) is LlamaForCausalLM
    assert torch.equal(logits(loaded, IDS), want)
    assert str(describe(loaded)) == str(describe(from_pretrained(folder)))
    loaded, info = auto.from_pretrained(folder, output_loading_info=True)
    assert is_patched(loaded)
    assert not info["missing_keys"]


def test_a_bare_model_and_keywords_of_the_config_are_taken(saved):
    folder, model, _ = saved
    bare = AutoModel.from_pretrained(folder, dtype=model.dtype)
    assert is_patched(bare)
    want = model.model(IDS, use_cache=False).last_hidden_state
    assert torch.equal(bare(IDS, use_cache=False).last_hidden_state, want)
    assert AutoModelForCausalLM.from_pretrained(folder, rms_norm_eps=1e-3).config.rms_norm_eps == 1e-3
    config = AutoConfig.from_pretrained(folder)
    assert is_patched(LlamaForCausalLM.from_pretrained(folder, config=config))


def test_the_name_of_our_attention_is_no_other_attention(saved):
    folder, model, want = saved
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="linattn", dtype=model.dtype)
    assert torch.equal(logits(loaded, IDS), want)


def test_a_model_of_a_patched_config_is_patched(saved):
    _, model, _ = saved
    for config in (model.config, AutoConfig.from_pretrained(saved[0])):
        fresh = AutoModelForCausalLM.from_config(config)
        assert type(fresh) is LlamaForCausalLM
        assert fresh.state_dict().keys() == model.state_dict().keys()
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(logits(fresh.to(model.dtype), IDS), saved[2])
    assert is_patched(model), "the config it was made of is another's"


def test_ordinary_folders_and_configs_are_left_alone(tmp_path):
    plain = tiny_models.llama(1)
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=plain.dtype)
    assert not is_patched(loaded)
    assert torch.equal(logits(loaded, IDS), logits(plain, IDS))
    assert not is_patched(AutoModelForCausalLM.from_config(plain.config))
    with pytest.raises(OSError, match="nowhere"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_an_ordinary_folder_with_the_name_of_our_attention_is_refused(tmp_path):
    tiny_models.llama(1).save_pretrained(tmp_path)
    for auto in (AutoModelForCausalLM, LlamaForCausalLM):
        with pytest.raises(UnsupportedModelError, match=r"no patched model.*ref_model=copy"):
            auto.from_pretrained(tmp_path, attn_implementation="linattn")


@pytest.mark.parametrize("kind", DECODERS)
def test_a_pipeline_by_the_name_of_the_folder(kind, tmp_path):
    patch, options = KINDS[kind]
    model = patch_model(AutoModelForCausalLM.from_pretrained(BASE), patch, options=options)
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    made = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert is_patched(made.model)
    text = made("def main(", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    prompt = tokenizer("def main(", return_tensors="pt")
    want = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert text == tokenizer.decode(want[0], skip_special_tokens=True)


def test_a_pipeline_of_an_encoder(tmp_path):
    torch.manual_seed(0)
    model = patch_model(BertForMaskedLM(bert_config(initializer_range=0.2)).eval(), "hedgehog")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    made = pipeline("fill-mask", model=str(tmp_path), device="cpu")
    assert is_patched(made.model)
    batch = made.tokenizer("the c[MASK]t", return_tensors="pt")
    want = logits(model, batch["input_ids"])[batch["input_ids"] == MASK].softmax(-1)
    found = made("the c[MASK]t", top_k=3)
    assert [row["token"] for row in found] == want.topk(3).indices[0].tolist()
    assert [row["score"] for row in found] == pytest.approx(want.topk(3).values[0].tolist(), rel=1e-4)
