"""The recall command: the original first, verdicts, files, resuming, a user's own cases, refusals."""

from __future__ import annotations

import csv
import json

import pytest
from helpers.fixtures_perplexity import make_folder
from helpers.real_data import DATA, needs_data
from transformers import AutoTokenizer

from hf_linattn import from_pretrained, patch_model
from hf_linattn.errors import DataError
from hf_linattn.eval.recall import measure_recall, plot
from hf_linattn.eval.recall import run as recall_run
from hf_linattn.eval.recall.__main__ import main
from hf_linattn.eval.recall.custom import grouped, load_cases
from hf_linattn.eval.recall.verdict import assess_baseline, percent
from hf_linattn.eval.recall.vocabulary import Vocabulary

EXTRA = ("--lengths", "64,96", "--depths", "0,1", "--samples", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def patched_folder(folder, tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tuned"
    patch_model(model := from_pretrained(str(folder)), "elu1")
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def run(models, out, *extra, tasks="induction,mqar"):
    words = ["--model", *models, "--output-dir", out, "--tasks", tasks, *EXTRA, *extra]
    return main([str(word) for word in words])


def results(out):
    return json.loads((out / "results.json").read_text())


def labels(found):
    return [model["label"] for model in found["models"]]


class TestCommand:
    def test_equals_the_function_and_writes_everything(self, folder, tokenizer, tmp_path, capsys):
        assert run([folder], tmp_path, "--patch", "elu1,logn:train_length=64") == 0
        printed = capsys.readouterr()
        found = results(tmp_path)
        assert found["complete"]
        assert found["train_length"] == 64
        assert labels(found) == ["tiny", "elu1", "logn:train_length=64"]
        model = from_pretrained(str(folder))
        ask = {"lengths": (64, 96), "depths": (0.0, 1.0), "samples": 3}
        plain = measure_recall(model, tokenizer, ("induction", "mqar"), **ask)
        patch_model(model, "elu1")
        patched = measure_recall(model, tokenizer, ("induction", "mqar"), **ask)
        rows = found["rows"]
        assert len(rows) == 24
        for row, want in zip(rows, [*plain, *patched], strict=False):
            assert {key: value for key, value in row.items() if key != "model"} == vars(want)
        with (tmp_path / "results.csv").open() as file:
            table = list(csv.DictReader(file))
        columns = ["task", "model", "length", "depth", "samples", "accuracy", "stderr", "logprob", "chance"]
        assert list(table[0])[:9] == columns
        assert [float(row["logprob"]) for row in table] == [row["logprob"] for row in rows]
        for name in ("heatmap-induction.png", "heatmap-mqar.png", "curves.png"):
            assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        # the model is random: the output has to say so, before the patched versions and after
        for verdict, task in zip(found["verdicts"], ("induction", "mqar"), strict=True):
            assert verdict["able"] == "no"
            assert verdict["text"].startswith(f"tiny cannot do {task}: ")
            assert verdict["text"].endswith("recall of its patched versions means nothing")
            assert verdict["text"] in printed.out
            assert printed.err.index(verdict["text"]) < printed.err.index("elu1:")
            title = plot.heatmap([row for row in rows if row["task"] == task], verdict).get_suptitle()
            assert title.replace("\n", " ") == verdict["text"]
        assert "elu1" in printed.out

    def test_goes_on_where_it_was_interrupted(self, folder, tmp_path, capsys, monkeypatch):
        assert run([folder], tmp_path / "whole", "--patch", "elu1", tasks="mqar") == 0
        whole = results(tmp_path / "whole")
        score, calls = recall_run.score, []

        def interrupted(*args):
            calls.append(args)
            if len(calls) == 6:
                raise KeyboardInterrupt
            return score(*args)

        monkeypatch.setattr(recall_run, "score", interrupted)
        out = tmp_path / "parts"
        assert run([folder], out, "--patch", "elu1", tasks="mqar") == 130
        assert "goes on" in capsys.readouterr().err
        assert results(out)["rows"] == whole["rows"][:5]
        assert not results(out)["complete"]
        assert run([folder], out, "--patch", "elu1", tasks="mqar") == 0
        assert len(calls) == 6 + 3
        assert results(out)["rows"] == whole["rows"]
        assert results(out)["verdicts"] == whole["verdicts"]
        calls.clear()
        assert run([folder], out, "--patch", "elu1", tasks="mqar") == 0  # nothing is left to do
        assert calls == []
        before = (out / "results.json").read_bytes()
        assert run([folder], out, "--patch", "logn", tasks="mqar") == 1
        assert "other arguments (--patch)" in capsys.readouterr().err
        assert (out / "results.json").read_bytes() == before

    def test_a_patched_folder_is_measured_unpatched_first(self, folder, patched_folder, tmp_path, capsys):
        assert run([patched_folder], tmp_path / "a", tasks="induction") == 0
        assert labels(results(tmp_path / "a")) == ["tuned unpatched", "tuned"]
        assert run([folder, patched_folder], tmp_path / "b", "--patch", "elu1", tasks="induction") == 0
        found = results(tmp_path / "b")
        assert labels(found) == ["tiny", "elu1", "tuned"]
        numbers = [[row["logprob"] for row in found["rows"] if row["model"] == m] for m in labels(found)]
        assert numbers[1] == numbers[2]  # the same weights under the same patch
        assert numbers[0] != numbers[1]
        first = results(tmp_path / "a")["rows"]
        assert [row["logprob"] for row in first if row["model"] == "tuned unpatched"] == numbers[0]

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            (("--patch", "elu2"), "unknown"),
            (("--patch", "elu1,elu1"), "--compare has 'elu1' twice"),
            (("--patch", "softmax"), "measured first anyway"),
            (("--patch", "elu1:nothing=1"), "elu1:nothing=1: "),
            (("--lengths", "5"), "does not fit into 5 tokens"),
            (("--tasks", "key_value"), "take mqar"),
            (("--tokenizer", "/no/such"), "--tokenizer"),
            (("--cases", "/no/such.jsonl"), "cannot read the cases"),
        ],
    )
    def test_refuses_before_it_measures(self, folder, tmp_path, capsys, monkeypatch, extra, words):
        monkeypatch.setattr(recall_run, "score", None)
        assert run([folder], tmp_path / "out", *extra) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert words in error
        assert not (tmp_path / "out").exists()

    def test_refuses_models_that_are_not_there_or_named_twice(self, folder, tmp_path, capsys):
        assert run([folder, tmp_path / "none"], tmp_path / "out") == 1
        assert "no such folder" in capsys.readouterr().err
        assert run([folder, folder, folder], tmp_path / "out") == 1
        assert "names a model twice" in capsys.readouterr().err

    def test_refuses_a_model_with_other_tokens(self, folder, tmp_path, capsys):
        other = tmp_path / "other"
        from_pretrained(str(folder)).save_pretrained(other)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(["new"])
        tokenizer.save_pretrained(other)
        assert run([folder, other], tmp_path / "out") == 1
        assert "has another tokenizer" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            (("--tasks", "needle"), "unknown task 'needle'"),
            (("--depths", "0,2"), "from 0 (start) to 1 (end)"),
            (("--depths", "middle"), "from 0 (start) to 1 (end)"),
            (("--lengths", "0"), "at least 1"),
            (("--samples", "0"), "at least 1"),
            (("--patch", "elu1,"), "names no patch"),
        ],
    )
    def test_wrong_usage(self, folder, tmp_path, capsys, extra, words):
        with pytest.raises(SystemExit, match="2"):
            run([folder], tmp_path, *extra)
        assert words in capsys.readouterr().err

    def test_help_teaches(self, capsys):
        with pytest.raises(SystemExit, match="0"):
            main(["--help"])
        assert "--compare elu1,window:size=64" in capsys.readouterr().out


class TestCases:
    def test_own_cases(self, folder, tmp_path, capsys):
        cases = [
            {"prompt": "The key is 42. " * 2 + "The key is", "answer": " 42", "candidates": [" 42", " 17"]},
            {"prompt": "It is red. It is", "answer": " red", "name": "colours", "depth": 0},
            {"prompt": "x " * 35 + "It is blue. It is", "answer": " blue", "name": "colours", "depth": 0},
        ]
        path = tmp_path / "cases.jsonl"
        path.write_text("\ufeff" + "\n".join(map(json.dumps, cases)) + "\n\n")  # as editors on Windows begin
        out = tmp_path / "out"
        words = ["--model", folder, "--cases", path, "--lengths", "64,128", "--output-dir", out]
        assert main([str(word) for word in words]) == 0
        rows = results(out)["rows"]
        found = [(row["task"], row["length"], row["depth"], row["samples"]) for row in rows]
        assert found == [("cases", 64, None, 1), ("colours", 64, 0.0, 1), ("colours", 128, 0.0, 1)]
        assert (rows[0]["chance"], rows[0]["choice_chance"]) == (0.5, 0.5)
        # without candidates the chance is that of any tokens: 257 ** -len(" red")
        assert (rows[1]["chance"], rows[1]["choice"]) == (pytest.approx(257.0**-4), None)
        assert (out / "heatmap-colours.png").exists()
        capsys.readouterr()
        path.write_text(json.dumps(cases[0]))
        assert main([str(word) for word in words]) == 1
        assert "other arguments (--cases)" in capsys.readouterr().err

    def test_tokens_are_those_of_the_joined_text(self, tokenizer, tmp_path):
        path = tmp_path / "cases.jsonl"
        path.write_text(json.dumps({"prompt": "a b", "answer": " c", "candidates": [" c", " dd"]}))
        ((name, length, depth, (sample,)),) = grouped(load_cases(path), Vocabulary(tokenizer, 257), [8])
        assert (name, length, depth) == ("cases", 8, None)
        assert sample.ids.tolist() == tokenizer("a b c")["input_ids"]
        assert sample.answers == ((4, 6),)
        assert len(sample.candidates.answers) == 2

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("", "holds no cases"),
            ("{", "1 is no JSON"),
            ("[1]", "1 is no JSON object"),
            ('{"promt": "a"}', "unknown key 'promt'; a case has prompt, answer"),
            ('{"prompt": "a"}', "'answer' must be a text"),
            ('{"prompt": "", "answer": "b"}', "'prompt' must be a text"),
            ('{"prompt": "a", "answer": 5}', "'answer' must be a text"),
            ('{"prompt": "a", "answer": "b", "depth": 2}', "'depth' must be a number from 0"),
            ('{"prompt": "a", "answer": "b", "depth": true}', "'depth' must be a number"),
            ('{"prompt": "a", "answer": "b", "name": "mqar"}', "'name' must be"),
            ('{"prompt": "a", "answer": "b", "candidates": "b"}', "must be a list of texts"),
            ('{"prompt": "a", "answer": "b", "candidates": ["c"]}', "none of its candidates"),
        ],
    )
    def test_a_line_that_is_no_case(self, tmp_path, line, words):
        path = tmp_path / "cases.jsonl"
        path.write_text(line)
        with pytest.raises(DataError, match=words):
            load_cases(path)

    def test_a_case_that_is_too_long(self, tokenizer, tmp_path):
        path = tmp_path / "cases.jsonl"
        path.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": "aaaaaaaa", "answer": "b"}')
        with pytest.raises(DataError, match=r":3 has 10 tokens, .* the longest of the lengths, 8: add"):
            list(grouped(load_cases(path), Vocabulary(tokenizer, 257), [4, 8]))


def row(length, accuracy, stderr=0.01, chance=0.05, choice=None, task="mqar", model="m"):
    return {
        "task": task, "model": model, "length": length, "depth": 0.0, "accuracy": accuracy, "stderr": stderr,
        "logprob": -1.0, "chance": chance, "choice": choice, "choice_chance": chance,
    }  # fmt: skip


class TestVerdicts:
    @pytest.mark.parametrize(
        ("accuracies", "stderr", "able", "length"),
        [
            ((0.9, 0.1), 0.01, "yes", 64),  # it can, and loses it with length
            ((0.1, 0.9), 0.01, "yes", 128),
            ((0.3, 0.1), 0.01, "hardly", 64),
            ((0.1, 0.06), 0.01, "no", 64),
            ((0.0, 0.0), 0.0, "no", 64),
            ((0.5, 0.0), 0.2, "no", 64),  # not surely above chance
            ((0.9, 0.0), None, "yes", 64),
        ],
    )
    def test_at_the_length_where_it_does_best(self, accuracies, stderr, able, length):
        rows = [row(n, accuracy, stderr) for n, accuracy in zip((64, 128), accuracies, strict=True)]
        (verdict,) = assess_baseline([*rows, row(64, 1.0, model="other")], "m")
        assert (verdict["able"], verdict["length"]) == (able, length)

    def test_says_what_the_candidates_show(self):
        (verdict,) = assess_baseline([row(64, 0.0, 0.0, choice=0.8)], "m")
        assert verdict["text"] == (
            "m cannot do mqar: 0 % at 64, chance 5.0 %; 80.0 % among the candidates, chance 5.0 %; "
            "recall of its patched versions means nothing"
        )
        (verdict,) = assess_baseline([row(64, 0.0, 0.0, choice=0.06)], "m")
        assert "candidates" not in verdict["text"]

    def test_percent(self):
        assert [percent(x) for x in (0, 1, 0.987, 0.004, 1 / 2047, 1 / 90000)] == [
            "0 %", "100 %", "98.7 %", "0.4 %", "0.049 %", "0.0011 %",
        ]  # fmt: skip


@needs_data
def test_a_real_model_without_induction(tmp_path, capsys):
    model = DATA / "models" / "books-1m"
    words = ["--model", model, "--tasks", "induction", "--lengths", "512", "--samples", "4", "--depths", "1"]
    assert main([str(word) for word in [*words, "--output-dir", tmp_path]]) == 0
    assert "books-1m cannot do induction: " in capsys.readouterr().out
