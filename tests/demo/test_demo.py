"""The demo from end to end on a tiny model, its refusals, and what it does with a user's text."""

import json
import time
from pathlib import Path

import pytest
from helpers.fixtures_demo import SENTENCE, save_model
from transformers import AutoTokenizer

from hf_linattn.demo.__main__ import _patches, main
from hf_linattn.demo.data import prepare
from hf_linattn.errors import DataError, LinattnError, OptionError


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n}. {SENTENCE}" for n in range(300)))
    return path


def command(model, text, folder, *extra):
    arguments = [
        "--model",
        str(model),
        "--data",
        str(text),
        "--output-dir",
        str(folder),
        "--patch",
        "hybrid,elu1",
        "--options",
        '{"hybrid": {"size": 4}}',
        "--cpu",
    ]
    arguments += ["--max-steps", "2", "--batch-size", "2", "--block-size", "32", "--lengths", "32,64"]
    return [*arguments, "--eval-tokens", "96", "--new-tokens", "4", "--jobs", "2", *extra]


@pytest.mark.usefixtures("warm_start")
def test_whole_demo_then_again_from_its_files(model, text, tmp_path, capsys):
    folder = tmp_path / "out"
    assert main(command(model, text, folder)) == 0
    printed = capsys.readouterr()
    assert str((folder / "report.html").resolve()) in printed.out
    first_words = [line.split()[0] for line in printed.out.splitlines()[:5]]
    assert first_words == ["run", "unpatched", "control", "elu1", "hybrid"]
    assert "were kept back to measure on" in printed.err
    for name in ("control", "elu1"):
        assert (folder / "runs" / name / "model.safetensors").exists()
        assert json.loads((folder / "runs" / name / "results.json").read_text())["tokens"] == 2 * 2 * 32
    assert (folder / "runs" / "hybrid" / "distill" / "model.safetensors").exists()
    rows = {row["row"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}
    assert rows["elu1"]["patch"] == "elu1"
    assert rows["hybrid"]["patch"] == "window+gated"
    assert rows["hybrid"]["training_tokens"] == rows["control"]["training_tokens"]
    assert rows["hybrid"]["state_bytes"] > 0 == rows["hybrid"]["bytes_per_token"]
    assert rows["elu1"]["state_bytes"] == 2 * 4 * 2 * 8 * 9  # layers, float32, heads, features, values and 1
    assert rows["control"]["bytes_per_token"] == 2 * 4 * 2 * (8 + 8)
    assert all(row["perplexity_64"] > 1 for row in rows.values())
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "accelerate launch" in page
    for part in ("What was found", "What they write", "Equal tokens, not equal care", "were kept back"):
        assert part in page
    commands = json.loads((folder / "commands.json").read_text())
    assert commands["elu1"][0].startswith("accelerate launch")
    assert "--patch elu1" in commands["elu1"][0]
    assert "hf_linattn.convert" in commands["hybrid"][0]
    assert '"size": 4' in commands["hybrid"][0]

    # a measurement is lost and the page: only these are made again
    before = (folder / "runs" / "elu1" / "model.safetensors").stat().st_mtime_ns
    (folder / "perplexity" / "elu1" / "results.json").unlink()
    (folder / "report.html").unlink()
    start = time.time_ns()
    assert main(command(model, text, folder)) == 0
    assert (folder / "runs" / "elu1" / "model.safetensors").stat().st_mtime_ns == before
    assert (folder / "perplexity" / "unpatched" / "results.json").stat().st_mtime_ns < start
    assert (folder / "report.html").stat().st_mtime_ns > start
    assert (
        json.loads((folder / "results.json").read_text())["rows"][2]["perplexity_64"]
        == rows["elu1"]["perplexity_64"]
    )

    capsys.readouterr()
    assert main(command(model, text, folder, "--seed", "1")) == 1
    assert "other settings (seed 0 then, 1 now)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("--model", "nowhere/at-all"), "no model at 'nowhere/at-all'"),
        (("--data", "nowhere.txt"), "no such file or folder: nowhere.txt"),
        (("--data", "empty.txt"), "is empty"),
        (("--patch", "sofmax1"), "unknown patch 'sofmax1'. Did you mean 'softmax1'?"),
        (("--patch", "elu1,elu1"), "each once"),
        (("--options", '{"nonsense": 1}'), "none of hybrid, elu1 has an option 'nonsense'"),
        (("--lengths", "1000000"), "the smallest length is 1000000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_refused_in_one_line_before_any_job(
    model, text, tmp_path, monkeypatch, capsys, change, reason
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert main(command(model, text, tmp_path / "out", *change)) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert reason in printed.err
    assert printed.out == ""
    assert not (tmp_path / "out" / "runs").exists()


def test_folder_of_something_else_is_left_alone(model, text, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    assert main(command(model, text, tmp_path)) == 1
    assert "is not empty and holds no demo" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "text.txt"}


@pytest.mark.usefixtures("warm_start")
def test_failed_job_shows_the_end_of_its_log(model, text, tmp_path, capsys):
    assert main(command(model, text, tmp_path / "out", "--lr", "1e30", "--jobs", "3")) == 1
    error = capsys.readouterr().err
    assert "convert hybrid" in error
    assert "failed (exit status" in error
    assert not (tmp_path / "out" / "report.html").exists()


def test_options_go_to_the_patches_that_have_them():
    chosen = _patches("elu1,logn,softmax1+logn", {"train_length": 64, "softmax1+logn": {"clip": True}})
    assert chosen == {
        "elu1": {},
        "logn": {"train_length": 64},
        "softmax1+logn": {"train_length": 64, "clip": True},
    }
    with pytest.raises(OptionError, match="must be"):
        _patches("logn", {"train_length": "long"})
    with pytest.raises(LinattnError, match="unknown patch"):
        _patches("log", {})


def cut(tmp_path, model, lengths=(32, 64), tokens=100_000, **sources):
    tokenizer = AutoTokenizer.from_pretrained(model)
    return prepare(
        tmp_path / "data", tokenizer, train_tokens=tokens, block_size=32, lengths=lengths, **sources
    )


def rows(path):
    return [json.loads(line)["text"] for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_last_documents_are_kept_back(tmp_path, model):
    documents = [f"document {n}: {SENTENCE * 3}" for n in range(40)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    data = cut(tmp_path, model, data=str(source), eval_data=None)
    assert rows(data.train) + rows(data.held_out) == documents
    assert len(rows(data.held_out)) == 4
    assert "the last 4 of 40 documents were kept back" in data.notes[0]
    again = cut(tmp_path, model, data=str(source), eval_data=None)
    assert again == data


def test_end_of_a_single_document_is_kept_back(tmp_path, model):
    source = tmp_path / "book.txt"
    source.write_text(SENTENCE * 100)
    data = cut(tmp_path, model, data=str(source), eval_data=None)
    assert rows(data.train)[0] + rows(data.held_out)[0] == source.read_text()
    assert len(rows(data.held_out)[0]) == len(source.read_text()) // 10


def test_short_documents_are_joined_and_lengths_cut(tmp_path, model):
    source, held = tmp_path / "book.txt", tmp_path / "held.jsonl"
    source.write_text(SENTENCE * 100)
    held.write_text(json.dumps({"text": "x" * 50}) + "\n" + json.dumps({"text": "y" * 40}) + "\n")
    sources = {"data": str(source), "eval_data": str(held)}
    for name in "abcd":
        (tmp_path / name).mkdir()
    data = cut(tmp_path / "a", model, [32], **sources)
    assert (data.join, data.lengths, len(data.notes)) == (False, [32], 1)
    data = cut(tmp_path / "b", model, [32, 64], **sources)
    assert (data.join, data.lengths) == (True, [32, 64])
    data = cut(tmp_path / "c", model, [32, 64, 128], **sources)
    assert (data.join, data.lengths) == (True, [32, 64])
    assert "lengths beyond 64 are left out" in data.notes[-1]
    with pytest.raises(DataError, match="give more text"):
        cut(tmp_path / "d", model, [512], **sources)


def test_training_text_is_no_longer_than_needed(tmp_path, model):
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": SENTENCE}) + "\n" for _ in range(500)))
    data = cut(tmp_path, model, tokens=100, data=str(source), eval_data=None, lengths=[32])
    assert 800 <= sum(map(len, rows(data.train))) <= 800 + len(SENTENCE)


def test_standard_library_is_the_default_text(tmp_path, model):
    data = cut(tmp_path, model, tokens=20_000, data=None, eval_data=None)
    held_out = {path.name[4:] for path in (tmp_path / "data" / "held_out").iterdir()}
    train = {path.name[4:] for path in (tmp_path / "data" / "train").iterdir()}
    assert {"argparse.txt", "typing.txt"} <= held_out
    assert not train & held_out
    assert len(data.prompts) == 2
