"""Trackers: the rows of train.csv reach them, stage by stage; a missing one is refused before anything."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import csv
from pathlib import Path

import pytest
from helpers.fixtures_finetune import BASE, SHORT, rows_of, surroundings, workplace

from hf_linattn.convert.__main__ import main as convert
from hf_linattn.finetune.__main__ import main
from hf_linattn.training import loop, tracking

pytestmark = pytest.mark.usefixtures("surroundings")


def scalars(folder):
    """Name -> {step: value} of all event files below a folder."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: {event.step: event.value for event in accumulator.Scalars(name)} for name in names}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard
def test_tensorboard_has_the_rows_of_a_run_that_was_cut_off(workplace, monkeypatch):
    pytest.importorskip("tensorboard")
    argv = [*SHORT, "--checkpoint-every", "4", "--log-with", "tensorboard", "--output-dir", "logged"]
    step = loop.TrainingLoop._train_step

    def interrupted(self):
        if self.step == 6:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(loop.TrainingLoop, "_train_step", interrupted)
        assert main(argv) == 130
    assert main([*argv, "--resume"]) == 0
    seen = scalars("logged/logs/hf_linattn")
    for row in rows_of("logged"):
        for name in ("loss", "lr", "eval_loss", "tokens"):
            value = seen[name].get(int(row["step"]))
            assert (value is None) == (not row[name])
            assert value is None or value == pytest.approx(float(row[name]), rel=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_each_stage_of_a_conversion_is_a_run(workplace):
    pytest.importorskip("tensorboard")
    argv = ["--model", "model", "--data", "train.txt", "--patch", "hedgehog", "--no-dropout", "--cpu"]
    argv += ["--block-size", "32", "--batch-size", "4", "--transfer-tokens", "256", "--distill-tokens", "384"]
    assert convert([*argv, "--log-with", "tensorboard", "--output-dir", "logged-stages"]) == 0
    for stage, steps in (("transfer", 2), ("distill", 3)):
        assert list(scalars(f"logged-stages/{stage}/logs/hf_linattn")["loss"]) == list(range(1, steps + 1))
    ids = {path.read_text() for path in Path("logged-stages").glob("*/logs/id")}
    assert len(ids) == 2


@pytest.mark.parametrize("command", [main, convert])
def test_a_tracker_that_is_not_installed_is_one_line(workplace, monkeypatch, capsys, command):
    monkeypatch.setattr(tracking, "get_available_trackers", list)
    argv = ["--model", "model", "--data", "train.txt", "--log-with", "trackio", "--output-dir", "untracked"]
    assert command(argv) == 1
    error = capsys.readouterr().err
    assert error == "error: --log-with trackio: trackio is not installed: pip install trackio\n"
    assert not Path("untracked").exists()


def test_wandb_offline_gets_the_rows(workplace, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert main([*BASE, "--max-steps", "2", "--log-with", "wandb", "--output-dir", "wandb-run"]) == 0
    number = Path("wandb-run/logs/id").read_text()
    assert list(Path("wandb-run/wandb").glob(f"offline-run-*-{number}/run-{number}.wandb"))
