"""The conversion command: what --overwrite and --resume leave as it was."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import shutil
from pathlib import Path

import pytest
from helpers.fixtures_convert import BASE
from helpers.fixtures_finetune import surroundings, workplace

from hf_linattn.convert.__main__ import main
from hf_linattn.training.folder import RunFolder

pytestmark = pytest.mark.usefixtures("surroundings")

EVAL = BASE.index("--eval-data")
BLIND = (*BASE[:EVAL], "--preset", "plain")
SMALL = ("--patch", "hedgehog", "--stages", "transfer,distill", "--tokens", "512")


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def done(workplace, surroundings, tmp_path):
    """Folder of a finished conversion, of which each test has its own."""
    if not Path("done").exists():
        assert main([*BASE, *SMALL, "--output-dir", "done"]) == 0
    shutil.copytree("done", tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "missing.txt"], "no such file or folder: missing.txt"),
        (["--data", "tiny.txt"], "fewer than one block"),
        (["--eval-data", "missing.txt"], "no such file or folder: missing.txt"),
        (["--eval-data", "tiny.txt"], "fewer than one block"),
        (["--block-size", "1000000"], "fewer than one block"),
        (["--patch", "elu1"], "and elu1 has none"),
        (["--preset", "h2o", "--patch", "h2o"], "has none"),
        (["--patch", "gated", "--target", "weights"], "'gated' makes its gates of the values"),
    ],
)
def test_overwrite_deletes_nothing_where_the_inputs_are_wrong(done, argv, message, capsys):
    before = contents(done)
    assert main([*BASE, *SMALL, *argv, "--output-dir", str(done), "--overwrite"]) == 1
    assert message in capsys.readouterr().err
    assert contents(done) == before


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--model", "distill"),
        ("--teacher", "transfer"),
        ("--tokenizer", "distill"),
        ("--data", "self.jsonl"),
        ("--eval-data", "self.jsonl"),
    ],
)
def test_overwrite_does_not_delete_its_own_inputs(done, option, name, capsys):
    (done / "self.jsonl").write_text(json.dumps({"text": Path("train.txt").read_text()}) + "\n")
    before = contents(done)
    patch = [] if option == "--model" else SMALL[:2]
    argv = [*BASE, *patch, *SMALL[2:], option, str(done / name), "--output-dir", str(done), "--overwrite"]
    assert main(argv) == 1
    assert f"--overwrite would delete {option} " in capsys.readouterr().err
    assert contents(done) == before


def test_own_text_is_written_once_the_folder_is_cleared(done):
    (done / "self.jsonl").write_text("of another conversion")
    argv = [*BASE, *SMALL[:2], "--stages", "distill", "--tokens", "128", "--data", "self"]
    assert main([*argv, "--output-dir", str(done), "--overwrite"]) == 0
    assert not (done / "transfer").exists()
    assert json.loads((done / "self.jsonl").read_text().splitlines()[0])["batch"] == 0


@pytest.mark.parametrize(
    ("began", "now", "what"),
    [
        (BLIND, BASE, "other eval_data (None then, 'eval.txt' now)"),
        (BASE, (*BASE, "--eval-data", "train.txt"), "other eval_data ('eval.txt' then, 'train.txt' now)"),
        (BASE, (*BASE, "--eval-blocks", "3"), "other eval_blocks (4 then, 3 now)"),
        (BASE, BLIND, "other eval_data ('eval.txt' then, None now)"),
    ],
    ids=["added", "changed", "fewer", "left out"],
)
def test_a_resumed_conversion_keeps_its_validation(began, now, what, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*began, *SMALL, "--output-dir", str(out)]) == 0
    shutil.rmtree(out / "distill")
    before = contents(out)
    assert main([*now, *SMALL, "--output-dir", str(out), "--resume"]) == 1
    assert f"it began with {what}" in capsys.readouterr().err
    assert contents(out) == before


def test_a_resumed_conversion_is_validated_on_the_same_rows(done, tmp_path, capsys):
    text, out = tmp_path / "held_out.txt", tmp_path / "other"
    text.write_text(Path("eval.txt").read_text())
    argv = [*BASE, *SMALL, "--eval-data", str(text), "--output-dir", str(out)]
    assert main(argv) == 0
    text.write_text(Path("eval.txt").read_text().upper())
    before = contents(out)
    assert main([*argv, "--resume"]) == 1
    assert "held_out.txt has changed since; restore it" in capsys.readouterr().err
    assert contents(out) == before
    record = json.loads((out / "plan.json").read_text())
    del record["eval_sha256"]
    (out / "plan.json").write_text(json.dumps(record))
    assert main([*argv, "--resume"]) == 0


def test_two_conversions_do_not_share_a_folder(done, capsys):
    before = contents(done)
    with RunFolder(done, "conversion", "plan.json", (), ()).held():
        for how in ("--resume", "--overwrite"):
            assert main([*BASE, *SMALL, "--output-dir", str(done), how]) == 1
            assert "error: another run is at work in " in capsys.readouterr().err
            assert contents(done) == before
