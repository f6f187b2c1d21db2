"""Continuations of prompts by one model after the other: generation --prompt, and its former name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.fixtures_demo import SENTENCE, save_model
from helpers.tiny_models import build
from transformers import AutoTokenizer

from hf_linattn import from_pretrained
from hf_linattn.eval.generation.__main__ import main
from hf_linattn.eval.sample import main as former_main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_they_are_the_models_own(model, tmp_path, capsys):
    prompt, output = tmp_path / "prompt.txt", tmp_path / "samples.json"
    prompt.write_text(SENTENCE)
    words = ["--model", str(model), "--prompt", "ab", "--prompt-file", str(prompt), "--max-new-tokens", "5"]
    assert main([*words, "--output", str(output)]) == 0
    greedy = json.loads(output.read_text())
    assert greedy["format"] == "hf_linattn.samples/1"
    assert [s["prompt"] for s in greedy["samples"]] == [0, 1]
    assert greedy["prompts"] == ["ab", SENTENCE]
    tokenizer, loaded = AutoTokenizer.from_pretrained(model), from_pretrained(str(model))
    ids = tokenizer("ab", return_tensors="pt")["input_ids"]
    for _ in range(5):  # without a cache, token by token
        best = loaded(ids).logits[:, -1].argmax(-1)
        ids = ids.new_tensor([[*ids[0].tolist(), int(best)]])
        if int(best) == 256:
            break
    assert greedy["samples"][0]["text"] == tokenizer.decode(ids[0, 2:], skip_special_tokens=True)
    random = [*words, "--temperature", "1.5", "--samples", "2", "--seed", "3", "--output", str(output)]
    assert main(random) == 0
    first = json.loads(output.read_text())["samples"]
    assert main(random) == 0
    again = json.loads(output.read_text())["samples"]
    assert [s["text"] for s in first] == [s["text"] for s in again]
    assert first[0]["text"] != first[1]["text"]
    assert "written to" in capsys.readouterr().out


@pytest.mark.parametrize("choice", [(), ("--temperature", "1.0")], ids=["greedy", "random"])
def test_a_model_of_nan_writes_nothing(model, tmp_path, capsys, choice):
    loaded = from_pretrained(str(model))
    torch.nn.init.constant_(loaded.lm_head.weight, float("nan"))
    loaded.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    output = tmp_path / "samples.json"
    assert main(["--model", str(tmp_path / "model"), "--prompt", "ab", "--output", str(output), *choice]) == 1
    assert "are not numbers: the weights hold NaN" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (
            "BertForMaskedLM",
            {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
            "BertForMaskedLM sees later tokens",
        ),
        ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 16}, "table ends at 16"),
    ],
)
def test_a_model_that_cannot_write_is_one_line(kind, sizes, message, model, tmp_path, capsys):
    folder, output = tmp_path / "other", tmp_path / "samples.json"
    build(kind, dtype=torch.float32, vocab_size=300, **sizes).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    assert main(["--model", str(folder), "--prompt", SENTENCE, "--output", str(output)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not output.exists()


def test_damaged_weights_are_one_line(model, tmp_path, capsys):
    shutil.copytree(model, tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    words = ["--model", str(tmp_path / "cut"), "--prompt", "ab", "--output", str(tmp_path / "samples.json")]
    assert main(words) == 1
    assert "error: no model at " in capsys.readouterr().err


def test_the_former_command_says_how_it_is_called_now(model, tmp_path, capsys):
    words = ["--model", str(model), "--model", str(model), "--prompt", "ab", "--max-new-tokens", "3"]
    words += ["--greedy", "--dtype", "float32", "--seed", "1", "--output"]
    assert main([*words, str(tmp_path / "new.json")]) == 0
    capsys.readouterr()
    assert former_main([*words, str(tmp_path / "old.json")]) == 0
    assert "python -m hf_linattn.eval.generation --prompt" in capsys.readouterr().err
    new, old = (json.loads((tmp_path / name).read_text()) for name in ("new.json", "old.json"))
    for results in (new, old):
        del results["command"], results["samples"][0]["seconds"]
    assert new == old


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "nowhere/at-all", "--prompt", "a"], "nowhere/at-all"),
        (["--model", "MODEL", "--prompt-file", "nowhere.txt"], "cannot read the prompt"),
        (["--model", "MODEL", "--prompt", ""], "holds no text"),
    ],
)
def test_refusals_are_one_line(model, tmp_path, monkeypatch, capsys, arguments, reason):
    monkeypatch.chdir(tmp_path)
    arguments = [str(model) if word == "MODEL" else word for word in arguments]
    assert main([*arguments, "--output", "samples.json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert reason in error
    assert not (tmp_path / "samples.json").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--output", "a.json"], "has no meaning without --prompt"),
        (["--samples", "2", "--data", "x"], "has no meaning without --prompt"),
        (["--prompt", "a"], "--output"),
        (["--prompt", "a", "--output", "a.json", "--compare", "elu1"], "has no meaning with --prompt"),
        (["--prompt", "a", "--output", "a.json", "--greedy", "--temperature", "1"], "not allowed with"),
        (["--prompt", "a", "--output", "a.json", "--temperature", "0"], "for 0 use --greedy"),
    ],
)
def test_wrong_usage(words, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--model", "x", *words])
    assert reason in capsys.readouterr().err
