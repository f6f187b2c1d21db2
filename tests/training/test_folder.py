"""The output folder of a run: who may use it, and what --overwrite deletes."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.fixtures_finetune import in_child

from hf_linattn.errors import TrainingError
from hf_linattn.training.arguments import TrainingArguments
from hf_linattn.training.folder import RunFolder


def folder_at(path, settings_key=None):
    return RunFolder(
        path, "run", "run.json", contents=("log", "*.bin"), signs=("*.bin",), settings_key=settings_key
    )


def arguments_for(path, **options):
    return TrainingArguments("model", "text", str(path), **options)


def test_a_new_folder_is_made(tmp_path):
    folder = folder_at(tmp_path / "deep" / "out")
    folder.check(arguments_for(folder.path), {})
    assert list(folder.path.iterdir()) == []


def test_files_of_something_else_are_left_alone(tmp_path):
    (tmp_path / "weights.bin").touch()
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(TrainingError, match=r"holds \*\.bin but no run of this command: choose another"):
            folder_at(tmp_path).check(arguments_for(tmp_path, **options), {})


def test_a_run_is_not_taken_up_unasked(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(TrainingError, match="already holds a run: give --resume, --overwrite"):
        folder_at(tmp_path).check(arguments_for(tmp_path), {})
    folder_at(tmp_path).check(arguments_for(tmp_path, overwrite=True), {"seed": 1})


@pytest.mark.parametrize("settings_key", [None, "arguments"])
def test_a_resumed_run_has_its_settings_of_before(tmp_path, settings_key):
    settings = {"seed": 3}
    record = settings if settings_key is None else {"command": "train", settings_key: settings}
    (tmp_path / "run.json").write_text(json.dumps(record))
    folder, resumed = folder_at(tmp_path, settings_key), arguments_for(tmp_path, resume=True)
    folder.check(resumed, {"seed": 3, "patience": 0})  # an older record does not name patience
    with pytest.raises(TrainingError, match=r"it began with other seed \(3 then, 4 now\)"):
        folder.check(resumed, {"seed": 4})


def test_the_model_is_not_written_over(tmp_path):
    with pytest.raises(TrainingError, match="is --model itself"):
        folder_at(tmp_path).check(TrainingArguments(str(tmp_path), "text", "out"), {})


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"cannot write .*out: Not a directory"):
        folder_at(tmp_path / "file" / "out").check(arguments_for(tmp_path), {})


def test_clearing_deletes_what_a_run_leaves_and_its_record_last(tmp_path, monkeypatch):
    (tmp_path / "log").mkdir()
    for name in ("log/rows", "a.bin", "b.bin", "notes.txt", "run.json"):
        (tmp_path / name).touch()
    deleted, unlink = [], Path.unlink

    def noted(path, **options):
        deleted.append(path.name)
        return unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", noted)
    folder_at(tmp_path).clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert deleted[-1] == "run.json"
    folder_at(tmp_path).clear()  # nothing is left to delete


@pytest.mark.parametrize("name", ["model", "data", "eval_data", "tokenizer"])
@pytest.mark.parametrize("source", ["log", "log/rows", "run.json"])
def test_overwrite_spares_what_the_run_reads(tmp_path, name, source):
    (tmp_path / "log").mkdir()
    for path in ("log/rows", "run.json"):
        (tmp_path / path).touch()
    options = {"model": "model", "data": "text", "output_dir": str(tmp_path)}
    options[name] = str(tmp_path / source)
    flag = "--" + name.replace("_", "-")
    with pytest.raises(TrainingError, match=f"--overwrite would delete {flag} .*: choose another --output"):
        folder_at(tmp_path).check(TrainingArguments(**options, overwrite=True), {})
    options[name] = str(tmp_path / "notes.txt")
    folder_at(tmp_path).check(TrainingArguments(**options, overwrite=True), {})


@pytest.mark.parametrize("name", ["data", "eval_data"])
@pytest.mark.parametrize("source", ["out", "."])
def test_overwrite_spares_a_folder_of_texts_around_what_it_deletes(tmp_path, monkeypatch, name, source):
    monkeypatch.chdir(tmp_path)
    folder = folder_at(tmp_path / "out")
    options = {"model": "model", "data": "text", name: source, "output_dir": "out", "overwrite": True}
    folder.check(TrainingArguments(**options), {})  # nothing is there to delete
    (tmp_path / "out" / "log").mkdir()
    flag = "--" + name.replace("_", "-")
    with pytest.raises(TrainingError, match=f"--overwrite would delete {flag} .*: choose another --output"):
        folder.check(TrainingArguments(**options), {})


def test_a_folder_is_held_by_one_run(tmp_path):
    folder = folder_at(tmp_path / "deep" / "out")
    for _ in range(2):  # one after the other
        with folder.held():
            assert list(folder.path.iterdir()) == []
            with (
                pytest.raises(TrainingError, match=r"another run is at work in .*out: wait for it"),
                folder.held(),
            ):
                pass
            with folder.held(main=False):
                pass
    assert folder.path.exists()


def test_a_held_folder_goes_with_a_run_that_fails(tmp_path):
    folder = folder_at(tmp_path / "deep" / "out")
    with pytest.raises(KeyError), folder.held():
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with folder.held():
        pass


@pytest.mark.parametrize("missing", ["open", "flock"])
def test_a_folder_without_locks_is_used(tmp_path, monkeypatch, missing):
    fcntl = pytest.importorskip("fcntl")

    def refused(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os if missing == "open" else fcntl, missing, refused)
    with folder_at(tmp_path).held(), folder_at(tmp_path).held():
        pass


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_fork_that_outlives_its_run_does_not_hold_the_folder(tmp_path):
    folder = folder_at(tmp_path)

    def run():
        with folder.held():
            child = os.fork()
            if child == 0:
                signal.pause()
            (tmp_path / "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(run) == signal.SIGKILL
    try:
        with folder.held():
            pass
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
