"""What the tests of the harness share: a tiny model, patched and not, tasks, requests."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from transformers import AutoTokenizer

from helpers.fixtures_perplexity import make_folder
from hf_linattn import from_pretrained, patch_model

WARNINGS = [
    # of the packages that lm_eval imports and calls, not of this one
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def lm_class():
    """The class under test, on the CPU; without lm_eval everything that asks for it is skipped."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hf-linattn[harness]'")
    import lm_eval.evaluator

    from hf_linattn.eval.harness.model import LinattnLM

    with pytest.MonkeyPatch.context() as patches:
        # it asks pip for all packages, anew for every task
        patches.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
        yield functools.partial(LinattnLM, device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def patched(folder, tokenizer, tmp_path_factory):
    """A folder with a patch that has weights of its own, not those that it starts with."""
    path = tmp_path_factory.mktemp("patched")
    model = from_pretrained(folder)
    patch_model(model, "hedgehog")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linattn" in name:
                parameter.add_(torch.randn_like(parameter) / 4)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Three tasks of two documents: choosing, generating, rolling; and two that have none."""
    import datasets

    path = tmp_path_factory.mktemp("tasks")
    documents = [
        {"question": "one two", "choices": [" three", " apple pie"], "label": 0},
        {"question": "the sky is", "choices": [" blue", " green", " a"], "label": 1},
    ]
    data = path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    bits = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
    accuracy = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    kinds = {
        "tiny_choice": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_target": "{{label}}",
            "doc_to_choice": "{{choices}}",
            "metric_list": [accuracy],
        },
        "tiny_text": {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "x",
            "generation_kwargs": {"max_gen_toks": 8, "until": ["\n\n"]},
            "metric_list": [exact],
        },
        "tiny_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{(question + ' ') * 20}}",
            "metric_list": [bits],
        },
    }
    files = {"tiny_lost": "nowhere.jsonl", "tiny_empty": "empty.jsonl"}
    (path / "empty.jsonl").touch()
    kinds |= dict.fromkeys(files, kinds["tiny_choice"])
    for name, kind in kinds.items():
        source = {"test": str(path / files.get(name, data.name))}
        content = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": source}, **kind}
        content |= {"test_split": "test", "metadata": {"version": 1.0}}
        (path / f"{name}.yaml").write_text(json.dumps(content))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(datasets.config, "HF_DATASETS_CACHE", path / "cache")
        yield path


def request(kind, *arguments):
    from lm_eval.api.instance import Instance

    return Instance(kind, {}, arguments, 0, metadata=("some_task", 0, 1))
