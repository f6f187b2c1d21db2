"""Encoder-decoders: masks of two texts, and which part of a model a plan reaches."""

import pytest
import torch
import transformers
from helpers.family_checks import check
from helpers.family_configs import KINDS, sizes
from helpers.family_models import prepare
from helpers.oracle import as_oracle

from hf_linattn import describe, patch_model, unpatch_model
from hf_linattn.errors import UnsupportedMaskError, UnsupportedModelError

TEXT = sizes("""vocab_size=128 hidden_size=32 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2
    head_dim=8 intermediate_size=64 sliding_window=8 pad_token_id=0 bos_token_id=1 eos_token_id=2
    attn_logit_softcapping=null query_pre_attn_scalar=8""")
TEXT |= KINDS
PICTURES = sizes("hidden_size=32 num_hidden_layers=1 num_attention_heads=4 intermediate_size=64")
BART = sizes("""vocab_size=128 d_model=32 encoder_layers=2 decoder_layers=2 encoder_attention_heads=4
    decoder_attention_heads=4 encoder_ffn_dim=64 decoder_ffn_dim=64 max_position_embeddings=64
    pad_token_id=0 bos_token_id=1 eos_token_id=2 decoder_start_token_id=2 forced_eos_token_id=null""")
SAYS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def built(name, config):
    config._attn_implementation = "eager"
    config.decoder_start_token_id = 1
    torch.manual_seed(0)
    return prepare(getattr(transformers, name)(config), torch.float32)


def t5gemma():
    return built(
        "T5GemmaForConditionalGeneration",
        transformers.T5GemmaConfig(encoder=TEXT, decoder=TEXT, vocab_size=128),
    )


def t5gemma2():
    text = {key: value for key, value in TEXT.items() if key != "attn_logit_softcapping"}
    pictures = {**PICTURES, "image_size": 28, "patch_size": 14}
    encoder = {"text_config": text, "vision_config": pictures, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(encoder=encoder, decoder=text, image_token_index=100)
    return built("T5Gemma2ForConditionalGeneration", config)


def texts(length, shown):
    ids, other = torch.randint(3, 90, (2, 2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, shown:] = 0
    return {"input_ids": ids[:, :length], "attention_mask": mask}, other[:, :20]


@pytest.mark.parametrize("length", [12, 30])
@pytest.mark.parametrize("patch", ["elu1", "softmax1"])
def test_a_dropped_window_leaves_cross_attention_its_padding(length, patch):
    model = t5gemma()
    patch_model(model, {"*.decoder.*.self_attn": patch}, sliding="global")
    inputs, tokens = texts(length, length - 5)
    alone = inputs["input_ids"][1:, : length - 5]
    for count in (1, 20):
        got = model(**inputs, decoder_input_ids=tokens[:, :count]).logits[1:]
        want = model(input_ids=alone, decoder_input_ids=tokens[1:, :count]).logits
        assert torch.allclose(got, want, atol=1e-4)
    assert torch.equal(model.generate(**inputs, **SAYS)[1:], model.generate(alone, **SAYS))


def test_a_mask_of_two_texts_in_one_is_dense():
    """T5Gemma 2 puts the encoder's keys behind the decoder's own, and joins their masks."""
    model = t5gemma2()
    inputs, tokens = texts(12, 7)
    with torch.no_grad():
        base = model(**inputs, decoder_input_ids=tokens).logits
        got = patch_model(model, {"*.decoder.*": "softmax1"})(**inputs, decoder_input_ids=tokens).logits
        cached, plain = (model.generate(**inputs, **SAYS, use_cache=use) for use in (True, False))
        assert torch.equal(cached, plain)
        unpatch_model(model)
        decoder = set(model.get_decoder().modules())
        with as_oracle(model, "softmax1", where=decoder.__contains__):
            want = model(**inputs, decoder_input_ids=tokens).logits
    assert torch.allclose(got, want, atol=1e-4)
    assert not torch.allclose(got, base, atol=1e-2)
    patch_model(model, {"*.decoder.*": "softmax1"}, sliding="global")
    with pytest.raises(UnsupportedMaskError, match="no plain form to drop one from"):
        model(**inputs, decoder_input_ids=tokens)
    with pytest.raises(UnsupportedModelError, match="makes a mask of its own"):
        patch_model(model, {"*.decoder.*": "elu1"}, sliding="global")


def test_a_decoder_that_says_it_is_not_causal_is_reached_beside_an_encoder_that_is_not():
    config = transformers.BigBirdPegasusConfig(**BART, attention_type="original_full")
    model = built("BigBirdPegasusForConditionalGeneration", config)
    with pytest.warns(UserWarning, match="modules stay as they are .*BigBirdPegasusSelfAttention"):
        patch_model(model, "elu1")
    assert {row.patch for row in describe(model) if ".decoder." in row.module} == {"elu1"}
    inputs, _ = texts(30, 25)
    cached, plain = (model.generate(**inputs, **SAYS, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    assert torch.equal(cached[1:], model.generate(inputs["input_ids"][1:, :25], **SAYS))


def test_queries_with_a_place_beside_them_get_maps_of_their_size():
    stages = {"hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
    backbone = transformers.ResNetConfig(embedding_size=8, **stages)
    detr = {**BART, "num_queries": 5, "backbone_config": backbone, "dropout": 0.0}
    torch.manual_seed(0)
    model = transformers.ConditionalDetrModel(transformers.ConditionalDetrConfig(**detr)).double().eval()
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
    result = check("conditional_detr", model, pixels, ("elu1", "softmax1", "hedgehog"), cached=False)
    assert result.status == "right", f"{result.reason} {result.patches}"


def informer(**options):
    sizes = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 1}
    layers = {key: value for key, value in BART.items() if "layers" in key or "heads" in key or "ffn" in key}
    torch.manual_seed(0)
    config = transformers.InformerConfig(**sizes, **layers, d_model=16, **options)
    return prepare(transformers.InformerModel(config), torch.float32)


def test_an_encoder_that_halves_its_text_gets_no_mask_of_the_whole():
    model = informer()
    past, future = torch.randn(2, 2, 14).unbind(), torch.randn(2, 2, 4).unbind()
    batch = {"past_values": past[0], "past_time_features": past[1][..., None]}
    batch |= {"future_values": future[0], "future_time_features": future[1][..., None]}
    batch["past_observed_mask"] = torch.ones(2, 14)
    torch.manual_seed(1)  # its sparse attention, which no patch reaches, draws keys
    want = model(**batch).encoder_last_hidden_state
    with pytest.warns(UserWarning, match="InformerProbSparseAttention"):
        patch_model(model, "softmax1")
    torch.manual_seed(1)
    torch.testing.assert_close(model(**batch).encoder_last_hidden_state, want)


def test_layers_behind_a_halved_text_count_the_keys_that_are_left():
    encoder = informer(attention_type="full", dropout=0.0).encoder
    text = torch.randn(2, 12, encoder.config.feature_size, generator=torch.Generator().manual_seed(0))
    want = encoder(inputs_embeds=text).last_hidden_state
    patch_model(encoder, {"layers.1.self_attn": "logn"}, options={"train_length": 6})  # a factor of 1
    torch.testing.assert_close(encoder(inputs_embeds=text).last_hidden_state, want)
    mask = torch.ones(2, 12, dtype=torch.long)
    torch.testing.assert_close(encoder(inputs_embeds=text, attention_mask=mask).last_hidden_state, want)
    mask[1, 7:] = 0
    with pytest.raises(UnsupportedMaskError, match=r"12 keys, and this layer has 6 left.*rows of one length"):
        encoder(inputs_embeds=text, attention_mask=mask)
