"""Diagnosis: the weights are the model's, the numbers are right, and the model stays as it was."""

import json
import math

import pytest
import torch
from helpers.oracle import elu_plus_one
from helpers.tiny_models import SIZES, build, left_padded, llama, tokens
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_linattn import patch_model
from hf_linattn.errors import DataError, LinattnError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.eval.diagnose import diagnose, statistics
from hf_linattn.eval.diagnose.attention_weights import watching
from hf_linattn.eval.diagnose.measure import layer_of

LENGTH, WINDOW, PADDING = 24, 6, 5
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 97}
MODELS = {
    "llama": ("LlamaForCausalLM", SIZES),
    "llama, a head each": ("LlamaForCausalLM", {**SIZES, "num_key_value_heads": 4}),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gemma3": ("Gemma3ForCausalLM", {**SIZES, **HYBRID, "query_pre_attn_scalar": 8}),
    "bert": ("BertModel", {**SIZES, "pad_token_id": 0}),
    "softcap": ("Gemma2ForCausalLM", {**SIZES, **HYBRID, "attn_logit_softcapping": 2.0}),
    "sinks": ("GptOssForCausalLM", {**SIZES, **HYBRID, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
ONLY_EAGER = ("softcap", "sinks")


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def make(name, implementation="sdpa", layers=2, **options):
    cls, config = MODELS[name]
    counted = config if cls.startswith("GPT2") else {**config, "num_hidden_layers": layers}
    return build(cls, implementation=implementation, **{**counted, **options})


def calls_of(model, ids, mask=None, **inputs):
    calls = []
    with watching(model, calls.append):
        model(ids, attention_mask=mask, use_cache=False, **inputs)
    return calls


def seen_by(name, layer, mask):
    """Keys that queries see, from the definition: `[B, 1, N, N]`."""
    row, column = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool) if name == "bert" else column <= row
    if name in ("gemma3", "softcap", "sinks") and layer == 0:
        seen = seen & (column > row - WINDOW)
    return seen[None, None] & mask[:, None, None].bool()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [(name, "eager") for name in MODELS] + [(name, "sdpa") for name in MODELS if name not in ONLY_EAGER],
)
def test_weights_are_those_that_the_model_reports(name, implementation):
    ids, mask = left_padded(tokens(2, LENGTH), PADDING)
    # float32: in float64 eager turns the rows of padding into NaN
    eager, model = (make(name, kind, dtype=torch.float32) for kind in ("eager", implementation))
    want = eager(ids, attention_mask=mask, output_attentions=True, use_cache=False).attentions
    calls = calls_of(model, ids, mask)
    assert len(calls) == len(want) == 2
    for layer, (call, weights) in enumerate(zip(calls, want, strict=True)):
        seen = seen_by(name, layer, mask).expand_as(call.weights)
        rows = mask.bool()[:, None, :, None] & seen  # what padding sees is its own affair
        assert float((call.weights - weights)[rows].abs().max()) < 2e-6
        real = mask.bool()[:, None, :, None].expand_as(seen)
        assert torch.equal(call.visible[real], seen[real])


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
@pytest.mark.parametrize("patch", ["elu1", "softmax1", "logn"])
def test_weights_of_patches_are_the_formula(name, patch):
    ids, mask = left_padded(tokens(2, LENGTH), PADDING)
    model = patch_model(make(name), patch, sliding="global")
    for call in calls_of(model, ids, mask):
        key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], 1)
        seen = seen_by("bert" if name == "bert" else "llama", 0, mask).expand_as(call.weights)
        if patch == "elu1":
            size = elu_plus_one(call.query) @ elu_plus_one(key).mT
        else:
            factor = seen.sum(-1, keepdim=True).double().log() / math.log(512) if patch == "logn" else 1
            size = (call.query * factor @ key.mT * call.scaling).exp()
        size = size * seen
        want = size / (size.sum(-1, keepdim=True) + (patch == "softmax1"))
        real = mask.bool()[:, None, :, None].expand_as(seen)
        assert float((call.weights - want)[real].abs().max()) < 1e-12
        assert torch.equal(call.visible[real], seen[real])


def test_scaled_scores_and_layers_kept_beside_a_patch():
    model = patch_model(llama(layers=3), {"1": "elu1"})
    ids = tokens(1, LENGTH)
    calls = calls_of(model, ids)
    assert [call.name for call in calls] == [f"model.layers.{layer}.self_attn" for layer in range(3)]
    first = calls[0]
    scores = first.query @ first.key.repeat_interleave(2, 1).mT * 8**-0.5
    want = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf).softmax(-1)
    assert float((first.weights - want).abs().max()) < 1e-12
    result = diagnose(model, ids)
    assert [layer.attention for layer in result.layers] == ["softmax", "elu1", "softmax"]


def test_half_precision_is_measured_in_float32():
    ids = tokens(1, LENGTH)
    whole, half = (calls_of(llama(dtype=dtype), ids)[0] for dtype in (torch.float32, torch.bfloat16))
    assert half.weights.dtype == torch.float32
    assert float((half.weights.sum(-1) - 1).abs().max()) < 1e-6
    assert float((half.weights - whole.weights).abs().max()) < 0.1


def test_what_is_not_linear_in_the_values_is_refused(monkeypatch):
    real = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def squared(module, query, key, value, *args, **kwargs):
        return real(module, query, key, value.square(), *args, **kwargs)

    def gated(module, query, key, value, *args, **kwargs):
        return real(module, query, key, value * value.new_ones(8), *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", gated)
    with pytest.raises(UnsupportedCallError, match=r"layers\.0\.self_attn.*no other values than its own"):
        diagnose(llama(), tokens(1, LENGTH))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", squared)
    with pytest.raises(UnsupportedCallError, match=r"layers\.0\.self_attn.*not linear in its values"):
        diagnose(llama(), tokens(1, LENGTH))


def test_weights_that_are_no_numbers_are_named():
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.fill_(math.nan)
    with pytest.raises(UnsupportedCallError, match=r"layers\.1\.self_attn.*not finite: the weights hold NaN"):
        diagnose(model, tokens(1, LENGTH))


@pytest.mark.parametrize("patch", [None, "elu1"])
def test_model_is_as_before(patch):
    model = llama()
    if patch:
        patch_model(model, patch)
    model.train()
    model.model.layers[0].eval()
    ids = tokens(1, LENGTH)

    def state():
        hooks = [len(hooks) for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        modes = [module.training for module in model.modules()]
        every = ALL_ATTENTION_FUNCTIONS
        functions = dict(every._local_mapping), dict(every._global_mapping)
        return hooks, modes, functions, model.config.to_dict(), model.config._attn_implementation

    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits, before = model(ids, use_cache=False).logits, state()
    diagnose(model, ids)
    assert state() == before
    model.lm_head.register_forward_hook(lambda *_: 1 / 0)  # after all layers have been seen
    before = state()
    with pytest.raises(ZeroDivisionError):
        diagnose(model, ids)
    assert state() == before
    model.lm_head._forward_hooks.clear()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(model(ids, use_cache=False).logits, logits)


def test_other_models_are_left_alone_meanwhile():
    model, other, ids = llama(), llama(seed=2), tokens(1, LENGTH)
    calls = []
    with watching(model, calls.append):
        other(ids)
    assert calls == []


def test_uniform_attention_has_the_entropy_log_n():
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    result = diagnose(model, tokens(2, 64))
    for head in result.heads:
        assert head.relative_entropy == pytest.approx(1, abs=1e-12)
        assert head.effective_share == pytest.approx(1, abs=1e-12)
        assert head.score_variance == head.query_std == 0
        assert head.mass == pytest.approx(1)
        assert [point["up_to"] for point in head.curve] == [1, 2, 4, 8, 16, 32, 64]
        assert head.curve[2]["keys"] == 3.5
        assert head.curve[2]["entropy"] == pytest.approx((math.log(3) + math.log(4)) / 2)
        # the queries 32 ... 63 see the first token with 1 / n
        assert head.sink == pytest.approx(sum(1 / n for n in range(33, 65)) / 32)
        assert head.keys90 == pytest.approx(sum(math.ceil(0.9 * n) for n in range(33, 65)) / 32)
        # rows of equal entries: one direction before the mask, all under it
        assert (head.block_rank, head.rank) == (1, 64)
        assert head.block_effective_rank == pytest.approx(1, abs=1e-5)


def test_rank_of_linear_attention_is_at_most_its_features():
    model, ids = llama(), tokens(2, 64)
    softmax = diagnose(model, ids)
    assert softmax.grid("block_rank").min() > 8
    linear = diagnose(patch_model(model, "elu1"), ids)
    assert linear.grid("block_rank").max() <= 8  # elu1 has a feature per dimension of the head
    assert linear.grid("rank").min() == 64  # the mask makes any matrix triangular
    encoder = diagnose(patch_model(make("bert"), "elu1"), tokens(1, 64))
    assert encoder.grid("rank").max() <= 8  # no mask: the whole matrix tells


def test_softmax1_leaves_mass_and_a_sink_head_shows():
    model, ids = llama(), tokens(1, 64)
    assert diagnose(model, ids).grid("mass").min() == pytest.approx(1)
    assert diagnose(patch_model(model, "softmax1"), ids).grid("mass").max() < 1
    weights = torch.eye(16, dtype=torch.float64) * 0.25
    weights[:, 0] += 0.75
    found = statistics.head_statistics(weights, torch.ones(16, 16).tril().bool())
    assert found["sink"] == 0.75
    assert found["keys90"] == 2
    assert found["entropy"] == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    mass = statistics.received(weights, torch.ones(16, 16).tril().bool())
    assert mass.argmax() == 0
    assert mass[1:8].sum() == 0
    assert float(mass.sum()) == pytest.approx(1)


def test_tokens_with_most_mass_are_named_without_padding():
    ids, mask = left_padded(tokens(2, LENGTH), PADDING)
    padded = diagnose(make("llama"), ids[:1], mask[:1], position_ids=(mask.cumsum(1) - 1).clamp_min(0)[:1])
    bare = diagnose(make("llama"), ids[:1, PADDING:])
    for one, other in zip(padded.heads, bare.heads, strict=True):
        assert one.top[0]["tokens"] == other.top[0]["tokens"]
        assert one.top[0]["tokens"] == [str(int(ids[0, PADDING + one.top[0]["position"]]))]
        assert one.entropy == pytest.approx(other.entropy)
        assert one.rank == other.rank
    assert padded.layers[1].kurtosis == pytest.approx(bare.layers[1].kurtosis)


def test_windows_are_averaged_and_matrices_come_from_the_first():
    model, ids = llama(), tokens(3, 32)
    together = diagnose(model, ids, top=2)
    alone = [diagnose(model, row[None]) for row in ids]
    for name in ("entropy", "sink", "block_rank", "score_variance"):
        mean = sum(result.grid(name) for result in alone) / 3
        assert together.grid(name) == pytest.approx(mean)
    assert together.layers[1].inf_norm == pytest.approx(sum(r.layers[1].inf_norm for r in alone) / 3)
    assert len(together.heads[0].top) == 2
    assert len(together.heads[0].top[0]["tokens"]) == 3
    call = calls_of(model, ids[:1])[1]
    assert together.matrices[1, 3] == pytest.approx(call.weights[0, 3].float().numpy())


def test_a_window_hides_the_block():
    result = diagnose(make("gemma3"), tokens(1, LENGTH))
    assert {head.block_rank for head in result.heads if head.layer == 0} == {None}
    assert all(head.block_rank > 0 for head in result.heads if head.layer == 1)
    assert max(point["up_to"] for point in result.heads[0].curve) == 8  # six keys at most
    assert json.loads(result.to_json()) == result.to_dict()
    assert type(result).from_dict(result.to_dict()).heads == result.heads


def test_statistics_by_hand():
    x = torch.zeros(10, 100)
    x[0, 0] = -5.0
    found = statistics.activation_statistics(x)
    m, s2 = -0.005, 25 / 1000 - 0.005**2
    assert found["inf_norm"] == 5
    assert found["outliers"] == pytest.approx(1 / 1000)
    assert found["kurtosis"] == pytest.approx(((5 + m) ** 4 / 1000 + 0.999 * m**4) / s2**2)
    normal = statistics.activation_statistics(
        torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    )
    assert normal["kurtosis"] == pytest.approx(3, abs=0.05)
    assert statistics.ranks(torch.eye(8)[:, :5]) == (5, pytest.approx(5))
    assert statistics.ranks(torch.zeros(4, 4)) == (0, 0.0)
    assert statistics.keys_for_mass(torch.full((1, 10), 0.1, dtype=torch.float64)).tolist() == [9]
    assert statistics.pooled(torch.arange(36.0).view(6, 6), 3).tolist()[0][0] == (0 + 1 + 6 + 7) / 4
    query, key = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [-2.0]])
    spread = statistics.score_statistics(query, key, torch.tensor([[True, False], [True, True]]), 0.5)
    assert spread["score_variance"] == pytest.approx(torch.tensor([2.0, 6, -6]).var(correction=0))
    assert spread["scaled_score_variance"] == pytest.approx(spread["score_variance"] / 4)
    assert spread["key_std"] == 2


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.self_attn", "model.layers.3"),
        ("bert.encoder.layer.0.attention.self", "bert.encoder.layer.0"),
        ("encoder.block.0.layer.0.SelfAttention", "encoder.block.0.layer.0"),
        ("attention", "attention"),
    ],
)
def test_layers_around_attention(name, layer):
    assert layer_of(name) == layer


def test_refusals():
    ids = tokens(1, LENGTH)
    with pytest.raises(DataError, match="4 tokens"):
        diagnose(llama(), ids[:, :3])
    with pytest.raises(DataError, match="one has 2"):
        diagnose(llama(), *left_padded(ids, LENGTH - 2))
    with pytest.raises(DataError, match=r"\[windows, tokens\]"):
        diagnose(llama(), ids[0])
    with pytest.raises(UnsupportedModelError, match="it has none"):
        diagnose(build("MambaForCausalLM", hidden_size=32, num_hidden_layers=1, vocab_size=97), ids)
    with pytest.raises(LinattnError, match="transformers model"):
        diagnose(nn.Linear(2, 2), ids)
    model = build("T5ForConditionalGeneration", d_model=32, d_kv=8, num_heads=4, num_layers=1, vocab_size=97)
    with pytest.raises(UnsupportedModelError, match="get_encoder"):
        diagnose(model, ids)
    assert diagnose(model.get_encoder(), ids).layers[0].heads == 4  # a position bias per head
    with pytest.raises(UnsupportedModelError, match="its table ends at 64"):
        diagnose(make("gpt2"), tokens(1, 80))
    bert = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 32}
    with pytest.raises(UnsupportedModelError, match="its table ends at 64"):  # cut out of a table
        diagnose(build("BertModel", **bert, vocab_size=97, max_position_embeddings=64), tokens(1, 80))
    flex = llama()
    flex.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(UnsupportedModelError, match="attn_implementation='sdpa'"):
        diagnose(flex, ids)
