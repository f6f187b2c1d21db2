"""Early stopping keeps the weights of the best validation, however often the run is killed."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
from pathlib import Path

import pytest
from helpers.fixtures_finetune import (
    SHORT,
    die_at_event,
    in_child,
    rows_of,
    surroundings,
    weights_of,
    workplace,
)

from hf_linattn.finetune.__main__ import main

pytestmark = pytest.mark.usefixtures("surroundings")

SETTINGS = ("--eval-data", "other.txt", "--eval-every", "1", "--warmup", "1", "--no-dropout")
PATIENT = (*SHORT, *SETTINGS, "--lr", "0.05", "--max-steps", "16")


@pytest.fixture(autouse=True)
def _another_text(surroundings):
    """Training helps here for some steps, and then harms."""
    Path("other.txt").write_text("go to the moon, he said; and she went. " * 20)


def results_of(folder):
    return json.loads(Path(folder, "results.json").read_text())


def validations(folder):
    return {int(row["step"]): float(row["eval_loss"]) for row in rows_of(folder) if row["eval_loss"]}


def test_the_best_weights_are_kept(workplace, capsys):
    assert main([*PATIENT, "--patience", "3", "--output-dir", "patient"]) == 0
    assert "the weights are those of step" in capsys.readouterr().out
    found, losses = results_of("patient"), validations("patient")
    best = min(losses, key=losses.__getitem__)
    assert 0 < best == found["kept_step"] < found["steps"] == best + 3
    assert found["eval_loss"] == losses[best] < losses[found["steps"]]
    assert not Path("patient/checkpoint").exists()
    assert main([*PATIENT, "--output-dir", "whole"]) == 0
    assert results_of("whole")["kept_step"] == 16
    assert weights_of("whole") != weights_of("patient")
    # and they are those that were validated
    again = [*PATIENT, "--model", "patient", "--max-steps", "1", "--output-dir", "again"]
    assert main(again) == 0
    assert validations("again")[0] == pytest.approx(losses[best], abs=1e-6)


def test_training_that_only_hurts_leaves_the_model_as_it_was(workplace):
    assert main([*PATIENT, "--lr", "1", "--patience", "2", "--output-dir", "hurt"]) == 0
    found = results_of("hurt")
    assert (found["kept_step"], found["steps"]) == (0, 2)
    assert found["eval_loss"] == found["eval_loss_before"]


# tests/finetune/test_failures.py kills a run at every kind of write that it has in every run
@pytest.mark.full
def test_killed_at_every_kind_of_write(workplace, monkeypatch):
    argv = [*PATIENT, "--patience", "3", "--checkpoint-every", "2", "--resume", "--output-dir"]
    assert main([*argv, "calm"]) == 0

    def attempt(number):
        die_at_event(number, monkeypatch)
        return main([*argv, "often"])

    kills = 0
    while in_child(lambda: attempt(kills + 1)) != 0:  # noqa: B023  called at once
        kills += 1
    assert kills > 20
    assert weights_of("often") == weights_of("calm")
    assert results_of("often")["kept_step"] == results_of("calm")["kept_step"]
    assert not list(Path("often").rglob("*.partial"))


def test_what_decides_the_best_cannot_change_in_a_resumed_run(workplace, capsys, monkeypatch):
    argv = [*PATIENT, "--patience", "3", "--resume", "--output-dir", "changed"]

    def dies():
        die_at_event(30, monkeypatch)
        return main(argv)

    assert in_child(dies) != 0
    assert main([*argv, "--eval-every", "2"]) == 1
    assert "it began with other eval_every (1 then, 2 now)" in capsys.readouterr().err
