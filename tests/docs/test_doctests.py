"""Examples in docstrings do what they show: each by itself, in an empty folder beside `examples/`."""

import doctest
import importlib

import pytest
from helpers.paths import EXAMPLES

DOCUMENTED = [
    "hf_linattn.bypassed",
    "hf_linattn.data.pack_blocks",
    "hf_linattn.describe",
    "hf_linattn.from_pretrained",
    "hf_linattn.is_linear",
    "hf_linattn.patch_model",
    "hf_linattn.patched",
    "hf_linattn.unpatch_model",
    "hf_linattn.use_branches",
]
"""Public functions whose docstrings must have an example that imports all it needs."""


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    module, _, function = name.rpartition(".")
    documented = getattr(importlib.import_module(module), function)
    tests = doctest.DocTestFinder(recurse=False).find(documented, name, module=False, globs={})
    examples = sum(len(test.examples) for test in tests)
    assert examples, f"{name} has no example"
    report = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)
