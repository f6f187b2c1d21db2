"""A finished run of the benchmark, and its arguments."""

from __future__ import annotations

import json
import shutil

import pytest

from helpers.fixtures_perplexity import make_folder
from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.bench import plots

QUICK = ["--rounds", "2", "--min-time", "0.01", "--threads", "1", "--device", "cpu"]


def arguments(out, *extra, lengths="16,32"):
    return ["--shapes", "1x4/2x8", "--lengths", lengths, *QUICK, "--output-dir", str(out), *extra]


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def refused(arguments, reason, capsys):
    assert bench.main(arguments) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert reason in error


@pytest.fixture(scope="module")
def finished(made_once, tmp_path_factory):
    """A copy: tests of a module may change it."""

    def fill(folder):
        assert bench.main(arguments(folder / "out", "--patches", "elu1,softmax1")) == 0

    return shutil.copytree(made_once("bench", fill) / "out", tmp_path_factory.mktemp("bench") / "out")


@pytest.fixture(autouse=True)
def no_pictures(finished, monkeypatch):
    """They take the most time by far; the run of `finished` has them."""
    monkeypatch.setattr(plots, "save_plots", lambda folder, rows: [])
    monkeypatch.setattr(plots, "pictures", lambda rows, group: [])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model") / "tiny-base")


def whole_arguments(model, out, *extra, lengths="16,32"):
    return ["--model", str(model), "--lengths", lengths, *QUICK, "--output-dir", str(out), *extra]
