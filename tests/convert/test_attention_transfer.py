"""Attention transfer and distillation: their losses against what they are said to be."""

import pytest
import torch
from helpers import oracle, tiny_models
from helpers.oracle import as_oracle
from helpers.properties import model_of
from torch import nn

from hf_linattn import patch_model, unpatch_model
from hf_linattn.convert.attention_transfer import AttentionTransfer, relative_error, weights_divergence
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher, teacher_inside
from hf_linattn.patching.contexts import bypassed, use_branches
from hf_linattn.patching.plan import sites_of
from hf_linattn.training.divergence import token_divergence

CAUSAL = ["llama", "mqa, odd head_dim", "gpt2", "qwen3", "gpt_neox", "gemma3", "stablelm"]
IDS = tiny_models.tokens(3, 40)


def attention_outputs(model, ids):
    """Inputs and outputs of every attention module."""
    seen, handles = {}, []
    for site in sites_of(model):

        def note(module, args, kwargs, output, name=site.name):
            seen[name] = args, kwargs, output[0] if isinstance(output, tuple) else output

        handles.append(site.module.register_forward_hook(note, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def shaken(model):
    """Learned weights of the patch moved away from where they start."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".linattn." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("spec", ["hedgehog", "elu1", "softmax1+logn"])
def test_each_layer_is_compared_on_the_inputs_of_the_original(family, spec):
    model = model_of(family)
    original = attention_outputs(model, IDS)
    shaken(patch_model(model, spec))
    want = {}
    for site in sites_of(model):
        if not hasattr(site.module, "linattn"):  # gemma3 keeps its windows
            continue
        args, kwargs, output = original[site.name]
        with torch.no_grad():
            given = site.module(*args, **kwargs)[0]
        want[site.name] = (given - output).square().mean((1, 2)) / output.flatten(1).var(1, correction=0)
    transfer = AttentionTransfer(model)
    losses = transfer(IDS)
    assert losses.shape == (3,)
    assert tiny_models.distance(losses, torch.stack(list(want.values())).mean(0)) < 1e-5
    assert list(transfer.layer_losses) == list(want)
    # one row at a time is the same, so that batches can be divided in any way
    assert tiny_models.distance(torch.cat([transfer(row[None]) for row in IDS]), losses) < 1e-5


def test_the_model_is_left_as_it_was():
    model = patch_model(tiny_models.llama(), "hedgehog")
    want = model(input_ids=IDS).logits
    transfer = AttentionTransfer(model)
    transfer(IDS).mean().backward()
    assert torch.equal(transfer.finish()(input_ids=IDS).logits, want)
    assert not any(site.module._forward_hooks for site in sites_of(model))


def test_what_is_the_original_has_no_error():
    model = patch_model(tiny_models.llama(), "softmax1", options={"sink": -200.0})
    assert float(AttentionTransfer(model)(IDS).max()) < 1e-8
    assert float(AttentionTransfer(model, "weights")(IDS).max()) < 1e-8


@pytest.mark.parametrize("family", ["llama", "gpt2", "mqa, odd head_dim"])
def test_weights_are_those_of_the_formulas(family, monkeypatch):
    """Against softmax of the scores and hedgehog's weights, from the tensors that the attention gets."""
    model = shaken(patch_model(model_of(family), "hedgehog"))
    transfer = AttentionTransfer(model, "weights")
    got = transfer(IDS)
    seen = []

    def note(x):
        scores = x.scores()
        softmax = oracle.softmax_weights(scores, x.visible)
        linear = oracle.over_its_sum(oracle.hedgehog_weights(x, "hedgehog."), x.visible)
        divergence = torch.where(x.visible, softmax * (softmax.clamp_min(1e-38).log() - linear.log()), 0.0)
        seen.append(divergence.sum(-1).mean((1, 2)))
        return softmax @ x.value

    learned = {site.module: dict(site.module.linattn.named_parameters()) for site in sites_of(model)}
    unpatch_model(model)
    monkeypatch.setitem(oracle.FORMULAS, "hedgehog", note)
    with as_oracle(model, "hedgehog", learned=learned), torch.no_grad():
        model(input_ids=IDS)
    assert tiny_models.distance(got, torch.stack(seen).mean(0)) < 1e-4


@pytest.mark.parametrize("target", ["output", "weights"])
def test_only_the_patch_learns_and_each_layer_alone(target):
    model = patch_model(tiny_models.llama(2), "hedgehog")
    transfer = AttentionTransfer(model, target)
    transfer(IDS).mean().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if ".linattn." in name}
    first = model.model.layers[0].self_attn.linattn.hedgehog.query_weight.grad.clone()
    with torch.no_grad():  # what comes later changes nothing for the first layer
        model.model.layers[1].self_attn.linattn.hedgehog.query_weight.normal_()
    transfer.zero_grad()
    transfer(IDS).mean().backward()
    assert (
        tiny_models.distance(model.model.layers[0].self_attn.linattn.hedgehog.query_weight.grad, first) < 1e-6
    )


@pytest.mark.parametrize("target", ["output", "weights"])
def test_it_learns(target):
    transfer = AttentionTransfer(patch_model(tiny_models.llama(), "hedgehog"), target)
    optimizer = torch.optim.Adam([p for p in transfer.parameters() if p.requires_grad], 3e-2)
    losses = []
    for _ in range(30):
        loss = transfer(IDS).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_copies_of_projections_learn_beside_and_come_in_at_the_end():
    model = patch_model(tiny_models.llama(2), "elu1")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ids = IDS
    with bypassed(model):
        original = model(input_ids=ids).logits
    transfer = AttentionTransfer(model, projections=True)
    optimizer = torch.optim.SGD([p for p in transfer.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(5):
        loss = transfer(ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    with bypassed(model):
        assert torch.equal(model(input_ids=ids).logits, original)
    transfer.finish()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    own = {name for name in before if "self_attn" in name}
    assert changed == own
    with torch.no_grad():  # in place they do what they did beside
        outputs = attention_outputs(model, ids)
    assert outputs


def test_what_has_no_part_is_frozen():
    options = {"size": 8, "mix": "learned"}
    model = patch_model(tiny_models.llama(2), "window+hedgehog", options=options)
    transfer = AttentionTransfer(model)
    count = transfer.freeze_unused(IDS[:1])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if ".linattn.window.rest." in name}
    assert count == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all(p.grad is None for p in model.parameters())
    assert AttentionTransfer(patch_model(tiny_models.llama(2), "elu1")).freeze_unused(IDS[:1]) == 0


def test_hybrids_are_compared_by_their_linear_part_alone():
    model = patch_model(tiny_models.llama(2), "hedgehog")
    want = AttentionTransfer(model)(IDS)
    patch_model(model, "window+hedgehog", options={"size": 8})
    assert tiny_models.distance(AttentionTransfer(model)(IDS), want) < 1e-6


def test_a_constant_target_does_not_divide_by_zero():
    assert torch.isfinite(relative_error(torch.ones(2, 3, 4), torch.zeros(2, 3, 4))).all()
    divergence = weights_divergence(torch.tensor([[[[0.5, 0.5]]]]), torch.tensor([[[[1.0, 0.0]]]]))
    assert tiny_models.distance(divergence, torch.tensor([2.0]).log()) < 1e-6


def test_divergence_of_tokens_is_the_formula():
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 11), torch.randn(2, 5, 11)
    p, q = teacher.double().softmax(-1), student.double().softmax(-1)
    want = (p * (p / q).log()).sum(-1)
    assert tiny_models.distance(token_divergence(student, teacher), want) < 1e-6
    assert float(token_divergence(teacher, teacher).abs().max()) < 1e-7


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("saved", [None, ["linattn"]])
def test_the_teacher_inside_is_the_original(saved):
    import peft

    model = tiny_models.llama(2)
    want = model(input_ids=IDS).logits
    patch_model(model, "hedgehog")
    lora = peft.LoraConfig(target_modules="all-linear", exclude_modules=r".*linattn.*", modules_to_save=saved)
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    model.train()
    teacher = teacher_inside(model)
    with torch.no_grad():
        assert tiny_models.distance(teacher(IDS), want) < 1e-12
    assert model.training
    assert tiny_models.distance(model(input_ids=IDS).logits, want) > 1e-2


class TestDistillationLoss:
    def loss_of(self, **kwargs):
        teacher = tiny_models.llama(2)
        student = patch_model(tiny_models.llama(2), "window+elu1", options={"size": 8})
        return DistillationLoss(frozen_teacher(teacher), **kwargs), student, teacher

    def test_is_the_mean_over_tokens(self):
        loss, student, teacher = self.loss_of()
        want = token_divergence(student(input_ids=IDS).logits, teacher(input_ids=IDS).logits).mean(1)
        assert tiny_models.distance(loss(student, IDS), want) < 1e-6
        assert not any(parameter.requires_grad for parameter in teacher.parameters())

    @pytest.mark.parametrize("weight", [0.5, 2.0])
    def test_the_text_has_its_weight(self, weight):
        loss, student, teacher = self.loss_of(ce_weight=weight)
        logits = student(input_ids=IDS).logits
        nats = -logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0].mean(1)
        want = token_divergence(logits, teacher(input_ids=IDS).logits).mean(1) + weight * nats
        assert tiny_models.distance(loss(student, IDS), want) < 1e-5

    def test_drops_the_window_at_its_rate_and_never_in_validation(self):
        loss, student, _ = self.loss_of(drop_window=0.5, seed=3)
        whole = loss(student, IDS)
        with use_branches(student, "linear"):
            alone = loss(student, IDS)
        dropped = []
        for step in range(1, 41):
            loss.prepare(None, None, step)
            got = loss(student, IDS)
            dropped.append(tiny_models.distance(got, alone) < 1e-9)
            assert dropped[-1] or tiny_models.distance(got, whole) < 1e-9
        assert 10 < sum(dropped) < 30
        loss.prepare(None, None, 0)
        assert tiny_models.distance(loss(student, IDS), whole) < 1e-9
        again, _, _ = self.loss_of(drop_window=0.5, seed=3)
        choices = []
        for step in range(1, 41):
            again.prepare(None, None, step)
            choices.append(again._drops(student))
        assert choices == dropped

    def test_an_unpatched_model_can_be_the_student(self):
        loss, student, _ = self.loss_of(drop_window=1.0)
        unpatch_model(student)
        loss.prepare(None, None, 1)
        assert loss(student, IDS).max().item() < 1e-6


def test_models_without_windows_are_trained_whole():
    loss = DistillationLoss(frozen_teacher(tiny_models.llama(2)), drop_window=1.0)
    student = patch_model(tiny_models.llama(2), "elu1")
    loss.prepare(None, None, 1)
    assert isinstance(student, nn.Module)
    assert loss(student, IDS).min().item() > 0
