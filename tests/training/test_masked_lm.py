"""Masked-language modelling in the fine-tuning command: blocks, masks, loss, runs, refusals."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from helpers import tiny_models
from helpers.family_models import causal_model
from helpers.fixtures_finetune import gain, make_workplace, rows_of, stable_rows, surroundings, weights_of
from helpers.fixtures_masked_lm import CLS, MASK, PAD, SEP, bert_config, masking, workplace
from helpers.launch import TORCHRUN, in_two_processes
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
)

from hf_linattn import describe, from_pretrained, is_patched, patch_model
from hf_linattn.errors import DataError, TrainingError, UnsupportedModelError
from hf_linattn.finetune.__main__ import main
from hf_linattn.finetune.model import check_fit
from hf_linattn.patching.causality import require_causal
from hf_linattn.training import loop
from hf_linattn.training.divergence import NO_TARGET
from hf_linattn.training.masked_lm import Masking, masked_losses
from hf_linattn.training.objectives import build_objective, choose_objective

pytestmark = pytest.mark.usefixtures("surroundings")
BASE = ("--data", "train.txt", "--block-size", "34", "--batch-size", "4", "--lr", "1e-2", "--cpu")
SHORT = (*BASE, "--model", "bert", "--max-steps", "6", "--eval-data", "eval.txt", "--eval-every", "3")


def test_blocks_stand_between_special_tokens(masking, workplace, tmp_path):
    texts = ["first document", "", "the second one", "x" * 100]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with pytest.warns(UserWarning, match="empty in 1 of 4 rows"):
        blocks = masking.load_blocks(tmp_path / "rows.jsonl")
    stream = [t for text in texts if text for t in (*masking.tokenizer(text)["input_ids"][1:-1], SEP)]
    assert blocks.shape == (len(stream) // 32, 34)
    assert set(blocks[:, 0]) == {CLS}
    assert set(blocks[:, -1]) == {SEP}
    assert blocks[:, 1:-1].flatten().tolist() == stream[: len(blocks) * 32]
    assert "followed by the token '[SEP]'" in masking.description
    assert "pieces of 32 tokens, each between '[CLS]' and '[SEP]'" in masking.description


def test_block_of_separators_is_left_out(masking, tmp_path):
    many = [{"text": "[SEP]" * 31 + "a"}, {"text": "b" * 40}]  # a text may hold special tokens itself
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, many)))
    blocks = masking.load_blocks(tmp_path / "rows.jsonl")
    assert len(blocks) == 1
    assert (blocks[0] < 256).sum() > masking.targets


def test_masks_depend_on_seed_step_and_number_alone(masking):
    blocks = masking.load_blocks("train.txt")[:12]
    numbers = np.arange(12)
    full = masking.prepare(blocks, numbers, 5)
    shuffled = np.array([7, 2, 11, 4])
    assert np.array_equal(masking.prepare(blocks[shuffled], shuffled, 5), full[shuffled])
    twin = Masking.of(AutoTokenizer.from_pretrained("bert"), block_size=34, seed=3)
    assert np.array_equal(twin.prepare(blocks, numbers, 5), full)
    other = Masking.of(masking.tokenizer, block_size=34, seed=4)
    same = np.broadcast_to(blocks[:1], blocks.shape)  # only the numbers differ
    for changed in (masking.prepare(blocks, numbers, 6), other.prepare(blocks, numbers, 5)):
        assert (changed != full).any((1, 2)).all()
    assert len({row.tobytes() for row in masking.prepare(same, numbers, 5)}) == 12
    assert np.array_equal(masking.prepare(blocks, numbers, 0), other.prepare(blocks, numbers, 0))


def test_shares_of_masked_swapped_and_kept_tokens(masking):
    blocks = np.tile(masking.load_blocks("train.txt"), (12, 1))
    seen, targets = masking.prepare(blocks, np.arange(len(blocks)), 1).swapaxes(0, 1)
    chosen = targets != NO_TARGET
    assert set(chosen.sum(1)) == {5}  # 15 % of 32
    assert np.array_equal(targets[chosen], blocks[chosen])
    assert np.array_equal(seen[~chosen], blocks[~chosen])
    assert not chosen[blocks >= 256].any()
    assert abs(chosen[:, 1:-1].mean(0) - 5 / 32).max() < 0.05  # everywhere alike
    hidden, kept = seen[chosen] == MASK, seen[chosen] == targets[chosen]
    assert hidden.mean() == pytest.approx(0.8, abs=0.02)
    assert kept.mean() == pytest.approx(0.1, abs=0.02)
    swapped = seen[chosen][~hidden & ~kept]
    assert len(np.unique(swapped)) > 200  # any token of the vocabulary
    assert swapped.max() < 256  # but special ones: RoBERTa counts positions without padding


def test_loss_is_that_of_transformers_over_masked_tokens_alone(masking):
    model = from_pretrained("bert")
    numbers = np.arange(4)
    batch = torch.from_numpy(masking.prepare(masking.load_blocks("train.txt")[:4], numbers, 1)).long()
    with torch.no_grad():
        want = model(input_ids=batch[:, 0], labels=batch[:, 1].contiguous()).loss
        rows = masked_losses(model, batch)
    assert rows.shape == (4,)
    assert float(rows.mean()) == pytest.approx(float(want), abs=1e-6)
    seen = []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    masked_losses(model, batch)
    assert [list(kwargs) for kwargs in seen] == [["input_ids"]]  # the targets stay out of the model
    assert (seen[0]["input_ids"][batch[:, 1] != NO_TARGET] == MASK).any()


@pytest.fixture(scope="module")
def finished(workplace):
    """An uninterrupted run with elu1."""
    here = Path.cwd()
    os.chdir(workplace)
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    argv = [*SHORT, "--patch", "elu1", "--no-dropout", "--max-steps", "30", "--output-dir", "finished"]
    assert main(argv) == 0
    os.chdir(here)
    return workplace / "finished"


def test_patched_encoder_learns_and_leaves_the_usual_files(finished):
    results = json.loads((finished / "results.json").read_text())
    assert results["objective"] == "mlm"  # chosen by itself
    assert "'[CLS]'" in results["documents"]
    assert results["eval_loss_before"] == pytest.approx(np.log(260), abs=0.5)
    assert results["eval_loss"] < results["eval_loss_before"] - 2
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert len(rows_of(finished)) == 31


def test_saved_encoder_is_the_one_that_was_validated(finished, masking):
    model = from_pretrained(finished, auto_class=AutoModelForMaskedLM)
    assert type(model) is BertForMaskedLM
    assert {row.patch for row in describe(model)} == {"elu1"}
    by_itself = from_pretrained(finished)
    blocks = masking.load_blocks("eval.txt")
    batch = torch.from_numpy(masking.prepare(blocks, np.arange(len(blocks)), 0)).long()
    with torch.no_grad():
        assert torch.equal(model(batch[:, 0]).logits, by_itself(batch[:, 0]).logits)
        loss = float(masked_losses(model, batch).mean())
    assert loss == pytest.approx(float(rows_of(finished)[-1]["eval_loss"]), abs=1e-5)


def interrupt_at(step, monkeypatch):
    train_step = loop.TrainingLoop._train_step

    def interrupted(self):
        if self.step == step:
            raise KeyboardInterrupt
        return train_step(self)

    monkeypatch.setattr(loop.TrainingLoop, "_train_step", interrupted)


@pytest.mark.parametrize("model", ["bert", "bare"])
def test_resumed_run_ends_with_the_same_bytes(model, monkeypatch):
    """Also with dropout, and with a head that the seed decides."""
    argv = [*SHORT, "--model", model, "--checkpoint-every", "2"]
    assert main([*argv, "--output-dir", f"{model}-full"]) == 0
    with monkeypatch.context() as patched:
        interrupt_at(5, patched)
        assert main([*argv, "--output-dir", f"{model}-cut"]) == 130
    assert Path(f"{model}-cut/checkpoint/state.safetensors").exists()
    assert main([*argv, "--output-dir", f"{model}-cut", "--resume"]) == 0
    assert weights_of(f"{model}-cut") == weights_of(f"{model}-full")
    assert stable_rows(f"{model}-cut") == stable_rows(f"{model}-full")
    assert from_pretrained(f"{model}-cut").cls.predictions.transform.dense.weight.shape == (32, 32)


def test_attention_dropout_is_left_out_where_there_are_no_weights(workplace, capsys):
    """Not the other kinds: a model whose config has no dropout of attention trains the same."""
    BertForMaskedLM.from_pretrained("bert", attention_probs_dropout_prob=0.0).save_pretrained("without")
    AutoTokenizer.from_pretrained("bert").save_pretrained("without")
    argv = [*BASE, "--patch", "elu1", "--max-steps", "2"]
    assert main([*argv, "--model", "bert", "--output-dir", "with"]) == 0
    assert "attention dropout of 0.1 is left out in 2 layers: 'elu1' has no" in capsys.readouterr().err
    assert main([*argv, "--model", "without", "--output-dir", "out"]) == 0
    assert "left out" not in capsys.readouterr().err
    assert [row["loss"] for row in rows_of("with")] == [row["loss"] for row in rows_of("out")]
    assert main([*argv, "--model", "bert", "--no-dropout", "--output-dir", "none"]) == 0
    assert [row["loss"] for row in rows_of("none")] != [row["loss"] for row in rows_of("out")]


@pytest.mark.full
def test_processes_and_division_of_the_batch_do_not_matter(workplace):
    common = [*SHORT, "--no-dropout", "--patch", "elu1", "--max-steps", "3"]
    two = ["--batch-size", "2", "--output-dir", "two"]
    in_two_processes("-m", "hf_linattn.finetune", *common, *two, launcher=TORCHRUN)
    assert main([*common, "--output-dir", "one"]) == 0
    assert main([*common, "--batch-size", "1", "--grad-accum", "4", "--output-dir", "four"]) == 0
    assert json.loads(Path("two/results.json").read_text())["processes"] == 2
    for other in ("two", "four"):
        for row, want in zip(rows_of(other), rows_of("one"), strict=True):
            for name in ("loss", "eval_loss", "grad_norm"):
                assert float(row[name] or 0) == pytest.approx(float(want[name] or 0), rel=1e-5), name


def test_lora_and_the_patch_alone(gain):
    argv = [*BASE, "--model", "bert", "--patch", "gain", "--max-steps", "2", "--no-dropout"]
    assert main([*argv, "--lora", "2", "--output-dir", "lora"]) == 0
    before, after = load_file("bert/model.safetensors"), load_file("lora/model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("attention.self.query.weight" in name for name in changed)
    assert not any("embeddings" in name for name in changed)
    assert Path("lora/adapter/adapter_model.safetensors").exists()
    assert main([*argv, "--train-only-patch", "--output-dir", "only"]) == 0
    only = load_file("only/model.safetensors")
    assert all(torch.equal(before[name], only[name]) for name in before)
    assert all(only[name] != 1 for name in only if ".linattn." in name)
    assert is_patched(from_pretrained("only"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--tokenizer", "maskless"), "the tokenizer maskless has no mask token"),
        (("--tokenizer", "model"), "has no mask token"),
        (("--block-size", "2"), "--block-size 2 leaves no room for text"),
        (("--data", "tiny.txt"), "tiny.txt holds 10 tokens, fewer than one block of 34"),
        (("--objective", "causal"), "BertForMaskedLM sees later tokens"),
        (("--objective", "causal", "--patch", "elu1"), "BertForMaskedLM sees later tokens"),
        (("--objective", "causal", "--model", "bare"), "BertModel gives no logits"),
        (("--objective", "mlm", "--model", "model"), "no masked-LM encoder for the model type 'llama'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(capsys, argv, message):
    assert main([*SHORT, "--output-dir", "never", "--overwrite", *argv]) == 1
    errors = [line for line in capsys.readouterr().err.split("\n") if line.startswith("error")]
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (bert_config(architectures=["BertForMaskedLM"]), "mlm"),
        (bert_config(architectures=["BertModel"]), "mlm"),
        (bert_config(), "mlm"),
        (bert_config(is_decoder=True), "causal"),
        (bert_config(architectures=["BertLMHeadModel"]), "causal"),
        (tiny_models.llama().config, "causal"),
        (T5Config(), "causal"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_architecture_chooses_the_objective(config, name):
    assert choose_objective("auto", config) == name


def test_an_encoder_decoder_is_no_encoder():
    with pytest.raises(TrainingError, match="no masked-LM encoder for the model type 't5'"):
        choose_objective("mlm", T5Config())


@pytest.mark.parametrize("patch", [None, "elu1", "softmax1"])
def test_only_encoders_see_later_tokens(patch):
    llama, bert = tiny_models.llama(dtype=torch.bfloat16), BertForMaskedLM(bert_config())
    decoder = tiny_models.build("BertLMHeadModel", **bert_config(is_decoder=True).to_diff_dict())
    for model, sees in ((llama, False), (bert, True), (decoder, False)):
        if patch:
            patch_model(model, patch)
        with pytest.raises(UnsupportedModelError, match="sees later tokens") if sees else nullcontext():
            require_causal(model.train())
        assert model.training
        assert all(parameter.grad is None for parameter in model.parameters())


def test_reversible_layers_cannot_be_tested_and_pass():
    model = causal_model("reformer")
    require_causal(model)


def test_positions_that_roberta_skips_do_not_count():
    options = bert_config().to_diff_dict() | {"max_position_embeddings": 36, "pad_token_id": 1}
    options.pop("model_type")
    model = RobertaForMaskedLM(RobertaConfig(**options)).eval()
    objective = build_objective("mlm", AutoTokenizer.from_pretrained("bert"), 34, seed=0)
    blocks = objective.load_blocks("train.txt")
    check_fit(model, objective, blocks)
    model(torch.from_numpy(blocks[:1]).long())
    longer = np.concatenate([blocks, blocks[:, -1:]], axis=1)
    with pytest.raises(DataError, match="rows of 35 tokens are longer than the model's 34 positions"):
        check_fit(model, objective, longer)
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(torch.from_numpy(longer[:1]).long())
