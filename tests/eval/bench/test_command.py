"""The benchmark command: files, resuming, pages, and what a stranger would try."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import csv
import functools
import json
import sys
from itertools import product

import pytest
from helpers.fixtures_bench import (
    arguments,
    finished,
    model,
    no_pictures,
    refused,
    results_of,
    whole_arguments,
)
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
)

from hf_linattn import patch_model
from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.bench import peers, series
from hf_linattn.eval.bench.caches import random_tokens
from hf_linattn.eval.bench.config import KINDS
from hf_linattn.eval.bench.model import ModelSeries
from hf_linattn.ops.cpp import auto, build, plan, takes
from hf_linattn.ops.cpp.build import CPP, asked


def test_a_run_leaves_numbers_pictures_and_a_page(finished):
    results = results_of(finished)
    rows = results["rows"]
    assert (results["complete"], results["run"]["basis"]) == (True, "thread time")
    assert {(row["kind"], row["length"]) for row in rows} == set(product(KINDS, (16, 32)))
    assert all(row["measured"] and row["time"] > 0 and row["shape"] == "1x4/2x8" for row in rows)
    own = [row for row in rows if row["candidate"] == "elu1"]
    assert all(row["speed_low"] <= row["speed"] <= row["speed_high"] for row in own)
    assert all(row["peak_bytes"] > 0 and 0 < row["share"] < 10 for row in own)
    assert any(text.startswith("softmax1: prefill") for text in results["answers"])
    with (finished / "bench.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    for name in ("time-1x4of2x8-float32.png", "memory-1x4of2x8-float32.png"):
        assert (finished / name).read_bytes()[:4] == b"\x89PNG"
    page = (finished / "report.html").read_text()
    assert "sdpa, keys in place" in page
    assert "Share of what the machine can do" in page
    assert page.count("data:image/svg+xml") == 4
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_finished_run_is_shown_again_not_measured(finished, monkeypatch, capsys):
    before = results_of(finished)["rows"]
    (finished / "report.html").unlink()
    monkeypatch.setattr(series, "measure", None)
    assert bench.main(arguments(finished, "--patches", "elu1,softmax1")) == 0
    shown = capsys.readouterr().out
    assert "times as fast as softmax" in shown
    assert "elu1: prefill" in shown
    assert (finished / "report.html").exists()
    assert results_of(finished)["rows"] == before


def test_other_dtypes_have_series_of_their_own(tmp_path, capsys):
    extra = ("--dtypes", "bfloat16,float32", "--shapes", "1x2x8,1x2x8x4", "--kinds", "prefill")
    assert bench.main(arguments(tmp_path, *extra, lengths="16")) == 0
    results = results_of(tmp_path)
    assert set(results["ceilings"]) == {"float32", "bfloat16"}
    assert all(row["measured"] for row in results["rows"])
    assert "elu1 at 1x2x8x4, bfloat16: prefill" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    real, seen = series.measure, []

    def measure(*args, **options):
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(series, "measure", measure)
    assert bench.main(arguments(tmp_path)) == 130
    assert "goes on after the last finished setting" in capsys.readouterr().err
    first = results_of(tmp_path)
    assert not first["complete"]
    assert {(row["kind"], row["length"]) for row in first["rows"]} == {
        ("prefill", 16),
        ("prefill", 32),
        ("train", 16),
    }
    assert bench.main(arguments(tmp_path)) == 0
    again = results_of(tmp_path)
    assert again["rows"][: len(first["rows"])] == first["rows"]
    assert len(seen) == 4 + 3
    assert len({(row["kind"], row["length"], row["candidate"]) for row in again["rows"]}) == len(
        again["rows"]
    )
    refused(arguments(tmp_path, "--patches", "relu"), "other arguments (--patches)", capsys)


def test_an_unfinished_run_of_another_place_is_not_continued(tmp_path, capsys):
    assert bench.main(arguments(tmp_path, "--kinds", "prefill")) == 0
    results = results_of(tmp_path)
    results["complete"] = False
    results["run"]["machine"] = "another"
    (tmp_path / "results.json").write_text(json.dumps(results))
    refused(arguments(tmp_path, "--kinds", "prefill"), "begun elsewhere (machine differ)", capsys)


def test_refuses_with_one_line_and_leaves_nothing(tmp_path, capsys):
    out = tmp_path / "out"
    refused(arguments(out, "--patches", "sofmax1"), "Did you mean 'softmax1'?", capsys)
    refused(arguments(out, "--patches", "linformer"), "bidirectional only", capsys)
    refused(arguments(out, "--patches", "decay", "--bidirectional"), "causal only", capsys)
    refused(arguments(out, "--patches", "elu1,nope"), "rotary embedding", capsys)
    refused(arguments(out, "--patches", "window", "--options", '{"window": {"sise": 3}}'), "size", capsys)
    refused(arguments(out, "--patches", "window,elu1", "--options", '{"siz": 3}'), "mean 'size'?", capsys)
    refused([*arguments(out), "--device", "cudda"], "--device cudda", capsys)
    refused([*arguments(out), "--device", "meta"], "nothing that could be timed", capsys)
    assert not out.exists()
    (tmp_path / "file").write_text("")
    refused(arguments(tmp_path / "file"), "cannot write", capsys)


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--lengths", "0"], "at least 1"),
        (["--lengths", "16,...,"], "whole number"),
        (["--shapes", "8x64"], "is no shape"),
        (["--shapes", "1x8x-64"], "is no shape"),
        (["--shapes", "1x0x64"], "at least 1"),
        (["--shapes", "1x8/3x64"], "cannot share 3 key heads"),
        (["--kinds", "prefil"], "none of prefill, train, decode"),
        (["--dtypes", "int8"], "none of float32"),
        (["--patches", "elu1,"], "names by comma"),
        (["--peers", "flash"], "none of fla, fla-naive"),
        (["--budget", "0"], "above 0"),
        (["--threads", "0"], "at least 1"),
        (["--bidirectional", "--kinds", "decode"], "no decoding where every query sees all keys"),
        (["--batch-size", "2"], "belongs to --model"),
        (["--docs", "page.md"], "belong together"),
        (["--model", "x"], "does not go with --model"),
    ],
)
def test_wrong_usage(extra, reason, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments(tmp_path, *extra))
    assert reason in capsys.readouterr().err


def test_an_output_folder_is_asked_for(capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main([])
    assert "--output-dir is required" in capsys.readouterr().err


def test_both_ways_and_no_peers(tmp_path, monkeypatch, capsys):
    assert (
        bench.main(arguments(tmp_path / "a", "--bidirectional", "--patches", "linformer,elu1", lengths="16"))
        == 0
    )
    rows = results_of(tmp_path / "a")["rows"]
    assert {row["kind"] for row in rows} == {"prefill", "train"}
    assert {row["causal"] for row in rows} == {False}
    for name in ("fla", "fast_transformers", "performer_pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(peers.torch, "compile", lambda function, **options: function)
    capsys.readouterr()
    assert bench.main(arguments(tmp_path / "b", "--peers", "--kinds", "prefill", lengths="64")) == 0
    shown = capsys.readouterr().out
    assert "note: performer: not installed: pip install performer-pytorch" in shown
    assert "torch.compile" in [row["candidate"] for row in results_of(tmp_path / "b")["rows"]]
    assert "not installed" in (tmp_path / "b" / "report.html").read_text()


def test_what_is_beyond_the_budget_is_not_run_and_said(tmp_path, capsys):
    assert bench.main(arguments(tmp_path, "--kinds", "prefill", "--budget", "1e-9", lengths="16")) == 0
    results = results_of(tmp_path)
    assert not any(row["measured"] for row in results["rows"])
    assert (
        "note: elu1, prefill, 1x4/2x8, float32, 16 tokens: not run: one call took" in capsys.readouterr().out
    )
    assert "Not run" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("by", ["option", "environment"])
def test_without_a_compiler_the_way_out_is_an_option(by, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(CPP, "1" if by == "environment" else "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "compiled", build.compiled.__wrapped__)
    monkeypatch.setattr(build, "chosen", [])
    words = ["--lengths", "16", "--output-dir", str(tmp_path / "out")]
    assert bench.main([*words, *(["--cpp"] if by == "option" else [])]) == 1
    said = capsys.readouterr().err
    assert "no compiler (no-such-compiler): install one, or name it by CXX. Or give --no-cpp." in said
    assert "unset" not in said


@pytest.mark.parametrize("by", ["option", "environment"])
def test_kernels_in_cpp_are_asked_for_and_told(by, tmp_path, monkeypatch):
    monkeypatch.setenv(CPP, "1" if by == "environment" else "0")
    used = []
    monkeypatch.setattr(takes, "linear", lambda *inputs: used.append(asked() == "1"))
    monkeypatch.setattr(build, "library", lambda: None)  # none is compiled here
    monkeypatch.setattr(build, "chosen", [])  # nor was in another test
    monkeypatch.setattr(plan, "_plans", {})  # nor does a call go the way of another test's
    monkeypatch.setattr(build, "compiled", functools.cache(build.compiled.__wrapped__))
    extra = ["--cpp"] if by == "option" else []
    assert bench.main(arguments(tmp_path, "--kinds", "prefill", *extra, lengths="16")) == 0
    assert used
    assert all(used)
    results = results_of(tmp_path)
    assert results["arguments"]["cpp"]
    assert results["run"]["kernels"] == "cpp, compiled at the first call"
    assert results["command"].count("--cpp") == 1


def test_what_nobody_asked_for_is_told_too(tmp_path, monkeypatch):
    monkeypatch.delenv(CPP)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    auto.found.cache_clear()
    assert bench.main(arguments(tmp_path / "out", "--kinds", "prefill", lengths="16")) == 0
    results = results_of(tmp_path / "out")
    assert results["run"]["kernels"].startswith("torch: this installation has no prebuilt library")
    assert results["command"].endswith(" --no-cpp")
    assert results["arguments"]["cpp"] is False
    auto.found.cache_clear()


def test_explain_prints_the_rule(monkeypatch, capsys):
    monkeypatch.setattr("hf_linattn.ops.dispatch.explain", lambda: "short: one chunk", raising=False)
    assert bench.main(["--explain"]) == 0
    assert capsys.readouterr().out == "short: one chunk\n"


def test_a_whole_model_says_from_where_on_it_is_worth_it(model, tmp_path, capsys):
    assert (
        bench.main(whole_arguments(model, tmp_path, "--patches", "elu1,softmax1", "--batch-size", "2")) == 0
    )
    shown = capsys.readouterr().out
    # 2 layers, 2 key heads of 8, float32: a state of 4 * 2 * (8 * 8 + 8), a token of 4 * 2 * 2 * 8 in each
    assert "its cache smaller from 5 tokens on" in shown
    assert "its cache never smaller" in shown
    assert "tokens per second" in shown
    results = results_of(tmp_path)
    assert len(results["rows"]) == 2 * 2 * 3 * 2  # patches, sides, kinds, lengths
    rows = {(r["beside"], r["kind"], r["length"], r["candidate"]): r for r in results["rows"]}
    assert rows["elu1", "prefill", 32, "elu1"]["cache_bytes"] == 2 * 2 * 4 * 2 * (8 * 8 + 8)
    assert rows["elu1", "prefill", 32, "unpatched"]["cache_bytes"] == 2 * 2 * 4 * 2 * 2 * 8 * 32
    assert rows["elu1", "train", 16, "elu1"]["speed"] > 0
    assert rows["elu1", "decode", 16, "unpatched"]["speed"] is None
    one = rows["elu1", "prefill", 16, "elu1"]
    assert one["tokens_per_second"] == pytest.approx(2 * 16 / one["seconds"])
    assert "Cache or state behind a prefill" in (tmp_path / "report.html").read_text()
    assert str(model) not in (tmp_path / "bench.csv").read_text()


def test_the_model_is_left_as_it_was_and_decodes_behind_the_same_cache(model):
    import torch

    loaded = patch_model(AutoModelForCausalLM.from_pretrained(model), "elu1").train()
    before = {name: x.clone() for name, x in loaded.state_dict().items()}
    sizes = {"batch": 1, "seed": 0, "limits": series.Limits(1, 0.0)}
    for kind in ("prefill", "train", "decode"):
        one = ModelSeries(loaded, kind, "elu1", "tiny", **sizes)
        assert [row["measured"] for row in one.run(12)] == [True, True]
    assert loaded.training
    assert all(x.grad is None for x in loaded.parameters())
    assert all(torch.equal(before[name], x) for name, x in loaded.state_dict().items())
    loaded.eval()
    with torch.no_grad():
        step, restore, _ = one._call(12)
        want = loaded(random_tokens(loaded, 1, 13, 0)).logits[:, -1:]
        torch.testing.assert_close(step(), want)
        restore()
        torch.testing.assert_close(step(), want)


def test_a_whole_run_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    real, seen = series.measure, []

    def measure(*args, **options):
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(series, "measure", measure)
    asked = whole_arguments(model, tmp_path, "--kinds", "prefill")
    assert bench.main(asked) == 130
    assert {row["length"] for row in results_of(tmp_path)["rows"]} == {16}
    assert bench.main(asked) == 0
    assert len(seen) == 3
    assert {row["length"] for row in results_of(tmp_path)["rows"]} == {16, 32}


def test_a_patched_folder_is_measured_as_it_is(model, tmp_path, capsys):
    patched = patch_model(AutoModelForCausalLM.from_pretrained(model), {"0": "elu1", "1": "hedgehog"})
    patched.save_pretrained(tmp_path / "patched")
    asked = whole_arguments(tmp_path / "patched", tmp_path / "out", "--kinds", "decode", lengths="16")
    assert bench.main(asked) == 0
    rows = results_of(tmp_path / "out")["rows"]
    assert [row["candidate"] for row in rows] == ["unpatched", "elu1 and hedgehog"]
    again = whole_arguments(tmp_path / "patched", tmp_path / "other", "--patches", "relu")
    refused(again, "is patched already and is measured as it is", capsys)


def test_models_that_do_not_suit_are_refused(tmp_path, capsys):
    refused(whole_arguments(tmp_path / "nowhere", tmp_path / "o"), "no such folder", capsys)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=30, **sizes)).save_pretrained(tmp_path / "bert")
    refused(whole_arguments(tmp_path / "bert", tmp_path / "o"), "sees later tokens", capsys)
    T5Config(vocab_size=30).save_pretrained(tmp_path / "t5")
    refused(whole_arguments(tmp_path / "t5", tmp_path / "o"), "encoder-decoder", capsys)
    assert not (tmp_path / "o").exists()


def test_lengths_that_a_model_has_no_positions_for_are_not_run(tmp_path):
    sizes = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "gpt2")
    out = tmp_path / "out"
    assert bench.main(whole_arguments(tmp_path / "gpt2", out, "--kinds", "prefill,train")) == 0
    rows = results_of(out)["rows"]
    assert {row["length"]: row["measured"] for row in rows} == {16: True, 32: False}
    assert all("table ends at 24" in row["note"] for row in rows if row["length"] == 32)
