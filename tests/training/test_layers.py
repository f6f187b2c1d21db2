"""Layers computed again in the backward, or compiled: gradients stay what they were."""

import shutil
import warnings

import peft
import pytest
import torch
from helpers import tiny_models
from helpers.selection import rest_full
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend

from hf_linattn import patch_model
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher, teacher_inside
from hf_linattn.errors import OptionError
from hf_linattn.ops.cpp.build import COMPILERS
from hf_linattn.training.layers import compile_layers, recompute_layers
from hf_linattn.training.loop import next_token_losses

IDS = tiny_models.tokens(2, 40)
PATCHES = {
    "softmax": None,
    "elu1": {},
    "hedgehog": {},
    "gated": {},
    "delta": {},
    "window+hedgehog": {"size": 8, "mix": "learned"},
    "window+gated": {"size": 8},
    "softmax1+logn": {"train_length": 16},
}


def build(patch, layers=2, **options):
    model = tiny_models.llama(layers, **options)
    torch.manual_seed(0)
    return (
        model if patch == "softmax" else patch_model(model, patch, options=PATCHES[patch] or None)
    ).train()


def gradients(model, loss):
    model.zero_grad()
    torch.manual_seed(1)
    loss(model, IDS).mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, tolerance=1e-9):
    assert got.keys() == want.keys()
    for name in want:
        assert tiny_models.distance(got[name], want[name]) < tolerance, name


class Runs:
    """Counts the runs of the first layer's MLP."""

    def __init__(self, model):
        self.count = 0
        model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(self)

    def __call__(self, *args):
        self.count += 1


@pytest.mark.parametrize("patch", PATCHES)
def test_recomputed_layers_have_the_same_gradients(patch):
    model = build(patch)
    want = gradients(model, next_token_losses)
    recompute_layers(model)
    runs = Runs(model)
    assert_same(gradients(model, next_token_losses), want)
    assert runs.count == 2


def test_dropout_is_the_same_in_both_runs():
    model = build("softmax", attention_dropout=0.5)
    want = gradients(model, next_token_losses)
    recompute_layers(model)
    assert_same(gradients(model, next_token_losses), want)


@pytest.mark.parametrize("inside", [False, True])
def test_dropped_windows_and_bypasses_are_those_of_the_first_run(inside):
    def build_loss():
        model = build("window+hedgehog")
        if inside:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                model = peft.get_peft_model(
                    model,
                    peft.LoraConfig(
                        target_modules="all-linear",
                        exclude_modules=r".*linattn.*",
                        modules_to_save=["linattn"],
                    ),
                )
        teacher = teacher_inside(model) if inside else frozen_teacher(tiny_models.llama(2, seed=3))
        loss = DistillationLoss(teacher, drop_window=1.0)
        loss.prepare(None, None, 1)
        return model.train(), loss

    torch.manual_seed(5)
    model, loss = build_loss()
    want = gradients(model, loss)
    whole = gradients(model, DistillationLoss(loss.teacher))
    recompute_layers(model)
    assert_same(gradients(model, loss), want)
    assert any(
        name not in want or tiny_models.distance(grad, want[name]) > 1e-3 for name, grad in whole.items()
    )


def test_a_model_that_cannot_is_refused():
    model = tiny_models.llama(2)
    model.supports_gradient_checkpointing = False
    with pytest.raises(OptionError, match="LlamaForCausalLM does not support it"):
        recompute_layers(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # read by dynamo
@pytest.mark.parametrize(
    ("patch", "recompute"),
    rest_full(
        [("softmax", True), ("elu1", False), ("window+gated", True)],
        [("elu1", False), ("window+gated", True)],
    ),
)
def test_compiled_layers_have_the_same_gradients(patch, recompute, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend="aot_eager"))
    torch._dynamo.reset()
    model = build(patch, layers=1)
    names = list(model.state_dict())
    want = gradients(model, next_token_losses)
    if recompute:
        recompute_layers(model, switches=False)
    compile_layers(model)
    assert_same(gradients(model, next_token_losses), want, 1e-6)
    assert list(model.state_dict()) == names
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_patched_layers_that_are_alike_are_compiled_once(monkeypatch):
    compiled, counter = torch.compile, CompileCounter()
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend=counter))
    torch._dynamo.reset()
    model = build("elu1", layers=3)
    compile_layers(model)
    next_token_losses(model, IDS)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiled")
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler here")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_layers_that_keep_different_numbers_of_tokens_are_compiled_together(monkeypatch):
    """As `--preset h2o` makes them; torch compiles eight of a kind and runs others as they are."""
    compiled, counter = torch.compile, CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model: compiled(model, backend=counter))
    torch._dynamo.reset()
    sizes = {str(i): ["h2o", {"size": 16 + 2 * i, "heavy": 4 + i, "sinks": 2}] for i in range(4)}
    model = patch_model(tiny_models.llama(4, dtype=torch.float32), sizes).train()
    want = gradients(model, next_token_losses)
    compile_layers(model)
    assert_same(gradients(model, next_token_losses), want, 1e-5)
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_compiling_needs_layers_and_a_compiler(monkeypatch):
    with pytest.raises(OptionError, match="has no layers that could be compiled"):
        compile_layers(tiny_models.llama(0))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(OptionError, match="needs a C\\+\\+ compiler"):
        compile_layers(tiny_models.llama(1))
