"""What every command shares: its processes, types of options, versions, JSON files."""

import argparse
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from hf_linattn.cli import main
from hf_linattn.cli.arguments import argparse_type, json_object, positive_int, positive_ints, positive_number
from hf_linattn.cli.files import read_json, write_json
from hf_linattn.errors import DataError, OptionError

START = sys.executable


@pytest.mark.parametrize(
    ("command", "want"),
    [
        ("accelerate launch --cpu --num_processes 2 -m x", 2),
        ("accelerate launch --num-processes=3 -m x", 3),
        ("accelerate launch --cpu -m x --max-steps 4", None),
    ],
)
def test_number_of_processes_is_read_from_the_launcher(command, want):
    assert main._processes_in(command.split()) == want


@pytest.mark.parametrize(
    ("parse", "text", "want"),
    [
        (positive_int, " 12 ", 12),
        (positive_ints, "64, 8,64", [8, 64]),
        (positive_number, "2.5", 2.5),
        (argparse_type(json_object), '{"a": [1]}', {"a": [1]}),
        (argparse_type(json_object, keep_text=True), '{"a": [1]}', '{"a": [1]}'),
    ],
)
def test_types_of_options_read(parse, text, want):
    assert parse(text) == want


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (positive_int, ("0", "-1", "1.5", "x", ""), "a whole number of at least 1"),
        (positive_ints, ("", "8,,9", "8,0"), "a whole number of at least 1"),
        (positive_number, ("0", "-2", "nan", "inf", "x"), "a number above 0"),
        (argparse_type(json_object), ("{", "train"), "not JSON"),
        (argparse_type(json_object), ("[1]", "3"), "expected a JSON object"),
    ],
)
def test_types_of_options_refuse(parse, texts, message):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)


def test_a_json_object_from_python_is_an_option_error():
    with pytest.raises(OptionError, match="not JSON"):
        json_object("{")


def test_versions():
    names, installed = ("torch", "no-such-distribution"), {"torch": metadata.version("torch")}
    assert main.package_versions(names) == installed
    assert main.package_versions(names, missing="-") == {**installed, names[1]: "-"}


def test_json_files(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    for text, message in (("[1]", "holds no JSON object"), ("{", "cannot read")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_json(path)
    with pytest.raises(DataError, match="cannot read"):
        read_json(tmp_path / "missing.json")


@pytest.mark.usefixtures("warm_start")
def test_quiet_libraries():
    code = """
import datasets
from transformers.utils import logging
from hf_linattn.cli.main import quiet_libraries
cases = ((0, True, True, False), (0, False, False, False), (1, True, False, True))
for process, data_bars, bars, errors_only in cases:
    datasets.enable_progress_bars()
    logging.set_verbosity_warning()
    quiet_libraries(process, data_bars=data_bars)
    assert not logging.is_progress_bar_enabled()
    assert datasets.are_progress_bars_disabled() != bars, process
    assert (logging.get_verbosity() == logging.ERROR) == errors_only, process
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("warm_start")
def test_processes_begin_with_their_imports_behind_a_library_that_sets_variables_too(monkeypatch):
    """As lm_eval does; else each process of a test would import for some seconds."""
    if sys.executable == START:
        pytest.skip("processes are not forked here")
    monkeypatch.setenv("HF_XET_HIGH_PERFORMANCE", "0")
    code = "import sys; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def _raises(error):
    raise error


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (
            lambda: torch.empty(2**60),
            "out of memory: 4611686018427387904 bytes more cannot be had",
        ),
        (
            lambda: _raises(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.50 GiB. GPU")),
            "out of memory: 20.50 GiB more cannot be had. Take fewer",
        ),
        (lambda: _raises(MemoryError()), "out of memory. Take fewer"),
    ],
)
def test_a_command_without_memory_ends_in_one_line(work, said, capsys):
    assert main.exit_status(work, interrupted="") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {said}")
    with pytest.raises(RuntimeError, match="shapes"):
        main.exit_status(lambda: _raises(RuntimeError("shapes differ")), interrupted="")
