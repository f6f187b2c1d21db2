"""The harness command: rows, resuming, refusals; the command line of lm_eval; and no lm_eval at all."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

from __future__ import annotations

import functools
import json
import sys

import pytest
import torch
from helpers.fixtures_harness import WARNINGS, folder, lm_class, patched, request, tasks, tokenizer

from hf_linattn.eval.harness.__main__ import main

pytestmark = WARNINGS


def command(folder, tasks, out, *extra):
    """Two tasks of two kinds, unless others are named."""
    named = () if "--tasks" in extra else ("--tasks", "tiny_choice", "tiny_rolling")
    fixed = ("--model", folder, "--include-path", tasks, "--device", "cpu", "--output-dir", out)
    return [str(item) for item in (*fixed, *named, *extra)]


def values(out):
    rows = json.loads((out / "results.json").read_text())["rows"]
    return {(row["model"], row["task"], row["metric"]): row["value"] for row in rows}


def test_command(lm_class, folder, tasks, tmp_path, capsys):
    names = ("--tasks", "tiny_choice,tiny_text", "tiny_rolling", "--batch-size", "2")
    extra = ("--patch", "elu1", "--compare-original", *names)
    assert main(command(folder, tasks, tmp_path / "both", *extra)) == 0
    printed = capsys.readouterr().out
    label = f"{folder.name} unpatched"
    lines = printed.splitlines()
    assert lines[0].split()[-4:] == [folder.name, "elu1", folder.name, "unpatched"]
    assert [line.split()[0] for line in lines[1:4]] == ["tiny_choice", "tiny_text", "tiny_rolling"]
    found = values(tmp_path / "both")
    lm = lm_class(str(folder), patch="elu1")
    texts = [(question + " ") * 20 for question in ("one two", "the sky is")]
    nats = lm.loglikelihood_rolling([request("loglikelihood_rolling", text) for text in texts])
    bits = -sum(nats) / sum(map(len, texts)) / torch.tensor(2.0).log().item()
    assert found[f"{folder.name} elu1", "tiny_rolling", "bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert main(command(folder, tasks, tmp_path / "one", *names)) == 0
    alone = values(tmp_path / "one")
    assert {key[1:]: value for key, value in found.items() if key[0] == label} == {
        key[1:]: value for key, value in alone.items()
    }
    assert (tmp_path / "both/results.csv").read_text().count("\n") == 1 + len(found)


def test_the_original_may_be_another_folder(lm_class, folder, patched, tasks, tmp_path):
    extra = ("--tasks", "tiny_rolling", "--compare-original")
    assert main(command(patched, tasks, tmp_path / "a", *extra)) == 0
    assert main(command(patched, tasks, tmp_path / "b", *extra, folder)) == 0
    (mine, off), (again, original) = values(tmp_path / "a").values(), values(tmp_path / "b").values()
    assert mine == again != off == original


def test_an_interrupted_run_goes_on(lm_class, folder, tasks, tmp_path, monkeypatch, capsys):
    from hf_linattn.eval.harness import run

    real, calls = run._evaluate, []

    def interrupted(lm, task, *rest):
        calls.append(task)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(lm, task, *rest)

    monkeypatch.setattr(run, "_evaluate", interrupted)
    line = command(folder, tasks, tmp_path / "out")
    assert main(line) == 130
    assert "goes on" in capsys.readouterr().err
    before = values(tmp_path / "out")
    assert {task for _, task, _ in before} == {"tiny_choice"}
    assert main(line) == 0
    assert calls == ["tiny_choice", "tiny_rolling", "tiny_rolling"]
    printed = capsys.readouterr().out
    assert main(line) == 0
    assert (len(calls), capsys.readouterr().out) == (3, printed)
    assert main([*line, "--max-length", "32"]) == 1
    assert "--max-length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--tasks", "tiny_lost"), 1, "nowhere.jsonl"),
        (("--tasks", "tiny_empty"), 1, "data are empty"),
        (("--include-path", "nowhere"), 1, "no such folder: nowhere"),
        (("--model", "./nowhere"), 1, "no such folder"),
        (("--compare-original",), 1, "no patch to take off"),
        (("--patch", "elu2"), 1, "elu1"),
        (("--tasks", "tiny_text", "--max-length", "8"), 1, "max_length 8"),
        (("--options", "{}"), 2, "--patch"),
        (("--patch", "elu1", "--options", "[]"), 2, "JSON object"),
        (("--tasks", ","), 2, "no task"),
        (("--tasks", "tiny_text", "tiny_text"), 2, "twice"),
        (("--limit", "0"), 2, "number of documents"),
        (("--limit", "1.5"), 2, "number of documents"),
        (("--batch-size", "0"), 2, "at least 1"),
    ],
)
def test_bad_commands(lm_class, folder, tasks, tmp_path, capsys, extra, status, words):
    try:
        code = main(command(folder, tasks, tmp_path / "out", *extra))
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    last = message.strip().splitlines()[-1]
    assert code == status
    assert words in last
    assert status == 2 or last.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_unknown_task_is_answered_with_near_ones(lm_class, folder, tasks, tmp_path, monkeypatch, capsys):
    from hf_linattn.eval.harness import run

    # the list of lm_eval's own tasks takes long to read
    own = functools.partial(run.TaskManager, include_defaults=False)
    monkeypatch.setattr(run, "TaskManager", lambda **kwargs: own(**(kwargs | {"include_defaults": False})))
    assert main(command(folder, tasks, tmp_path / "out", "--tasks", "tiny_chioce")) == 1
    assert "Did you mean tiny_choice" in capsys.readouterr().err


def test_the_command_line_of_lm_eval(lm_class, folder, tasks, tmp_path, monkeypatch, capsys):
    from lm_eval.tasks import TaskManager

    from hf_linattn.eval import harness_cli

    monkeypatch.setattr(
        TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False)
    )
    arguments = {"pretrained": str(folder), "patch": "window+elu1", "options": {"size": 3, "sinks": 1}}
    line = [
        "lm_eval",
        "--model",
        "hf_linattn",
        "--model_args",
        json.dumps(arguments),
        "--tasks",
        "tiny_rolling",
    ]
    line += ["--include_path", str(tasks), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", line)
    assert harness_cli.main() == 0
    shown = next(row for row in capsys.readouterr().out.splitlines() if "bits_per_byte" in row)
    extra = ("--tasks", "tiny_rolling", "--patch", "window+elu1", "--options", '{"size": 3, "sinks": 1}')
    assert main(command(folder, tasks, tmp_path, *extra)) == 0
    [value] = values(tmp_path).values()
    assert f"{value:.4f}" in shown


@pytest.mark.parametrize("name", ["harness", "harness_cli"])
def test_without_lm_eval(name, monkeypatch, capsys):
    from importlib import import_module

    for module in [key for key in sys.modules if key.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    for module in ("run", "model"):
        monkeypatch.delitem(sys.modules, f"hf_linattn.eval.harness.{module}", raising=False)
    line = ["--model", "x", "--tasks", "y", "--output-dir", "z"]
    monkeypatch.setattr(sys, "argv", [name, *line])
    command = import_module(f"hf_linattn.eval.{'harness.__main__' if name == 'harness' else name}").main
    assert command() == 1
    assert capsys.readouterr().err == "error: lm_eval is not installed; pip install 'hf-linattn[harness]'\n"


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "python -m hf_linattn.eval.harness_cli" in capsys.readouterr().out


def test_table_of_what_is_no_number(lm_class):
    from hf_linattn.eval.harness.run import table

    row = {
        "model": "m",
        "task": "t",
        "metric": "perplexity",
        "filter": "none",
        "value": "inf",
        "stderr": None,
    }
    row |= {"higher_is_better": False, "num_fewshot": 0}
    assert table([row]).splitlines()[1].split() == ["t", "0", "perplexity", "lower", "is", "better", "inf"]
