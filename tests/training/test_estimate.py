"""What a run will take: counted bytes, an estimate that steps confirm, a refusal that leaves nothing."""
# ruff: noqa: F401, F811  fixtures are imported, and then named as arguments

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import tiny_models
from helpers.fixtures_finetune import BASE, surroundings, workplace

from hf_linattn import patch_model
from hf_linattn.convert import __main__ as convert
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher
from hf_linattn.errors import TrainingError
from hf_linattn.finetune import __main__ as finetune
from hf_linattn.training import estimate, head
from hf_linattn.training.estimate import LiveBytes, announce
from hf_linattn.training.layers import recompute_layers
from hf_linattn.training.loop import LoopSettings, next_token_losses

BLOCKS = tiny_models.tokens(8, 64).numpy().astype(np.int32)


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_live_bytes_are_those_of_tensors_that_were_made():
    old = torch.ones(100)
    with LiveBytes(10**6) as live:
        old.add_(1)
        view = old.view(10, 10)
        first = torch.ones(1000)
        assert live.now == 4000
        second = first.double()[::2]  # a view keeps all of it
        assert live.now == live.peak == 12000
        del second
        assert (live.now, live.peak) == (4000, 12000)
        with pytest.raises(TrainingError, match="out of memory before the first step"):
            torch.ones(10**6)
    assert view.shape == (10, 10)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_estimate_is_what_a_step_takes(recompute):
    model = patch_model(tiny_models.llama(4, dtype=torch.float32), "hedgehog").train()
    if recompute:
        recompute_layers(model)
    settings = LoopSettings(max_steps=10, lr=1e-3, warmup=0, batch_size=8)
    accelerator = Accelerator(cpu=True)
    found = announce(accelerator, model, BLOCKS, settings, next_token_losses, None)
    with LiveBytes(10**9) as live:
        next_token_losses(model, torch.from_numpy(BLOCKS).long()).mean().backward()
    assert found.gradients + found.activations == pytest.approx(live.peak, rel=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    state = sum(value.nbytes for of in optimizer.state.values() for value in of.values() if value.ndim)
    assert found.optimizer == state


def test_a_gpu_is_timed_with_a_whole_batch_of_the_rows_that_were_read_before(monkeypatch, capsys):
    model = tiny_models.llama(1, dtype=torch.float32)
    settings = LoopSettings(max_steps=100, lr=1e-3, warmup=0, batch_size=8, grad_accum=3)
    accelerator, passes = Accelerator(cpu=True), []

    def seconds(*given):
        taken, rows = real(*given), given[-1]
        passes.append(rows)
        return {1: 30.0, 2: 20.0, 8: 2.0}[rows] if taken > 0 else 0.0

    real = estimate._pass_seconds
    monkeypatch.setattr(estimate, "_pass_seconds", seconds)
    found = announce(accelerator, model, BLOCKS, settings, next_token_losses, None)
    assert found.seconds == 20 / 2 * 8 * 3  # a CPU takes as long for each row
    read = []
    monkeypatch.setattr(accelerator.state, "device", torch.device("meta"))
    monkeypatch.setattr(estimate, "free_bytes", lambda device: 10**9)
    monkeypatch.setattr(estimate, "to_device", lambda batch, accelerator: read.append(batch) or batch)
    monkeypatch.setattr(estimate, "_measure", lambda *_, **__: estimate.Estimate(1, 1, 1, 1.0))
    monkeypatch.setattr(model, "to", lambda device: model)  # works where it is
    del passes[:]

    def losses(model, rows):
        return next_token_losses(model, torch.from_numpy(rows).long())

    found = announce(accelerator, model, BLOCKS, settings, losses, None)
    assert passes == [8, 8]
    assert found.seconds == 2 * 3
    assert {bytes(row) for batch in read for row in batch} == {bytes(row) for row in BLOCKS[:2]}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "Time: about 10 min for 100 steps" in capsys.readouterr().err


def test_a_measured_model_is_as_it_was(capsys):
    model = tiny_models.llama(2, dtype=torch.float32)
    patch_model(model, "performer", options={"redraw": 1})
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    settings = LoopSettings(max_steps=10, lr=1e-3, warmup=0, batch_size=4)
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    announce(Accelerator(cpu=True), model, BLOCKS, settings, next_token_losses, None)
    assert torch.equal(torch.rand(3), want)
    assert not any(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    after = dict(model.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert "memory: about" in capsys.readouterr().err


def test_memory_does_not_grow_with_the_vocabulary(monkeypatch):
    monkeypatch.setattr(head, "CHUNK", 2**18)
    peaks = {}
    for words in (49_152, 151_936):
        sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": words}
        student, teacher = (tiny_models.llama(1, seed=s, dtype=torch.float32, **sizes) for s in (1, 2))
        loss = DistillationLoss(frozen_teacher(teacher))
        with LiveBytes(10**10) as live:
            loss(student, tiny_models.tokens(2, 32)).mean().backward()
        peaks[words] = live.peak - sum(parameter.grad.nbytes for parameter in student.parameters())
    assert peaks[151_936] < 1.1 * peaks[49_152] < 4 * 64 * 49_152  # less than the logits alone, once


@pytest.mark.parametrize("command", [finetune, convert])
@pytest.mark.parametrize(
    ("free", "message"),
    [(10_000, "the weights of"), (100_000, "rows alone need"), (1_000_000, "a step needs about")],
)
def test_what_cannot_fit_is_refused_in_one_line(
    command, free, message, workplace, surroundings, monkeypatch, capsys
):
    monkeypatch.setattr(estimate, "free_bytes", lambda device: free)
    own = ("--max-steps", "2") if command is finetune else ("--stages", "distill")
    words = [word for word in BASE if word not in ("--lr", "1e-2")]
    words[words.index("--batch-size") + 1] = "64"
    folder = workplace / f"refused-{command.__name__}-{free}"
    assert command.main([*words, *own, "--patch", "elu1", "--no-dropout", "--output-dir", str(folder)]) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(error) == 1
    assert message in error[0]
    assert "Give --" in error[0]
    assert not list(folder.rglob("run.json"))
