"""Conversion of encoders: masked tokens in place of the next one."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.fixtures_finetune import rows_of, surroundings
from helpers.fixtures_masked_lm import masking, workplace
from helpers.launch import TORCHRUN, in_two_processes
from transformers import AutoTokenizer, BertForMaskedLM, BertModel

from hf_linattn import describe, from_pretrained, patch_model
from hf_linattn.convert import convert
from hf_linattn.convert.__main__ import main
from hf_linattn.convert.attention_transfer import AttentionTransfer
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher
from hf_linattn.errors import TrainingError
from hf_linattn.training.masked_lm import masked_losses
from hf_linattn.training.objectives import build_objective

pytestmark = pytest.mark.usefixtures("surroundings")
STAGES = ("transfer", "distill", "finetune")
TOKENS = str(6 * 4 * 34)
BASE = (
    *("--preset", "plain", "--data", "train.txt", "--block-size", "34", "--batch-size", "4", "--cpu"),
    *("--no-dropout", "--eval-data", "eval.txt", "--eval-every", "3", "--eval-blocks", "4"),
)
THREE = (*BASE, "--transfer-tokens", TOKENS, "--distill-tokens", TOKENS, "--finetune-tokens", TOKENS)


def read(path):
    return json.loads(Path(path).read_text())


@pytest.fixture
def sharp(workplace):
    """An encoder whose attention is not nearly uniform, and which shows in its predictions."""
    model = BertForMaskedLM.from_pretrained("bert")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".self." in name or "predictions" in name:
                weight.mul_(20)
    model.save_pretrained("sharp")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        Path("sharp", name).write_bytes(Path("bert", name).read_bytes())
    return "sharp"


def test_stages_train_an_encoder_on_masked_rows(sharp, masking, capsys):
    argv = ["--model", sharp, *THREE, "--patch", "hedgehog", "--distill-lr", "1e-4"]
    assert main([*argv, "--output-dir", "converted"]) == 0
    assert "perplexity of masked tokens" in capsys.readouterr().out
    plan, validation = read("converted/plan.json"), read("converted/validation.json")
    assert plan["objective"] == "mlm"
    assert list(validation) == ["original", "swapped", *STAGES]
    for stage in STAGES:
        results = read(f"converted/{stage}/results.json")
        assert results["objective"] == "mlm"
        assert results["steps"] == 6
        model = from_pretrained(f"converted/{stage}")
        assert type(model) is BertForMaskedLM
        assert {row.patch for row in describe(model)} == {"hedgehog"}
        if stage != "finetune":
            assert results["eval_loss"] < results["eval_loss_before"]
    blocks = masking.load_blocks("eval.txt")[:4]
    batch = torch.from_numpy(masking.prepare(blocks, np.arange(4), 0)).long()
    with torch.no_grad():
        losses = {name: float(masked_losses(load(name), batch).mean()) for name in validation}
    for name, loss in losses.items():
        if name != "swapped":  # which was drawn with the seed
            assert loss == pytest.approx(validation[name], abs=1e-5), name
    assert "Perplexity of masked tokens" in Path("converted/report.html").read_text()


def load(name):
    if name in ("original", "swapped"):
        return BertForMaskedLM.from_pretrained("sharp").eval()
    return from_pretrained(f"converted/{name}").eval()


SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
HEADED = {
    "DistilBertForMaskedLM": {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48},
    "RobertaForMaskedLM": SMALL,
    "ModernBertForMaskedLM": {**SMALL, **ENDS, "layer_types": ["full_attention"] * 2},
    "ElectraForMaskedLM": {**SMALL, "embedding_size": 32},
}


@pytest.mark.parametrize("target", ["output", "weights"])
@pytest.mark.parametrize("name", HEADED)
def test_layers_of_encoders_are_compared(name, target):
    model = tiny_models.build(name, vocab_size=97, **HEADED[name])
    transfer = AttentionTransfer(patch_model(model, "hedgehog"), target, keywords={})
    assert transfer.freeze_unused(tiny_models.tokens(1, 20)) == 2 * 2 * 4 * 8 * 8
    transfer(tiny_models.tokens(2, 20))
    assert len(transfer.layer_losses) == 2
    assert all(0 < loss < 1 for loss in transfer.layer_losses.values())


def test_every_token_is_compared_and_both_see_the_masks(sharp, masking):
    objective = build_objective("mlm", masking.tokenizer, 34, 3)
    teacher = BertForMaskedLM.from_pretrained(sharp).eval()
    student = patch_model(BertForMaskedLM.from_pretrained(sharp).eval(), "elu1")
    loss = DistillationLoss(frozen_teacher(teacher, objective.comparison), objective=objective)
    blocks, numbers = masking.load_blocks("train.txt")[:3], np.arange(3)
    batch = torch.from_numpy(loss.prepare(blocks, numbers, 5)).long()
    seen = torch.from_numpy(masking.prepare(blocks, numbers, 5)[:, 0]).long()
    assert (seen != torch.from_numpy(blocks)).any()
    with torch.no_grad():
        wanted, given = (m(input_ids=seen).logits.double().log_softmax(-1) for m in (teacher, student))
        want = (wanted.exp() * (wanted - given)).sum(-1).mean(1)
        assert torch.allclose(loss(student, batch).double(), want, rtol=1e-5)
        both = DistillationLoss(
            frozen_teacher(teacher, objective.comparison), objective=objective, ce_weight=0.5
        )
        want = want + 0.5 * masked_losses(student, batch).double()
        assert torch.allclose(both(student, batch).double(), want, rtol=1e-5)
    assert float(want.min()) > 0


def test_an_encoder_in_memory_with_lora(sharp, masking):
    model = BertForMaskedLM.from_pretrained(sharp)
    converted = convert(
        model,
        "train.txt",
        patch="hedgehog",
        output_dir="lora",
        tokenizer=masking.tokenizer,
        stages="distill",
        distill_tokens=6 * 4 * 34,
        preset="plain",
        **{"lora": 4, "block_size": 34, "batch_size": 4, "no_dropout": True, "cpu": True},
    )
    assert type(converted) is BertForMaskedLM
    losses = [float(row["loss"]) for row in rows_of(Path("lora/distill"))]
    assert losses[-1] < losses[0]
    assert all(math.isfinite(loss) for loss in losses)


@pytest.fixture
def bare(workplace):
    """An encoder without a head, whose attention shows in its hidden states."""
    model = BertModel.from_pretrained("bare")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".attention." in name and "LayerNorm" not in name:
                weight.mul_(8)
    model.save_pretrained("sharp-bare")
    AutoTokenizer.from_pretrained("bert").save_pretrained("sharp-bare")
    return "sharp-bare"


def states_apart(got, want):
    """Squared error of `[B, N, D]` over the variance, row by row."""
    pairs = zip(got.double(), want.double(), strict=True)
    rows = [((g - w) ** 2).sum() / ((w - w.mean(0)) ** 2).sum() for g, w in pairs]
    return float(sum(rows) / len(rows))


HYBRID = ["--patch", "window+elu1", "--options", '{"size": 8}']


@pytest.mark.parametrize("extra", [[], ["--lora", "4"], HYBRID], ids=["all weights", "LoRA", "hybrid"])
def test_a_model_without_a_head_learns_the_hidden_states(bare, masking, extra, capsys, tmp_path):
    argv = ["--model", bare, *BASE, "--stages", "distill", "--distill-tokens", str(12 * 4 * 34), *extra]
    assert main([*argv, "--distill-lr", "1e-3", "--output-dir", str(tmp_path)]) == 0
    assert "error of the last hidden states over their variance" in capsys.readouterr().out
    validation = read(tmp_path / "validation.json")
    assert read(tmp_path / "plan.json")["objective"] == "states"
    assert list(validation) == ["original", "swapped", "distill"]
    assert validation["original"] == 0
    assert 0 < validation["distill"] < 0.8 * validation["swapped"]
    rows = torch.from_numpy(masking.load_blocks("eval.txt")[:4]).long()
    converted = from_pretrained(tmp_path / "distill")
    assert type(converted) is BertModel
    with torch.no_grad():
        want = BertModel.from_pretrained(bare).eval()(rows, output_hidden_states=True).hidden_states[1:]
        got = converted.eval()(rows, output_hidden_states=True).hidden_states[1:]
    assert states_apart(got[-1], want[-1]) == pytest.approx(validation["distill"], rel=1e-3)
    layers = sum(map(states_apart, got, want)) / len(want)
    results = read(tmp_path / "distill/results.json")
    assert results["eval_loss"] == pytest.approx(layers, rel=1e-3)
    assert results["objective"] == "states"
    assert "no better than the mean of a row" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "objective"),
    [("LlamaModel", "auto"), ("LlamaForCausalLM", "states"), ("BertForSequenceClassification", "auto")],
)
def test_models_with_other_heads_and_decoders_without(name, objective, workplace, masking, tmp_path):
    model = tiny_models.build(
        name, dtype=torch.float32, num_hidden_layers=2, **{**tiny_models.SIZES, "vocab_size": 260}
    )
    told = {"stages": "transfer,distill", "transfer_tokens": 6 * 4 * 34, "distill_tokens": 6 * 4 * 34}
    told |= {"block_size": 34, "batch_size": 4, "cpu": True, "no_dropout": True, "objective": objective}
    told |= {"eval_data": "eval.txt", "eval_blocks": 4, "tokenizer": masking.tokenizer}
    converted = convert(model, "train.txt", patch="hedgehog", output_dir=str(tmp_path), **told)
    assert type(converted) is type(model)
    assert read(tmp_path / "plan.json")["objective"] == "states"
    validation = read(tmp_path / "validation.json")
    assert validation["original"] == 0
    assert validation["distill"] < validation["swapped"]


@pytest.mark.full
def test_two_processes_learn_hidden_states_as_one(bare):
    argv = ["--model", bare, *BASE, "--stages", "distill", "--distill-tokens", str(6 * 4 * 34)]
    assert main([*argv, "--output-dir", "one"]) == 0
    two = ("--batch-size", "2", "--output-dir", "two")
    in_two_processes("-m", "hf_linattn.convert", *argv, *two, launcher=TORCHRUN)
    one, two = read("one/validation.json"), read("two/validation.json")
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "bare", "--objective", "mlm"], "was saved as BertModel, without a head that predicts"),
        (["--model", "bare", "--data", "self"], "predicts no text, so there is no --data self"),
        (["--model", "bare", "--finetune-tokens", "99"], "stage finetune (--stages distill leaves it out)"),
        (["--model", "bare", "--ce-weight", "1"], "there is no --ce-weight"),
        (["--model", "bare", "--patch", "gated"], "bidirectional"),
        (["--model", "bare", "--teacher", "nobody"], "cannot load --teacher nobody"),
        (["--model", "bert", "--cache-teacher", "c"], "masked tokens are other ones in every step"),
        (["--model", "bert", "--data", "self"], "writes no text: give --data a text of yours"),
        (["--model", "bert", "--objective", "causal"], "sees later tokens"),
        (["--model", "model", "--objective", "mlm"], "no masked-LM encoder for the model type 'llama'"),
        (["--model", "bert", "--tokenizer", "maskless"], "mask token"),
        (["--model", "bert", "--patch", "gated"], "bidirectional"),
    ],
)
def test_what_cannot_be_converted_is_refused(argv, message, workplace, capsys):
    assert main([*BASE, *argv, "--output-dir", "refused"]) == 1
    assert message in capsys.readouterr().err
    assert not Path("refused/plan.json").exists()


def test_only_causal_models_write_text_of_their_own(workplace):
    with pytest.raises(TrainingError, match="writes no text"):
        convert("bert", "self", output_dir="refused")
