"""The perplexity command: files, processes, resuming, baselines, refusals; and the metric beside it."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import accelerate
import pytest
import torch
from helpers.fixtures_perplexity import TEXTS, curve, make_folder, make_texts
from helpers.launch import TORCHRUN, in_two_processes
from transformers import AutoTokenizer

from hf_linattn import from_pretrained, patch_model
from hf_linattn.eval import length_perplexity
from hf_linattn.eval.common import nll
from hf_linattn.eval.perplexity import PerplexityArguments, perplexity
from hf_linattn.eval.perplexity import run as command_run
from hf_linattn.eval.perplexity.__main__ import build_parser, main
from hf_linattn.eval.perplexity.measure import measure


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(folder):
    return from_pretrained(str(folder)).eval()


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


def command(folder, data, out, *extra):
    return ["--model", str(folder), "--data", str(data), "--output-dir", str(out), *map(str, extra)]


def results(out):
    return json.loads((out / "results.json").read_text())


def test_command_metric_and_function_agree(folder, data, model, tokenizer, tmp_path, capsys):
    import evaluate

    extra = ("--lengths", "64,...,256", "--stride", "32", "--max-tokens", "512", "--batch-size", "2")
    assert main(command(folder, data, tmp_path, *extra)) == 0
    printed = capsys.readouterr().out
    rows = results(tmp_path)["rows"]
    options = {"lengths": [256, 64, 128], "stride": 32, "max_tokens": 512, "batch_size": 2}
    measured = measure(model, tokenizer, TEXTS, **options)
    metric = evaluate.load(length_perplexity.__file__, keep_in_memory=True)
    computed = metric.compute(predictions=TEXTS, model=model, tokenizer=tokenizer, **options)
    assert curve(rows) == curve(measured) == computed["perplexities"] == curve(computed["rows"])
    assert curve(rows, "stderr") == computed["stderrs"]
    assert curve(rows, "length") == computed["lengths"] == [64, 128, 256]
    assert "3 of 4 documents" in printed
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(table[0])[:5] == ["length", "perplexity", "byte_perplexity", "stderr", "tokens"]
    assert [float(line["perplexity"]) for line in table] == curve(rows)
    assert (tmp_path / "perplexity.png").read_bytes()[:4] == b"\x89PNG"


# tests/parallel/test_split.py compares the same without a launcher in every run
@pytest.mark.full
@pytest.mark.usefixtures("warm_start")
def test_two_processes_give_the_same_file(folder, data, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "480", "--batch-size", "2")
    both = tmp_path / "both"
    words = ("-m", "hf_linattn.eval.perplexity", *command(folder, data, both, *extra))
    printed = in_two_processes(*words, launcher=TORCHRUN)
    assert printed.count("byte_ppl") == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert main(command(folder, data, tmp_path / "one", *extra)) == 0
    finally:
        torch.set_num_threads(threads)
    assert results(both)["run"]["processes"] == 2
    keys = ("rows", "data", "arguments", "models", "versions")
    assert [results(both)[key] for key in keys] == [results(tmp_path / "one")[key] for key in keys]


def test_resume(folder, data, tmp_path, monkeypatch, capsys):
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "128")
    assert main(command(folder, data, tmp_path / "whole", *extra)) == 0
    real = nll.forward

    def interrupted(model, ids, *args, **kwargs):
        if ids.shape[1] == 128:
            raise KeyboardInterrupt
        return real(model, ids, *args, **kwargs)

    broken = tmp_path / "broken"
    monkeypatch.setattr(nll, "forward", interrupted)
    assert main(command(folder, data, broken, *extra)) == 130
    assert not results(broken)["complete"]
    assert curve(results(broken)["rows"], "length") == [64]
    read = []
    monkeypatch.setattr(
        nll, "forward", lambda m, ids, *a, **k: read.append(ids.shape[1]) or real(m, ids, *a, **k)
    )
    assert main(command(folder, data, broken, *extra)) == 0
    assert set(read) == {128}
    assert results(broken)["rows"] == results(tmp_path / "whole")["rows"]
    assert results(broken)["complete"]
    # finished: nothing is measured again
    read.clear()
    assert main(command(folder, data, broken, *extra)) == 0
    assert not read
    capsys.readouterr()
    assert main(command(folder, data, broken, *extra, "--bos", "no")) == 1
    assert "other arguments (--bos)" in capsys.readouterr().err


def test_patch_and_baseline(folder, data, tokenizer, tmp_path):
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "128")
    assert main(command(folder, data, tmp_path / "plain", *extra)) == 0
    tried = ("--patch", "elu1", "--baseline", "unpatched")
    assert main(command(folder, data, tmp_path / "tried", *extra, *tried)) == 0
    rows = results(tmp_path / "tried")["rows"]
    assert [row["model"].split()[-1] for row in rows] == ["elu1", "elu1", "unpatched", "unpatched"]
    assert curve(rows[2:]) == curve(results(tmp_path / "plain")["rows"])
    assert curve(rows[:2]) != curve(rows[2:])
    saved = tmp_path / "saved"
    patch_model(from_pretrained(str(folder)), "elu1").save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    assert main(command(saved, data, tmp_path / "saved-out", *extra, "--baseline", folder)) == 0
    assert curve(results(tmp_path / "saved-out")["rows"]) == curve(rows)


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--lengths", "64,0"), 2, "at least 1, got '0'"),
        (("--lengths", "...,64"), 2, "between two lengths"),
        (("--max-tokens", "0"), 2, "at least 1"),
        (("--rope-scaling", "ntk:2"), 2, "linear, dynamic, yarn"),
        (("--rope-scaling", "yarn:x"), 2, "number of at least 1"),
        (("--options", "{}"), 2, "belongs to --patch"),
        (("--patch", "logn", "--options", "[1]"), 2, "JSON object"),
        (("--stream", "--stride", "8"), 2, "no meaning with --stream"),
        (("--segment", "8"), 2, "no meaning without --stream"),
        (("--stream", "--baseline", "unpatched", "--patch", "elu1"), 2, "needs linear attention"),
        (("--stream", "--max-tokens", "64"), 1, "cache grows"),
        (("--patch", "sofmax1"), 1, "Did you mean 'softmax1'"),
        (("--data", "/nowhere.txt"), 1, "no such file"),
        (("--model", "/nowhere"), 1, "no such folder"),
        (("--lengths", "64,1048576"), 1, "fits is 64"),
        (("--baseline", "."), 1, "."),
    ],
)
def test_bad_commands(folder, data, tmp_path, capsys, extra, status, words):
    extra = ("--lengths", "64,128", "--stride", "32", *extra) if "--stream" not in extra else extra
    try:
        code = main(command(folder, data, tmp_path / "out", *extra))
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == status
    assert words in message
    assert status == 2 or message.startswith("error: ")
    assert status == 2 or message.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_from_python_as_from_the_command_line(folder, data, tmp_path):
    extra = ("--lengths", "64,128", "--stride", "32", "--max-tokens", "128", "--compare", "elu1,softmax")
    assert main(command(folder, data, tmp_path / "command", *extra)) == 0
    arguments = PerplexityArguments(
        model=str(folder),
        data=str(data),
        output_dir=tmp_path / "python",
        lengths=[64, 128],
        stride=32,
        max_tokens=128,
        compare=["elu1", "softmax"],
    )
    returned = perplexity(arguments)
    assert returned == results(tmp_path / "python")
    assert returned["rows"] == results(tmp_path / "command")["rows"]
    assert returned["arguments"] == results(tmp_path / "command")["arguments"]
    words = ["--model", "a", "--data", "b", "--output-dir", "c"]
    assert PerplexityArguments(**vars(build_parser().parse_args(words))) == PerplexityArguments("a", "b", "c")


def test_no_tokenizer(folder, data, tmp_path, capsys, model):
    model.save_pretrained(tmp_path / "bare")
    assert main(command(tmp_path / "bare", data, tmp_path / "out")) == 1
    assert "--tokenizer" in capsys.readouterr().err
    extra = ("--tokenizer", folder, "--lengths", "64", "--stride", "32", "--max-tokens", "64")
    assert main(command(tmp_path / "bare", data, tmp_path / "out", *extra)) == 0


def test_a_first_process_that_fails_at_the_end_is_one_line_of_the_others(tmp_path, monkeypatch, capsys):
    """It writes the plot while the others only wait for it."""

    class Second(SimpleNamespace):
        def wait_for_everyone(self):
            raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")

    monkeypatch.setattr(
        accelerate, "PartialState", lambda **options: Second(process_index=1, num_processes=2)
    )
    monkeypatch.setattr(command_run, "_run", lambda *arguments: {})
    monkeypatch.setenv("RANK", "1")
    assert main(command("model", "data", tmp_path / "out")) == 1
    assert "error (process 1): process 1 of 2 waited for the others in vain" in capsys.readouterr().err


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m hf_linattn.eval.perplexity" in shown
    assert "accelerate launch" in shown
