"""Every example in a docstring of the package runs and prints what it says."""

import doctest
import importlib
import inspect

import pytest
from helpers.paths import ROOT

FOLDERS = {"hf_linattn": "hf_linattn", "patches": "hf_linattn.patches", "eval": "hf_linattn.eval"}
METRIC = "eval/length_perplexity.py"
"""Its docstring is a template of `evaluate`, about texts of a user; docs/perplexity.md runs the same code."""


def modules():
    """Dotted names of the files with an example."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8") and path != ROOT / METRIC:
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join((package, *(part for part in parts if part != "__init__")))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # short examples open files as people do
@pytest.mark.parametrize("name", list(modules()))
def test_examples_print_what_they_say(name, checkout):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    failed, tried = doctest.testmod(importlib.import_module(name), optionflags=flags)
    assert tried
    assert not failed


DOCUMENTED = [
    "hf_linattn.bypassed",
    "hf_linattn.convert.convert",
    "hf_linattn.data.pack_blocks",
    "hf_linattn.describe",
    "hf_linattn.eval.perplexity.measure.measure",
    "hf_linattn.finetune.finetune",
    "hf_linattn.from_pretrained",
    "hf_linattn.is_linear",
    "hf_linattn.patch_model",
    "hf_linattn.patched",
    "hf_linattn.unpatch_model",
    "hf_linattn.use_branches",
]
"""Public functions whose docstrings must have an example."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_users_call_first_has_an_example(name):
    module, _, function = name.rpartition(".")
    assert ">>> " in inspect.getdoc(getattr(importlib.import_module(module), function))
