"""A patched model saved and loaded: the same logits to the last bit, in every way that transformers loads."""

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers
from helpers import learned_patches, tiny_models
from helpers.kinds import KINDS, patched_model
from helpers.learned_patches import logits, patched_llama
from helpers.versions import OLD
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaModel,
)

from hf_linattn import describe, from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.errors import CheckpointError, NotPatchedError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
IDS = tiny_models.tokens(2, 70)
WEIGHT = "model.layers.1.self_attn.linattn.learned_map.map.weight"


@pytest.fixture(autouse=True)
def learned_map():
    with learned_patches.registered():
        yield


@pytest.fixture
def model():
    return patched_llama()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def read(folder):
    return json.loads((folder / "config.json").read_text())


def test_folder_is_plain_safetensors_and_an_entry(model, folder):
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    entry = read(folder)["linattn"]
    assert entry["format"] == 1
    assert entry["sliding"] == "keep"
    assert {group["patch"] for group in entry["patches"]} == {"softmax1+logn", "learned_map", "softmax"}
    assert WEIGHT in model.state_dict()


OFFLOAD = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
OFFLOAD |= {"model.layers.0": "disk", "model.layers.1": "disk", "model.layers.2": "cpu"}


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", "disk"])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_round_trip(model, tmp_path, shard, device_map):
    want = logits(model, IDS)
    model.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    assert (len(list((tmp_path / "saved").glob("*.safetensors"))) > 1) == (shard == "10KB")
    options = {"device_map": OFFLOAD, "offload_folder": tmp_path / "off"} if device_map == "disk" else {}
    loaded, info = from_pretrained(
        tmp_path / "saved", output_loading_info=True, **options or {"device_map": device_map}
    )
    assert type(loaded) is LlamaForCausalLM
    assert not any(info.values())
    assert torch.equal(logits(loaded, IDS), want)
    if device_map == "disk":
        assert loaded.model.layers[1].self_attn.linattn.learned_map.map.weight.is_meta
    else:
        loaded.get_parameter(WEIGHT).data.add_(1)
        assert not torch.equal(logits(loaded, IDS), want)  # the weight is in use


def test_bfloat16(model, folder):
    for parameter in model.parameters():  # from_pretrained leaves rotary buffers in float32
        parameter.data = parameter.data.bfloat16()
    loaded = from_pretrained(folder, dtype=torch.bfloat16)
    assert loaded.get_parameter(WEIGHT).dtype == torch.bfloat16
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def test_saved_again_and_unpatched_after_loading(folder, tmp_path):
    loaded = from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "again")
    assert read(tmp_path / "again") == read(folder)
    assert torch.equal(logits(from_pretrained(tmp_path / "again"), IDS), logits(loaded, IDS))
    plain = tiny_models.llama(3, dtype=torch.float32)
    assert torch.equal(logits(unpatch_model(loaded), IDS), logits(plain, IDS))
    loaded.save_pretrained(tmp_path / "unpatched")
    plain.save_pretrained(tmp_path / "plain")
    assert read(tmp_path / "unpatched") == read(tmp_path / "plain")
    for load in (AutoModelForCausalLM.from_pretrained, from_pretrained):
        assert torch.equal(logits(load(tmp_path / "unpatched"), IDS), logits(plain, IDS))
    assert not is_patched(from_pretrained(tmp_path / "plain"))


def test_other_classes(model, folder):
    want = logits(model, IDS)
    for auto_class in (LlamaModel, AutoModel):
        base = from_pretrained(folder, auto_class=auto_class)
        assert type(base) is LlamaModel
        with torch.no_grad():
            assert torch.equal(model.lm_head(base(IDS, use_cache=False)[0]), want)
    classifier = from_pretrained(
        folder, auto_class=AutoModelForSequenceClassification, num_labels=3, pad_token_id=0
    )
    assert [row.patch for row in describe(classifier)] == ["softmax1+logn", "learned_map", "softmax"]
    assert classifier(IDS).logits.shape == (2, 3)


def test_a_part_saved_alone_is_patched_too(model, tmp_path):
    model.model.save_pretrained(tmp_path)
    base = from_pretrained(tmp_path)
    assert type(base) is LlamaModel
    with torch.no_grad():
        assert torch.equal(model.lm_head(base(IDS, use_cache=False)[0]), logits(model, IDS))
    assert str(describe(AutoModel.from_pretrained(tmp_path))) == str(describe(base))


def test_attributes_of_the_config_are_keywords(folder):
    loaded = from_pretrained(folder, attention_dropout=0.25, use_cache=False)
    assert loaded.model.layers[0].self_attn.attention_dropout == 0.25
    assert loaded.config.use_cache is False
    assert (
        from_pretrained(folder, attn_implementation="eager").model.layers[2].self_attn._linattn_kept
        == "eager"
    )


LOADERS = (AutoModel, AutoModelForCausalLM, LlamaForCausalLM)


@pytest.mark.parametrize(
    "given", [{}, {"attn_implementation": "sdpa"}, {"attn_implementation": "linattn"}], ids=str
)
@pytest.mark.parametrize("loader", LOADERS)
def test_plain_loaders_give_the_patched_model_with_the_package_imported(folder, loader, given):
    want = from_pretrained(folder, auto_class=loader)
    got = loader.from_pretrained(folder, **given)
    assert str(describe(got)) == str(describe(want))
    assert torch.equal(got(IDS, use_cache=False)[0], want(IDS, use_cache=False)[0])


PLAIN = """
import itertools, sys, transformers
names = ("AutoModel", "AutoModelForCausalLM")
calls = [("LlamaForCausalLM", sys.argv[1]), *itertools.product(names, sys.argv[1:])]
for (name, folder), given in itertools.product(calls, ({}, {"attn_implementation": "sdpa"})):
    try:
        getattr(transformers, name).from_pretrained(folder, **given)
    except (ValueError, OSError) as error:
        print(name, folder, given, "linattn" in str(error))
assert "hf_linattn" not in sys.modules
"""


@pytest.mark.usefixtures("warm_start")
def test_plain_loaders_fail_without_the_package(folder, tmp_path):
    for kind in KINDS:
        patched_model(kind).save_pretrained(tmp_path / kind)
    folders = [folder, *(tmp_path / kind for kind in KINDS)]
    run = subprocess.run([sys.executable, "-c", PLAIN, *folders], capture_output=True, text=True, check=True)
    assert run.stdout.count("True") == 2 + 4 * len(folders), run.stdout


def test_a_new_model_from_the_config_of_a_patched_one_is_loud(model):
    with pytest.raises(NotPatchedError, match="was not patched"):
        LlamaForCausalLM(copy.deepcopy(model.config))(IDS)


def lora(model, tmp_path):
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(
        model,
        LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["linattn"], init_lora_weights=False),
    )
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        tuned(IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step()
    tuned.eval().save_pretrained(tmp_path / "lora")
    return tuned


def test_lora(folder, tmp_path):
    from peft import PeftModel

    before = logits(from_pretrained(folder), IDS)
    tuned = lora(from_pretrained(folder), tmp_path)
    want = logits(tuned, IDS)
    assert tiny_models.distance(want, before) > 1e-2
    assert torch.equal(
        logits(PeftModel.from_pretrained(from_pretrained(folder), tmp_path / "lora"), IDS), want
    )
    with pytest.raises(CheckpointError, match="adapter"):
        from_pretrained(tmp_path / "lora")
    if OLD:
        with pytest.raises(CheckpointError, match=r"lacks .*modules_to_save"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "lora")
    else:
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "lora"), IDS), want)
    merged = tuned.merge_and_unload()
    assert tiny_models.distance(logits(merged, IDS), want) < 1e-4
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(from_pretrained(tmp_path / "merged"), IDS), logits(merged, IDS))
    unpatch_model(merged)
    assert not any("linattn" in name for name, _ in merged.named_modules())


def test_windows_and_options_come_back(tmp_path):
    model = tiny_models.build(
        "MistralForCausalLM", dtype=torch.float32, num_hidden_layers=2, sliding_window=16, **tiny_models.SIZES
    )
    patch_model(model, {"0": ("elu1+logn", {"kappa": 0.5})}, sliding="global").save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path)
    assert str(describe(loaded)) == str(describe(model))
    assert torch.equal(logits(loaded, IDS), logits(model, IDS))


def test_half_precision_comes_back_bit_for_bit(tmp_path):
    """Once loaded: `model.to(dtype)` rounds buffers that no checkpoint holds, of unpatched models too."""
    model = from_pretrained(saved(tmp_path / "first", patch_model(tiny_models.llama(), "window+elu1")))
    for dtype in (torch.bfloat16, torch.float16):
        once = from_pretrained(saved(tmp_path / "first", model), dtype=dtype)
        twice = from_pretrained(saved(tmp_path / "second", once), dtype=dtype)
        assert torch.equal(logits(twice, IDS), logits(once, IDS))


def saved(folder, model):
    model.save_pretrained(folder)
    return folder


def test_modules_that_make_weights_on_the_cpu_while_loading(tmp_path):
    """diffllama draws its lambdas there, and has the rest on the meta device."""
    model = tiny_models.build(
        "DiffLlamaForCausalLM", dtype=torch.float32, num_hidden_layers=2, **tiny_models.SIZES
    )
    patch_model(model, "temperature")
    assert torch.equal(logits(from_pretrained(saved(tmp_path, model)), IDS), logits(model, IDS))


def test_architectures_of_other_families(tmp_path):
    for cls, config in (
        ("BertForMaskedLM", {}),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    ):
        sizes = {k: v for k, v in tiny_models.SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
        sizes = {"vocab_size": 97} if config else {**sizes, "num_hidden_layers": 2}
        model = patch_model(tiny_models.build(cls, dtype=torch.float32, **sizes, **config), "elu1")
        model.save_pretrained(tmp_path / cls)
        loaded = from_pretrained(tmp_path / cls)
        assert type(loaded) is getattr(transformers, cls)
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, model(IDS).logits)
