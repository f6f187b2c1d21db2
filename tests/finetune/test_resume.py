"""The fine-tuning command: what a resumed run finds changed, lost or left over."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import shutil
from pathlib import Path

import pytest
from helpers.fixtures_finetune import BASE, SHORT, finished, rows_of, surroundings, weights_of, workplace
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_linattn.finetune.__main__ import main
from hf_linattn.training import loop
from hf_linattn.training.folder import RunFolder

pytestmark = pytest.mark.usefixtures("surroundings")

UNSEEN = (*BASE, "--max-steps", "8", "--checkpoint-every", "2", "--eval-every", "2")
SEEN = (*UNSEEN, "--eval-data", "eval.txt", "--eval-blocks", "4")


def read(*parts):
    return json.loads(Path(*parts).read_text())


@pytest.fixture
def cut(monkeypatch):
    """A function that runs the command up to a step, as a kill would end it."""
    step = loop.TrainingLoop._train_step

    def run(argv, last=5):
        def interrupted(self):
            if self.step == last:
                raise KeyboardInterrupt
            return step(self)

        with monkeypatch.context() as patched:
            patched.setattr(loop.TrainingLoop, "_train_step", interrupted)
            assert main(argv) == 130

    return run


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_validation_that_comes_later_has_no_loss_before(cut, tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out")]
    cut([*UNSEEN, *out])
    assert main([*SEEN, *out, "--resume"]) == 0
    results = read(tmp_path, "out/results.json")
    assert results["eval_loss_before"] is None
    assert results["eval_loss"] == float(rows_of(tmp_path / "out")[-1]["eval_loss"])
    assert f"validation loss {results['eval_loss']:.4f} nats per token" in capsys.readouterr().out
    card = (tmp_path / "out/README.md").read_text()
    assert "| trained |" in card
    assert "| before |" not in card


def test_a_loss_of_an_earlier_step_is_not_that_of_the_end(cut, tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out")]
    cut([*SEEN, *out])
    assert main([*UNSEEN, *out, "--resume"]) == 0
    results = read(tmp_path, "out/results.json")
    assert results["eval_loss"] is None
    assert results["eval_loss_before"] == float(rows_of(tmp_path / "out")[0]["eval_loss"])
    assert "validation loss" not in capsys.readouterr().out
    assert "No text was given for validation" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("began", [SEEN, UNSEEN], ids=["seen", "unseen"])
def test_losses_of_two_texts_are_not_set_against_each_other(cut, began, tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out")]
    cut([*began, *out])
    if began is UNSEEN:
        cut([*SEEN, *out, "--resume"], last=7)
    before = contents(tmp_path / "out")
    for other in (("--eval-data", "train.txt"), ("--eval-blocks", "3")):
        assert main([*SEEN, *other, *out, "--resume"]) == 1
        assert "its validation had other rows; give --eval-data" in capsys.readouterr().err
        assert contents(tmp_path / "out") == before
    assert main([*SEEN, *out, "--resume"]) == 0


def test_an_older_record_takes_any_text(cut, tmp_path):
    cut([*SEEN, "--output-dir", str(tmp_path)])
    record = read(tmp_path, "run.json")
    digest = record.pop("eval_sha256")
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert main([*SEEN, "--eval-blocks", "3", "--output-dir", str(tmp_path), "--resume"]) == 0
    assert read(tmp_path, "run.json")["eval_sha256"] != digest


@pytest.mark.parametrize(
    "left", [None, "", "\xff", "step,tokens,loss\n", "rubbish\n1\n", "step,tokens\n1,128\n4,512\n"]
)
def test_a_lost_log_is_not_gone_on_without(cut, left, tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out")]
    cut([*SEEN, *out])
    log = tmp_path / "out/train.csv"
    log.unlink() if left is None else log.write_bytes(left.encode("latin-1"))
    for _ in range(2):  # it is not replaced by another
        assert main([*SEEN, *out, "--resume"]) == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
        assert len(lines) == 1
        missing = 2 if left and "4," in left else 1
        assert f"train.csv lacks step {missing}, and the checkpoint beside it is of step 4" in lines[0]
        assert "restore the file, or begin again with --overwrite" in lines[0]
    assert main([*SEEN, *out, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        (lambda name, tensor: None if name.startswith("optimizer.") else tensor, {}, "no state of the opt"),
        (lambda name, tensor: tensor[..., :1] if tensor.dim() else tensor, {}, "holds other parameters"),
        (lambda name, tensor: tensor[:1] if "exp_avg." in name else tensor, {}, "holds other parameters"),
        (lambda name, tensor: tensor, {"progress": "{"}, "cannot read the checkpoint"),
        (lambda name, tensor: tensor, None, "cannot read the checkpoint"),
    ],
)
def test_a_checkpoint_that_lost_something_is_one_line(cut, tensors, metadata, message, tmp_path, capsys):
    argv = [*UNSEEN, "--output-dir", str(tmp_path / "out"), "--resume"]
    cut(argv)
    path = tmp_path / "out/checkpoint/state.safetensors"
    with safe_open(path, "pt") as file:
        before = file.metadata()
    kept = {name: tensors(name, tensor) for name, tensor in load_file(path).items()}
    kept = {name: tensor.contiguous() for name, tensor in kept.items() if tensor is not None}
    save_file(kept, path, None if metadata is None else before | metadata)
    assert main(argv) == 1
    assert message in capsys.readouterr().err


def test_what_a_kill_left_of_a_finished_run_is_deleted(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    (tmp_path / "out/checkpoint").mkdir()
    for name in ("checkpoint/state.safetensors", "blocks.bin"):
        (tmp_path / "out" / name).touch()
    assert main([*SHORT, "--output-dir", str(tmp_path / "out"), "--resume"]) == 0
    assert not (tmp_path / "out/checkpoint").exists()
    assert not (tmp_path / "out/blocks.bin").exists()
    assert weights_of(tmp_path / "out") == weights_of(finished)


def test_two_runs_do_not_share_a_folder(cut, tmp_path, capsys):
    out = ["--output-dir", str(tmp_path / "out")]
    cut([*SEEN, *out])
    before = contents(tmp_path / "out")
    with RunFolder(tmp_path / "out", "run", "run.json", (), ()).held():
        for how in ("--resume", "--overwrite"):
            assert main([*SEEN, *out, how]) == 1
            assert "error: another run is at work in " in capsys.readouterr().err
            assert contents(tmp_path / "out") == before
    assert main([*SEEN, *out, "--resume"]) == 0
