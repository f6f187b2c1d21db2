"""Cost: bytes against what transformers and `describe` say, rounds in turn, files that resume."""

import csv
import json

import pytest
import torch
from helpers import tiny_models
from helpers.fixtures_perplexity import make_folder
from torch import nn
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache

from hf_linattn import bypassed, describe, is_patched, patch_model
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.eval import cost as former
from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.bench import caches, cost


def read(model, length):
    return model(tiny_models.tokens(2, length), use_cache=True).past_key_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_keys_and_values(dtype):
    model = tiny_models.llama(dtype=dtype)
    # 2 layers, 2 rows, 2 heads of keys, head_dim 8, keys and values
    assert caches.cache_bytes(read(model, 20)) == 2 * 2 * 2 * 8 * 2 * 20 * dtype.itemsize


@pytest.mark.parametrize("patch", ["elu1", "gated", "flow"])
def test_a_state_has_the_bytes_that_describe_declares(patch):
    model = patch_model(tiny_models.llama(dtype=torch.float32), patch)
    declared = 2 * describe(model).state_bytes  # two rows
    assert [caches.cache_bytes(read(model, n)) for n in (5, 50)] == [declared, declared]


@pytest.mark.parametrize(
    ("plan", "options"),
    [("logn", {}), ({"0": "elu1"}, {}), ("window+elu1", {"size": 16}), ({"1": ("window", {"size": 4})}, {})],
)
def test_computed_bytes_are_those_of_a_long_text(plan, options):
    model = patch_model(
        tiny_models.llama(dtype=torch.float32), plan, **({"options": options} if options else {})
    )
    found = caches.growth_by_side(model, tiny_models.tokens(2, 8))
    long = {"patched": caches.cache_bytes(read(model, 200))}
    with bypassed(model):
        long["unpatched"] = caches.cache_bytes(read(model, 200))
    assert {side: sum(layer.at(200) for layer in layers) for side, layers in found.items()} == long


def test_layers_with_a_window_stop_growing():
    sizes = {**tiny_models.SIZES, "sliding_window": 16}
    model = tiny_models.build("MistralForCausalLM", dtype=torch.float32, num_hidden_layers=2, **sizes)
    layers = caches.growth_by_side(model, tiny_models.tokens(2, 8))["unpatched"]
    for length in (4, 16, 200):
        assert sum(layer.at(length) for layer in layers) == caches.cache_bytes(read(model, length))
    assert layers[0].at(200) == layers[0].at(10**6)


def test_a_part_of_a_larger_tensor_holds_all_of_it():
    cache = DynamicCache()
    whole = torch.zeros(1, 1, 100, 4)
    cache.update(whole[:, :, :3], whole[:, :, 3:6], 0)
    # as in transformers' layer with a window: a view of what came
    cache.layers[0].keys, cache.layers[0].values = whole[:, :, :3], whole[:, :, 3:6]
    assert caches.cache_bytes(cache) == 2 * 3 * 4 * 4
    assert caches.held_bytes(cache) == 100 * 4 * 4  # one storage, counted once


def test_unknown_cache_layers_are_not_computed():
    class Strange:
        def __init__(self):
            self.things = {"a": [torch.zeros(3)]}

    cache = DynamicCache()
    cache.layers = [Strange()]
    assert caches.growth(cache) is None
    assert caches.cache_bytes(cache) == 12


def test_rounds_are_in_turn_and_ratios_are_of_a_round(monkeypatch):
    model = patch_model(tiny_models.llama(dtype=torch.float32), "elu1")
    asked = []
    # (seconds of reading, of writing) by round: a machine that is slow in the third round
    slow = [9.0, 1.0, 1.0, 4.0]

    def once(model, ids, length):
        patched = not any(m.bypass for m in model.modules() if hasattr(m, "bypass"))
        times = slow[len(asked) // 2]
        asked.append(patched)
        seconds = (2 * times if patched else times, times / 2 if patched else times)
        return (*seconds, 100, 100 + len(asked))

    monkeypatch.setattr(cost, "_once", once)
    found = cost.measure_cost(model, tiny_models.tokens(3, 40), new_tokens=8, repeats=3)
    assert asked == [False, True, True, False] * 2
    patched, unpatched = found["patched"], found["unpatched"]
    assert patched["length"] == 32
    speeds = [unpatched[f"prefill_{name}"] for name in ("low", "tokens_per_second", "high")]
    assert speeds == [24, 96, 96]
    assert [patched[f"prefill_ratio{end}"] for end in ("", "_low", "_high")] == [0.5, 0.5, 0.5]
    assert patched["decode_tokens_per_second"] == 48
    assert patched["decode_ratio"] == 2
    assert unpatched["prefill_ratio"] is None
    assert patched["peak_bytes"] > patched["cache_bytes"]


def test_the_model_is_left_as_it_was_found():
    model = patch_model(tiny_models.llama(dtype=torch.float32), "elu1").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = cost.measure_cost(model, tiny_models.tokens(1, 12), new_tokens=4, repeats=1)
    assert found["patched"]["cache_bytes"] == describe(model).state_bytes
    assert found["unpatched"]["cache_bytes"] == 2 * 2 * 2 * 8 * 4 * 8
    assert model.training
    assert is_patched(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def arguments(model, output, *extra):
    short = ["--lengths", "16,32", "--also", "64", "--new-tokens", "2", "--rounds", "2"]
    return ["--model", str(model), "--cost", *short, "--output-dir", str(output), *extra]


def test_command_leaves_numbers_and_a_picture(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert bench.main(arguments(folder, out, "--patches", "elu1")) == 0
    shown = capsys.readouterr().out
    assert "(computed)" in shown
    results = json.loads((out / "results.json").read_text())
    assert results["complete"]
    assert results["run"]["threads"] == torch.get_num_threads()
    rows = {(row["model"].split()[-1], row["length"]): row for row in results["rows"]}
    assert set(rows) == {(name, n) for name in ("elu1", "unpatched") for n in (16, 32, 64)}
    # 2 layers, 2 key heads of 8: keys and values; S and z in float32
    assert [rows["unpatched", n]["cache_bytes"] for n in (16, 32, 64)] == [
        2 * 2 * 2 * 8 * 4 * n for n in (16, 32, 64)
    ]
    assert {rows["elu1", n]["cache_bytes"] for n in (16, 32, 64)} == {2 * 2 * (8 * 8 + 8) * 4}
    assert rows["elu1", 64]["bytes_ratio"] == pytest.approx(1152 / 16384)
    assert rows["elu1", 64]["measured"] is False
    assert rows["elu1", 64]["prefill_tokens_per_second"] is None
    assert rows["elu1", 32]["decode_low"] <= rows["elu1", 32]["decode_tokens_per_second"]
    assert rows["elu1", 32]["prefill_ratio"] > 0
    with (out / "cost.csv").open(newline="") as file:
        assert [row["length"] for row in csv.DictReader(file)] == ["16", "32", "64"] * 2
    assert (out / "cost.png").read_bytes()[:4] == b"\x89PNG"


def test_a_model_without_a_patch_has_no_ratio(folder, tmp_path, capsys):
    assert bench.main(arguments(folder, tmp_path)) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"unpatched"}
    assert all(row["prefill_ratio"] is row["bytes_ratio"] is None for row in rows)


def test_goes_on_after_the_last_length(folder, tmp_path, monkeypatch, capsys):
    real, seen = cost.measure_cost, []

    def measure(model, ids, **settings):
        if len(seen) == 1:
            seen.append("stopped")
            raise KeyboardInterrupt
        seen.append(ids.shape[1] - 2)
        return real(model, ids, **settings)

    monkeypatch.setattr(cost, "measure_cost", measure)
    assert bench.main(arguments(folder, tmp_path, "--patches", "elu1")) == 130
    first = json.loads((tmp_path / "results.json").read_text())
    assert not first["complete"]
    assert bench.main(arguments(folder, tmp_path, "--patches", "elu1")) == 0
    assert seen == [16, "stopped", 32]
    again = json.loads((tmp_path / "results.json").read_text())
    assert all(row in again["rows"] for row in first["rows"])
    capsys.readouterr()
    assert bench.main(arguments(folder, tmp_path, "--patches", "relu")) == 1
    assert "other arguments (--patch)" in capsys.readouterr().err


def refused(arguments, reason, capsys):
    assert bench.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert reason in error


def test_refuses_with_one_line(folder, tmp_path, capsys):
    refused(arguments(tmp_path / "nowhere", tmp_path / "o"), "no such folder", capsys)
    refused(arguments(folder, tmp_path / "o", "--patches", "elu2"), "elu2", capsys)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertLMHeadModel(BertConfig(vocab_size=30, **sizes)).save_pretrained(tmp_path / "bert")
    refused(arguments(tmp_path / "bert", tmp_path / "o"), "sees later tokens", capsys)
    short = GPT2Config(
        vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(short).save_pretrained(tmp_path / "gpt2")
    refused(arguments(tmp_path / "gpt2", tmp_path / "o2"), "table ends at 24", capsys)
    # what could be measured is there
    assert len(json.loads((tmp_path / "o2" / "results.json").read_text())["rows"]) == 1
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments(folder, tmp_path / "o", "--options", "{}"))
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--model", "x", "--lengths", "0", "--output-dir", str(tmp_path)])


def test_a_model_without_a_cache_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(97, 4)

        def forward(self, input_ids, use_cache=False):
            return type("Out", (), {"logits": self.table(input_ids)})()

    with pytest.raises(UnsupportedModelError, match="gives no cache"):
        caches.read(Bare(), tiny_models.tokens(1, 4))


def test_the_former_command_gives_the_same_results_and_says_so(folder, tmp_path, capsys):
    old = ["--lengths", "16", "--also", "64", "--new-tokens", "2", "--repeats", "1", "--dtype", "auto"]
    asked = ["--model", str(folder), "--patch", "elu1", *old, "--output-dir", str(tmp_path)]
    assert former.main(asked) == 0
    assert "this command is now python -m hf_linattn.bench --cost" in capsys.readouterr().err
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["format"] == "hf_linattn.cost/1"
    arguments = results["arguments"]
    assert (arguments["patch"], arguments["repeats"], arguments["dtype"]) == ("elu1", 1, "auto")
    new = ["--lengths", "16", "--also", "64", "--new-tokens", "2", "--rounds", "1"]
    known = ["--model", str(folder), "--cost", "--patches", "elu1", "--output-dir", str(tmp_path)]
    before = (tmp_path / "results.json").stat().st_mtime_ns
    assert bench.main([*known, *new]) == 0  # the folder is finished: shown again
    assert (tmp_path / "results.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (["--kinds", "prefill"], "--kinds does not go with --cost"),
        (["--budget", "3"], "--budget does not go with --cost"),
        (["--patches", "elu1,relu"], "--cost takes one of --patches at a time"),
    ],
)
def test_what_does_not_go_with_cost_is_wrong_usage(folder, tmp_path, capsys, extra, reason):
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments(folder, tmp_path, *extra))
    assert reason in capsys.readouterr().err


def test_options_of_cost_belong_to_it(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--also", "64", "--output-dir", str(tmp_path)])
    assert "--also belongs to --cost" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--cost", "--output-dir", str(tmp_path)])
    assert "give --model" in capsys.readouterr().err
