"""Muon for the matrices of the blocks: which parameters it gets, its steps, resumed runs."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import copy
import json
from pathlib import Path

import pytest
import torch
from helpers.fixtures_finetune import SHORT, stable_rows, surroundings, weights_of, workplace
from helpers.tiny_models import build, llama

from hf_linattn import patch_model
from hf_linattn.finetune.__main__ import main
from hf_linattn.training import loop
from hf_linattn.training.optimizers import build_optimizer

COMMON = (*SHORT, "--patch", "hedgehog", "--no-dropout")
BERT = {
    "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 31,
    "num_hidden_layers": 1,
}  # fmt: skip
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 31, "n_positions": 32}


def optimizer_of(model, name="muon", factor=lambda parameter: 1.0, decay=0.0, beta2=0.95):
    return build_optimizer(name, model, factor, 0.01, decay, beta2)


def names_of(model, optimizer, muon):
    chosen = {id(p) for group in optimizer.param_groups if group["muon"] == muon for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def gradients(model):
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_takes_the_matrices_of_the_blocks(tied):
    model = llama(dtype=torch.float32, tie_word_embeddings=tied)
    patch_model(model, "gated", options={"feature_map": "hedgehog"})
    optimizer = optimizer_of(model)
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    want = {f"model.layers.{layer}.{part}.weight" for layer in (0, 1) for part in (*parts, *mlp)}
    assert names_of(model, optimizer, muon=True) == want
    rest = names_of(model, optimizer, muon=False)
    assert rest == {name for name, _ in model.named_parameters()} - want
    assert any(".linattn." in name for name in rest)


@pytest.mark.parametrize(
    ("cls", "config", "ends"),
    [("GPT2LMHeadModel", GPT2, ("wte", "wpe")), ("BertForMaskedLM", BERT, ("embeddings", "decoder"))],
)
def test_matrices_of_other_families(cls, config, ends):
    model = build(cls, dtype=torch.float32, **config)
    muon = names_of(model, optimizer_of(model), muon=True)
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert muon == {name for name in matrices if not any(end in name for end in ends)}
    assert len(muon) >= 4


def test_a_step_is_that_of_the_two_optimizers_of_torch():
    model = llama(dtype=torch.float32, tie_word_embeddings=True)
    other = copy.deepcopy(model)
    both = optimizer_of(model, factor=lambda name: 3.0 if "q_proj" in name else 1.0, decay=0.1)
    muon, rest = ([p for n, p in other.named_parameters() if ("proj" in n) == inside] for inside in (1, 0))
    fast = [p for n, p in other.named_parameters() if "q_proj" in n]
    slow = [p for p in muon if not any(p is one for one in fast)]
    apart = [
        torch.optim.Muon(fast, lr=0.06, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Muon(slow, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    for _ in range(3):
        for one in (model, other):
            gradients(one)
        for group in both.param_groups:
            group["lr"] = 0.02 * group["factor"]
        both.step()
        for optimizer in apart:
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name
    assert both.step(lambda: 7.0) == 7.0


def test_its_state_goes_through_a_state_dict():
    model = llama(dtype=torch.float32)
    first = optimizer_of(model)
    gradients(model)
    first.step()
    again = copy.deepcopy(model)
    second = optimizer_of(again)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for one, optimizer in ((model, first), (again, second)):
        gradients(one)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_adamw_is_that_of_torch(beta2):
    model = llama(dtype=torch.float32)
    other = copy.deepcopy(model)
    ours = optimizer_of(model, "adamw", beta2=beta2)
    torchs = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.9, beta2), weight_decay=0.0)
    for times in (1.0, 3.0):  # after one step alone every beta2 gives the same
        for one, optimizer in ((model, ours), (other, torchs)):
            gradients(one)
            for parameter in one.parameters():
                parameter.grad *= times
            optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


def test_a_run_with_muon_resumes_to_the_same_bytes(workplace, surroundings, monkeypatch, capsys):
    argv = [*COMMON, "--optimizer", "muon", "--checkpoint-every", "3"]
    assert main([*argv, "--output-dir", "muon"]) == 0
    results = json.loads(Path("muon/results.json").read_text())
    assert results["eval_loss"] < results["eval_loss_before"] - 0.5
    step = loop.TrainingLoop._train_step

    def interrupted(self):
        if self.step == 5:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patched:
        patched.setattr(loop.TrainingLoop, "_train_step", interrupted)
        assert main([*argv, "--output-dir", "muon-cut"]) == 130
    capsys.readouterr()
    assert main([*COMMON, "--checkpoint-every", "3", "--output-dir", "muon-cut", "--resume"]) == 1
    assert "optimizer ('muon' then, 'adamw' now)" in capsys.readouterr().err
    assert main([*argv, "--output-dir", "muon-cut", "--resume"]) == 0
    assert weights_of("muon-cut") == weights_of("muon")
    assert stable_rows("muon-cut") == stable_rows("muon")


@pytest.mark.parametrize(
    "words", [("--lora", "2"), ("--mixed-precision", "bf16"), ("--dtype", "bfloat16")], ids="-".join
)
def test_muon_with_lora_and_bfloat16(workplace, surroundings, words):
    argv = [*SHORT, "--optimizer", "muon", *words, "--output-dir", f"muon{'-'.join(words)}"]
    assert main(argv) == 0
    results = json.loads(Path(argv[-1], "results.json").read_text())
    assert results["eval_loss"] < results["eval_loss_before"]
