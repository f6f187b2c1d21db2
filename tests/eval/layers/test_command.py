"""The layers command: files, resuming, ranking again, hybrids, wrong usage; once on a real model."""

import csv
import json
import math

import pytest
import torch
from helpers import tiny_models
from helpers.fixtures_layers import LENGTH, learned, original, recall_of, tokenizer_of
from helpers.fixtures_perplexity import make_texts
from helpers.real_data import DATA, needs_data
from transformers import AutoTokenizer

from hf_linattn import bypassed, describe, from_pretrained, patch_model
from hf_linattn.eval.layers import measure as layers_measure
from hf_linattn.eval.layers import run
from hf_linattn.eval.layers.__main__ import main

SMALL = (
    "--length",
    str(LENGTH),
    "--max-tokens",
    str(3 * LENGTH),
    "--batch-size",
    "3",
    "--context",
    "64,1024",
)
COSTS = (0.0, 0.3, 0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("linear")
    tokenizer = tokenizer_of(path)
    learned(original(3)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_texts(tmp_path_factory.mktemp("data") / "texts.jsonl")


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr("hf_linattn.eval.recall.measure_recall", recall_of(COSTS))


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def command(folder, data, out, *extra):
    return ["--model", str(folder), "--data", str(data), "--output-dir", str(out), *SMALL, *map(str, extra)]


def results(out):
    return json.loads((out / "results.json").read_text())


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plans_in(printed):
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_a_model_that_overflows_leaves_no_figures(folder, data, tmp_path, capsys):
    broken, out = from_pretrained(folder), tmp_path / "out"
    broken.lm_head.weight.fill_(math.nan)
    broken.save_pretrained(tmp_path / "broken")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "broken")
    assert main(command(tmp_path / "broken", data, out, "--tasks", "none", "--keep", "1")) == 1
    assert "not finite" in capsys.readouterr().err
    assert not (out / "results.json").exists()


def test_everything_at_once(folder, data, tmp_path, capsys, fake):
    out = tmp_path / "out"
    extra = ("--keep", "1", "--nope", "--curves", "all", "--train-length", "32", "--recall-lengths", "32,64")
    assert main(command(folder, data, out, *extra)) == 0
    printed = capsys.readouterr().out
    found = results(out)
    assert found["complete"]
    assert found["rank"] == "recall_over_perplexity"
    assert sorted(path.name for path in out.iterdir()) == [
        "layers.csv", "layers.png", "results.json", "tradeoff.csv", "tradeoff.png",
    ]  # fmt: skip
    assert (out / "layers.png").read_bytes()[:4] == (out / "tradeoff.png").read_bytes()[:4] == b"\x89PNG"
    first = found["order"][0]
    assert [row["patch"] for row in found["layers"]] == ["hedgehog"] * 3
    plans = plans_in(printed)
    assert plans == list(found["plans"].values())
    for plan, kept in zip(plans, ("softmax", "nope", "nope+logn"), strict=True):
        rows = list(describe(patch_model(original(3), plan)))
        assert [row.patch for row in rows] == [kept if i == first else "hedgehog" for i in range(3)]
    assert plans[2][str(first)] == ["nope+logn", {"logn": {"train_length": 32}}]
    rows = table(out / "layers.csv")
    assert [int(row["layer"]) for row in rows] == [0, 1, 2]
    assert [float(row["worth_recall"]) for row in rows] == pytest.approx(COSTS)
    assert sorted(int(row["place_kl"]) for row in rows) == [1, 2, 3]
    points = table(out / "tradeoff.csv")
    # four ranks and even layers with softmax; nope and nope+logn along the chosen rank
    assert len(points) == (5 + 2) * 4
    for point in points:
        kept = [int(i) for i in point["layers"].split()]
        assert len(kept) == int(point["softmax_layers"])
        hybrid = (
            describe(patch_model(original(3), {str(i): "hedgehog" for i in range(3) if i not in kept}))
            if len(kept) < 3
            else describe(original(3))
        )
        want = sum(row.state_bytes or 1024 * row.bytes_per_token for row in hybrid)
        assert int(point["bytes_1024"]) == want
        assert math.log(float(point["perplexity"])) == pytest.approx(float(point["nats"]))
        expected = 0.9 - sum(COSTS[i] for i in range(3) if i not in kept)
        assert float(point["recall"]) == pytest.approx(expected) == pytest.approx(float(point["recall_32"]))
    whole = [point for point in points if point["softmax_layers"] == "3" and point["kept"] == "softmax"]
    assert {float(point["kl"]) for point in whole} == {0.0}


def test_it_goes_on_where_it_stopped_and_ranks_again_for_nothing(folder, data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    real, done = layers_measure.Evaluator.measure, []

    def interrupted(self, own, *args, **kwargs):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(own)
        return real(self, own, *args, **kwargs)

    monkeypatch.setattr(layers_measure.Evaluator, "measure", interrupted)
    assert main(command(folder, data, out, "--tasks", "none")) == 130
    assert "goes on after" in capsys.readouterr().err
    assert not results(out)["complete"]
    assert len(results(out)["rows"]) == 3
    monkeypatch.setattr(
        layers_measure.Evaluator,
        "measure",
        lambda self, own, *a, **k: done.append(own) or real(self, own, *a, **k),
    )
    assert main(command(folder, data, out, "--tasks", "none")) == 0
    assert len(done) == len(set(done)) == len(results(out)["rows"])
    whole = tmp_path / "whole"
    assert main(command(folder, data, whole, "--tasks", "none")) == 0
    assert results(whole)["rows"] == results(out)["rows"]
    # what is there needs no model: another rank, another number
    monkeypatch.setattr(run, "load_model", lambda *args, **kwargs: pytest.fail("loaded"))
    count = len(done)
    same = ("--tasks", "none", "--counts", "0,3")
    assert main(command(folder, data, out, *same, "--rank", "perplexity", "--keep", "3")) == 0
    assert plans_in(capsys.readouterr().out)[-1] == {"0-2": "softmax"}
    assert len(done) == count
    assert main(command(folder, data, out, "--tasks", "none", "--seed", "1")) == 1
    assert "other arguments (--seed)" in capsys.readouterr().err


def test_other_weights_do_not_stand_in_one_table(folder, data, tmp_path, capsys):
    model, linear = learned(original(3)), tmp_path / "linear"
    AutoTokenizer.from_pretrained(folder).save_pretrained(linear)
    model.save_pretrained(linear)
    same = ("--tasks", "none", "--counts", "0")
    assert main(command(linear, data, tmp_path / "out", *same)) == 0
    before = (tmp_path / "out" / "results.json").read_text()
    model.model.layers[0].self_attn.linattn.hedgehog.query_weight.add_(0.1)
    model.save_pretrained(linear)
    assert main(command(linear, data, tmp_path / "out", *same[:2])) == 1
    assert f"what --model {linear} was before it changed" in capsys.readouterr().err
    assert (tmp_path / "out" / "results.json").read_text() == before


def test_where_the_hybrid_cannot_be_written_is_said_first(folder, data, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    extra = ("--tasks", "none", "--counts", "1", "--keep", "1", "--save", tmp_path / "file")
    assert main(command(folder, data, tmp_path / "out", *extra)) == 1
    assert f"cannot write {tmp_path / 'file'}: Not a directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_hybrid_is_written(folder, data, tmp_path, capsys):
    extra = ("--tasks", "none", "--counts", "1", "--keep", "1", "--save", tmp_path / "hybrid")
    assert main(command(folder, data, tmp_path / "out", *extra)) == 0
    first, ids = results(tmp_path / "out")["order"][0], tiny_models.tokens(1, 40)
    hybrid, linear = from_pretrained(tmp_path / "hybrid"), from_pretrained(folder)
    assert [row.patch == "softmax" for row in describe(hybrid)] == [i == first for i in range(3)]
    with bypassed(linear, [f"model.layers.{first}.self_attn"]):
        assert torch.equal(hybrid(ids).logits, linear(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "hybrid").vocab_size == 256
    capsys.readouterr()
    assert main(command(folder, data, tmp_path / "out", *extra[:-1], data)) == 1
    assert "cannot write" in capsys.readouterr().err


def test_kept_layers_see_no_more_than_a_window(folder, data, tmp_path, capsys):
    out, same = tmp_path / "out", ("--tasks", "none", "--counts", "1", "--keep", "1", "--save")
    assert main(command(folder, data, out, *same, tmp_path / "all")) == 0
    assert "tokens add --window 60" in capsys.readouterr().out
    assert main(command(folder, data, out, *same, tmp_path / "last", "--window", "36")) == 0
    first, ids = results(out)["order"][0], tiny_models.tokens(1, 60)
    want, got = (from_pretrained(tmp_path / name) for name in ("all", "last"))
    [kept] = [row for row in describe(got) if row.patch == "window"]
    assert kept.module == f"model.layers.{first}.self_attn"
    assert kept.options["window"] == {"size": 36, "sinks": 4}
    assert plans_in(capsys.readouterr().out)[-1][str(first)] == ["window", kept.options["window"]]
    point = next(row for row in table(out / "tradeoff.csv") if row["softmax_layers"] == "1")
    rows = list(describe(from_pretrained(tmp_path / "all")))
    size = sum(row.state_bytes or 40 * row.bytes_per_token for row in rows)
    assert {point[name] for name in point if name.startswith("bytes_")} == {str(size)}  # at all lengths
    # 36 tokens and 4 sinks are all of the first 40
    want, got = want(ids).logits, got(ids).logits
    torch.testing.assert_close(got[:, :40], want[:, :40], rtol=1e-4, atol=1e-5)
    assert (got - want)[:, 41:].abs().max() > 1e-4


def test_no_recall_to_speak_of_is_said(folder, data, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_linattn.eval.recall.measure_recall", recall_of(COSTS, best=0.02))
    assert main(command(folder, data, tmp_path / "out", "--counts", "0")) == 0
    assert "note: the original's recall is 2 % in 20 samples (chance 1 %)" in capsys.readouterr().out
    assert main(command(folder, data, tmp_path / "out", "--rank", "recall")) == 1
    assert "cannot do the task" in capsys.readouterr().err
    # forced, recall alone is measured where the rest is there
    again = ("--rank", "recall", "--force-recall", "--counts", "0")
    assert main(command(folder, data, tmp_path / "out", *again)) == 0
    assert results(tmp_path / "out")["worth"]["recall"] == pytest.approx([0.0, 0.02, 0.02])


@pytest.mark.parametrize(
    ("extra", "status", "words"),
    [
        (("--rank", "recall", "--tasks", "none"), 2, "--tasks none measures none"),
        (("--force-recall", "--tasks", "none"), 2, "no meaning with --tasks none"),
        (("--rank", "ppl"), 2, "invalid choice"),
        (("--keep", "-1"), 2, "at least 0"),
        (("--counts", "0,x"), 2, "at least 0, got 'x'"),
        (("--tasks", "none", "--nope", "--save", "x"), 2, "leave out --nope"),
        (("--tasks", "none", "--nope", "--window", "9"), 2, "leave out --nope"),
        (("--window", "0"), 2, "at least 1"),
        (("--length", "0"), 2, "at least 1"),
        (("--tasks", "none", "--keep", "9"), 1, "9 softmax layers, and"),
        (("--tasks", "none", "--counts", "4"), 1, "4 softmax layers, and"),
        (("--tasks", "recal"), 1, "recal"),
        (("--recall-lengths", "2"), 1, "2"),
        (("--data", "/nowhere.txt"), 1, "no such file"),
        (("--model", "/nowhere"), 1, "no such folder"),
        (("--length", "1048576", "--max-tokens", "all"), 1, "no length fits"),
        (("--original", "/nowhere"), 1, "no such folder: /nowhere"),
    ],
)
def test_bad_commands(folder, data, tmp_path, capsys, extra, status, words):
    try:
        code = main(command(folder, data, tmp_path / "out", *extra))
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == status
    assert words in message
    lines = [line for line in message.splitlines() if line.startswith("error: ")]
    assert status == 2 or len(lines) == 1
    assert not (tmp_path / "out").exists()


def test_folders_that_cannot_be_asked(folder, data, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, model, words in (
        ("plain", original(3), "is not patched"),
        ("part", patch_model(original(3), {"0": "elu1"}), "a part of the layers only"),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        assert main(command(tmp_path / name, data, tmp_path / "out")) == 1
        assert words in capsys.readouterr().err
    gpt2 = tiny_models.build(
        "GPT2LMHeadModel", dtype=torch.float32, n_embd=32, n_layer=2, n_head=4, n_positions=64,
        vocab_size=257, eos_token_id=None,
    )  # fmt: skip
    patch_model(gpt2, "elu1").save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    assert main(command(tmp_path / "gpt2", data, tmp_path / "out", "--tasks", "none", "--nope")) == 1
    assert "'nope' switches the rotary embedding off" in capsys.readouterr().err
    assert main(command(tmp_path / "gpt2", data, tmp_path / "gpt2-out", "--tasks", "none")) == 0


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "python -m hf_linattn.eval.layers" in shown
    assert "rank_layers" in shown


@needs_data
def test_books_1m(tmp_path, capsys):
    """Its first layer attends to everything alike, which linear attention does too; the third does not."""
    source = DATA / "models" / "books-1m"
    patch_model(from_pretrained(source), "hedgehog").save_pretrained(tmp_path / "linear")
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / "linear")
    book = tmp_path / "emma.txt"
    book.write_text((DATA / "text" / "books" / "eval" / "Emma.md").read_text(encoding="utf-8")[:20000])
    given = ["--model", str(tmp_path / "linear"), "--data", str(book), "--output-dir", str(tmp_path / "out")]
    given += ["--max-tokens", "1024", "--original", str(source), "--tasks", "none", "--counts", "2"]
    assert main(given) == 0
    assert results(tmp_path / "out")["order"][0] == 2
    assert results(tmp_path / "out")["order"][-1] == 0
    best, spaced = (float(row["perplexity"]) for row in table(tmp_path / "out" / "tradeoff.csv"))
    assert best < spaced
