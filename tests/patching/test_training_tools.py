"""Training a patched model with ordinary tools: gradients, Trainer, checkpointing, autocast, DDP, copies."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from helpers import learned_patches, tiny_models
from helpers.kinds import KINDS, patched_model
from helpers.learned_patches import logits, patched_llama
from helpers.oracle import as_oracle
from torch.nn.parallel import DistributedDataParallel

from hf_linattn import describe, is_patched, patch_model, unpatch_model
from hf_linattn.attention import Modifier, StatefulAttention
from hf_linattn.errors import NotPatchedError, UnsupportedCallError, UnsupportedModelError

IDS = tiny_models.tokens(2, 70)
PADDED, MASK = tiny_models.left_padded(IDS, 9)


@pytest.fixture(autouse=True)
def learned_map():
    with learned_patches.registered():
        yield


def gradients(model, **kwargs):
    model.zero_grad()
    model(PADDED, attention_mask=MASK, labels=PADDED, use_cache=False, **kwargs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def difference(got, want):
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).norm() / want[name].norm().clamp_min(1e-12)) for name in want)


@pytest.mark.parametrize("patch", ["elu1", "softmax1", "logn", "softmax1+logn", "elu1+logn"])
def test_gradients_of_all_parameters_equal_the_oracle(patch):
    model = tiny_models.llama(2)
    with as_oracle(model, patch) as seen:
        want = gradients(model)
    plain = gradients(model)
    got = gradients(patch_model(model, patch))
    assert len(seen.calls) == 2
    assert difference(got, want) < 1e-5  # the model's norms compute in float32
    assert difference(plain, want) > 1e-2


def test_gradients_of_learned_weights_by_differences():
    model = patched_llama(dtype=torch.float64).train()
    weight = model.model.layers[1].self_attn.linattn.learned_map.map.weight
    gradient = gradients(model)["model.layers.1.self_attn.linattn.learned_map.map.weight"]
    step = 1e-2 * gradient / gradient.norm()  # norms in float32 need steps that are not small
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step
            losses.append(model(PADDED, attention_mask=MASK, labels=PADDED, use_cache=False).loss)
            weight -= sign * step
    assert float((losses[0] - losses[1]) / 2e-2) == pytest.approx(float(gradient.norm()), rel=1e-2)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_.*able. is deprecated:FutureWarning")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant):
    model = patched_llama(dtype=torch.float64).train()
    want = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert difference(gradients(model), want) < 1e-9
    model.gradient_checkpointing_disable()


def test_half_precision():
    model = patched_llama().train()
    want = gradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = gradients(model)
    assert 1e-6 < difference(got, want) < 0.2
    loss = model(IDS, labels=IDS).loss
    half = model.bfloat16()(IDS, labels=IDS)
    assert half.logits.dtype == torch.bfloat16
    assert float((half.loss - loss).abs().detach()) < 0.1


@pytest.mark.parametrize("spec", ["elu1", "window", "h2o"])
def test_autocast_is_that_of_softmax(spec, monkeypatch):
    """Rotated queries and keys are float32 there, values are not; kernels want one dtype."""
    model = patch_model(tiny_models.llama(2).float(), spec)
    seen = []
    attention = next(m for m in model.modules() if isinstance(m, StatefulAttention) and m.name == spec)
    causal = attention.causal
    monkeypatch.setattr(attention, "causal", lambda *given: seen.append(given[0]) or causal(*given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(IDS, labels=IDS).loss.backward()
    assert {x.dtype for tokens in seen for x in (tokens.query, tokens.key, tokens.value)} == {torch.bfloat16}


class Gathering(torch.autograd.Function):
    """Calls a function before the gradients of what a module returned go on, as DeepSpeed's stage 3 does."""

    @staticmethod
    def forward(ctx, tensor, gather):
        ctx.gather = gather
        return tensor.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.gather()
        return gradient, None


@pytest.mark.parametrize("patch", ["fox", "temperature", "kerple", "output_gate+fox"])
def test_weights_of_modifiers_that_are_there_around_their_forward_alone(patch):
    """DeepSpeed's stage 3 gathers weights by hooks on the tensors that their module takes and returns."""
    model = patch_model(tiny_models.llama(2), patch)
    want = gradients(model)
    for module in model.modules():
        if isinstance(module, Modifier) and (
            whole := [(p, p.data) for p in module.parameters(recurse=False)]
        ):

            def gather(*_, whole=whole):
                for parameter, data in whole:
                    parameter.data = data

            def free(_, __, output, gather=gather, whole=whole):
                for parameter, _ in whole:
                    parameter.data = parameter.data.new_empty(0)
                if isinstance(output, dict):
                    return {name: Gathering.apply(tensor, gather) for name, tensor in output.items()}
                return output if output is None else Gathering.apply(output, gather)

            gather()
            module.register_forward_pre_hook(gather)
            module.register_forward_hook(free)
            free(None, None, {})
    assert difference(gradients(model), want) < 1e-12


def test_dropout_is_refused_by_linear_attention_and_applied_by_softmax1():
    model = patch_model(tiny_models.llama(2, attention_dropout=0.5), "elu1").train()
    with pytest.raises(UnsupportedCallError, match=r"attention_dropout=0.0"):
        model(IDS)
    evaluated = logits(model.eval(), IDS)
    assert torch.isfinite(evaluated).all()
    patch_model(model, "softmax1")
    want = logits(model, IDS)
    model.train()
    torch.manual_seed(0)
    runs = torch.stack([logits(model, IDS[:, :8]) for _ in range(2)])
    assert tiny_models.distance(runs[0], runs[1]) > 1e-3
    assert torch.equal(logits(model.eval(), IDS), want)


def test_ddp_gives_the_same_gradients(tmp_path):
    model = patched_llama(dtype=torch.float64).train()
    want = gradients(model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        got = {name.removeprefix("module."): grad for name, grad in gradients(wrapped).items()}
        with pytest.raises(UnsupportedModelError, match="before DistributedDataParallel"):
            patch_model(wrapped, "elu1")
    finally:
        torch.distributed.destroy_process_group()
    assert difference(got, want) < 1e-9
    assert is_patched(wrapped)


def trained(folder, **kwargs):
    from transformers import Trainer, TrainingArguments

    model = patched_llama().train()
    rows = [{"input_ids": row, "labels": row} for row in tiny_models.tokens(24, 40, seed=3)]
    options = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "seed": 5,
        "save_steps": 3,
    }
    options |= {
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "max_steps": 6,
    }
    trainer = Trainer(model, TrainingArguments(str(folder), **options), train_dataset=rows)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(**kwargs)
    return trainer


def test_trainer_resumes_to_the_same_weights(tmp_path):
    whole = trained(tmp_path / "whole")
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    resumed = trained(tmp_path / "resumed", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    want, got = whole.model.state_dict(), resumed.model.state_dict()
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    start = patched_llama().state_dict()
    name = "model.layers.1.self_attn.linattn.learned_map.map.weight"
    assert tiny_models.distance(want[name], start[name]) > 1e-3
    from hf_linattn import from_pretrained

    loaded = from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert torch.equal(logits(loaded, IDS), logits(whole.model.eval(), IDS))


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_accelerator(kind, tmp_path):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = patched_model(kind) if kind else patched_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step():
        optimizer.zero_grad()
        options = {} if kind == "encoder" else {"use_cache": False}
        loss = model(IDS, labels=IDS, **options).loss
        accelerator.backward(loss)
        optimizer.step()
        return float(loss.detach())

    step()
    accelerator.save_state(tmp_path)
    want = [step(), step()]
    accelerator.load_state(tmp_path)
    assert [step(), step()] == want
    unpatch_model(model)
    patch_model(model, "elu1")
    assert {row.patch for row in describe(model)} == {"elu1"}


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled, saved_whole])
def test_copies_are_whole_and_independent(duplicate, tmp_path):
    model = patched_llama()
    want = logits(model, IDS)
    generate = {"max_new_tokens": 5, "do_sample": False}
    text = model.generate(IDS[:1, :20], **generate)
    twin = duplicate(model)
    assert torch.equal(logits(twin, IDS), want)
    assert torch.equal(twin.generate(IDS[:1, :20], **generate), text)
    assert twin.config is not model.config
    assert twin.config.to_dict() == model.config.to_dict()
    twin.model.layers[1].self_attn.linattn.learned_map.map.weight.data.add_(1)
    twin.config.use_cache = False
    unpatch_model(twin)
    assert twin.config.to_dict() == {
        **tiny_models.llama(3, dtype=torch.float32).config.to_dict(),
        "use_cache": False,
    }
    assert torch.equal(logits(twin, IDS), logits(tiny_models.llama(3, dtype=torch.float32), IDS))
    assert torch.equal(logits(model, IDS), want)
    assert torch.equal(model.generate(IDS[:1, :20], **generate), text)


def test_moving_between_types():
    model = patched_llama()
    want = logits(model, IDS)
    assert tiny_models.distance(logits(model.double(), IDS), want) < 1e-3
    assert tiny_models.distance(logits(model.half().float(), IDS), want) < 0.1
    late = patch_model(tiny_models.llama(3).bfloat16(), "learned_map")
    assert late.model.layers[0].self_attn.linattn.learned_map.map.weight.dtype == torch.bfloat16
    assert logits(late.to("cpu"), IDS).dtype == torch.bfloat16


def test_another_implementation_set_later_is_noticed():
    model = patched_llama()
    want = logits(model, IDS)
    model.set_attn_implementation("sdpa")
    with pytest.raises(NotPatchedError, match="'sdpa' after patch_model"):
        model(IDS)
    model.set_attn_implementation("linattn")
    assert torch.equal(logits(model, IDS), want)
    model.set_attn_implementation("eager")
    unpatch_model(model)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model, IDS), logits(tiny_models.llama(3, dtype=torch.float32), IDS))
