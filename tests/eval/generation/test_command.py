"""The command that compares continuations: what it writes, how it goes on, what it refuses."""

import csv
import json
import re

import pytest
from helpers.fixtures_perplexity import TEXTS, make_folder, make_texts
from transformers import AutoTokenizer

from hf_linattn import from_pretrained, patch_model
from hf_linattn.eval.generation import compare_generation, outputs
from hf_linattn.eval.generation.__main__ import main
from hf_linattn.eval.generation.measure import Comparer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


def command(data, out, *extra, new_tokens=8):
    words = ["--data", data, "--prompt-tokens", 20, "--count", 5, "--new-tokens", new_tokens]
    return [*map(str, extra), *map(str, words), "--output-dir", str(out)]


def results(out):
    return json.loads((out / "results.json").read_text())


class TestCommand:
    def test_patches_of_one_model(self, folder, data, tmp_path, capsys):
        entries = "softmax,window+elu1:size=8,softmax@yarn:4"
        words = command(data, tmp_path, "--model", folder, "--compare", entries, "--dtype", "float32")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert main(words) == 0
        printed, stored = capsys.readouterr().out, results(tmp_path)
        assert stored["complete"]
        labels = ["original", "softmax", "window+elu1:size=8", "softmax@yarn:4"]
        assert [one["model"] for one in stored["summaries"]] == labels
        assert re.search(r"^softmax +8\.0 +5/5 +", printed, re.MULTILINE)
        # prompts in turn from every document that is long enough: 3, the first two of them twice
        documents = [tokenizer(text)["input_ids"] for text in TEXTS[:3]]
        assert stored["prompts"][:2] == [documents[0][:20], documents[0][20:40]]
        assert stored["prompts"][4] == documents[2][:20]
        model, other = from_pretrained(str(folder)), from_pretrained(str(folder))
        hybrid = patch_model(other, "window+elu1", options={"size": 8})
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in stored["prompts"]]
        ids = dict(zip(texts, stored["prompts"], strict=True))
        whole = {text for text in texts if tokenizer(text)["input_ids"] == ids[text]}
        found = compare_generation(model, {"x": hybrid}, tokenizer, sorted(whole), new_tokens=8)
        got = {
            tuple(stored["prompts"][one["prompt"]]): one
            for one in stored["continuations"]
            if one["model"] == labels[2]
        }
        assert whole
        for prompt, one in zip(found.prompts, found.of("x"), strict=True):
            assert got[tuple(prompt)]["ids"] == one.ids
            assert got[tuple(prompt)]["kl"] == pytest.approx(one.kl, abs=1e-5)
        with (tmp_path / "generation.csv").open(newline="", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
        assert [row["model"] for row in table] == [label for label in labels for _ in range(5)]
        assert float(table[10]["kl"]) == pytest.approx(sum(stored["continuations"][10]["kl"]) / 8)
        assert (tmp_path / "kl.png").read_bytes()[:4] == b"\x89PNG"
        page = (tmp_path / "generation.md").read_text(encoding="utf-8")
        assert page.count("### Prompt") == 5
        assert outputs.MARK in page

    def test_a_saved_folder_has_its_original_inside(self, folder, data, tmp_path, capsys):
        hybrid = patch_model(from_pretrained(str(folder)), "elu1")
        hybrid.save_pretrained(tmp_path / "patched")
        words = ["--tokenizer", folder, "--model", tmp_path / "patched"]
        assert main(command(data, tmp_path / "a", *words)) == 0
        assert "the same weights with their own attention" in capsys.readouterr().out
        assert main(command(data, tmp_path / "b", *words, "--original", folder)) == 0
        assert main(command(data, tmp_path / "c", "--model", folder, "--compare", "elu1")) == 0
        both = [results(tmp_path / name)["continuations"] for name in "abc"]
        for one, two, three in zip(*both, strict=True):
            assert one["ids"] == two["ids"] == three["ids"]
            assert one["kl"] == pytest.approx(two["kl"], abs=1e-6)
        every = [*words, "--original", folder, "--compare", "softmax"]
        assert main(command(data, tmp_path / "d", *every)) == 0
        assert [one["model"] for one in results(tmp_path / "d")["summaries"]] == [
            "original",
            "patched",
            "softmax",
        ]
        assert results(tmp_path / "d")["continuations"][:10] == both[1]
        (tmp_path / "patched" / "run.json").write_text("{}")
        assert main(command(data, tmp_path / "e", *words)) == 1
        assert "was trained after it was patched" in capsys.readouterr().err
        assert (
            main(command(data, tmp_path / "e", *words[:2], "--original", words[3], "--compare", "logn")) == 1
        )
        assert "is patched (elu1): name the model that it came from" in capsys.readouterr().err

    def test_it_goes_on_after_the_last_finished_model(self, folder, data, tmp_path, monkeypatch, capsys):
        words = command(data, tmp_path, "--model", folder, "--compare", "softmax1,elu1")
        real, seen = Comparer.add, []

        def interrupted(comparer, label, other):
            seen.append(label)
            if label == "elu1" and len(seen) == 2:
                raise KeyboardInterrupt
            return real(comparer, label, other)

        monkeypatch.setattr(Comparer, "add", interrupted)
        assert main(words) == 130
        assert "goes on after the last finished model" in capsys.readouterr().err
        half = results(tmp_path)
        assert not half["complete"]
        assert [one["model"] for one in half["summaries"]] == ["original", "softmax1"]
        assert main(words) == 0
        assert seen == ["softmax1", "elu1", "elu1"]
        whole = results(tmp_path)
        assert whole["continuations"][: len(half["continuations"])] == half["continuations"]
        first = capsys.readouterr().out
        assert main(words) == 0
        assert capsys.readouterr().out == first
        assert len(seen) == 3
        assert main([*words, "--seed", "1"]) == 1
        assert "other arguments (--seed)" in capsys.readouterr().err

    def test_prompts_of_a_file(self, folder, data, tmp_path):
        path = tmp_path / "prompts.txt"
        path.write_text("\n".join(["one two", "", "  ", "three | four", "é"]), encoding="utf-8")
        words = ["--model", folder, "--compare", "elu1", "--prompts", path, "--new-tokens", 5]
        assert main([*map(str, words), "--output-dir", str(tmp_path / "out")]) == 0
        tokenizer = AutoTokenizer.from_pretrained(folder)
        want = [tokenizer(text)["input_ids"] for text in ("one two", "three | four", "é")]
        assert results(tmp_path / "out")["prompts"] == want
        assert "three \\| four" in (tmp_path / "out" / "generation.md").read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            (["--model", "{folder}"], "is not patched: name patches to compare with --compare"),
            (["--model", "{folder}", "x"], "need the model that they came from: --original"),
            (["--original", "{folder}"], "nothing to compare"),
            (["--original", "{folder}", "--model", "{folder}"], "is the original itself"),
            (
                ["--model", "{folder}", "x", "--compare", "elu1"],
                "patches of one model: name it with --original",
            ),
            (["--model", "{folder}", "--compare", "elu2"], "elu2: unknown patch 'elu2'"),
            (["--model", "{folder}", "--compare", "elu1,elu1"], "has 'elu1' twice"),
            (["--model", "/nowhere", "--compare", "elu1"], "/nowhere"),
            (["--model", "{folder}", "--compare", "linformer"], "linformer"),
        ],
    )
    def test_failures_are_one_line(self, folder, data, tmp_path, capsys, extra, message):
        words = [word.format(folder=folder) for word in extra]
        assert main(command(data, tmp_path / "out", *words)) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("error: ")
        assert message in error
        assert not (tmp_path / "out").exists()

    def test_a_folder_that_cannot_be_written(self, folder, data, tmp_path, capsys):
        (tmp_path / "out").write_text("a file")
        words = ("--model", folder, "--compare", "elu1")
        assert main(command(data, tmp_path / "out" / "in", *words)) == 1
        assert "error: cannot write" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("content", "message"), [("\n \n", "holds no prompt"), (None, "cannot read"), (b"\xff\xfe1", "no")]
    )
    def test_prompts_that_are_none(self, folder, tmp_path, capsys, content, message):
        path = tmp_path / "prompts.txt"
        if content is not None:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        words = ["--model", folder, "--compare", "elu1", "--prompts", path, "--output-dir", tmp_path / "out"]
        assert main(list(map(str, words))) == 1
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        "words",
        [
            ["--data", "x"],
            ["--model", "x"],
            ["--model", "x", "--data", "x", "--prompts", "y"],
            ["--model", "x", "--prompts", "y", "--count", "3"],
            ["--model", "x", "--data", "x", "--prompt-tokens", "1"],
            ["--model", "x", "--data", "x", "--new-tokens", "0"],
            ["--model", "x", "--data", "x", "--compare", "elu1:3"],
        ],
    )
    def test_wrong_usage(self, words, tmp_path):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--output-dir", str(tmp_path)])
        assert stopped.value.code == 2

    def test_a_folder_with_other_tokens_is_refused(self, folder, data, tmp_path, capsys):
        other = make_folder(tmp_path / "other")
        settings = json.loads((other / "tokenizer.json").read_text())
        vocabulary = settings["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
        (other / "tokenizer.json").write_text(json.dumps(settings))
        assert main(command(data, tmp_path / "out", "--original", folder, "--model", other)) == 1
        assert "into other tokens than" in capsys.readouterr().err
