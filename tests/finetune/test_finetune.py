"""The fine-tuning command: what it writes and what it trains."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from helpers.fixtures_finetune import (
    BASE,
    SHORT,
    STEPS,
    finished,
    gain,
    rows_of,
    stable_rows,
    surroundings,
    weights_of,
    workplace,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_linattn import from_pretrained, patch_model
from hf_linattn.finetune import FinetuneArguments, finetune
from hf_linattn.finetune.__main__ import main
from hf_linattn.training import loop
from hf_linattn.training.checkpoint import CSV_COLUMNS

pytestmark = pytest.mark.usefixtures("surroundings")


def test_files_of_a_finished_run(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["steps"] == STEPS
    assert results["tokens"] == STEPS * 4 * 32
    assert results["arguments"]["lr"] == 1e-2
    assert results["command"].startswith("python -m hf_linattn.finetune --model model --data train.txt")
    assert results["versions"]["torch"] == metadata.version("torch")
    assert "BOS token '<s>' (256)" in results["documents"]
    assert results["eval_loss"] < results["eval_loss_before"] < 7
    rows = rows_of(finished)
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [int(row["step"]) for row in rows] == list(range(STEPS + 1))
    assert [int(row["step"]) for row in rows if row["eval_loss"]] == [0, 4, 8, 10]
    assert [int(row["tokens"]) for row in rows] == [128 * step for step in range(STEPS + 1)]
    assert float(rows[-1]["lr"]) == pytest.approx(1e-3)
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (finished / "checkpoint").exists()
    assert list(finished.glob("*.partial")) == []


@pytest.mark.full
def test_the_python_api_and_the_help_load_no_training_loop():
    script = """
import runpy, sys
for command in ("finetune", "convert"):
    module = __import__(f"hf_linattn.{command}", fromlist=[command])
    getattr(module, command), getattr(module, f"{command.capitalize()}Arguments")
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(f"hf_linattn.{command}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0
heavy = {"datasets", "peft", "matplotlib", "hf_linattn.training.loop"}
sys.stderr.write(f"loaded: {heavy & sys.modules.keys()}")
"""
    # -W error: runpy would warn of a package that imports its own command
    words = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("loaded: set()")  # libraries may write before
    assert "python -m hf_linattn.finetune" in done.stdout
    assert "python -m hf_linattn.convert" in done.stdout


def test_losses_are_those_of_transformers(workplace, finished):
    """Step 0 validates the untouched model: its own loss over the same blocks."""
    model = from_pretrained("model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained("model")
    ids = [tokenizer.bos_token_id, *tokenizer(Path("eval.txt").read_text())["input_ids"]]
    blocks = torch.tensor(ids[: 6 * 32]).view(6, 32)
    with torch.no_grad():
        want = model(input_ids=blocks, labels=blocks).loss
    assert float(rows_of(finished)[0]["eval_loss"]) == pytest.approx(float(want), abs=1e-6)


def test_saved_model_is_the_one_that_was_validated(workplace, finished):
    AcceleratorState._reset_state(reset_partial_state=True)
    assert main([*BASE, "--model", "finished", "--max-steps", "1", "--lr", "0", "--eval-data", "eval.txt",
                 "--eval-blocks", "6", "--output-dir", "again"]) == 0  # fmt: skip
    assert rows_of("again")[0]["eval_loss"] == rows_of(finished)[-1]["eval_loss"]


def test_finished_run_is_not_run_again(finished, capsys):
    before = weights_of(finished)
    assert main([*SHORT, "--output-dir", "finished", "--resume"]) == 0
    assert f"{STEPS} steps" in capsys.readouterr().out
    assert main([*SHORT, "--output-dir", "finished"]) == 1
    assert "already holds a run: give --resume, --overwrite" in capsys.readouterr().err
    assert weights_of(finished) == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (("--lr", "1e-3"), "lr (0.01 then, 0.001 now)"),
        (("--batch-size", "2"), "global batch (4 then, 2 now)"),
        (("--seed", "5", "--block-size", "16"), "block_size (32 then, 16 now), seed (0 then, 5 now)"),
        (("--patch", "elu1"), "patch (None then, 'elu1' now)"),
    ],
)
def test_resume_refuses_other_settings_and_names_them(finished, capsys, changed, named):
    assert main([*SHORT, "--output-dir", "finished", "--resume", *changed]) == 1
    assert named in capsys.readouterr().err


def test_overwrite_starts_afresh_and_reproduces(finished, workplace):
    (workplace / "second").mkdir()
    assert main([*SHORT, "--max-steps", "2", "--output-dir", "second"]) == 0
    assert main([*SHORT, "--output-dir", "second", "--overwrite"]) == 0
    assert weights_of("second") == weights_of(finished)
    assert stable_rows("second") == stable_rows(finished)


def test_train_only_patch_leaves_the_rest_alone(gain):
    assert (
        main([*BASE, "--patch", "gain", "--train-only-patch", "--max-steps", "2", "--output-dir", "only"])
        == 0
    )
    before, after = load_file("model/model.safetensors"), load_file("only/model.safetensors")
    new = {name for name in after if ".linattn." in name}
    assert after.keys() - new == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert new
    assert all(after[name] != 1 for name in new)
    results = json.loads(Path("only/results.json").read_text())
    assert results["trained_parameters"] == results["patch_parameters"] == 2


def test_train_only_patch_lists_patches_that_learn(gain, capsys):
    assert main([*BASE, "--patch", "logn", "--train-only-patch", "--output-dir", "never"]) == 1
    assert "gain" in capsys.readouterr().err.split("some have:")[1]


def test_lora_trains_adapters_and_the_patch_and_saves_them_merged(gain):
    argv = [
        *BASE,
        "--patch",
        "gain",
        "--lora",
        "2",
        "--max-steps",
        "3",
        "--eval-data",
        "eval.txt",
        "--no-dropout",
    ]
    assert main([*argv, "--output-dir", "lora"]) == 0
    before, after = load_file("model/model.safetensors"), load_file("lora/model.safetensors")
    new = {name for name in after if name not in before}
    assert {name.split(".")[-3] for name in new} == {"linattn"}
    assert all(after[name] != 1 for name in new)
    changed = {name for name in before if not torch.equal(after[name], before[name])}
    assert changed == {name for name in before if "_proj." in name}
    assert Path("lora/adapter/adapter_model.safetensors").exists()
    card = Path("lora/adapter/README.md").read_text()
    assert "library_name: peft" in card
    assert "They alone go on a patched model" in card
    assert "More Information Needed" not in card
    results = json.loads(Path("lora/results.json").read_text())
    assert results["patch_parameters"] == 2
    assert results["trained_parameters"] < results["parameters"]
    # the merged model computes what the adapters computed
    AcceleratorState._reset_state(reset_partial_state=True)
    again = finetune(
        FinetuneArguments(
            model="lora",
            data="train.txt",
            output_dir="lora-again",
            eval_data="eval.txt",
            block_size=32,
            lr=0,
            max_steps=1,
        )
    )
    assert again["eval_loss_before"] == pytest.approx(results["eval_loss"], abs=1e-5)
    assert again["command"].startswith("finetune(FinetuneArguments(model='lora'")


def test_lora_run_resumes_to_the_same_bytes(gain, monkeypatch):
    argv = [*BASE, "--patch", "gain", "--lora", "2", "--max-steps", "4", "--checkpoint-every", "1"]
    assert main([*argv, "--output-dir", "lora-whole"]) == 0
    step = loop.TrainingLoop._train_step

    def interrupted(self):
        if self.step == 3:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(loop.TrainingLoop, "_train_step", interrupted)
        assert main([*argv, "--output-dir", "lora-cut"]) == 130
    assert main([*argv, "--output-dir", "lora-cut", "--resume"]) == 0
    assert weights_of("lora-cut") == weights_of("lora-whole")


def test_bfloat16_autocast_trains(workplace):
    assert main([*SHORT, "--mixed-precision", "bf16", "--output-dir", "bf16"]) == 0
    results = json.loads(Path("bf16/results.json").read_text())
    assert results["eval_loss"] < results["eval_loss_before"]
    assert {tensor.dtype for tensor in load_file("bf16/model.safetensors").values()} == {torch.float32}


def test_a_patch_that_is_replaced_is_named(tmp_path):
    model = patch_model(AutoModelForCausalLM.from_pretrained("model"), "hedgehog")
    count = sum(p.numel() for name, p in model.named_parameters() if "linattn" in name)
    model.save_pretrained(tmp_path / "mapped")
    AutoTokenizer.from_pretrained("model").save_pretrained(tmp_path / "mapped")
    argv = [*BASE, "--model", str(tmp_path / "mapped"), "--max-steps", "1"]
    with pytest.warns(UserWarning, match=rf"mapped \(hedgehog\) and its {count:,} weights"):
        assert main([*argv, "--patch", "elu1", "--output-dir", str(tmp_path / "replaced")]) == 0


def test_saved_patched_model_keeps_its_patch(workplace):
    assert main([*BASE, "--patch", "elu1", "--no-dropout", "--max-steps", "2", "--output-dir", "elu1"]) == 0
    assert "linattn" in json.loads(Path("elu1/config.json").read_text())
    AcceleratorState._reset_state(reset_partial_state=True)
    assert (
        main([*BASE, "--model", "elu1", "--no-dropout", "--max-steps", "1", "--output-dir", "elu1-more"]) == 0
    )
    assert "linattn" in json.loads(Path("elu1-more/config.json").read_text())


def test_every_epoch_shows_every_block_once_in_an_order_of_its_own():
    stream = [int(row) for step in range(1, 13) for row in loop.batch_rows(step, 5, 20, seed=3)]
    epochs = [stream[start : start + 20] for start in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert stream[:5] != [int(row) for row in loop.batch_rows(1, 5, 20, seed=4)]
    assert sorted(loop.batch_rows(1, 7, 3, seed=0).tolist())[:2] == [0, 0]  # more rows than blocks


def test_learning_rate_warms_up_and_ends_at_a_tenth():
    settings = loop.LoopSettings(max_steps=10, lr=1.0, warmup=4, batch_size=1)
    rates = [loop.learning_rate(step, settings) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)
    for part in (0.0, 1.0):
        settings = replace(settings, min_lr_rate=part)
        rates = [loop.learning_rate(step, settings) for step in (4, 7, 10)]
        assert rates == pytest.approx([1.0, (1 + part) / 2, part])
