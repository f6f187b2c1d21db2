"""The vectorised form, which GPUs fall back to: spans of bounded size, products in 16 bits."""

import itertools

import pytest
import torch
from helpers import definitions, tiny_models

from hf_linattn import patch_model
from hf_linattn.attention import Tokens
from hf_linattn.eval.bench import memory
from hf_linattn.ops.eager import linear
from hf_linattn.ops.types import State


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
    documents = (torch.arange(300) >= 130).long()[None]
    before = State(*(torch.rand(1, 2, *shape, generator=generator) for shape in ((16, 16), (16,))))
    for fade, labels, state in itertools.product((None, decay), (None, documents), (None, before)):
        numerator, total, after = linear.causal(
            phi_q, phi_k, value.float(), state, labels, fade, products=torch.bfloat16
        )
        assert numerator.dtype == torch.bfloat16
        assert {x.dtype for x in (total, *after)} == {torch.float32}
        output = linear.normalised(numerator.clone(), total)
        assert output.dtype == torch.float32
        with torch.no_grad():
            assert torch.equal(linear.normalised(numerator, total), output.bfloat16())
        given = phi_q.double(), phi_k.double(), value.double()
        exact = definitions.linear(
            *given,
            **{} if state is None else {"S": state.S.double(), "z": state.z.double()},
            documents=labels,
            log_decay=None if fade is None else fade.double(),
        )
        for got, want in zip((output, total, *after), exact, strict=True):
            assert float((got - want).norm() / want.norm()) < 6e-3


@pytest.mark.usefixtures("vectorised")
@pytest.mark.parametrize("spec", ["elu1", "relu", "hedgehog"])
@pytest.mark.parametrize("length", [1, 300])
def test_models_in_bfloat16(monkeypatch, spec, length):
    """Maps in 16 bits, and queries all of whose numbers are far below 0."""
    monkeypatch.setattr(
        "hf_linattn.attention.linear._products",
        lambda key, value: torch.bfloat16 if key.dtype == torch.bfloat16 else None,
    )
    attention = patch_model(tiny_models.llama(1), spec).model.layers[0].self_attn.linattn.attention
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, heads, length, 8, generator=generator).bfloat16() for heads in (4, 2, 2)]
    given[0][:, 0] = given[0][:, 0].abs() * -20
    valid = torch.rand(2, length, generator=generator) < 0.8
    valid[:, 0] = True
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        own = [x.to(dtype).requires_grad_() for x in given]
        output = attention.to(dtype).causal(Tokens(*own, 8**-0.5, valid), None)[0]
        assert output.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
        grads = torch.autograd.grad((output * weight.to(output)).sum(), own)
        results.append([output.detach(), *grads])
    for got, want in zip(*results, strict=True):
        assert float((got - want).norm()) < 3e-2 * float(want.norm() + weight.norm() * (length == 1))


@pytest.mark.parametrize(("spec", "most", "trained"), [("elu1", 13, 43), ("relu", 10, 34), ("decay", 19, 50)])
def test_what_it_moves_in_bfloat16(spec, most, trained):
    """In times queries, keys, values and outputs; `pytest -s` prints it."""
    model = patch_model(tiny_models.llama(1, dtype=torch.bfloat16, head_dim=64), spec)
    attention = model.model.layers[0].self_attn.linattn.attention
    for length, train in ((4096, False), (8192, False), (4096, True)):
        given = [torch.empty(1, length, 2, 64, dtype=torch.bfloat16, device="meta") for _ in "qkv"]
        given = [x.transpose(1, 2).requires_grad_(train) for x in given]

        def call(given=given, train=train):
            with torch.set_grad_enabled(train):
                output = attention.causal(Tokens(*given, 0.125), None)[0].to(torch.bfloat16)
            return torch.autograd.grad(output, given, torch.empty_like(output)) if train else output

        times = memory.moved(call) / (4 * given[0].numel() * 2)
        print(f"{spec}, {length:,} tokens{', trained' * train}: {times:.1f} times q + k + v + o")
        assert 6 < times < (trained if train else most + (length > 4096) * 2)  # two spans are put together
    x = torch.empty(10, 10, device="meta")
    assert memory.moved(lambda: (x.view(100), x.mT, torch.empty_like(x))) == 0
    assert memory.moved(lambda: (x + x[0], x.add_(1))) == (210 + 200) * 4
