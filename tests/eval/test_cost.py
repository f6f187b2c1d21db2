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
from hf_linattn.eval.cost import __main__ as cost
from hf_linattn.eval.cost import measure as cost_measure
from hf_linattn.eval.cost import run as cost_run


def read(model, length):
    return model(tiny_models.tokens(2, length), use_cache=True).past_key_values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_keys_and_values(dtype):
    model = tiny_models.llama(dtype=dtype)
    # 2 layers, 2 rows, 2 heads of keys, head_dim 8, keys and values
    assert cost_measure.cache_bytes(read(model, 20)) == 2 * 2 * 2 * 8 * 2 * 20 * dtype.itemsize


@pytest.mark.parametrize("patch", ["elu1", "gated", "flow"])
def test_a_state_has_the_bytes_that_describe_declares(patch):
    model = patch_model(tiny_models.llama(dtype=torch.float32), patch)
    declared = 2 * describe(model).state_bytes  # two rows
    assert [cost_measure.cache_bytes(read(model, n)) for n in (5, 50)] == [declared, declared]


@pytest.mark.parametrize(
    ("plan", "options"),
    [("logn", {}), ({"0": "elu1"}, {}), ("window+elu1", {"size": 16}), ({"1": ("window", {"size": 4})}, {})],
)
def test_computed_bytes_are_those_of_a_long_text(plan, options):
    model = patch_model(
        tiny_models.llama(dtype=torch.float32), plan, **({"options": options} if options else {})
    )
    found = cost_measure.computed(model, tiny_models.tokens(2, 8))
    long = {"patched": cost_measure.cache_bytes(read(model, 200))}
    with bypassed(model):
        long["unpatched"] = cost_measure.cache_bytes(read(model, 200))
    assert {side: sum(layer.at(200) for layer in layers) for side, layers in found.items()} == long


def test_layers_with_a_window_stop_growing():
    sizes = {**tiny_models.SIZES, "sliding_window": 16}
    model = tiny_models.build("MistralForCausalLM", dtype=torch.float32, num_hidden_layers=2, **sizes)
    layers = cost_measure.computed(model, tiny_models.tokens(2, 8))["unpatched"]
    for length in (4, 16, 200):
        assert sum(layer.at(length) for layer in layers) == cost_measure.cache_bytes(read(model, length))
    assert layers[0].at(200) == layers[0].at(10**6)


def test_a_part_of_a_larger_tensor_holds_all_of_it():
    cache = DynamicCache()
    whole = torch.zeros(1, 1, 100, 4)
    cache.update(whole[:, :, :3], whole[:, :, 3:6], 0)
    # as in transformers' layer with a window: a view of what came
    cache.layers[0].keys, cache.layers[0].values = whole[:, :, :3], whole[:, :, 3:6]
    assert cost_measure.cache_bytes(cache) == 2 * 3 * 4 * 4
    assert cost_measure.held_bytes(cache) == 100 * 4 * 4  # one storage, counted once


def test_unknown_cache_layers_are_not_computed():
    class Strange:
        def __init__(self):
            self.things = {"a": [torch.zeros(3)]}

    cache = DynamicCache()
    cache.layers = [Strange()]
    assert cost_measure.growth(cache) is None
    assert cost_measure.cache_bytes(cache) == 12


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

    monkeypatch.setattr(cost_measure, "_once", once)
    found = cost_measure.measure(model, tiny_models.tokens(3, 40), new_tokens=8, repeats=3)
    assert asked == [False, True, True, False] * 2
    patched, unpatched = found["patched"], found["unpatched"]
    assert patched.length == 32
    assert (unpatched.prefill.low, unpatched.prefill.median, unpatched.prefill.high) == (24, 96, 96)
    assert (patched.prefill.ratio, patched.prefill.ratio_low, patched.prefill.ratio_high) == (0.5, 0.5, 0.5)
    assert patched.decode.median == 48
    assert patched.decode.ratio == 2
    assert unpatched.prefill.ratio is None
    assert patched.peak_bytes > patched.cache_bytes


def test_the_model_is_left_as_it_was_found():
    model = patch_model(tiny_models.llama(dtype=torch.float32), "elu1").train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    found = cost_measure.measure(model, tiny_models.tokens(1, 12), new_tokens=4, repeats=1)
    assert found["patched"].cache_bytes == describe(model).state_bytes
    assert found["unpatched"].cache_bytes == 2 * 2 * 2 * 8 * 4 * 8
    assert model.training
    assert is_patched(model)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def arguments(model, output, *extra):
    short = ["--lengths", "16,32", "--also", "64", "--new-tokens", "2", "--repeats", "2"]
    return ["--model", str(model), *short, "--output-dir", str(output), *extra]


def test_command_leaves_numbers_and_a_picture(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert cost.main(arguments(folder, out, "--patch", "elu1")) == 0
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
    assert cost.main(arguments(folder, tmp_path)) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {"unpatched"}
    assert all(row["prefill_ratio"] is row["bytes_ratio"] is None for row in rows)


def test_goes_on_after_the_last_length(folder, tmp_path, monkeypatch, capsys):
    real, seen = cost_run.measure, []

    def measure(model, ids, **settings):
        if len(seen) == 1:
            seen.append("stopped")
            raise KeyboardInterrupt
        seen.append(ids.shape[1] - 2)
        return real(model, ids, **settings)

    monkeypatch.setattr(cost_run, "measure", measure)
    assert cost.main(arguments(folder, tmp_path, "--patch", "elu1")) == 130
    first = json.loads((tmp_path / "results.json").read_text())
    assert not first["complete"]
    assert cost.main(arguments(folder, tmp_path, "--patch", "elu1")) == 0
    assert seen == [16, "stopped", 32]
    again = json.loads((tmp_path / "results.json").read_text())
    assert all(row in again["rows"] for row in first["rows"])
    capsys.readouterr()
    assert cost.main(arguments(folder, tmp_path, "--patch", "relu")) == 1
    assert "other arguments (--patch)" in capsys.readouterr().err


def refused(arguments, reason, capsys):
    assert cost.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("error: ")
    assert reason in error


def test_refuses_with_one_line(folder, tmp_path, capsys):
    refused(arguments(tmp_path / "nowhere", tmp_path / "o"), "no such folder", capsys)
    refused(arguments(folder, tmp_path / "o", "--patch", "elu2"), "elu2", capsys)
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
        cost.main(arguments(folder, tmp_path / "o", "--options", "{}"))
    with pytest.raises(SystemExit, match="2"):
        cost.main(["--model", "x", "--lengths", "0", "--output-dir", str(tmp_path)])


def test_a_model_without_a_cache_is_refused():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(97, 4)

        def forward(self, input_ids, use_cache=False):
            return type("Out", (), {"logits": self.table(input_ids)})()

    with pytest.raises(cost_measure.UnsupportedModelError, match="gives no cache"):
        cost_measure._read(Bare(), tiny_models.tokens(1, 4))
