"""performer: close to softmax, safe without a maximum over keys, redrawn when and only when it may be."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny_models
from helpers.linear_patches import SHAPE, attention_of, tokens_of
from helpers.random_inputs import random_qkv, relative_error
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from hf_linattn import from_pretrained, patch_model
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.patches.performer import LIMIT, drawn


def softmax_error(features, size=0.5, seeds=range(8)):
    query, key, value = random_qkv((1, 4, 4, 100, 8, 8), scale=size)
    key, value = key[:, ::2], value[:, ::2]
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    errors = []
    for seed in seeds:
        attention = attention_of("performer", features=features, seed=seed)
        errors.append(relative_error(attention.causal(tokens_of(query, key, value), None)[0], want) ** 2)
    return (sum(errors) / len(errors)) ** 0.5


def test_comes_close_to_softmax_as_features_grow():
    few, more, many = softmax_error(32), softmax_error(128), softmax_error(512)
    assert 0.35 < more / few < 0.65
    assert 0.35 < many / more < 0.65
    assert many < 0.1


def test_is_unbiased():
    query, key, _ = random_qkv((1, 4, 4, 5, 8, 8), scale=0.5)
    want = (query @ key.mT / 8**0.5).exp()
    attention, total = attention_of("performer", features=16), 0
    for seed in range(400):
        attention.projection = drawn(16, 8, str(seed)).double()
        phi_q = attention.query_map(query) * attention.query_log_scale(query).exp().unsqueeze(-1)
        total = total + phi_q @ attention.key_map(key).mT / 400
    assert relative_error(total, want) < 0.05


def test_is_the_published_form():
    """Features over the largest of a row (queries) and of all keys: it divides away where all are seen."""
    attention = attention_of("performer")
    query, key, value = random_qkv((1, 4, 4, 60, 8, 8))
    key, value = key[:, ::2], value[:, ::2]
    x, y = query * 8**-0.25, key * 8**-0.25
    dash_x, dash_y = x @ attention.projection.mT, y @ attention.projection.mT
    phi_q = (dash_x - x.square().sum(-1, keepdim=True) / 2 - dash_x.amax(-1, keepdim=True)).exp() / 16**0.5
    phi_k = (dash_y - y.square().sum(-1, keepdim=True) / 2 - dash_y.max()).exp() / 16**0.5
    weights = phi_q @ phi_k.repeat_interleave(2, 1).mT
    want = weights / weights.sum(-1, keepdim=True) @ value.repeat_interleave(2, 1)
    assert relative_error(attention.bidirectional(tokens_of(query, key, value)), want) < 1e-12


def test_projection_is_orthogonal_in_blocks_with_gaussian_lengths():
    rows = drawn(37, 8, "a").double()
    unit = rows / rows.norm(dim=-1, keepdim=True)
    for block in unit.split(8):
        assert float((block @ block.T - torch.eye(len(block)).double()).abs().max()) < 1e-6
    lengths = drawn(4000, 8, "b").norm(dim=-1)
    assert abs(float(lengths.square().mean()) / 8 - 1) < 0.05
    assert float(lengths.std()) > 0.5


def test_long_keys_average_and_never_vanish():
    attention = attention_of("performer", torch.float32)
    query, key, value = random_qkv(SHAPE, torch.float32)
    output, state = attention.causal(tokens_of(query, 1000 * key, value), None)
    mean = value.cumsum(2) / torch.arange(1, 131)[:, None]
    assert relative_error(output, mean.repeat_interleave(2, 1)) < 1e-5
    assert float(state.z.min()) > 0
    along = attention.projection[:1] * 8**0.25  # where w . x - |x|^2 / 2 is largest
    assert float(attention.key_map(100 * along).max()) <= math.exp(LIMIT) * 1.01


def projections(model):
    return [layer.self_attn.linattn.attention.projection.clone() for layer in model.model.layers]


def test_projections_by_seed_and_layer():
    first, again, other = (
        projections(patch_model(tiny_models.llama(2), "performer", options={"seed": seed}))
        for seed in (3, 3, 4)
    )
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], other[0])
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn(5, 8, "c")
    assert torch.equal(torch.rand(3), expected)  # the program's own randomness is left alone


def test_redraws_in_training_only_and_goes_on_where_it_was(tmp_path):
    model = patch_model(tiny_models.llama(2, dtype=torch.float32), "performer", options={"redraw": 2})
    ids, start = tiny_models.tokens(1, 10), projections(model)
    model(ids)
    model.generate(ids, max_new_tokens=5, do_sample=False)
    assert all(map(torch.equal, projections(model), start))
    model.train()
    model(ids)
    assert all(map(torch.equal, projections(model), start))
    model(ids)
    second = projections(model)
    assert not any(map(torch.equal, second, start))
    model(ids)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.float32).train()
    assert all(map(torch.equal, projections(loaded), second))
    model(ids), loaded(ids)
    third = projections(model)
    assert not any(map(torch.equal, third, second))
    assert all(map(torch.equal, projections(loaded), third))


@torch.no_grad()
def test_keeps_the_projection_of_a_state():
    model = patch_model(tiny_models.llama(1), "performer", options={"redraw": 1}).train()
    cache = DynamicCache(config=model.config)
    model(tiny_models.tokens(1, 10), past_key_values=cache)
    kept = projections(model)
    model(tiny_models.tokens(1, 3), past_key_values=cache)
    assert torch.equal(projections(model)[0], kept[0])


def test_redraw_under_gradient_checkpointing():
    """A rerun of a forward in the backward must see the projection of the first run."""
    attention = attention_of("performer", redraw=1).train()
    query, key, value = random_qkv((1, 4, 2, 20, 8, 8))
    gradients = []
    for again in (False, True):
        attention.step.zero_()
        x = query.clone().requires_grad_()

        def run(x):
            return attention.causal(tokens_of(x, key, value), None)[0].square().sum()

        (checkpoint(run, x, use_reentrant=False) if again else run(x)).backward()
        assert int(attention.step) == 1
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_redraw_between_two_forwards_and_their_backward():
    attention = attention_of("performer", redraw=1).train()
    query, key, value = (x.requires_grad_() for x in random_qkv((1, 4, 2, 20, 8, 8)))
    outputs = [attention.causal(tokens_of(query, key, value), None)[0].sum() for _ in range(2)]
    sum(outputs).backward()
    assert query.grad.isfinite().all()


def test_redraw_in_a_compiled_graph_is_refused(monkeypatch):
    attention = attention_of("performer", redraw=1).train()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(UnsupportedCallError, match="redraw=0"):
        attention.bidirectional(tokens_of(*random_qkv((1, 4, 2, 5, 8, 8))))
