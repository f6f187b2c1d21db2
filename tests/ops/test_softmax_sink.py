"""Sinks, fixed, learned and a model's own: what they equal, in a fused kernel and beside it."""

import pytest
import torch
from helpers.oracle import as_oracle
from helpers.random_inputs import random_qkv, relative_error
from helpers.real_data import DATA, needs_data
from helpers.score_patches import learned_of, logits
from helpers.tiny_models import SIZES, build, distance, llama, tokens
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_linattn import patch_model
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.ops import softmax as ops
from hf_linattn.ops.softmax import softmax_attention

GPT_OSS = {
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "layer_types": ["full_attention"] * 2,
    "implementation": "eager",
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "none", "mask", "bias"])
@pytest.mark.parametrize("sink", ["0", "per head", "per query"])
def test_a_sink_in_the_fused_kernel_has_the_gradients_of_an_extra_key(kind, sink, dtype, monkeypatch):
    leaves = [x.requires_grad_() for x in random_qkv((2, 4, 2, 70, 16, 16), dtype)]
    generator = torch.Generator().manual_seed(1)
    logit = {
        "0": torch.zeros((), dtype=dtype),
        "per head": torch.linspace(-1, 2, 4).to(dtype).requires_grad_(),
        "per query": torch.randn(2, 4, 70, 1, generator=generator).to(dtype).requires_grad_(),
    }[sink]
    lower = torch.ones(70, 70, dtype=torch.bool).tril()
    options = {
        "mask": (lower & (torch.arange(70) >= 20))[None, None]
        if kind == "mask"
        else None,  # rows without keys
        "bias": torch.randn(1, 4, 70, 70, generator=generator).to(dtype) if kind == "bias" else None,
        "is_causal": kind == "causal",
        "sink": logit,
    }
    leaves += [logit] if logit.requires_grad else []
    weight = torch.randn(2, 4, 70, 16, generator=generator).to(dtype)
    runs = []
    for _ in range(2):
        output = softmax_attention(*leaves[:3], **options)
        runs.append((output, *torch.autograd.grad((output * weight).sum(), leaves)))
        monkeypatch.setattr("hf_linattn.ops.softmax.fits", lambda *inputs: False)
    for a, b in zip(*runs, strict=True):
        assert relative_error(a.detach(), b.detach()) < (1e-12 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("kind", ["none", "mask", "bias"])
@pytest.mark.parametrize("sink", [None, "0", "per head"])
def test_fused_kernels_of_gpus_get_what_they_take(sink, kind, queries, monkeypatch):
    """Grouped heads without a mask alone: torch would compute all scores at once, in memory."""
    query, key, value = random_qkv((2, 6, 2, 9, 16, 16))
    query, logit = (
        query[:, :, :queries],
        {"0": torch.zeros(()), "per head": torch.linspace(-1, 2, 6)}.get(sink),
    )
    options = {
        "mask": (torch.arange(9) >= 4).expand(2, 1, queries, 9) if kind == "mask" else None,
        "bias": torch.randn(1, 6, queries, 9).double() if kind == "bias" else None,
        "sink": None if logit is None else logit.double(),
    }
    want, calls = softmax_attention(query, key, value, **options), []
    plain = ops.F.scaled_dot_product_attention

    def fused(query, key, value, mask, *how, enable_gqa, **named):
        calls.append(key)
        assert not (mask is not None and enable_gqa)
        assert enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]
        return plain(query, key, value, mask, *how, enable_gqa=enable_gqa, **named)

    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda x: False), raising=False)
    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", fused)
    got = softmax_attention(query, key, value, **options)
    assert len(calls) == 1
    assert calls[0].shape[1] == (2 if queries == 1 or kind == "none" else 6)
    assert got.shape == want.shape
    assert relative_error(got, want) < 1e-12


# torch's own: importing inductor's dependencies still defines script methods
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_the_operator_of_softmax_keeps_the_rules_of_torch():
    leaves = [x.requires_grad_() for x in random_qkv((2, 4, 2, 20, 8, 8))]
    sink = torch.linspace(-1, 2, 4).double().reshape(1, 4, 1, 1).requires_grad_()
    operator = torch.ops.hf_linattn.softmax_with_sink.default
    torch.library.opcheck(operator, (*leaves, None, sink, True, 0.3))


def test_fixed_sink_is_the_learned_one_at_itslearned_of():
    model = llama()
    for at in (1.5, -2.0):
        fixed = logits(model, "softmax1", sink=at)
        assert distance(fixed, logits(model, "softmax1", sink="learned", init=at)) < 1e-12
        assert distance(fixed, logits(model, "softmax1")) > 0.01
    assert distance(logits(model, "softmax1", sink=-40.0), logits(model)) < 1e-12
    assert torch.equal(logits(model, "softmax1", sink=0), logits(model, "softmax1"))


def test_sinks_need_no_mask(monkeypatch):
    masks = []
    plain = ops.sdpa

    def noted(query, key, value, mask, *others):
        masks.append(mask)
        return plain(query, key, value, mask, *others)

    kernel = ops.attention

    def noted_kernel(query, key, value, mask, *others):
        masks.append(mask)
        return kernel(query, key, value, mask, *others)

    monkeypatch.setattr(ops, "attention", noted_kernel)
    for sink in (0.0, "learned"):
        logits(llama(), "softmax1", sink=sink)
    assert masks == [None] * 4
    masks.clear()
    monkeypatch.setattr(ops, "fits", lambda *inputs: False)  # as on other devices
    monkeypatch.setattr(ops, "sdpa", noted)
    logits(llama(), "softmax1", sink=0.0)
    assert masks == [None, None]
    for sink in (1.5, "learned"):
        logits(llama(), "softmax1", sink=sink)
    assert masks == [None] * 6


def test_learned_sink_joins_the_models_own():
    model = build("GptOssForCausalLM", dtype=torch.float32, **SIZES, **GPT_OSS)
    options = {"sink": "learned", "init": 0.5}
    weights = learned_of(model, "softmax1", **options)
    with torch.no_grad(), as_oracle(model, "softmax1", learned=weights, **options):
        want = model(tokens(2, 40), use_cache=False).logits
    got = logits(model, "softmax1", **options)
    assert distance(got, want) < 1e-4
    assert distance(got, logits(model)) > 0.01


@pytest.mark.parametrize("name", ["relu2", "relu_n", "sigmoid_n", "l2softmax"])
def test_weights_without_a_denominator_refuse_sinks(name):
    model = build("GptOssForCausalLM", **SIZES, **GPT_OSS)
    with pytest.raises(UnsupportedModelError, match="sinks of its own"):
        patch_model(model, name)


def test_adamw_moves_a_learned_sink_from_itslearned_of():
    model = llama(dtype=torch.float32)
    patch_model(model, "softmax1", options={"sink": "learned"})
    logit = [x for name, x in model.named_parameters() if name.endswith("logit")]
    step = torch.optim.AdamW(logit, lr=0.01, weight_decay=0)
    for _ in range(3):
        step.zero_grad()
        model(tokens(4, 60), labels=tokens(4, 60)).loss.backward()
        step.step()
    moved = torch.cat([x.detach() for x in logit]) + 10
    assert float(moved.abs().min()) > 0.003


@needs_data
@torch.no_grad()
def test_learned_sink_starts_as_the_trained_model():
    folder = DATA / "models/stories260k"
    text = (DATA / "text/tinystories/val.txt").read_text(encoding="utf-8")[:4000]
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"][:512]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before = model(ids, labels=ids)
    patch_model(model, "softmax1", options={"sink": "learned"})
    after = model(ids, labels=ids)
    assert 0 < float((after.logits - before.logits).abs().mean()) < 1e-3
    assert abs(float(after.loss - before.loss)) < 1e-4
    assert abs(float(patch_model(model, "softmax1")(ids, labels=ids).loss - before.loss)) > 1e-3
