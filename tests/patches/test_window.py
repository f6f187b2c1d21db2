"""Softmax over a window, with sinks, and with a linear attention for the rest."""

import pytest
import torch
from helpers import tiny_models
from helpers.cases import CASES
from helpers.oracle import Case, as_oracle, softmax_weights
from helpers.properties import FAMILIES, check_decode, check_forward, check_gradient, check_padding, model_of
from transformers import DynamicCache

from hf_linattn import patch_model
from hf_linattn.errors import OptionError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patches.window import ring
from hf_linattn.patches.window.window import Window

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


@pytest.fixture
def calls(monkeypatch):
    """One item per call of torch's fused softmax attention from here on."""
    found, real = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **kwargs: (found.append(1), real(*args, **kwargs))[1],
    )
    return found


def check_long_window(sinks):
    """Decode behind a short text in a window as long as a real context, padding left and between."""
    model = tiny_models.llama()
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :7], mask[0, 70:72] = 0, 0
    ids = tiny_models.tokens(2, 80).masked_fill(mask == 0, 0)
    places = tiny_models.positions(mask)

    def decoded():
        cache, logits = DynamicCache(config=model.config), []
        for start, stop in [(0, 60), *((token, token + 1) for token in range(60, 80))]:
            given = {"attention_mask": mask[:, :stop], "position_ids": places[:, start:stop]}
            logits.append(model(ids[:, start:stop], past_key_values=cache, **given).logits)
        return torch.cat(logits, 1)[mask.bool()]

    with torch.no_grad():
        want = decoded()
        patch_model(model, "window", options={"size": 16384, "sinks": sinks, "positions": "text"})
        assert tiny_models.distance(decoded(), want) < 1e-5


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_long_window_behind_a_short_text_is_softmax(sinks, monkeypatch):
    sizes, real = [], ring._with_room
    monkeypatch.setattr(ring, "_with_room", lambda x, n: (sizes.append(n), real(x, n))[1])
    check_long_window(sinks)
    assert sizes == [16384 - 60] * 4  # keys and values of both layers


@pytest.mark.parametrize("sinks", [0, 4])
def test_kernels_in_cpp_read_what_is_filled_of_a_long_window(sinks, compiled):
    check_long_window(sinks)


def test_room_behind_tokens_is_zeros_in_rows_of_its_own():
    x = torch.randn(2, 40, 3, 8, dtype=torch.bfloat16).transpose(1, 2)
    valid = torch.ones(2, 40, dtype=torch.bool)
    got = ring.padded(ring.KeyValues(x, x[..., :4], valid), 0, 2**18)
    for after, before in zip(got[:2], (x, x[..., :4]), strict=True):
        assert after.is_contiguous()
        assert torch.equal(after, torch.nn.functional.pad(before, (0, 0, 0, 2**18)))
    assert got.valid.sum() == 80


class TestWindow:
    @pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
    @pytest.mark.parametrize("spec", ["window", "window+elu1"])
    def test_a_window_of_full_length_is_softmax(self, family, spec):
        model, ids = model_of(family), tiny_models.tokens(2, 60)
        want = model(ids).logits
        patch_model(model, spec, options={"size": 60})
        assert tiny_models.distance(model(ids).logits, want) < 1e-6
        patch_model(model, spec, options={"size": 59})
        assert tiny_models.distance(model(ids).logits, want) > 1e-6

    @pytest.mark.parametrize("spec", ["window", "window+hedgehog", "window+gated", "window+logn"])
    @pytest.mark.parametrize("length", [1, 7, 12])
    def test_texts_inside_the_window_are_torchs_softmax(self, spec, length, calls):
        """Longer texts, and what comes after, go on alike."""
        model, ids = model_of("llama"), tiny_models.tokens(2, 40)
        patch_model(model, spec, options={"size": 12})
        with torch.no_grad():
            short = model(ids[:, :length], use_cache=False).logits
            assert len(calls) == len(model.model.layers)
            begun = model(ids[:, :length], use_cache=True).past_key_values
            rest = [
                model(ids[:, i : i + 1], past_key_values=begun).logits[:, 0]
                for i in range(length, 2 * length + 8)
            ]
            rest.append(model(ids[:, 2 * length + 8 :], past_key_values=begun).logits[:, -1])
        want = model(ids).logits
        assert tiny_models.distance(short, want[:, :length]) < 1e-6
        for step, logits in enumerate(rest[:-1], start=length):
            assert tiny_models.distance(logits, want[:, step]) < 1e-6, step
        assert tiny_models.distance(rest[-1], want[:, -1]) < 1e-6

    @pytest.mark.parametrize("padding", ["none", "left", "right"])
    @pytest.mark.parametrize("family", ["llama", "qwen3", "bert"])
    @pytest.mark.parametrize(
        ("spec", "options"),
        [
            ("window", {}),
            ("window", {"sinks": 3}),
            ("window+elu1", {}),
            ("window+hedgehog", {}),
            ("window+hedgehog", {"mix": "learned", "sinks": 2}),
        ],
    )
    def test_training_inside_the_window_is_torchs_softmax(
        self, spec, options, family, padding, calls, monkeypatch
    ):
        """And each weight has the gradient that it has by the general way, zeros of no use among them."""
        model, ids = model_of(family), tiny_models.tokens(2, 12)
        mask = torch.ones_like(ids)
        mask[0, {"none": slice(0, 0), "left": slice(0, 5), "right": slice(7, None)}[padding]] = 0
        where = {"position_ids": tiny_models.positions(mask)}
        patch_model(model, spec, options={"size": 12, **options})

        def trained():
            model.zero_grad()
            logits = model(ids, attention_mask=mask, **where).logits[mask == 1]
            logits.square().sum().backward()
            return logits, {name: weight.grad for name, weight in model.named_parameters()}

        got, gradients = trained()
        assert len(calls) == 2
        monkeypatch.setattr(Window, "_holds", lambda *_: False)
        want, wanted = trained()
        assert len(calls) == 2
        assert tiny_models.distance(got, want) < 1e-9
        for name, gradient in wanted.items():
            assert (gradient is None) == (gradients[name] is None), name
            assert gradient is None or tiny_models.distance(gradients[name], gradient) < 1e-9, name

    @pytest.mark.parametrize("sinks", [1, 3])
    def test_what_follows_a_text_inside_the_window_knows_its_sinks(self, sinks):
        model, ids = model_of("llama"), tiny_models.tokens(2, 40)
        patch_model(model, "window+elu1", options={"size": 12, "sinks": sinks})
        with torch.no_grad():
            want = model(ids).logits
            begun = model(ids[:, :9], use_cache=True)
            got = [begun.logits]
            got += [
                model(ids[:, i : i + 1], past_key_values=begun.past_key_values).logits for i in range(9, 40)
            ]
        assert tiny_models.distance(torch.cat(got, 1), want) < 1e-9

    @pytest.mark.parametrize("family", ROTATED)
    def test_positions_inside_the_cache(self, family, monkeypatch):
        from helpers import oracle

        options = {"size": 20, "sinks": 3, "positions": "cache"}
        rotated = {"gpt_neox": 2}.get(family)
        monkeypatch.setitem(CASES, "streaming", Case("window", options))
        monkeypatch.setitem(oracle.FORMULAS, "window", lambda x: streaming(with_rotated(x, rotated)))
        check_forward(family, "streaming", (20, 23, 24, 90))
        check_gradient(family, "streaming")
        check_padding(family, "streaming")
        check_decode(family, "streaming", (0, 40, 41, 100))

    def test_positions_matter(self):
        model, ids = tiny_models.llama(), tiny_models.tokens(1, 90)
        text, cache = (
            patch_model(model, "window", options={"size": 20, "sinks": 3, "positions": kind})(ids).logits
            for kind in ("text", "cache")
        )
        assert tiny_models.distance(text[:, :23], cache[:, :23]) < 1e-10
        assert tiny_models.distance(text[:, 40:], cache[:, 40:]) > 1e-3

    def test_positions_that_cannot_be_turned_are_refused(self):
        options = {"sinks": 2, "positions": "cache"}
        with pytest.raises(OptionError, match="positions='text'"):
            patch_model(model_of("gpt2"), "window", options=options)
        patch_model(model_of("gpt2"), "window", options={"sinks": 2})  # auto: the text's
        dynamic = tiny_models.llama(
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        )
        with pytest.raises(OptionError, match="'dynamic'"):
            patch_model(dynamic, "window", options=options)

    def test_a_hybrid_without_memory_of_the_rest_is_the_window(self):
        """As g_h goes to 1."""
        model, ids = tiny_models.llama(), tiny_models.tokens(1, 70)
        want = patch_model(model, "window", options={"size": 16})(ids).logits
        patch_model(model, "window+elu1", options={"size": 16, "mix": "learned"})
        for layer in model.model.layers:
            torch.nn.init.constant_(layer.self_attn.linattn.window.gate, 60.0)
        assert tiny_models.distance(model(ids).logits, want) < 1e-8
        patch_model(model, "window+elu1", options={"size": 16})
        assert tiny_models.distance(model(ids).logits, want) > 1e-3

    def test_shared_normaliser_with_negative_queries(self):
        """elu1 divides its query features by a factor: here it must come back."""
        model = tiny_models.llama()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(6)
        ids = tiny_models.tokens(2, 70)
        with as_oracle(model, "window+elu1", size=12):
            want = model(ids).logits
        patch_model(model, "window+elu1", options={"size": 12})
        assert tiny_models.distance(model(ids).logits, want) < 1e-8

    @pytest.mark.parametrize(
        ("spec", "options", "message"),
        [
            ("window", {"size": 0}, "size must be at least 1 token, got 0"),
            ("window", {"sinks": -1}, "sinks must be at least 0 tokens, got -1"),
            ("window", {"sinks": 10**9}, "sinks must be at most 16,777,216 tokens, got 1,000,000,000"),
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
            patch_model(tiny_models.llama(), spec, options=options)

    def test_cross_attention_is_refused(self):
        model = tiny_models.build("BartForConditionalGeneration", **tiny_models.ENCODER_DECODER_SIZES)
        patch_model(model, "window")
        ids = tiny_models.tokens(1, 20)
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
