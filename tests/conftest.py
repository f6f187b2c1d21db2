"""Tests never reach for a hub and use one thread each, also when pytest is started by hand."""

import gc
import os
import random

import pytest

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# torch's form, whatever libraries this machine has: tests of the others ask for `compiled`
os.environ.setdefault("HF_LINATTN_CPP", "0")


def pytest_collection_finish():
    """What is there before the first test stays: garbage is looked for among what tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same numbers, whichever tests ran before it in its process."""
    import torch  # here, when the number of threads above is set

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Where kernels in C++ are compiled, once for all tests of a process."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def compiled(folder, monkeypatch):
    """Kernels in C++ are asked for."""
    monkeypatch.setenv("HF_LINATTN_CPP", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
