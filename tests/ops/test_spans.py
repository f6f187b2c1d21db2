"""The vectorised form, which GPUs fall back to: spans of bounded size, products in 16 bits."""

import pytest
import torch
from helpers import definitions, tiny_models

from hf_linattn import patch_model
from hf_linattn.eval.bench import memory
from hf_linattn.ops.eager import linear


@pytest.fixture
def vectorised(monkeypatch):
    monkeypatch.setattr("hf_linattn.attention.linear.choose_backend", lambda *inputs: "vectorised")


def test_the_span_bounds_the_states_of_a_million_tokens():
    for batch_heads, features, value_dim in ((8, 64, 64), (32, 128, 128), (256, 128, 128), (32, 8385, 128)):
        tokens = linear.span(batch_heads, features, value_dim)
        states = tokens // linear.CHUNK * batch_heads * features * value_dim
        assert states <= max(linear.STATES, batch_heads * features * value_dim)
        assert linear.CHUNK <= tokens <= linear.SPAN
    # in all chunks at once those of 32 heads of 128 would take 34 GB
    assert 1_048_576 // linear.CHUNK * 32 * 128 * 128 * 4 > 34e9


@pytest.mark.usefixtures("vectorised")
@pytest.mark.parametrize("train", [False, True], ids=["prefill", "train"])
def test_memory_grows_with_the_tokens_alone(monkeypatch, train):
    model = patch_model(tiny_models.llama(1), "elu1")
    attention = model.model.layers[0].self_attn.linattn.attention
    monkeypatch.setattr(linear, "SPAN", 128)

    def tokens(length):
        from hf_linattn.attention import Tokens

        given = (torch.randn(1, 2, length, 64, requires_grad=train) for _ in "qkv")
        return Tokens(*given, 1.0)

    def call(given):
        output = attention.sums(given, None, True)[0]
        if train:
            output.sum().backward()
        return output

    sizes = {}
    for length in (512, 2048):
        given = tokens(length)
        sizes[length] = memory.peak(lambda given=given: call(given)) / (length * 2 * 64 * 4)
    # in numbers per number of the queries; states of every chunk would be one more each, their copies others
    assert sizes[2048] < (7.5 if train else 3.5), sizes
    assert sizes[2048] < sizes[512]


@pytest.mark.usefixtures("vectorised")
@pytest.mark.parametrize("spec", ["elu1", "hedgehog", "gated"])
@pytest.mark.parametrize("packed", [False, True])
def test_spans_change_nothing(monkeypatch, spec, packed):
    model = patch_model(tiny_models.llama(), spec).double()
    ids = tiny_models.tokens(2, 300)
    positions = torch.cat([torch.arange(130), torch.arange(170)]).expand(2, -1) if packed else None
    results = []
    for most in (1 << 20, 128):
        monkeypatch.setattr(linear, "SPAN", most)
        model.zero_grad()
        logits = model(ids, position_ids=positions, use_cache=False).logits
        logits.square().mean().backward()
        results.append([logits, *(x.grad for x in model.parameters() if x.grad is not None)])
    for whole, spans in zip(*results, strict=True):
        assert tiny_models.distance(spans, whole) < 1e-12


@pytest.mark.parametrize("kind", ["elu1", "relu"])
def test_products_in_bfloat16(kind):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, 16, generator=generator).bfloat16() for _ in "qkv")
    phi_q, phi_k = (definitions.feature_map(x.float(), kind, True, 0.01) for x in (query, key))
    decay = -0.1 * torch.rand(1, 2, 300, generator=generator)
    for fade in (None, decay):
        numerator, total, state = linear.causal(
            phi_q, phi_k, value.float(), log_decay=fade, products=torch.bfloat16
        )
        output = linear.normalised(numerator, total)
        assert {x.dtype for x in (output, total, *state)} == {torch.float32}
        exact = definitions.linear(
            phi_q.double(), phi_k.double(), value.double(), log_decay=None if fade is None else fade.double()
        )
        for got, want in zip((output, total, *state), exact, strict=True):
            assert float((got - want).norm() / want.norm()) < 6e-3
