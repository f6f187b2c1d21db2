"""Attentions with a state: what must hold for every one of them, and what each is said to be."""

import math
from itertools import pairwise

import pytest
import tiny
import torch
from cases import CASES
from oracle import Case, as_oracle, softmax_weights
from properties import FAMILIES, check_decode, check_forward, check_gradient, check_padding, model_of, patch
from transformers import DynamicCache

from hf_linattn import describe, is_linear, patch_model
from hf_linattn.errors import CacheError, OptionError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.ops import gates, linear
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
        model = patch(tiny.llama(dtype=torch.float32), case)
        cache = DynamicCache()
        sizes = set()
        for _ in range(3):
            model(tiny.tokens(3, 40), past_key_values=cache)
            sizes.add(tuple(layer.nbytes for layer in cache.layers))
        assert sizes == {tuple(3 * row.state_bytes for row in describe(model))}
        assert is_linear(model)

    def test_tokens_can_be_taken_back(self, case):
        model, ids = patch(tiny.llama(), case), tiny.tokens(2, 90)
        cache = DynamicCache()
        pieces(model, ids, (0, 50), cache)
        cache.activate_past_recording()
        pieces(model, ids, (50, 70, 90), cache)
        cache.crop(-27)
        want = model(ids).logits[:, 63:]
        assert tiny.distance(pieces(model, ids, (63, 64, 90), cache), want) < EXACT

    def test_rows_can_change_places(self, case):
        model, ids = patch(tiny.llama(), case), tiny.tokens(3, 70)
        cache = DynamicCache()
        pieces(model, ids, (0, 60), cache)
        order = torch.tensor([2, 0, 0])
        cache.reorder_cache(order)
        got = pieces(model, ids[order], (60, 70), cache)
        assert tiny.distance(got, model(ids[order]).logits[:, 60:]) < EXACT

    def test_a_static_cache_gives_the_same_text(self, case):
        model, ids = patch(tiny.llama(), case), tiny.tokens(2, 40)
        want = tiny.grow(model, ids, 6)
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
        plain, ids = tiny.llama(layers=1), tiny.tokens(2, 80)  # keys of later layers depend on the patch
        model = patch(tiny.llama(layers=1), case)
        cache = DynamicCache()
        pieces(plain, ids, (0, 50), cache)
        if "flow" in case:  # its state holds sums of queries, and no cache does
            with pytest.raises(CacheError, match="queries"):
                pieces(model, ids, (50, 51, 80), cache)
            return
        got = pieces(model, ids, (50, 51, 80), cache)
        assert tiny.distance(got, model(ids).logits[:, 50:]) < EXACT


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
                    assert tiny.distance(a, b) < 1e-12

    def test_a_long_half_life_is_elu1(self):
        model, ids = tiny.llama(), tiny.tokens(1, 60)
        want = patch_model(model, "elu1")(ids).logits
        far = patch_model(model, "decay", options={"half_life": 1e12})(ids).logits
        near = patch_model(model, "decay", options={"half_life": 5.0})(ids).logits
        assert tiny.distance(far, want) < 1e-8
        assert tiny.distance(near, want) > 1e-2

    def test_the_recurrent_form_is_the_formula(self):
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.rand(1, 1, 70, 4, generator=generator, dtype=torch.float64) for _ in "qkv")
        decay = -torch.rand(1, 1, 70, generator=generator, dtype=torch.float64)
        numerator, total, state = linear.causal(query, key, value, None, None, decay)
        S, z = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        for t in range(70):
            S = S * decay[0, 0, t].exp() + key[0, 0, t][:, None] * value[0, 0, t]
            z = z * decay[0, 0, t].exp() + key[0, 0, t]
            assert tiny.distance(numerator[0, 0, t], query[0, 0, t] @ S) < 1e-12
            assert tiny.distance(total[0, 0, t], query[0, 0, t] @ z) < 1e-12
        assert tiny.distance(state.S[0, 0], S) < 1e-12

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"half_life": 0.0}, "half_life must be a number of tokens above 0, got 0"),
            ({"half_life": math.inf}, "half_life must be"),
            ({"rates": "lightning", "half_life": 2.0}, "twice"),
            ({"rates": "slow"}, "retnet"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(OptionError, match=message):
            patch_model(tiny.llama(), "decay", options=options)


class TestGated:
    def test_starts_near_elu1_and_learns(self):
        model, ids = tiny.llama(), tiny.tokens(1, 60)
        want = patch_model(model, "elu1")(ids).logits.detach()
        patch_model(model, "gated", options={"half_life": 1e9})
        out = model(ids).logits
        assert tiny.distance(out, want) < 1e-6
        patch_model(model, "gated")
        model(ids).logits.square().sum().backward()
        gate = model.model.layers[0].self_attn.linattn.gated
        assert float(gate.weight.grad.abs().max()) > 0
        assert float(gate.bias.grad.abs().max()) > 0

    def test_half_life_is_what_it_says(self):
        model = patch_model(tiny.llama(), "gated", options={"half_life": 100.0})
        gate = model.model.layers[0].self_attn.linattn.gated
        log_g = gate.log_decay(None, torch.randn(1, 2, 1, 8, dtype=torch.float64))
        assert float((100 * log_g.detach()).exp()[0, 0, 0]) == pytest.approx(0.5, rel=1e-6)
        with pytest.raises(OptionError, match=r"half_life must be at least 1 token, got 0\.5"):
            patch_model(tiny.llama(), "gated", options={"half_life": 0.5})


def module_of(spec, **options):
    model = patch_model(tiny.llama(), spec, options=options)
    return model.model.layers[0].self_attn.linattn.attention


def tokens_of(query, key, value):
    from hf_linattn.tokens import Tokens

    return Tokens(query, key, value, 0.5)


class TestEfficient:
    def qkv(self, length=70, dtype=torch.float64, scale=1.0):
        generator = torch.Generator().manual_seed(0)
        return [scale * torch.randn(1, 2, length, 8, generator=generator, dtype=dtype) for _ in "qkv"]

    @pytest.mark.parametrize("form", ["causal", "both_ways"])
    def test_rows_sum_to_one(self, form):
        query, key, value = self.qkv()
        output = getattr(module_of("efficient"), form)
        output = output(tokens_of(query, key, torch.ones_like(value)), *([None] if form == "causal" else []))
        output = output[0] if form == "causal" else output
        assert tiny.distance(output, torch.ones_like(output)) < 1e-11

    def test_it_is_not_softmax_and_exp_features(self):
        query, key, value = self.qkv()
        got = module_of("efficient").both_ways(tokens_of(query, key, value))
        weights = query.softmax(-1) @ key.exp().mT
        other = weights / weights.sum(-1, keepdim=True) @ value
        assert tiny.distance(got, other) > 1e-2

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
            assert tiny.distance(got[:, :, t], want) < 2e-3, t

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
            assert tiny.distance(got[:, :, t], (query[:, :, t, :, None] * state).sum(2)) < 1e-12
        assert tiny.distance(after, state) < 1e-12


ROTATED = ["llama", "mqa, odd head_dim", "qwen3", "olmo2", "gpt_neox"]


def rotate_half_back(x, angle):
    """By an angle per pair of features, the first half with the second."""
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


def streaming(x):
    """StreamingLLM: the sinks' distance counted inside the cache of sinks and window."""
    size, sinks = x.options["size"], x.options["sinks"]
    query, key = x.ranks()
    rotated = x.query.shape[-1] if x.query.shape[-1] == 8 or x.query.shape[-1] == 6 else 0
    rotated = x.options.get("rotated", rotated)
    frequency = 10000.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    back = (query - (sinks + size - 1)).clamp(min=0)
    angle = back[:, None, :, None] * frequency
    turned = torch.cat([rotate_half_back(x.query[..., :rotated], angle), x.query[..., rotated:]], -1)
    near = x.visible & (query[:, :, None] - key[:, None] < size)[:, None]
    first = x.visible & (key < sinks)[:, None, None]
    scores = torch.where(first, turned @ x.key.mT, x.query @ x.key.mT) * x.scaling
    return softmax_weights(scores, near | first) @ x.value


class TestWindow:
    @pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
    @pytest.mark.parametrize("spec", ["window", "window+elu1"])
    def test_a_window_of_full_length_is_softmax(self, family, spec):
        model, ids = model_of(family), tiny.tokens(2, 60)
        want = model(ids).logits
        patch_model(model, spec, options={"size": 60})
        assert tiny.distance(model(ids).logits, want) < 1e-6
        patch_model(model, spec, options={"size": 59})
        assert tiny.distance(model(ids).logits, want) > 1e-6

    @pytest.mark.parametrize("family", ROTATED)
    def test_positions_inside_the_cache(self, family, monkeypatch):
        import oracle

        options = {"size": 20, "sinks": 3, "positions": "cache"}
        rotated = {"gpt_neox": 2}.get(family)
        monkeypatch.setitem(CASES, "streaming", Case("window", options))
        monkeypatch.setitem(oracle.FORMULAS, "window", lambda x: streaming(with_rotated(x, rotated)))
        check_forward(family, "streaming", (20, 23, 24, 90))
        check_gradient(family, "streaming")
        check_padding(family, "streaming")
        check_decode(family, "streaming", (0, 40, 41, 100))

    def test_positions_matter(self):
        model, ids = tiny.llama(), tiny.tokens(1, 90)
        text, cache = (
            patch_model(model, "window", options={"size": 20, "sinks": 3, "positions": kind})(ids).logits
            for kind in ("text", "cache")
        )
        assert tiny.distance(text[:, :23], cache[:, :23]) < EXACT
        assert tiny.distance(text[:, 40:], cache[:, 40:]) > 1e-3

    def test_positions_that_cannot_be_turned_are_refused(self):
        options = {"sinks": 2, "positions": "cache"}
        with pytest.raises(OptionError, match="positions='text'"):
            patch_model(model_of("gpt2"), "window", options=options)
        patch_model(model_of("gpt2"), "window", options={"sinks": 2})  # auto: the text's
        dynamic = tiny.llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        with pytest.raises(OptionError, match="'dynamic'"):
            patch_model(dynamic, "window", options=options)

    def test_a_hybrid_without_memory_of_the_rest_is_the_window(self):
        """As g_h goes to 1."""
        model, ids = tiny.llama(), tiny.tokens(1, 70)
        want = patch_model(model, "window", options={"size": 16})(ids).logits
        patch_model(model, "window+elu1", options={"size": 16, "mix": "learned"})
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.linattn.window.gate, 60.0)
        assert tiny.distance(model(ids).logits, want) < 1e-8
        patch_model(model, "window+elu1", options={"size": 16})
        assert tiny.distance(model(ids).logits, want) > 1e-3

    def test_shared_normaliser_with_negative_queries(self):
        """elu1 divides its query features by a factor: here it must come back."""
        model = tiny.llama()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(6)
        ids = tiny.tokens(2, 70)
        with as_oracle(model, "window+elu1", size=12):
            want = model(ids).logits
        patch_model(model, "window+elu1", options={"size": 12})
        assert tiny.distance(model(ids).logits, want) < 1e-8

    @pytest.mark.parametrize(
        ("spec", "options", "message"),
        [
            ("window", {"size": 0}, "size must be at least 1 token, got 0"),
            ("window", {"sinks": -1}, "sinks must be at least 0 tokens, got -1"),
            ("window", {"mix": "both"}, "mix"),
            ("window+cosine", {}, "can be negative"),
            ("window+softmax1", {}, "one at most, or window with a linear attention"),
            ("elu1+relu", {}, "one at most"),
            ("window+elu1+relu", {}, "holds 3 attentions"),
            ("window+efficient", {}, "one at most"),
            ("alibi+window", {}, "has none to change"),
        ],
    )
    def test_bad_options(self, spec, options, message):
        with pytest.raises(OptionError, match=message):
            patch_model(tiny.llama(), spec, options=options)

    def test_cross_attention_is_refused(self):
        model = tiny.build("BartForConditionalGeneration", **tiny.ENCODER_DECODER_SIZES)
        patch_model(model, "window")
        ids = tiny.tokens(1, 20)
        with pytest.raises(UnsupportedCallError, match=r"cross-attention.*\*\.self_attn"):
            model(input_ids=ids, decoder_input_ids=ids)
        patch_model(model, {"*.self_attn": "window"})
        model(input_ids=ids, decoder_input_ids=ids)

    def test_a_causal_part_makes_the_hybrid_causal(self):
        with pytest.raises(UnsupportedModelError, match="causal only"):
            patch_model(model_of("bert"), "window+decay")


def with_rotated(x, rotated):
    if rotated is not None:
        x.options = {**x.options, "rotated": rotated}
    return x


def test_families_are_those_of_the_suite():
    assert set(ROTATED) <= set(FAMILIES)
