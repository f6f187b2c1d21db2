"""Biases by distance, with RoPE beside them or switched off."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import tiny_models
from helpers.oracle import as_oracle
from helpers.properties import learned
from helpers.selection import rest_full
from helpers.tiny_models import build, distance, left_padded, llama, positions, tokens
from torch import nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from hf_linattn import from_pretrained, patch_model, unpatch_model
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops.softmax import softmax_weights
from hf_linattn.patching.discovery import find_sites
from hf_linattn.registry import find

every_position = pytest.mark.parametrize("name", ["alibi", "kerple", "sandwich"])
SITE = find_sites(llama(1))[0]


def patch_of(name, heads=4, **options):
    return find(name)(replace(SITE, heads=heads), **options)


def apart(queries, keys=None):
    """Distances of the last queries of a text, `[1, N, S]`."""
    keys = queries if keys is None else keys
    row = torch.arange(keys - queries, keys, dtype=torch.float64)
    return (row[:, None] - torch.arange(keys))[None]


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


# -------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 32, 40])
def test_alibi_has_the_slopes_of_bloom(heads):
    got = patch_of("alibi", heads).slopes(torch.zeros(1, dtype=torch.float64))
    want = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]  # of the second key
    assert distance(got, want) < 1e-6


def test_alibi_is_blooms_bias_of_the_key_alone():
    """Rows of softmax do not see a shift: -m (i - j) is m j there."""
    scores = torch.randn(1, 4, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    bloom = build_alibi_tensor(torch.ones(1, 20), 4, torch.float64)[None]
    want = softmax_weights(scores + bloom, mask, None)
    assert (
        distance(softmax_weights(scores + patch_of("alibi").score_bias(apart(20)), mask, None), want) < 1e-7
    )


@every_position
def test_encoders_see_both_sides_alike(name):
    bias = patch_of(name).score_bias(apart(15))
    assert bias.shape == (1, 4, 15, 15)
    assert torch.equal(bias, bias.mT)
    assert not bias.diagonal(0, 2, 3).any()
    assert float(bias[..., 0, 1:].max()) < 0


def test_kerple_power_of_1_is_alibi():
    alibi, kerple = patch_of("alibi"), patch_of("kerple", kind="power").double()
    kerple.raw_r1.copy_(alibi.slopes(apart(1)).log())
    kerple.raw_r2.zero_()
    assert distance(kerple.score_bias(apart(30)), alibi.score_bias(apart(30))) < 1e-9


def test_kerple_log_of_a_small_factor_is_alibi():
    alibi, kerple = patch_of("alibi"), patch_of("kerple").double()
    kerple.raw_r1.copy_((alibi.slopes(apart(1)) * 1e7).log())
    kerple.raw_r2.fill_(math.log(1e-7))
    assert distance(kerple.score_bias(apart(30)), alibi.score_bias(apart(30))) < 1e-4


@pytest.mark.parametrize("kind", ["log", "power"])
def test_kerple_starts_in_the_papers_range_and_stays_in_it(kind):
    patch = patch_of("kerple", 1000, kind=kind).double()
    first = patch.raw_r1.exp()
    second = patch.raw_r2.exp() if kind == "log" else 2 * patch.raw_r2.sigmoid()
    tops = (2, 1) if kind == "log" else (1, 2)
    for values, top in zip((first, second), tops, strict=True):
        assert 0.009 < float(values.min()) < 0.05 * top
        assert 0.95 * top < float(values.max()) < top
        assert float(values.mean()) == pytest.approx(top / 2, abs=0.05)
    for far in (-30.0, 30.0):
        patch.raw_r2.fill_(far)
        bias = patch.score_bias(apart(9))
        assert bias.isfinite().all()
        assert float(bias.max()) <= 0


def test_kerple_starts_from_its_seed_and_differs_by_layer():
    def start(**options):
        model = patch_model(llama(), "kerple", options=options)
        return [m.linattn.kerple.raw_r1 for m in learned(model)]

    first = start()
    torch.manual_seed(2)
    assert torch.equal(first[0], start()[0])
    assert distance(first[0], first[1]) > 0.01
    assert distance(first[0], start(seed=1)[0]) > 0.01


def test_sandwich_is_the_product_of_sinusoids():
    """By vectors of sines and cosines and a ratio of 8 h / H, as in the paper's code."""
    place, t = np.arange(40)[:, None], np.arange(64)
    angle = place / 10000 ** (2 * t / 128)
    vectors = np.concatenate([np.sin(angle), np.cos(angle)], -1)
    want = (vectors @ vectors.T)[None] / (np.arange(1, 13) * 8 / 12)[:, None, None]
    got = patch_of("sandwich", 12).score_bias(apart(40))[0].numpy()
    shift = want[:, :1, :1]  # p . p, which softmax does not see
    assert np.abs(got - (want - shift)).max() < 1e-9


@every_position
def test_a_million_tokens_away(name):
    patch, far = patch_of(name, **({"size": 16} if name == "sandwich" else {})), apart(1, 10**6)
    got = patch.score_bias(far.float())
    want = patch.double().score_bias(far)
    assert got.dtype == torch.float32
    assert float(((got - want).abs() / want.abs().clamp_min(1)).max()) < 1e-5
    if name == "sandwich":
        rates = [10000 ** (-2 * t / 16) for t in range(8)]
        exact = sum(math.cos(999_999 * rate) - 1 for rate in rates)
        assert float(want[0, 3, 0, 0]) == pytest.approx(exact / 8, abs=1e-9)


# -------------------------------------------------------------------------------- RoPE switched off


class Still(nn.Module):
    """In place of a model's rotary embedding: no rotation."""

    def forward(self, x, position_ids, *args, **kwargs):
        shape = (*position_ids.shape, 8)
        return x.new_ones(shape), x.new_zeros(shape)


def unrotated(model, spec, ids, mask, **options):
    """The oracle on the model without its rotary embedding."""
    patch_model(model, spec, options=options)
    weights = learned(model)
    unpatch_model(model)
    rotary, model.model.rotary_emb = model.model.rotary_emb, Still()
    try:
        with as_oracle(model, spec, learned=weights, **options):
            return model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits
    finally:
        model.model.rotary_emb = rotary


def run(model, ids, mask):
    return model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("alibi", {}),
        ("kerple", {"kind": "power"}),
        ("sandwich", {}),
        ("softmax1+alibi+logn", {"train_length": 64}),
        ("relu2+kerple", {}),
    ],
    ids=str,
)
def test_without_rope_is_the_oracle_of_a_model_without_it(spec, options):
    model = llama()
    ids, mask = left_padded(tokens(2, 50), 9)
    live = mask.bool()
    before = run(model, ids, mask)
    want = unrotated(model, spec, ids, mask, **options)
    patch_model(model, spec, options=options)
    rotated = run(model, ids, mask)
    patch_model(model, spec, options={**options, "rope": False})
    got = run(model, ids, mask)
    assert distance(got[live], want[live]) < 1e-9
    assert distance(got[live], rotated[live]) > 1e-3
    unpatch_model(model)
    assert torch.equal(run(model, ids, mask), before)


@every_position
def test_without_rope_decoding_is_the_forward(name):
    model = patch_model(llama(), name, options={"rope": False})
    ids, mask = left_padded(tokens(2, 30), 5)
    want, cache, at = run(model, ids, mask), None, positions(mask)
    parts = []
    for first, last in [(0, 17), (17, 18), (18, 30)]:
        out = model(
            ids[:, first:last],
            attention_mask=mask[:, :last],
            position_ids=at[:, first:last],
            past_key_values=cache,
        )
        cache = out.past_key_values
        parts.append(out.logits)
    assert distance(torch.cat(parts, 1)[mask.bool()], want[mask.bool()]) < 1e-9


@every_position
def test_without_rope_is_saved(name, tmp_path):
    model = patch_model(llama(dtype=torch.float32), name, options={"rope": False})
    want = model(tokens(2, 30)).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(from_pretrained(str(tmp_path), dtype=torch.float32)(tokens(2, 30)).logits, want)
    (options,) = [group["options"] for group in model.config.linattn["patches"]]
    assert options == {name: {"rope": False}}


@torch.enable_grad()
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_without_rope_gradient_checkpointing_changes_nothing():
    model, found = patch_model(llama(), "kerple", options={"rope": False}).train(), []
    for _ in range(2):
        model.zero_grad()
        model(tokens(2, 30), labels=tokens(2, 30), use_cache=False).loss.backward()
        found.append({name: x.grad.clone() for name, x in model.named_parameters()})
        model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    assert found[0]["model.layers.0.self_attn.linattn.kerple.raw_r1"].any()
    for name, want in found[0].items():
        assert distance(found[1][name], want) < 1e-12


def test_without_rope_an_embedding_passed_by_place_is_switched_off_too():
    model = patch_model(llama(), "alibi", options={"rope": False})
    module, hidden = model.model.layers[0].self_attn, torch.randn(1, 12, 32, dtype=torch.float64)
    angle = torch.randn(1, 12, 8, dtype=torch.float64)
    still = (torch.ones_like(angle), torch.zeros_like(angle))
    want = module(hidden, position_embeddings=still, attention_mask=None)[0]
    by_place = module(hidden, (angle.cos(), angle.sin()), None)[0]
    by_name = module(hidden, position_embeddings=(angle.cos(), angle.sin()), attention_mask=None)[0]
    assert torch.equal(by_place, want)
    assert torch.equal(by_name, want)
    with pytest.raises(UnsupportedCallError, match=r"given as \(cos, sin\), not Tensor; leave rope=True"):
        module(hidden, position_embeddings=angle, attention_mask=None)


def test_without_rope_in_some_layers_only():
    model = patch_model(llama(), {"0": ("alibi", {"rope": False}), "1": "alibi"})
    assert [m.linattn.drops_rope for m in learned(model)] == [True, False]
    whole = patch_model(llama(), "alibi", options={"rope": False})(tokens(1, 20)).logits
    assert distance(model(tokens(1, 20)).logits, whole) > 1e-3


@every_position
@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "BertForMaskedLM"])
def test_without_rope_needs_a_model_that_has_it(name, cls):
    model = build(cls, num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=97)
    with pytest.raises(OptionError, match="gets no rotary embedding to switch off; leave rope=True"):
        patch_model(model, name, options={"rope": False})
    patch_model(model, name)


# -------------------------------------------------------------------------------- refusals


@every_position
def test_biases_need_scores(name):
    with pytest.raises(OptionError, match=f"'{name}' changes the scores .* 'elu1' has none"):
        patch_model(llama(1), f"elu1+{name}")


@every_position
def test_heads_that_cannot_be_told_are_refused(name):
    with pytest.raises(OptionError, match="number of its heads cannot be told"):
        patch_of(name, None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kerple", {"kind": "exp"}, "'kind' of 'kerple'"),
        ("kerple", {"seed": -1}, r"seed must be from 0 to 2\^31 - 1, got -1"),
        ("sandwich", {"size": 0}, "size must be an even number of at least 2, got 0"),
        ("sandwich", {"size": 7}, "size must be an even number of at least 2, got 7"),
        ("alibi", {"rope": 0}, "'rope' of 'alibi'"),
    ],
)
def test_options_out_of_range_are_refused_by_name(name, options, message):
    with pytest.raises(OptionError, match=message):
        patch_model(llama(1), name, options=options)


@pytest.mark.parametrize("name", rest_full(["kerple", "sandwich"], ["kerple"]))
def test_forward_compiles_as_one_graph(name):
    torch._dynamo.reset()
    model = patch_model(llama(layers=1), name, options={"rope": False})
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert distance(compiled(tokens(2, 50)).logits, model(tokens(2, 50)).logits) < 1e-9
    torch._dynamo.reset()


def test_cross_attention_has_no_distances():
    model = tiny_models.build("BartForConditionalGeneration", **tiny_models.ENCODER_DECODER_SIZES)
    ids = tiny_models.tokens(1, 20)
    patch_model(model, "alibi")
    with pytest.raises(UnsupportedCallError, match=r"'alibi' goes by distance.*self_attn"):
        model(input_ids=ids, decoder_input_ids=ids)
    patch_model(model, {"*.self_attn": "alibi"})
    whole = model(input_ids=ids, decoder_input_ids=ids).logits
    cache, parts = None, []
    for step in range(0, 20, 5):
        out = model(
            input_ids=ids, decoder_input_ids=ids[:, step : step + 5], past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        parts.append(out.logits)
    assert tiny_models.distance(torch.cat(parts, 1), whole) < 1e-10
