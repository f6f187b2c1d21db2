"""The fine-tuning command: kills, several processes, bad input."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import csv
import functools
import json
import os
import re
import resource
import shutil
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from helpers.fixtures_finetune import (
    BASE,
    SHORT,
    die_at_event,
    finished,
    gain,
    in_child,
    kill_at_step,
    rows_of,
    stable_rows,
    start_slowly,
    surroundings,
    weights_of,
    workplace,
)
from helpers.launch import in_two_processes
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_linattn.cli.files import replacing
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.finetune import FinetuneArguments
from hf_linattn.finetune.__main__ import main
from hf_linattn.finetune.arguments import build_parser
from hf_linattn.training import loop as training

pytestmark = pytest.mark.usefixtures("surroundings")


@pytest.mark.usefixtures("warm_start")
def test_killed_and_resumed_run_ends_with_the_same_bytes(finished):
    argv = (*SHORT, "--checkpoint-every", "3", "--output-dir", "killed", "--resume")
    kill_at_step(start_slowly("finetune", *argv), "killed", 2)
    assert not Path("killed/checkpoint").exists()
    kill_at_step(start_slowly("finetune", *argv), "killed", 8)
    assert Path("killed/checkpoint/state.safetensors").exists()
    assert main([*argv]) == 0
    assert weights_of("killed") == weights_of(finished)
    assert stable_rows("killed") == stable_rows(finished)


def test_checkpoints_of_slow_steps_come_early(finished, monkeypatch):
    """A step that takes long is not lost with 99 others: here every one counts as long."""
    saved = []
    monkeypatch.setattr(training, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(training, "CHECKPOINT_SHARE", 0)
    save = training.Checkpoint.save

    def noting(self, model, optimizer, progress, **options):
        saved.append(progress["step"])
        save(self, model, optimizer, progress, **options)

    monkeypatch.setattr(training.Checkpoint, "save", noting)
    assert main([*SHORT, "--output-dir", "slow"]) == 0
    assert saved == list(range(1, len(saved) + 1))
    assert len(saved) > 5
    assert weights_of("slow") == weights_of(finished)
    assert stable_rows("slow") == stable_rows(finished)


def test_kill_at_every_kind_of_write(finished, monkeypatch):
    """One run, killed at its 1st, 2nd, 3rd, ... write, each time resumed from what the last kill left."""
    argv = [*SHORT, "--checkpoint-every", "2", "--output-dir", "often", "--resume"]

    def attempt(number):
        die_at_event(number, monkeypatch)
        return main(argv)

    kills = 0
    while (status := in_child(functools.partial(attempt, kills + 1))) != 0:
        assert os.WIFSIGNALED(status), status
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
    assert kills > 20
    assert weights_of("often") == weights_of(finished)
    assert stable_rows("often") == stable_rows(finished)
    assert not list(Path("often").rglob("*.partial"))


def test_resume_with_changed_text_is_refused(capsys, monkeypatch):
    Path("moving.txt").write_text(Path("train.txt").read_text())
    argv = [*BASE, "--data", "moving.txt", "--max-steps", "3", "--output-dir", "moved", "--resume"]
    with monkeypatch.context() as patched:
        patched.setattr(training.TrainingLoop, "run", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(argv) == 130
    assert capsys.readouterr().err.strip().endswith("from the last checkpoint, without one from the start")
    Path("moving.txt").write_text(Path("train.txt").read_text().upper())
    assert main(argv) == 1
    assert "it began with other data_sha256" in capsys.readouterr().err


def test_damaged_weights_and_records_are_one_line(finished, capsys):
    shutil.copytree("model", "cut")
    with Path("cut/model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert main([*BASE, "--model", "cut", "--output-dir", "never"]) == 1
    assert "error: cannot read cut/model.safetensors: " in capsys.readouterr().err
    assert not Path("never").exists()
    shutil.copytree(finished, "damaged")
    for content in ("{", "[]"):
        for name in ("results.json", "run.json"):
            shutil.copy(Path(finished, name), "damaged")
        Path("damaged", name).write_text(content)
        assert main([*SHORT, "--output-dir", "damaged", "--resume"]) == 1
        assert f"damaged/{name}" in capsys.readouterr().err


@pytest.mark.usefixtures("warm_start")
def test_two_processes_give_the_result_of_one(workplace):
    # dropout differs between processes by design
    common = [*SHORT, "--no-dropout", "--grad-accum", "2", "--max-steps", "5", "--checkpoint-every", "2"]
    in_two_processes("-m", "hf_linattn.finetune", *common, "--batch-size", "2", "--output-dir", "two")
    assert main([*common, "--output-dir", "one"]) == 0
    results = json.loads(Path("two/results.json").read_text())
    assert results["processes"] == 2
    assert results["global_batch"] == 8
    one, two = load_file("one/model.safetensors"), load_file("two/model.safetensors")
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=2e-5)
    for row_one, row_two in zip(rows_of("one"), rows_of("two"), strict=True):
        for name in ("loss", "eval_loss", "grad_norm"):
            assert float(row_two[name] or 0) == pytest.approx(float(row_one[name] or 0), rel=1e-5), name


def test_nan_stops_at_its_step_and_keeps_the_last_good_checkpoint(monkeypatch, capsys):
    rate = training.learning_rate
    monkeypatch.setattr(training, "learning_rate", lambda step, s: 1e30 if step == 4 else rate(step, s))
    assert main([*BASE, "--max-steps", "8", "--checkpoint-every", "1", "--output-dir", "nan"]) == 1
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert re.match(
        r"error: the (loss|gradient's norm) is (nan|inf) at step 5; the checkpoint of step 3 is kept", error
    )
    assert [row["step"] for row in rows_of("nan")] == ["1", "2", "3", "4"]
    with safe_open("nan/checkpoint/state.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["progress"])["step"] == 3
        assert all(torch.isfinite(file.get_tensor(name)).all() for name in file.keys())  # noqa: SIM118
    assert not Path("nan/model.safetensors").exists()
    # with the cause gone, the run goes on from there
    monkeypatch.setattr(training, "learning_rate", rate)
    assert (
        main([*BASE, "--max-steps", "8", "--checkpoint-every", "1", "--output-dir", "nan", "--resume"]) == 0
    )
    assert [row["step"] for row in rows_of("nan")] == [str(step) for step in range(1, 9)]


@pytest.mark.parametrize("extra", [(), ("--eval-data", "eval.txt")])
def test_weights_that_are_no_numbers_are_named(extra, capsys):
    """Before the first update no learning rate is to blame."""
    model = LlamaForCausalLM.from_pretrained("model")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    shutil.copytree("model", "broken", dirs_exist_ok=True)
    model.save_pretrained("broken")
    out = ("--output-dir", "from-broken", "--overwrite")
    assert main([*BASE, "--model", "broken", *extra, "--max-steps", "2", *out]) == 1
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert "its weights hold NaN or Inf" in error
    assert "learning rate" not in error


def test_a_last_step_that_overflows_is_not_saved(monkeypatch, capsys):
    def overflow(loop):
        loop.step += 1
        torch.nn.init.constant_(loop.parameters[0], torch.inf)
        return {"loss": 1.0, "tokens_per_second": 1.0}

    monkeypatch.setattr(training.TrainingLoop, "_train_step", overflow)
    assert main([*BASE, "--max-steps", "1", "--output-dir", "overflow"]) == 1
    assert "the last step, 1, left numbers" in capsys.readouterr().err
    assert not Path("overflow/model.safetensors").exists()


def test_full_disk_is_one_line_and_no_half_file(workplace):
    """A limit on the size of files stands for the full disk: writes fail the same way."""

    def attempt():
        sys.stderr.flush()
        os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
        status = main([*BASE, "--max-steps", "4", "--checkpoint-every", "2", "--output-dir", "full"])
        sys.stderr.flush()
        return status

    assert os.waitstatus_to_exitcode(in_child(attempt)) == 1
    lines = Path("stderr.txt").read_text().strip().split("\n")
    assert lines[-1].startswith("error: cannot write full/checkpoint/state.safetensors: ")
    assert "Traceback" not in Path("stderr.txt").read_text()
    assert list(Path("full/checkpoint").iterdir()) == []


def test_failed_replacement_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail():
        with replacing(path) as partial:
            partial.write_text("new")
            raise OSError(28, "No space left on device")

    with pytest.raises(TrainingError, match=r"cannot write .*file: No space left on device"):
        fail()
    assert [item.name for item in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--data", "missing.txt"), "no such file or folder: missing.txt"),
        (("--data", "tiny.txt"), "tiny.txt holds 10 tokens, fewer than one block of 32"),
        (("--eval-data", "tiny.txt"), "tiny.txt holds 10 tokens, fewer than one block of 32"),
        (("--model", "nowhere"), "no folder nowhere, and no tokenizer of this name on the Hub"),
        (("--model", "nowhere", "--tokenizer", "model"), "nowhere"),
        (("--model", "bare"), "no tokenizer in bare (give one with --tokenizer)"),
        (
            ("--model", "small-vocabulary", "--tokenizer", "model"),
            "the tokenizer gives token 256, the model knows 50",
        ),
        (("--model", "small-vocabulary", "--tokenizer", "model", "--streaming"), "the model knows 50"),
        (("--output-dir", "train.txt/out"), "cannot write train.txt/out: Not a directory"),
        (("--output-dir", "model"), "--output-dir model is --model itself"),
        (("--output-dir", "bare"), "bare holds config.json, model*.safetensors but no run of this command"),
        (("--patch", "elu2", "--data", "missing.txt"), "unknown patch 'elu2'"),
        (("--patch", "logn", "--options", '{"train_length": 0}'), "train_length must be at least 2"),
        (("--mixed-precision", "fp16"), "--mixed-precision fp16 needs a GPU"),
        (("--train-only-patch",), "has no parameters of its own to train"),
        (
            ("--train-only-patch", "--patch", "elu1"),
            "--train-only-patch: elu1 has no parameters of its own to train",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(capsys, argv, message):
    for name, size in (("bare", 257), ("small-vocabulary", 50)):
        if not Path(name).exists():
            config = LlamaConfig(vocab_size=size, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)  # fmt: skip
            LlamaForCausalLM(config).save_pretrained(name)
    capsys.readouterr()
    assert main([*BASE, "--max-steps", "1", "--output-dir", "never", *argv]) == 1
    errors = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not Path("never").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--options", "[1]"), "expected a JSON object"),
        (("--options", "{"), "not JSON"),
        (("--options", '{"a": 1}'), "--options belong to a --patch"),
        (("--max-steps", "0"), "--max-steps must be at least 1"),
        (("--lr", "nan"), "--lr must be at least 0"),
        (("--adam-beta2", "1"), "--adam-beta2 must be at most 0.9999, not 1.0"),
        (("--min-lr-rate", "1.5"), "--min-lr-rate must be at most 1, not 1.5"),
        (("--output-dir", ""), "--output-dir is empty"),
        (("--warmup", "100", "--max-steps", "9"), "--warmup 100 is longer than --max-steps 9"),
        (("--lora-alpha", "4"), "--lora-alpha scales LoRA: give --lora"),
        (("--lora", "4", "--train-only-patch"), "--lora and --train-only-patch exclude each other"),
        (("--resume", "--overwrite"), "--resume and --overwrite exclude each other"),
        (("--dtype", "float64"), "invalid choice"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, argv, message):
    with pytest.raises(SystemExit) as stop:
        main([*BASE, "--output-dir", "never", *argv])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["peft", "jinja2"])
def test_what_lora_needs_is_missed_before_training(name, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    assert main([*BASE, "--max-steps", "1", "--lora", "2", "--output-dir", "never"]) == 1
    assert capsys.readouterr().err.endswith(
        f"error: {name} is not installed; pip install 'hf-linattn[train]'\n"
    )
    assert not Path("never/train.csv").exists()


def test_python_call_checks_as_the_command_does():
    with pytest.raises(OptionError, match="--block-size must be at least 2, not 1"):
        FinetuneArguments(model="m", data="d", output_dir="o", block_size=1)
    with pytest.raises(OptionError, match="model must be a folder or Hub name, not Linear"):
        FinetuneArguments(model=torch.nn.Linear(2, 2), data="d", output_dir="o")
    with pytest.raises(OptionError, match="options must be a dict, got"):
        FinetuneArguments(model="m", data="d", output_dir="o", patch="window", options='{"size": 8}')


def test_help_shows_every_option_and_both_ways_to_start():
    text = build_parser().format_help()
    for name in FinetuneArguments.__dataclass_fields__:
        assert "--" + name.replace("_", "-") in text
    assert "accelerate launch --num_processes 2 -m hf_linattn.finetune" in text
    assert "python -m hf_linattn.finetune --model" in text
