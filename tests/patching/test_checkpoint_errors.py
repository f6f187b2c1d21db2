"""Damaged, hostile and newer folders: one clear error, and nothing in them is executed."""

import json
import shutil

import pytest
import torch
from helpers import learned_patches
from helpers.learned_patches import patched_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSeq2SeqLM, GPT2LMHeadModel

from hf_linattn import from_pretrained
from hf_linattn.errors import CheckpointError, OptionError

WEIGHT = "model.layers.1.self_attn.linattn.learned_map.map.weight"


@pytest.fixture(autouse=True)
def learned_map():
    with learned_patches.registered():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with learned_patches.registered():
        patched_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "folder")


def refused(folder, match, error=CheckpointError, **kwargs):
    with pytest.raises(error, match=match) as caught:
        from_pretrained(folder, **kwargs)
    assert type(caught.value) is error
    assert error is not CheckpointError or str(folder) in str(caught.value)


def change(folder, **values):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not Ellipsis}))


ENTRIES = [
    ([], "is not an object but list"),
    (None, "is not an object but NoneType"),
    ("elu1", "is not an object but str"),
    ({}, "no usable format number: None"),
    ({"format": 2}, "has format 2, and this version reads up to 1: update"),
    ({"format": "1"}, "no usable format number: '1'"),
    ({"format": True}, "no usable format number: True"),
    ({"format": 0}, "no usable format number: 0"),
    ({"format": 1, "part": True}, "a part of a patched model"),
    ({"format": 1, "code": "import os"}, "unknown keys: 'code'"),
    ({"format": 1, "sliding": "drop"}, "sliding='drop'"),
    ({"format": 1, "sliding": []}, r"sliding=\[\]"),
    ({"format": 1, "sliding": "keep"}, "lists no patches"),
    ({"format": 1, "sliding": "keep", "patches": {}}, "lists no patches"),
    ({"format": 1, "sliding": "keep", "patches": [3]}, "not patch, options and modules"),
]


@pytest.mark.parametrize(("entry", "match"), ENTRIES, ids=str)
def test_entry(folder, entry, match):
    change(folder, linattn=entry)
    refused(folder, match)


GROUPS = [
    ({"patch": "elu11"}, "unknown patch 'elu11'. Did you mean 'elu1'?"),
    ({"patch": "os.system"}, "unknown patch 'os.system'"),
    ({"patch": 3}, "named by a string"),
    ({"patch": ["elu1"]}, "named by a string"),
    ({"patch": "elu1+softmax1"}, "one at most"),
    ({"options": []}, "options are not an object per part"),
    ({"options": {"logn": 3}}, "options are not an object per part"),
    ({"options": {"logn": {"base": 2}}}, "no option 'base'"),
    ({"options": {"elu1": {"x": 1}}}, "no part with an option 'elu1'"),
    ({"options": {"logn": {"train_length": "all"}}}, "must be"),
    ({"options": {"logn": {"train_length": 1}}}, "at least 2 tokens"),
    ({"options": {"logn": {"kappa": float("nan")}}}, "positive number"),
    ({"modules": "model"}, "not a list of names"),
    ({"modules": []}, "not a list of names"),
    ({"modules": [1]}, "not a list of names"),
    ({"modules": ["model.layers.9.self_attn"]}, "no attention module 'model.layers.9.self_attn'"),
    ({"modules": ["model.layers.0.mlp"]}, "no attention module"),
    ({"modules": ["model.layers.1.self_attn"]}, "is named twice"),
]


@pytest.mark.parametrize(("group", "match"), GROUPS, ids=str)
def test_group(folder, group, match):
    entry = json.loads((folder / "config.json").read_text())["linattn"]
    groups = [{**entry["patches"][0], **group}, *entry["patches"][1:]]
    change(folder, linattn={**entry, "patches": groups})
    refused(folder, match)


CONFIGS = [
    ({"model_type": "unheard"}, "no model type 'unheard'"),
    ({"model_type": []}, r"no model type \[\]"),
    ({"model_type": ...}, "no model type None"),
    ({"model_type": "gpt2"}, "LlamaForCausalLM has no class for GPT2Config"),
    ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel has no class for LlamaConfig"),
    ({"architectures": ["Trainer"]}, "names no class of transformers"),
    (
        {"architectures": {"a": 1}},
        "names no class of transformers|Validation error for field 'architectures'",
    ),
    ({"architectures": None}, "names no class of transformers"),
    ({"hidden_size": "wide"}, "does not describe a llama model"),
    ({"num_attention_heads": 0}, "does not describe a llama model"),
    ({"num_hidden_layers": 1}, "no attention module 'model.layers.1.self_attn'"),
    ({"num_hidden_layers": 4}, "lacks 'model.layers.3"),
]


@pytest.mark.parametrize(("values", "match"), CONFIGS, ids=str)
def test_config(folder, values, match):
    change(folder, **values)
    refused(folder, match)


@pytest.mark.parametrize("content", [b"", b'{"linattn": {"form', b"\xff\xfe\x00", b"[]", b'"x"', b"{}", None])
def test_config_file(folder, content):
    path = folder / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    refused(folder, "config.json")


@pytest.mark.parametrize("size", [0, 4, 3000, 30000, None])
def test_truncated_weights(folder, size):
    path = folder / "model.safetensors"
    path.unlink() if size is None else path.write_bytes(path.read_bytes()[:size])
    refused(folder, "weights cannot be read")


WEIGHTS = [
    ({WEIGHT: None}, f"lacks {WEIGHT!r}"),
    ({"model.norm.weight": None}, "lacks 'model.norm.weight'"),
    (
        {"model.layers.0.self_attn.linattn.sink": torch.ones(2)},
        "no place for 'model.layers.0.self_attn.linattn.sink'",
    ),
    ({WEIGHT: torch.ones(3, 3)}, f"another shape of {WEIGHT!r}"),
]


@pytest.mark.parametrize(("changed", "match"), WEIGHTS, ids=lambda x: x if isinstance(x, str) else "")
def test_weights(folder, changed, match):
    path = folder / "model.safetensors"
    weights = {k: v for k, v in {**load_file(path), **changed}.items() if v is not None}
    save_file(weights, path, metadata={"format": "pt"})
    refused(folder, match)
    if "shape" in match:
        refused(folder, match, ignore_mismatched_sizes=True)


def test_code_in_the_folder_is_not_run(folder, tmp_path):
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import LlamaConfig as C, LlamaForCausalLM as M\n"
    )
    change(folder, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    for trust in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        assert type(from_pretrained(folder, **trust)).__module__ == "transformers.models.llama.modeling_llama"
    change(folder, model_type="evil")
    refused(folder, "no model type 'evil'")
    assert not (tmp_path / "ran").exists()


def test_arguments(folder, tmp_path):
    refused(folder, "not config=", OptionError, config=patched_llama().config)
    refused(folder, "class with from_pretrained", OptionError, auto_class="AutoModel")
    refused(folder, "GPT2LMHeadModel has no class for LlamaConfig", auto_class=GPT2LMHeadModel)
    refused(folder, "AutoModelForSeq2SeqLM has no class for LlamaConfig", auto_class=AutoModelForSeq2SeqLM)
    refused(folder, "keeps its own attention, 'flex_attention'", attn_implementation="flex_attention")
    refused(tmp_path / "nowhere", "cannot be read")
