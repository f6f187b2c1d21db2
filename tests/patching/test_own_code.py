"""Models whose code lies beside them (`trust_remote_code`): patched, saved, loaded as all others."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_models
from helpers.learned_patches import logits
from helpers.paths import BASE
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils
from transformers.models.llama import modeling_llama

from hf_linattn import from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.errors import CheckpointError
from hf_linattn.eval.perplexity.__main__ import main as perplexity

CONFIG = """from transformers import LlamaConfig


class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
WORDS = 2048  # of the tokenizer of examples/base
IDS = tiny_models.tokens(2, 30)


def code():
    """Llama's own file under other names: a forward that only this folder has."""
    text = Path(modeling_llama.__file__).read_text(encoding="utf-8")
    text = re.sub(r"from \.\.\.", "from transformers.", text).replace("from ...", "from transformers.")
    return text.replace(".configuration_llama", ".configuration_own").replace("Llama", "Own")


def llama():
    return tiny_models.llama(dtype=torch.float32, vocab_size=WORDS).eval()


def forget_code():
    """Of other tests in this process, from another folder."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its code; Python imports that from one place as long as it runs."""
    folder = tmp_path_factory.mktemp("own")
    llama().save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder)
    (folder / "configuration_own.py").write_text(CONFIG)
    (folder / "modeling_own.py").write_text(code())
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": MAP}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patched:
        forget_code()
        patched.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield folder
        forget_code()


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_it_is_patched_saved_and_loaded(folder, tmp_path):
    model = load(folder)
    assert type(model).__name__ == "OwnForCausalLM"
    before = logits(model, IDS)
    for spec in ("softmax1+logn", "elu1", "gated", "window+gated"):
        options = {"size": 8, "sinks": 2} if "window" in spec else {}
        options = {"train_length": 16} if "logn" in spec else options
        known = patch_model(
            tiny_models.llama(dtype=torch.float32, vocab_size=WORDS).eval(), spec, options=options
        )
        patch_model(model, spec, options=options)
        known.load_state_dict(model.state_dict())
        want = logits(known, IDS)
        assert torch.equal(logits(model, IDS), want)
        kwargs = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(IDS, **kwargs), known.generate(IDS, **kwargs))
        model.save_pretrained(tmp_path / spec)
        for again in (from_pretrained(tmp_path / spec, trust_remote_code=True), load(tmp_path / spec)):
            assert is_patched(again)
            assert type(again).__name__ == "OwnForCausalLM"
            assert torch.equal(logits(again, IDS), want)
        unpatch_model(model)
        assert torch.equal(logits(model, IDS), before)


def test_its_code_runs_for_those_who_ask_alone(folder, tmp_path):
    patch_model(load(folder), "elu1").save_pretrained(tmp_path / "patched")
    for trust in ({}, {"trust_remote_code": False}):
        with pytest.raises(CheckpointError, match="no model type 'own'; its code lies beside it") as error:
            from_pretrained(tmp_path / "patched", **trust)
        assert "trust_remote_code=True, or HF_LINATTN_TRUST_REMOTE_CODE=1" in str(error.value)


def test_commands_run_it_where_the_environment_says_so(folder, tmp_path, monkeypatch, capsys):
    patch_model(load(folder), "elu1").save_pretrained(tmp_path / "patched")
    AutoTokenizer.from_pretrained(BASE).save_pretrained(tmp_path / "patched")
    (tmp_path / "text.txt").write_text("a text of some words\n" * 40)
    common = [
        "--data",
        str(tmp_path / "text.txt"),
        "--lengths",
        "16",
        "--stride",
        "full",
        "--max-tokens",
        "64",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO())  # nobody answers
    for place in (folder, tmp_path / "patched"):
        argv = ["--model", str(place), *common, "--output-dir", str(tmp_path / f"{place.name}-measured")]
        assert perplexity(argv) == 1
        assert "HF_LINATTN_TRUST_REMOTE_CODE=1" in capsys.readouterr().err
        with monkeypatch.context() as trusting:
            trusting.setenv("HF_LINATTN_TRUST_REMOTE_CODE", "1")
            assert perplexity(argv) == 0
