"""What measuring commands leave behind, and what they say where they cannot leave it."""

from __future__ import annotations

import csv
import errno
import tempfile
from importlib import import_module
from pathlib import Path

import pytest
from helpers.fixtures_perplexity import make_folder, make_texts
from transformers import LlamaForCausalLM

from hf_linattn.cli.files import replacing
from hf_linattn.errors import DataError, TrainingError
from hf_linattn.eval.common import contents, results

TEXT = ("--data", "{data}", "--lengths", "64", "--stride", "32", "--max-tokens", "64")
COMMANDS = {
    "perplexity": TEXT,
    "perplexity --branches": (*TEXT, "--branches", "--patch", "window+elu1", "--options", '{{"size": 16}}'),
    "bench --cost": ("--cost", "--lengths", "16", "--new-tokens", "2", "--rounds", "2"),
    "diagnose": ("--data", "{data}", "--length", "64"),
    "generation": ("--data", "{data}", "--compare", "elu1", "--prompt-tokens", "8", "--new-tokens", "4"),
    "harness": ("--tasks", "tiny", "--include-path", "{data}"),
    "layers": ("--data", "{data}", "--length", "64"),
    "recall": ("--tasks", "induction", "--lengths", "64", "--samples", "2"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_cannot_be_written_is_said_before_the_work(
    name, folder, data, tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").write_text("in the way")
    words = [word.format(data=data) for word in COMMANDS[name]]
    if name == "harness":
        pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'hf-linattn[harness]'")
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("work was begun"))
    out = tmp_path / "file" / "out"
    main = import_module(f"hf_linattn.eval.{name.split()[0]}.__main__").main
    assert main(["--model", str(folder), *words, "--output-dir", str(out)]) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: cannot write {out}: Not a directory"
    assert (tmp_path / "file").read_text() == "in the way"


def test_tables_hold_every_column_once_in_order(tmp_path):
    path = tmp_path / "a.csv"
    results.save_csv(path, [{"b": 1, "a": None}, {"a": "ü, 2\r", "c": 3}])
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["b", "a", "c"], ["1", "", ""], ["", "ü, 2\r", "3"]]
    results.save_csv(path, [{"b": 1, "a": 2}], columns=("a",))
    assert path.read_bytes() == b"a\r\n2\r\n"


def test_what_cannot_be_written_leaves_the_old_file(tmp_path):
    results.save(tmp_path, {"format": "x/1", "arguments": {}, "value": 1})
    with pytest.raises(DataError, match="no finite number: the weights hold NaN"):
        results.save(tmp_path, {"format": "x/1", "arguments": {}, "value": float("nan")})
    assert results.load(tmp_path, {}, "x/1")["value"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainingError, match="cannot write"):
        results.save(tmp_path / "file", {"format": "x/1", "arguments": {}})


def test_only_a_run_of_the_same_command_and_arguments_is_gone_on_with(tmp_path):
    assert results.load(tmp_path, {"a": 1}, "x/1") is None
    results.save(tmp_path, {"format": "x/1", "arguments": {"a": 1, "some": (2, 3)}})
    assert results.load(tmp_path, {"a": 1, "some": (2, 3)}, "x/1")["arguments"]["a"] == 1
    with pytest.raises(DataError, match=r"other arguments \(--a, --new-one\)"):
        results.load(tmp_path, {"a": 2, "some": [2, 3], "new_one": 1}, "x/1")
    with pytest.raises(DataError, match="no file of this command"):
        results.load(tmp_path, {"a": 1, "some": [2, 3]}, "y/1")
    for text in ("[1]", "{", '{"format": "x/1"}', "\xff"):
        (tmp_path / "results.json").write_text(text, encoding="latin-1")
        with pytest.raises(DataError, match="no file of this command"):
            results.load(tmp_path, {}, "x/1")


def test_a_run_goes_on_where_it_ended(tmp_path):
    arguments = {"a": 1, "seed": 7}
    run = results.ResumableRun(tmp_path / "out", arguments, "x/1", "python -m x")
    assert (run.complete, run.rows, list(tmp_path.iterdir())) == (False, [], [])
    run.begin({"models": ["m"]})
    with run.timed("first"):
        run.rows.append({"value": 1})
    run.save()
    with pytest.raises(ZeroDivisionError), run.timed("second"):
        run.rows.append({"value": 1 / 0})
    again = results.ResumableRun(tmp_path / "out", arguments, "x/1", "python -m x")
    assert not again.complete
    assert again.rows == [{"value": 1}]
    assert list(again.seconds) == ["first"]
    again.begin({"models": ["m"]})
    again.rows.append({"value": 2})
    again.finish("results.csv", ("value",))
    done = results.ResumableRun(tmp_path / "out", arguments, "x/1", "python -m x")
    assert done.complete
    assert done.results == again.results
    keys = ("format", "complete", "command", "arguments", "seed", "versions", "contents")
    assert tuple(done.results) == (*keys, "models", "rows", "run")
    assert list(done.results["run"]) == ["device", "threads", "kernels", "seconds"]
    assert done.results["run"]["kernels"] == {"cpu": "torch: HF_LINATTN_CPP=0"}
    assert (tmp_path / "out" / "results.csv").read_text().split() == ["value", "1", "2"]
    with pytest.raises(DataError, match=r"other arguments \(--a\)"):
        results.ResumableRun(tmp_path / "out", {**arguments, "a": 2}, "x/1", "python -m x")


def test_of_two_runs_that_begin_in_a_folder_at_once_the_first_to_write_stays(tmp_path):
    runs = [results.ResumableRun(tmp_path, {"a": number}, "x/1", "python -m x") for number in (1, 2)]
    for run in runs:
        run.begin({})
        run.rows.append(run.results["arguments"])
    runs[0].finish("table.csv")
    with pytest.raises(DataError, match=r"other arguments \(--a\)"):
        runs[1].finish("table.csv")
    assert results.load(tmp_path, {"a": 1}, "x/1")["complete"]
    assert (tmp_path / "table.csv").read_text().split() == ["a", "1"]


def test_a_process_that_does_not_write_leaves_no_file(tmp_path):
    run = results.ResumableRun(tmp_path / "out", {"seed": 0}, "x/1", "python -m x", writes=False)
    run.begin({})
    run.rows.append({"value": 1})
    run.save()
    run.finish("results.csv")
    assert run.results["complete"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changed", ["data", "model", "prompts"])
def test_rows_of_a_text_or_model_that_has_changed_are_not_gone_on_with(tmp_path, changed):
    folder = tmp_path / "model"
    (tmp_path / "texts").mkdir()
    folder.mkdir()
    files = {"data": tmp_path / "texts" / "a.txt", "model": folder / "model.safetensors"}
    files["prompts"] = tmp_path / "prompts.txt"
    for file in files.values():
        file.write_text("as it was")
    arguments = {"model": str(folder), "data": str(tmp_path / "texts"), "prompts": files["prompts"]}

    def start():
        return results.ResumableRun(tmp_path / "out", {k: str(v) for k, v in arguments.items()}, "x/1", "run")

    run = start()
    run.begin({})
    run.rows.append({"value": 1})
    (tmp_path / "out").mkdir()
    run.save()
    (folder / "README.md").write_text("a card decides no numbers")
    assert start().rows == [{"value": 1}]
    files[changed].write_text("as it is!")
    with pytest.raises(
        DataError, match=f"what --{changed} .* was before it changed; choose another --output-dir"
    ):
        start()
    results.save(tmp_path / "out", {"format": "x/1", "arguments": run.results["arguments"], "rows": run.rows})
    assert start().rows == run.rows  # an older version took no digests
    assert not start().complete


def test_a_large_file_is_read_in_pieces_up_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "PIECE", 16)
    monkeypatch.setattr(contents, "PIECES", 4)
    file = tmp_path / "a.txt"
    found = set()
    for place in (0, 250, 500, 999):
        text = bytearray(1000)
        text[place] = 1
        file.write_bytes(text)
        found.add(contents.digests({"data": str(file)})["data"])
    assert len(found) == 4


PICTURES = {
    "perplexity": "perplexity.png",
    "perplexity --branches": "branches.png",
    "bench --cost": "cost.png",
    "generation": "kl.png",
    "recall": "heatmap-induction.png",
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_deleted_picture_is_drawn_again_from_the_results(name, folder, data, tmp_path, monkeypatch):
    out, words = tmp_path / "out", [word.format(data=data) for word in COMMANDS[name]]
    main = import_module(f"hf_linattn.eval.{name.split()[0]}.__main__").main
    command = ["--model", str(folder), *words, "--output-dir", str(out)]
    assert main(command) == 0
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    (out / PICTURES[name]).unlink()
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("work was begun"))
    assert main(command) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_two_runs_that_write_one_file_are_told_of_each_other(tmp_path):
    path = tmp_path / "a.csv"

    def write(meanwhile):
        with replacing(path) as partial:
            partial.write_text("text")
            meanwhile()

    with pytest.raises(TrainingError, match=r"a\.csv: its folder is gone, or another run writes it"):
        write(lambda: write(lambda: None))
    assert path.read_text() == "text"


@pytest.mark.parametrize("name", ["model", "data"])
def test_files_that_cannot_be_read_are_one_clear_error(name, tmp_path, monkeypatch):
    def refused(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(DataError, match=r"cannot read .*(config\.json|a\.txt): Permission denied"):
        contents.digests({name: str(tmp_path)})


def test_a_folder_that_cannot_be_written_gives_its_own_reason(tmp_path, monkeypatch):
    def refused(**kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "TemporaryFile", refused)
        with pytest.raises(TrainingError, match=r"cannot write .*out: Read-only file system"):
            results.check_writable(tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(TrainingError, match=r"cannot write .*file: Not a directory"):
        results.check_writable(tmp_path / "file")
    results.check_writable(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
