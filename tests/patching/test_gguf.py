"""Models from GGUF files: patched, saved, loaded and unpatched; damaged files in one line."""

# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import copy
import importlib

import pytest
import torch
from helpers.fixtures_finetune import BASE, surroundings, workplace
from helpers.gguf_files import FILE, gguf, write
from helpers.tiny_models import llama, tokens
from transformers import AutoModelForCausalLM
from transformers.integrations.gguf.utils import GgufLinear

import hf_linattn
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.eval.common.models import ModelSpec, load_model
from hf_linattn.finetune.__main__ import main
from hf_linattn.patching import gguf as marks
from hf_linattn.patching.loading import load_config, load_tokenizer

pytest.importorskip("accelerate")
UTILS = importlib.import_module("transformers.modeling_gguf_pytorch_utils")  # in 5.17 no attribute
IDS = tokens(2, 20)


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
    monkeypatch.setattr(UTILS, "is_gguf_available", lambda: False)
    with pytest.raises(CheckpointError, match=r"needs the packages gguf and accelerate .*hf-linattn\[gguf\]"):
        hf_linattn.from_pretrained(folder, gguf_file=FILE)


@pytest.fixture
def file(folder):
    return str(folder / FILE)


def test_a_file_by_its_path_is_an_ordinary_model(folder, file, tmp_path):
    """Without marks: it saves unpatched too, and unpatching brings none back."""
    model = hf_linattn.from_pretrained(file)
    want = logits(AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE))
    assert torch.equal(logits(model), want)
    assert not marks.is_marked(model)
    model.save_pretrained(tmp_path / "plain")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), want)
    hf_linattn.patch_model(model, "gated").save_pretrained(tmp_path / "patched")
    assert torch.equal(logits(hf_linattn.from_pretrained(tmp_path / "patched")), logits(model))
    assert torch.equal(logits(hf_linattn.unpatch_model(model)), want)
    assert load_config(file).num_hidden_layers == model.config.num_hidden_layers
    spec = ModelSpec("", file, "logn", {"train_length": 8})
    assert hf_linattn.is_patched(load_model(spec))


@pytest.mark.parametrize("load", [hf_linattn.from_pretrained, load_config, load_tokenizer])
def test_what_cannot_be_read_by_its_path_is_one_line(folder, file, tmp_path, monkeypatch, load):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((folder / FILE).read_bytes()[:1000])
    for source, message in ((cut, "cut.gguf: not a whole GGUF file"), (tmp_path / "no.gguf", "no such")):
        with pytest.raises(CheckpointError, match=message) as caught:
            load(str(source))
        assert "\n" not in str(caught.value)
    monkeypatch.setattr(UTILS, "is_gguf_available", lambda: False)
    with pytest.raises(CheckpointError, match=r"needs the packages gguf and accelerate"):
        load(file)


@pytest.mark.usefixtures("surroundings")
def test_finetune_trains_a_file_patched_or_not(workplace, capsys):
    write(AutoModelForCausalLM.from_pretrained("model"), "small.gguf", "F32")
    argv = [*BASE, "--model", "small.gguf", "--tokenizer", "model", "--max-steps", "2", "--no-dropout"]
    assert main([*argv, "--output-dir", "from-file"]) == 0
    assert main([*argv, "--patch", "elu1", "--lora", "2", "--output-dir", "from-file-elu1"]) == 0
    assert describe("from-file") == ["softmax", "softmax"]
    assert describe("from-file-elu1") == ["elu1", "elu1"]
    assert main([*BASE, "--model", "gone.gguf", "--output-dir", "from-nothing"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: no such GGUF file: gone.gguf"


def describe(folder):
    return [row.patch for row in hf_linattn.describe(hf_linattn.from_pretrained(folder))]


@pytest.mark.usefixtures("surroundings")
def test_lm_eval_takes_a_file(workplace):
    pytest.importorskip("lm_eval")
    from hf_linattn.eval.harness.model import LinattnLM

    write(AutoModelForCausalLM.from_pretrained("model"), "measured.gguf", "F32")
    lm = LinattnLM("measured.gguf", patch="elu1", tokenizer="model", device="cpu")
    assert {row.patch for row in hf_linattn.describe(lm.model)} == {"elu1"}
