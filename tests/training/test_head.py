"""Losses in chunks of tokens: values and gradients of the plain form, and never a tensor of all logits."""

import warnings
from dataclasses import astuple

import peft
import pytest
import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from helpers import tiny_models
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_linattn import patch_model
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher, teacher_inside
from hf_linattn.training import head
from hf_linattn.training.divergence import NO_TARGET, TopPredictions, top_predictions
from hf_linattn.training.head import Finish, HeldPredictions, logits_in_chunks, predict
from hf_linattn.training.loop import next_token_losses
from hf_linattn.training.masked_lm import masked_losses

IDS = tiny_models.tokens(3, 24)
ALL = IDS.numel() * 97
CHUNK = 97 * 10  # ten tokens: seven whole chunks and a rest

FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "bias": ("PhiForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.3}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0}),
    "vaultgemma": ("VaultGemmaForCausalLM", {"final_logit_softcapping": 3.0}),
}


def build(family, **options):
    cls, own = FAMILIES[family]
    return tiny_models.build(cls, num_hidden_layers=2, **{**tiny_models.SIZES, **own, **options})


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head, "CHUNK", CHUNK)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor of all operations holds."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


def plain_nats(model, ids=IDS):
    logits = model(input_ids=ids, use_cache=False).logits.double()
    return -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mean(1)


def plain_divergence(student, teacher):
    p, q = (
        model(input_ids=IDS, use_cache=False).logits.double().log_softmax(-1) for model in (teacher, student)
    )
    return (p.exp() * (p - q)).sum(-1).mean(1)


def gradients(model, losses):
    model.zero_grad()
    (losses * torch.tensor([1.0, 2.0, 4.0])).sum().backward()  # rows that differ in weight
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got, want, tolerance=1e-5):
    assert got.keys() == want.keys()
    for name in want:
        assert tiny_models.distance(got[name], want[name]) < tolerance, name


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_plain_form(family):
    model, teacher = build(family), build(family, seed=2)
    assert isinstance(predict(model, IDS, use_cache=False), HeldPredictions)
    losses, want = next_token_losses(model, IDS), plain_nats(model)
    assert tiny_models.distance(losses, want) < 1e-6
    assert_same(gradients(model, losses), gradients(model, want))
    loss = DistillationLoss(frozen_teacher(teacher), ce_weight=0.5)
    losses, want = loss(model, IDS), plain_divergence(model, teacher) + 0.5 * plain_nats(model)
    assert tiny_models.distance(losses, want) < 1e-6
    assert_same(gradients(model, losses), gradients(model, want))


def test_divergence_and_text_share_the_logits(monkeypatch):
    model, teacher = build("llama"), build("llama", seed=2)
    model.lm_head.requires_grad_(False)
    made = []
    raw = HeldPredictions.raw
    monkeypatch.setattr(HeldPredictions, "raw", lambda self: made.append(len(self.states)) or raw(self))
    DistillationLoss(frozen_teacher(teacher), ce_weight=0.5)(model, IDS).sum().backward()
    assert sum(made) == 2 * IDS.numel()  # the student's and the teacher's, once each


@pytest.mark.parametrize("frozen", [False, True])
def test_no_tensor_holds_all_logits(frozen, monkeypatch):
    words = 997
    monkeypatch.setattr(head, "CHUNK", 10 * words)
    model, teacher = build("llama", vocab_size=words), build("llama", seed=2, vocab_size=words)
    model.lm_head.requires_grad_(not frozen)
    loss = DistillationLoss(frozen_teacher(teacher), ce_weight=1.0)
    with LargestTensor() as largest:
        loss(model, IDS).mean().backward()
    assert largest.numbers == words * 32  # the head's weights
    assert (model.lm_head.weight.grad is None) == frozen
    with LargestTensor() as largest:  # which would be seen
        plain_nats(model)
    assert largest.numbers >= words * IDS.numel()


def test_the_top_of_predictions_needs_no_more(monkeypatch):
    words = 997
    monkeypatch.setattr(head, "CHUNK", 10 * words)
    model, teacher = build("llama", vocab_size=words), build("llama", seed=2, vocab_size=words)
    with LargestTensor() as largest, torch.no_grad():
        parts = [top_predictions(part, 8) for part in logits_in_chunks(predict(teacher, IDS))]
    ids, log_probs = (torch.cat(each).view(3, 24, -1) for each in zip(*map(astuple, parts), strict=True))
    with largest:
        DistillationLoss(lambda _: TopPredictions(ids, log_probs))(model, IDS).mean().backward()
    assert largest.numbers == words * 32


def test_half_precision_rounds_as_the_plain_form_does(monkeypatch):
    found = {}
    for chunk in (CHUNK, 2 * ALL):
        monkeypatch.setattr(head, "CHUNK", chunk)
        model = Accelerator(cpu=True, mixed_precision="bf16").prepare(build("gemma2", dtype=torch.float32))
        losses = next_token_losses(model, IDS)
        found[chunk] = losses.detach(), gradients(model, losses)
    assert tiny_models.distance(found[CHUNK][0], found[2 * ALL][0]) < 1e-3
    assert_same(found[CHUNK][1], found[2 * ALL][1], 2e-2)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
def test_lora_and_the_teacher_inside(targets, recwarn):
    def losses_by(chunk):
        head.CHUNK = chunk
        model = patch_model(tiny_models.llama(2), "window+hedgehog", options={"size": 8})
        config = peft.LoraConfig(
            target_modules=targets, exclude_modules=r".*linattn.*", modules_to_save=["linattn"]
        )
        model = peft.get_peft_model(model, config)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, 0, 0.2)
        losses = DistillationLoss(teacher_inside(model), ce_weight=0.5)(model, IDS)
        return losses, gradients(model, losses)

    want, got = losses_by(2 * ALL), losses_by(CHUNK)
    assert tiny_models.distance(got[0], want[0]) < 1e-6
    assert_same(got[1], want[1])
    said = [str(w.message) for w in recwarn if "losses hold all logits" in str(w.message)]
    assert len(said) == (targets != "all-linear")


def test_masked_tokens_alone_reach_the_head():
    model = tiny_models.build(
        "BertForMaskedLM", num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4,
        vocab_size=997,
    )  # fmt: skip
    targets = torch.full_like(IDS, NO_TARGET)
    targets[:, ::2] = IDS[:, ::2]
    batch = torch.stack([IDS, targets], 1)
    logits = model(input_ids=IDS).logits.double()
    want = -logits.log_softmax(-1).gather(-1, IDS[..., None])[:, ::2, 0].mean(1)
    with LargestTensor() as largest:
        losses = masked_losses(model, batch)
    assert largest.numbers == 997 * 32
    assert tiny_models.distance(losses, want) < 1e-6
    assert_same(gradients(model, losses), gradients(model, want))


@pytest.mark.parametrize("unused", [False, True])
def test_data_parallel_gradients(unused, tmp_path):
    model, want = build("tied"), build("tied")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        parallel = DistributedDataParallel(model, find_unused_parameters=unused)
        for _ in range(2):  # the second forward complains of what the first left unfinished
            got = gradients(model, next_token_losses(parallel, IDS))
    finally:
        del parallel
        torch.distributed.destroy_process_group()
    assert_same(got, gradients(want, plain_nats(want)))


def finish_of(model):
    return predict(model, IDS, use_cache=False).finish


def test_the_form_is_tried_where_a_cap_counts():
    model = build("gemma2")
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-4)  # logits that no cap moves
    assert finish_of(model) == Finish(cap=2.0)
    ignored = tiny_models.llama(2)
    ignored.config.final_logit_softcapping = 5.0
    assert finish_of(ignored) == Finish()


def test_another_form_keeps_all_logits_and_says_so_once():
    model = tiny_models.llama(2)
    forward = model.forward

    def shifted(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(97)
        return output

    model.forward = shifted
    with pytest.warns(UserWarning, match="its logits are not those of its output layer"):
        losses = next_token_losses(model, IDS)
    assert tiny_models.distance(losses, plain_nats(model)) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next_token_losses(model, IDS)


def test_trying_draws_no_random_numbers():
    model = build("llama", attention_dropout=0.5).train()
    torch.manual_seed(3)
    predict(model, IDS)
    first = torch.rand(())
    torch.manual_seed(3)
    model(input_ids=IDS)
    assert torch.equal(first, torch.rand(()))
