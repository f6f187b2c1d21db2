"""Patches that see summaries: linformer and pooled, and flow with its state."""

import pytest
import torch
from helpers import tiny_models
from helpers.oracle import as_oracle
from helpers.patch_factory import call, made, weights
from helpers.properties import learned, model_of
from torch import nn
from transformers import DynamicCache

from hf_linattn import describe, patch_model, unpatch_model
from hf_linattn.errors import UnsupportedCallError, UnsupportedMaskError, UnsupportedModelError


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


class TestLinformer:
    def test_starts_as_averages_of_segments(self):
        patch = made("linformer", "bert", rank=3, max_length=9)
        want = torch.eye(3, dtype=torch.float64).repeat_interleave(3, 1) / 3
        assert tiny_models.distance(patch.key_projection, want) < 1e-7
        assert torch.equal(patch.key_projection, patch.value_projection)
        given = call(6, causal=False)
        got = weights(patch, given)
        assert tiny_models.distance(got[..., :3], got[..., :1].expand(-1, -1, -1, 3)) < 1e-7
        assert (
            tiny_models.distance(got.sum(-1), torch.ones(2, 4, 6)) < 1e-6
        )  # the empty third segment draws nothing

    def test_default_rank_and_length(self):
        model = tiny_models.build(
            "BertForMaskedLM", num_hidden_layers=1, **{**tiny_models.SIZES, "head_dim": None}
        )
        patch_model(model, "linformer")
        row = next(iter(describe(model)))
        assert row.parameters == 2 * 256 * 256
        patch_model(model, "linformer", options={"rank": 10, "max_length": 30, "shared": True})
        assert next(iter(describe(model))).parameters == 10 * 30

    def test_longer_inputs_raise_and_padding_does_not_count(self):
        model = patch_model(model_of("bert"), "linformer", options={"rank": 8, "max_length": 20})
        with pytest.raises(UnsupportedCallError, match=r"21 tokens.*max_length = 20.*larger max_length"):
            model(tiny_models.tokens(2, 21))
        ids = tiny_models.tokens(2, 25)
        mask = torch.ones_like(ids)
        mask[:, 20:] = 0
        short = model(ids[:, :20]).logits
        assert tiny_models.distance(model(ids, attention_mask=mask).logits[:, :20], short) < 1e-12

    def test_causal_models_are_told_why(self):
        with pytest.raises(UnsupportedModelError, match="a token would see the future"):
            patch_model(model_of("llama"), "linformer")

    def test_masks_that_differ_between_queries_are_refused(self):
        model = patch_model(model_of("bert"), "linformer")
        lower = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
        with pytest.raises(UnsupportedMaskError, match="different keys to different queries"):
            model(tiny_models.tokens(1, 6), attention_mask=lower)

    def test_cross_attention(self):
        model = tiny_models.build("BartForConditionalGeneration", **tiny_models.ENCODER_DECODER_SIZES)
        ids, mask = tiny_models.left_padded(tiny_models.tokens(2, 30), 4)
        inputs = {"attention_mask": mask, "decoder_input_ids": tiny_models.tokens(2, 7)}
        options = {"rank": 5, "max_length": 40}
        patch_model(model, {"*.encoder_attn": ("linformer", options)})
        got, kept = model(ids, **inputs).logits, learned(model)
        unpatch_model(model)
        cross = {module for name, module in model.named_modules() if name.endswith("encoder_attn")}
        with as_oracle(model, "linformer", where=cross.__contains__, learned=kept, **options):
            want = model(ids, **inputs).logits
        assert tiny_models.distance(got, want) < 1e-9


class TestPooled:
    def test_causal_sees_ended_blocks_as_means_and_its_own_as_tokens(self):
        got = weights(made("pooled", size=4), call(11))[:, :, 9]
        for block in (slice(0, 4), slice(4, 8)):
            assert (
                tiny_models.distance(got[..., block], got[..., block].mean(-1, keepdim=True).expand(2, 4, 4))
                < 1e-12
            )
        assert tiny_models.distance(got[..., 10], torch.zeros(2, 4)) == 0
        assert float((got[..., 8] - got[..., 9]).abs().min()) > 1e-6
        assert tiny_models.distance(got.sum(-1), torch.ones(2, 4)) < 1e-12

    def test_encoders_see_means_alone_also_of_a_short_block(self):
        got = weights(made("pooled", "bert", size=4), call(10, causal=False))
        for block in (slice(0, 4), slice(4, 8), slice(8, 10)):
            part = got[..., block]
            assert tiny_models.distance(part, part.mean(-1, keepdim=True).expand_as(part)) < 1e-12
        assert tiny_models.distance(got.sum(-1), torch.ones(2, 4, 10)) < 1e-12

    @pytest.mark.parametrize("pool", ["mean", "conv"])
    def test_a_chunk_of_padding_alone_changes_nothing(self, pool):
        model = patch_model(model_of("llama"), "pooled", options={"size": 4, "pool": pool})
        ids = tiny_models.tokens(1, 24)
        mask = torch.ones_like(ids)
        mask[:, :9] = 0
        cache = DynamicCache(config=model.config)
        places = tiny_models.positions(mask)
        for chunk in (slice(0, 5), slice(5, 14), slice(14, 24)):
            output = model(
                ids[:, chunk], attention_mask=mask[:, : chunk.stop], position_ids=places[:, chunk],
                past_key_values=cache,
            )  # fmt: skip
        want = model(ids[:, 9:]).logits[:, 5:]
        assert tiny_models.distance(output.logits, want) < 1e-12

    @pytest.mark.parametrize("length", [1, 3, 11])
    def test_shapes_can_be_asked_on_the_meta_device(self, length):
        model = patch_model(model_of("llama").to("meta"), "pooled", options={"size": 4, "pool": "conv"})
        ids = torch.ones(2, length, dtype=torch.long, device="meta")
        assert model(ids).logits.shape == (2, length, 97)

    @pytest.mark.parametrize("causal", [True, False])
    def test_conv_starts_as_the_mean(self, causal):
        mean, conv = made("pooled", size=4), made("pooled", size=4, pool="conv")
        assert tiny_models.distance(mean(call(23, causal))[0], conv(call(23, causal))[0]) < 1e-7
        conv.key_pool[:, 0] += 1
        assert tiny_models.distance(mean(call(23, causal))[0], conv(call(23, causal))[0]) > 1e-3

    def test_a_mask_of_the_caller_decides_the_direction(self):
        model = model_of("llama")
        ids, full = tiny_models.tokens(2, 9), torch.ones(2, 1, 9, 9, dtype=torch.bool)
        patch_model(model, "pooled", options={"size": 1})
        got = model(ids, attention_mask=full).logits
        unpatch_model(model)
        assert tiny_models.distance(got, model(ids, attention_mask=full).logits) < 1e-12


@pytest.mark.parametrize("name", ["linformer", "pooled"])
class TestCompressed:
    def test_weights_over_tokens_are_not_there(self, name):
        model = patch_model(
            tiny_models.build("BertForMaskedLM", **{**tiny_models.SIZES, "head_dim": None}), name
        )
        with pytest.raises(UnsupportedCallError, match=r"output_attentions=True.*eval\.diagnose"):
            model(tiny_models.tokens(1, 5), output_attentions=True)

    def test_weights_are_dropped(self, name):
        patch, causal = made(name, "bert"), name == "pooled"
        assert float(patch(call(9, causal))[0].abs().min()) > 0
        assert not patch(call(9, causal, dropout=1.0))[0].any()

    def test_padding_may_hold_nan(self, name):
        valid = torch.ones(2, 9, dtype=torch.bool)
        valid[0, :4] = False
        given = call(9, name == "pooled", valid=valid)
        given.key[0, :, :4] = given.value[0, :, :4] = torch.nan
        assert made(name, "bert")(given)[0][:, :, 4:].isfinite().all()


class TestFlow:
    def test_what_flows_out_of_the_sources_is_conserved(self):
        # equal keys win equal shares, so o_i = sigmoid(a_i) where all values are 1; sum_i a_i counts the keys
        given = call(40, causal=False)
        given.key = given.key[:, :, :1].expand(-1, -1, 40, -1)
        given.value = torch.ones_like(given.value)
        a = made("flow")(given)[0][..., 0].logit()
        assert float(a.std()) > 0.01
        assert tiny_models.distance(a.sum(-1), torch.full((2, 4), 40.0)) < 1e-3

    def test_what_flows_into_the_sinks_is_conserved(self):
        # rows of W are sigmoid(a_i) phi(q_i) . phi(k_j) / I_i times the share that key j won; equal queries
        # have a_i = 1, and shares average 1
        given = call(40, causal=False)
        given.query = given.query[:, :, :1].expand(-1, -1, 40, -1)
        phi_q, phi_k = given.query.sigmoid(), given.key.repeat_interleave(2, 1).sigmoid()
        flows = phi_q @ phi_k.mT
        shares = (
            weights(made("flow"), given) / torch.ones(()).sigmoid() / (flows / flows.sum(-1, keepdim=True))
        )
        assert tiny_models.distance(shares.mean(-1), torch.ones(2, 4, 40)) < 1e-3
        assert float(shares.std(-1).min()) > 0.01

    def test_state_is_as_large_as_described(self):
        model = patch_model(tiny_models.llama(dtype=torch.float32), "flow")
        cache = DynamicCache(config=model.config)
        model(tiny_models.tokens(3, 10), past_key_values=cache, use_cache=True)
        for row, layer in zip(describe(model), cache.layers, strict=True):
            assert layer.nbytes == 3 * row.state_bytes
            assert row.linear

    @pytest.mark.parametrize("scale", [0.0, 1e4, -1e4, 1e30])
    @pytest.mark.parametrize("causal", [True, False])
    def test_any_inputs(self, causal, scale):
        given = call(20, causal)
        given.query, given.key = given.query.abs().float() * scale, given.key.abs().float() * scale
        given.value = given.value.float()
        output = made("flow").float()(given)[0]
        assert output.isfinite().all()
        assert float(output.abs().max()) <= 20 * float(given.value.abs().max())

    def test_float32_at_65536_tokens(self):
        exact = call(65536, heads=1, kv_heads=1)
        half = {name: getattr(exact, name)[:1] for name in ("query", "key", "value")}
        want = made("flow")(call(65536, heads=1, kv_heads=1, **half))[0]
        single = {name: x.float() for name, x in half.items()}
        got = made("flow").float()(call(65536, heads=1, kv_heads=1, **single))[0]
        error = (got - want)[:, :, -1000:].norm() / want[:, :, -1000:].norm()
        assert float(error) < 1e-4

    @pytest.mark.parametrize("causal", [True, False])
    def test_padding_may_hold_nan(self, causal):
        valid = torch.ones(2, 9, dtype=torch.bool)
        valid[0, :4] = False
        given = call(9, causal, valid=valid)
        given.query[0, :, :4] = given.key[0, :, :4] = given.value[0, :, :4] = torch.nan
        assert made("flow")(given)[0][:, :, 4:].isfinite().all()


def test_gradients_reach_the_learned_weights():
    for name, options in (("linformer", {}), ("pooled", {"pool": "conv"})):
        model = patch_model(model_of("bert"), name, options=options)
        with torch.enable_grad():
            model(tiny_models.tokens(2, 30)).logits.square().sum().backward()
        for key, parameter in model.named_parameters():
            if ".linattn." in key:
                assert isinstance(parameter, nn.Parameter)
                assert parameter.grad.any(), key
