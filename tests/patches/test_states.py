"""Attentions with a state: what must hold for every one of them, and what each is said to be."""

import math
import re
from itertools import pairwise

import pytest
import torch
from helpers import tiny_models
from helpers.cases import CASES
from helpers.properties import patch
from transformers import DynamicCache

from hf_linattn import describe, is_linear, patch_model
from hf_linattn.attention import Tokens
from hf_linattn.attention.site import AttentionSite, ForwardInfo
from hf_linattn.errors import CacheError, OptionError
from hf_linattn.ops.eager import gated as gates
from hf_linattn.ops.eager import linear
from hf_linattn.patches.decay import Decay
from hf_linattn.registry import parse

STATEFUL = [
    name
    for name, case in CASES.items()
    if any(part.linear for part in parse(case.spec, case.options).parts)
    and all(part.directions != "bidirectional" for part in parse(case.spec, case.options).parts)
]
EXACT = 1e-10


@torch.no_grad()
def pieces(model, ids, cuts, cache):
    outputs = []
    for first, last in pairwise(cuts):
        out = model(ids[:, first:last], past_key_values=cache, use_cache=True)
        outputs.append(out.logits)
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("case", STATEFUL)
class TestEveryState:
    def test_its_size_is_what_describe_says_and_does_not_grow(self, case):
        model = patch(tiny_models.llama(dtype=torch.float32), case)
        cache = DynamicCache()
        sizes = set()
        for _ in range(3):
            model(tiny_models.tokens(3, 40), past_key_values=cache)
            sizes.add(tuple(layer.nbytes for layer in cache.layers))
        assert sizes == {tuple(3 * row.state_bytes for row in describe(model))}
        assert is_linear(model)

    def test_tokens_can_be_taken_back(self, case):
        model, ids = patch(tiny_models.llama(), case), tiny_models.tokens(2, 90)
        cache = DynamicCache()
        pieces(model, ids, (0, 50), cache)
        cache.activate_past_recording()
        pieces(model, ids, (50, 70, 90), cache)
        cache.crop(-27)
        want = model(ids).logits[:, 63:]
        assert tiny_models.distance(pieces(model, ids, (63, 64, 90), cache), want) < EXACT

    def test_rows_can_change_places(self, case):
        model, ids = patch(tiny_models.llama(), case), tiny_models.tokens(3, 70)
        cache = DynamicCache()
        pieces(model, ids, (0, 60), cache)
        order = torch.tensor([2, 0, 0])
        cache.reorder_cache(order)
        got = pieces(model, ids[order], (60, 70), cache)
        assert tiny_models.distance(got, model(ids[order]).logits[:, 60:]) < EXACT

    def test_a_static_cache_gives_the_same_text(self, case):
        model, ids = patch(tiny_models.llama(), case), tiny_models.tokens(2, 40)
        want = tiny_models.grow(model, ids, 6)
        for implementation in ("dynamic", "static"):
            got = model.generate(
                ids,
                max_new_tokens=6,
                do_sample=False,
                cache_implementation=implementation,
                disable_compile=True,
                pad_token_id=0,
            )
            assert torch.equal(got, want), implementation

    def test_the_cache_of_the_unpatched_model_is_taken_over_or_refused(self, case):
        plain, ids = (
            tiny_models.llama(layers=1),
            tiny_models.tokens(2, 80),
        )  # keys of later layers depend on the patch
        model = patch(tiny_models.llama(layers=1), case)
        cache = DynamicCache()
        pieces(plain, ids, (0, 50), cache)
        if "flow" in case or "h2o" in case:  # which need past queries, and no cache holds any
            with pytest.raises(CacheError, match="queries"):
                pieces(model, ids, (50, 51, 80), cache)
            return
        if model.model.layers[0].self_attn.linattn.attention.needs_hidden:
            with pytest.raises(CacheError, match=r"from the hidden state of past tokens .*'source': 'value'"):
                pieces(model, ids, (50, 51, 80), cache)
            return
        if "nope" in case:  # its keys are not turned, and those are
            with pytest.raises(CacheError, match="turned"):
                pieces(model, ids, (50, 51, 80), cache)
            return
        got = pieces(model, ids, (50, 51, 80), cache)
        assert tiny_models.distance(got, model(ids).logits[:, 50:]) < EXACT


class TestDecay:
    def test_spans_are_seamless(self, monkeypatch):
        generator = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.rand(2, 2, 300, 4, generator=generator, dtype=torch.float64) for _ in "qkv"
        )
        decay = -torch.rand(2, 2, 300, generator=generator, dtype=torch.float64)
        documents = torch.randint(0, 2, (2, 300), generator=generator).cumsum(1) // 40
        for labels in (None, documents):
            for fade in (None, decay):
                want = linear.causal(query, key, value, None, labels, fade)
                with monkeypatch.context() as patched:
                    patched.setattr(linear, "SPAN", 64)
                    got = linear.causal(query, key, value, None, labels, fade)
                for a, b in zip((*got[:2], *got[2]), (*want[:2], *want[2]), strict=True):
                    assert tiny_models.distance(a, b) < 1e-12

    def test_a_long_half_life_is_elu1(self):
        model, ids = tiny_models.llama(), tiny_models.tokens(1, 60)
        want = patch_model(model, "elu1")(ids).logits
        far = patch_model(model, "decay", options={"half_life": 1e12})(ids).logits
        near = patch_model(model, "decay", options={"half_life": 5.0})(ids).logits
        assert tiny_models.distance(far, want) < 1e-8
        assert tiny_models.distance(near, want) > 1e-2

    def test_the_recurrent_form_is_the_formula(self):
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.rand(1, 1, 70, 4, generator=generator, dtype=torch.float64) for _ in "qkv")
        decay = -torch.rand(1, 1, 70, generator=generator, dtype=torch.float64)
        numerator, total, state = linear.causal(query, key, value, None, None, decay)
        S, z = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        for t in range(70):
            S = S * decay[0, 0, t].exp() + key[0, 0, t][:, None] * value[0, 0, t]
            z = z * decay[0, 0, t].exp() + key[0, 0, t]
            assert tiny_models.distance(numerator[0, 0, t], query[0, 0, t] @ S) < 1e-12
            assert tiny_models.distance(total[0, 0, t], query[0, 0, t] @ z) < 1e-12
        assert tiny_models.distance(state.S[0, 0], S) < 1e-12

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"half_life": 0.0}, "half_life must be a number of tokens above 0, got 0"),
            ({"half_life": math.inf}, "half_life must be"),
            ({"rates": "lightning", "half_life": 2.0}, "twice"),
            ({"rates": "slow"}, "retnet"),
            ({"feature_map": "softmax1"}, "feature_map='softmax1' is no linear patch made of .* elu1"),
            ({"feature_map": "cosine"}, "no linear patch made of a feature map alone"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(OptionError, match=message):
            patch_model(tiny_models.llama(), "decay", options=options)


class TestGated:
    def test_starts_near_elu1_and_learns(self):
        model, ids = tiny_models.llama(), tiny_models.tokens(1, 60)
        want = patch_model(model, "elu1")(ids).logits.detach()
        patch_model(model, "gated", options={"half_life": 1e9})
        out = model(ids).logits
        assert tiny_models.distance(out, want) < 1e-6
        patch_model(model, "gated")
        model(ids).logits.square().sum().backward()
        gate = model.model.layers[0].self_attn.linattn.gated
        assert float(gate.weight.grad.abs().max()) > 0
        assert float(gate.bias.grad.abs().max()) > 0

    def test_heads_start_from_near_to_far(self):
        model = patch_model(tiny_models.llama(), "gated", options={"shortest": 4.0, "half_life": 256.0})
        gate = model.model.layers[0].self_attn.linattn.gated
        log_g = gate.log_decay(None, torch.randn(1, 2, 1, 8, dtype=torch.float64)).detach()[0, :, 0]
        assert (math.log(0.5) / log_g).tolist() == pytest.approx([4.0, 256.0], rel=1e-5)

    @pytest.mark.parametrize("shortest", [0.5, 257.0])
    def test_shortest_is_at_most_half_life(self, shortest):
        with pytest.raises(
            OptionError, match="shortest must be from 1 token to half_life, which is 256, got"
        ):
            patch_model(tiny_models.llama(), "gated", options={"shortest": shortest, "half_life": 256.0})

    def test_half_life_is_what_it_says(self):
        model = patch_model(tiny_models.llama(), "gated", options={"half_life": 100.0})
        gate = model.model.layers[0].self_attn.linattn.gated
        log_g = gate.log_decay(None, torch.randn(1, 2, 1, 8, dtype=torch.float64))
        assert float((100 * log_g.detach()).exp()[0, 0, 0]) == pytest.approx(0.5, rel=1e-6)
        with pytest.raises(OptionError, match=r"half_life must be at least 1 token, got 0\.5"):
            patch_model(tiny_models.llama(), "gated", options={"half_life": 0.5})


SITE = AttentionSite(
    name="alone",
    module=torch.nn.Module(),
    forward_info=ForwardInfo(1, (), "self", True, None, ()),
    layer_idx=0,
    window=None,
    head_dim=8,
    value_dim=8,
    heads=2,
    kv_heads=2,
    max_positions=None,
    causal=True,
)


def module_of(spec, **options):
    model = patch_model(tiny_models.llama(), spec, options=options)
    return model.model.layers[0].self_attn.linattn.attention


def tokens_of(query, key, value):
    return Tokens(query, key, value, 0.5)


@pytest.mark.parametrize("changed", ["query_map", "key_map", "mapped", "nothing"])
def test_maps_that_a_class_changes_are_not_those_of_the_kernels(changed):
    def mapped(self, tokens):
        features, value, decay = Decay.mapped(self, tokens)
        return 2 * features.square(), value, decay

    own = {"mapped": mapped, "nothing": None}.get(changed, lambda self, x: x.square())
    attention = type("Changed", (Decay,), {changed: own})(SITE)
    assert attention.fused == ("elu1" if changed == "nothing" else "none")
    generator = torch.Generator().manual_seed(0)
    tokens = tokens_of(*(torch.randn(1, 2, 150, 8, generator=generator, dtype=torch.float64) for _ in "qkv"))
    got = attention.causal(tokens, None)[0]
    key, value, decay = attention.mapped(tokens)
    want = linear.causal(attention.query_map(tokens.query), key, value, log_decay=decay)
    assert tiny_models.distance(got, linear.normalised(*want[:2])) < 1e-11


class TestEfficient:
    def qkv(self, length=70, dtype=torch.float64, scale=1.0):
        generator = torch.Generator().manual_seed(0)
        return [scale * torch.randn(1, 2, length, 8, generator=generator, dtype=dtype) for _ in "qkv"]

    @pytest.mark.parametrize("form", ["causal", "bidirectional"])
    def test_rows_sum_to_one(self, form):
        query, key, value = self.qkv()
        output = getattr(module_of("efficient"), form)
        output = output(tokens_of(query, key, torch.ones_like(value)), *([None] if form == "causal" else []))
        output = output[0] if form == "causal" else output
        assert tiny_models.distance(output, torch.ones_like(output)) < 1e-11

    def test_it_is_not_softmax_and_exp_features(self):
        query, key, value = self.qkv()
        got = module_of("efficient").bidirectional(tokens_of(query, key, value))
        weights = query.softmax(-1) @ key.exp().mT
        other = weights / weights.sum(-1, keepdim=True) @ value
        assert tiny_models.distance(got, other) > 1e-2

    def test_safe_at_64k_tokens_whatever_the_keys(self):
        """Keys that jump by hundreds, up and down, in float32: against float64 sums at some positions."""
        length = 65536
        query, key, value = self.qkv(length, torch.float32)
        wave = 150 * torch.sin(torch.arange(length) / 4000.0)
        key = key * 20 + wave[:, None]
        got = module_of("efficient").causal(tokens_of(query, key, value), None)[0]
        assert torch.isfinite(got).all()
        for t in (0, 1, 15, 16, 4095, 20000, 65535):
            weights = key[:, :, : t + 1].double().softmax(2)
            want = (
                query[:, :, t].double().softmax(-1)[:, :, :, None]
                * (weights.mT @ value[:, :, : t + 1].double())
            ).sum(2)
            assert tiny_models.distance(got[:, :, t], want) < 2e-3, t

    def test_gates_are_the_formula(self, monkeypatch):
        generator = torch.Generator().manual_seed(0)
        query, key, value, gate = (
            torch.rand(2, 2, 100, 3, generator=generator, dtype=torch.float64) for _ in "qkvg"
        )
        state = torch.rand(2, 2, 3, 3, generator=generator, dtype=torch.float64)
        monkeypatch.setattr(gates, "SPAN", 32)
        got, after = gates.causal(query, key, value, -5 * gate, state)
        for t in range(100):
            state = (
                state * (-5 * gate[:, :, t]).exp()[..., None] + key[:, :, t, :, None] * value[:, :, t, None]
            )
            assert tiny_models.distance(got[:, :, t], (query[:, :, t, :, None] * state).sum(2)) < 1e-12
        assert tiny_models.distance(after, state) < 1e-12


class TestMapsWithOptions:
    """A feature map that is named with options of its own."""

    def test_more_features(self):
        model = patch_model(tiny_models.llama(), "gated", options={"feature_map": "taylor2(features=3)"})
        assert model.model.layers[0].self_attn.linattn.gated.features == 1 + 3 + 6
        want = patch_model(tiny_models.llama(), "gated", options={"feature_map": "taylor2"})
        assert want.model.layers[0].self_attn.linattn.gated.features == 1 + 8 + 36  # all of a head

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("taylor2(features)", "'features' is no OPTION=VALUE"),
            ("taylor2(features=0)", "features must be at least 1"),
            ("taylor2(features=many)", "option 'features' of 'taylor2' must be int"),
            ("taylor2(size=3)", "'taylor2' has no option 'size'"),
            ("taylor2(", "no linear patch made of a feature map alone"),
        ],
    )
    def test_refused(self, name, message):
        with pytest.raises(OptionError, match=re.escape(message)):
            patch_model(tiny_models.llama(), "delta", options={"feature_map": name})
