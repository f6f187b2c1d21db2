"""Preset h2o: layers keep as many tokens as they need, and large models get it unasked."""
# ruff: noqa: F401  fixtures are imported, and then named as arguments

import json

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_models
from helpers.fixtures_finetune import surroundings, weights_of, workplace
from transformers import AutoTokenizer, BertConfig, LlamaConfig

from hf_linattn import describe, from_pretrained, patch_model
from hf_linattn.convert import ConvertArguments, layer_sizes
from hf_linattn.convert.__main__ import main
from hf_linattn.convert.layer_sizes import layer_losses, share
from hf_linattn.convert.resolve import _preset_for
from hf_linattn.training import head
from hf_linattn.training.divergence import compare_predictions
from hf_linattn.training.objectives import CACHELESS

ARGV = ["--model", "model", "--data", "train.txt", "--eval-data", "eval.txt", "--eval-blocks", "2", "--cpu"]
ARGV += ["--block-size", "32", "--tokens", "128", "--preset", "h2o", "--options", '{"size": 16}']


def sizes_in(folder):
    return [row.options["h2o"] for row in describe(from_pretrained(folder))]


def test_sizes_follow_losses_and_are_no_more_together():
    losses = {str(layer): 0.001 * (1 + layer) ** 2 for layer in range(12)}
    sizes = share(losses, 256)
    assert list(sizes) == list(losses)
    assert sorted(sizes.values()) == [*sizes.values()]
    assert min(sizes.values()) == 96
    assert 448 < max(sizes.values()) < 1024
    assert 0.95 * 256 * 12 < sum(sizes.values()) <= 256 * 12
    assert not any(size % 16 for size in sizes.values())


@pytest.mark.parametrize("losses", [{"0": 0.0, "1": 0.0}, {"0": float("nan"), "1": 0.1}, {}])
def test_nothing_to_tell_by_leaves_all_the_same(losses):
    assert share(losses, 64) == dict.fromkeys(losses, 64)


def test_windows_of_few_tokens_stay_as_they_are():
    assert share({"0": 0.1, "1": 0.9}, 8) == {"0": 8, "1": 8}


@pytest.mark.parametrize("held", [False, True], ids=["logits", "what makes them"])
@torch.no_grad()
def test_losses_are_the_divergence_of_a_model_patched_there(held, monkeypatch):
    if held:
        monkeypatch.setattr(head, "CHUNK", 0)
    model, ids = tiny_models.llama(2), tiny_models.tokens(1, 60)
    names = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    before, want = model(ids).logits[0, 40:].log_softmax(-1), {}
    options = {"size": 8, "heavy": 2, "sinks": 1}
    for name in names:
        after = patch_model(tiny_models.llama(2), {name: ("h2o", options)})(ids).logits[0, 40:]
        want[name] = float(F.kl_div(after.log_softmax(-1), before, reduction="batchmean", log_target=True))
    comparison = compare_predictions(CACHELESS)
    got = layer_losses(patch_model(model, "h2o", options=options), [ids, ids], comparison, 40)
    assert min(want.values()) > 0
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.usefixtures("surroundings")
def test_layers_with_a_window_of_their_own_keep_it(tmp_path):
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes = {"num_hidden_layers": 4, "layer_types": kinds, "sliding_window": 16, "vocab_size": 257}
    model = tiny_models.build("Gemma3ForCausalLM", dtype=torch.float32, **{**tiny_models.SIZES, **sizes})
    model.save_pretrained(tmp_path / "gemma")
    AutoTokenizer.from_pretrained("model").save_pretrained(tmp_path / "gemma")
    argv = [*ARGV, "--model", str(tmp_path / "gemma"), "--output-dir", str(tmp_path / "out")]
    assert main(argv) == 0
    found = json.loads((tmp_path / "out/sizes.json").read_text())
    assert [name.split(".")[2] for name in found["losses"]] == ["1", "3"]
    rows = describe(from_pretrained(tmp_path / "out/finetune"))
    assert [row.patch for row in rows] == ["softmax", "h2o"] * 2


@pytest.mark.usefixtures("surroundings")
def test_the_preset_measures_once_and_trains_what_it_found(monkeypatch, capsys, tmp_path):
    out = tmp_path / "out"
    monkeypatch.setattr(layer_sizes, "share", lambda losses, size: dict(zip(losses, (32, 16), strict=True)))
    assert main([*ARGV, "--output-dir", str(out)]) == 0
    found = json.loads((out / "sizes.json").read_text())
    assert len(found["losses"]) == 2
    assert min(found["losses"].values()) > 0
    assert [(own["size"], own["heavy"]) for own in sizes_in(out / "finetune")] == [(32, 16), (16, 8)]
    assert "windows, by what each layer loses: 16 to 32 tokens" in capsys.readouterr().out
    monkeypatch.setattr(layer_sizes, "layer_losses", lambda *given: pytest.fail("measured again"))
    weights = weights_of(out / "finetune")
    assert main([*ARGV, "--output-dir", str(out), "--resume"]) == 0
    assert weights_of(out / "finetune") == weights


@pytest.mark.usefixtures("surroundings")
def test_what_was_measured_of_something_else_is_measured_again(monkeypatch, tmp_path):
    out = tmp_path / "out"
    with monkeypatch.context() as here:
        here.setattr(layer_sizes, "layer_losses", lambda *given: pytest.fail("stopped"))
        with pytest.raises(pytest.fail.Exception, match="stopped"):
            main([*ARGV, "--output-dir", str(out)])
    out.mkdir(exist_ok=True)
    (out / "sizes.json").write_text(json.dumps({"of": {"model": "other"}, "sizes": {"x": 1}}))
    assert main([*ARGV, "--output-dir", str(out), "--resume"]) == 0
    assert json.loads((out / "sizes.json").read_text())["of"]["model"] == "model"


@pytest.mark.usefixtures("surroundings")
def test_a_model_that_computes_nan_is_given_no_sizes(monkeypatch, capsys, tmp_path):
    out, nan = tmp_path / "out", {"a": float("nan"), "b": 0.1}
    monkeypatch.setattr(layer_sizes, "layer_losses", lambda *given: nan)
    assert main([*ARGV, "--output-dir", str(out)]) == 1
    assert "what layers of model lose is no number: its weights hold NaN" in capsys.readouterr().err
    assert not (out / "sizes.json").exists()


@pytest.mark.usefixtures("surroundings")
def test_a_short_text_leaves_all_layers_the_same(capsys, tmp_path):
    out = tmp_path / "out"
    argv = [*ARGV, "--options", '{"size": 4096}', "--output-dir", str(out)]
    assert main(argv) == 0
    assert json.loads((out / "sizes.json").read_text())["sizes"] == {}
    assert [options["size"] for options in sizes_in(out / "finetune")] == [4096, 4096]
    assert "the same, as the text is too short to tell" in capsys.readouterr().out


def test_large_causal_models_get_h2o_unasked():
    def preset(config=None, **given):
        return _preset_for(ConvertArguments("model", "train.txt", "out", **given), config or LlamaConfig())

    assert preset() == preset(options={"size": 128}) == preset(tokens=5) == "h2o"
    assert preset(LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=64)) == "hybrid"
    assert preset(BertConfig(architectures=["BertForMaskedLM"])) == "hybrid"
    for given in (
        {"patch": "window"},
        {"stages": "distill"},
        {"distill_tokens": 5},
        {"cache_teacher": "cache"},
        {"learn_front": True},
        {"data": "self"},
        {"objective": "states"},
    ):
        arguments = {"model": "model", "data": "train.txt", "output_dir": "out"} | given
        assert _preset_for(ConvertArguments(**arguments), LlamaConfig()) == "hybrid", given
