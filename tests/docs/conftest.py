"""A folder that looks like the checkout, for examples in pages and docstrings."""

import pytest
from helpers.paths import ROOT

from hf_linattn.registry import _PATCHES, patches


@pytest.fixture
def checkout(tmp_path, warm_start, monkeypatch):
    """A folder that looks like the checkout to relative paths, and takes what the examples write."""
    for name in ("README.md", "docs", "examples", "hf_linattn", "patches", "eval", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    patches()  # discovered before anything is registered here
    known = dict(_PATCHES)
    yield tmp_path
    for name in _PATCHES.keys() - known.keys():
        del _PATCHES[name]
