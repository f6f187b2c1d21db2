"""Tests never reach for a hub and use one thread each, also when pytest is started by hand."""

import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from helpers import warm

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
def made_once(tmp_path_factory):
    """A folder by its name, filled by the first of the processes of pytest-xdist that asks for it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def find(name, fill):
        shared, done = base / f"once-{name}", base / f"once-{name}.done"
        with FileLock(base / f"once-{name}.lock"):
            if not done.exists():
                shutil.rmtree(shared, ignore_errors=True)  # of one that failed
                shared.mkdir()
                fill(shared)
                done.touch()
        return shared

    return find


@pytest.fixture(scope="session")
def folder(made_once, tmp_path_factory):
    """A cache of this process with kernels in C++, which are compiled once for all that run side by side."""
    from hf_linattn.ops.cpp import build

    own = tmp_path_factory.mktemp("cache")
    if any(map(shutil.which, build.COMPILERS)):

        def compile_them(shared):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(shared))
                build.compiled.__wrapped__()

        shared = made_once("compiled", compile_them)
        shutil.copytree(shared, own, dirs_exist_ok=True)
    return own


@pytest.fixture
def compiled(folder, monkeypatch):
    """Kernels in C++ are asked for."""
    monkeypatch.setenv("HF_LINATTN_CPP", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture(scope="session")
def interpreted():
    """Calls a check in a process whose triton interprets, one for all tests."""
    from helpers.triton_processes import interpreter

    with interpreter() as call:
        yield call


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory):
    """A `python` whose imports are done, see helpers/warm.py; the real one where forking is not safe."""
    folder = tmp_path_factory.mktemp("warm")
    if sys.platform != "linux" or len(str(folder)) > 90:  # names of sockets end at 107 bytes
        yield sys.executable
        return
    command = [sys.executable, warm.__file__, str(folder)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **options) as server:
        assert server.stdout.readline() == f"{warm.READY}\n".encode()
        yield str(folder / "python")
        server.stdin.close()


@pytest.fixture
def warm_start(warm_python, monkeypatch):
    """Processes started by the test, and by what it starts, do not wait for imports."""
    folders = (str(Path(path).parent) for path in (warm_python, sys.executable))
    monkeypatch.setenv("PATH", os.pathsep.join([*folders, os.environ["PATH"]]))
    monkeypatch.setattr(sys, "executable", warm_python)
