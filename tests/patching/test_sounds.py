"""Models that hear and write text: a patch is for the text, right with a sound in the prompt."""

import pytest
import torch
import transformers
from helpers.family_checks import check
from helpers.multimodal import generated
from helpers.oracle import as_oracle
from helpers.sounds import ENCODED, GEMMA, MODELS, hearing, omni, transcriber, transcribing

from hf_linattn import describe, is_linear, patch_model, unpatch_model
from hf_linattn.errors import CacheError, UnsupportedMaskError
from hf_linattn.patching.discovery import find_sites

HYBRID = {"size": 8, "sinks": 2}
PATCHES = [("elu1", {}), ("window+gated", HYBRID), ("delta", {})]
OMNI, PHI = "Qwen2_5OmniThinkerForConditionalGeneration", "Phi4MultimodalForCausalLM"
ROUTED = [name for name in MODELS if name not in (PHI, GEMMA)]


def patched(model):
    return {row.module for row in describe(model) if row.patch != "softmax"}


def text_of(model):
    return {site.name for site in find_sites(model) if not site.tower}


def another(inputs):
    return {key: x.flip(1) if x.is_floating_point() else x for key, x in inputs.items()}


def close(got, want):
    return float((got - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_name_alone_is_for_the_text(name):
    model, inputs = hearing(name)
    text = text_of(model)
    assert {site.rpartition(".layers.")[0] for site in text} == {
        "model" if name == PHI else "model.language_model"
    }
    modules = [model.get_submodule(site) for site in text]
    with torch.no_grad():
        logits = model(**inputs).logits
        assert not close(model(**another(inputs)).logits, logits)
        got = patch_model(model, "elu1", sliding="global")(**inputs).logits
        assert patched(model) == text
        assert is_linear(model)
        assert str(describe(model)).count("(for images or sounds)") == len(describe(model)) - len(text)
        unpatch_model(model)
        assert torch.equal(model(**inputs).logits, logits)
        with as_oracle(model, "elu1", where=modules.__contains__, windows=False):
            assert close(got, model(**inputs).logits)


@pytest.mark.parametrize("name", ROUTED)
def test_sounds_in_the_prompt_equal_the_oracle(name):
    model, inputs = hearing(name)
    result = check(name, model, inputs, cached=False)  # what hears is patched too
    assert result.status == "right", f"{result.reason} {result.patches}"


def test_an_encoder_with_a_bias_takes_patches_of_scores():
    model, inputs = hearing(PHI)
    result = check(PHI, model, inputs, patches=("softmax1",), cached=False)
    assert result.status == "right", f"{result.reason} {result.patches}"
    patch_model(model, {"*audio_embed*": "elu1"})
    with pytest.raises(UnsupportedMaskError, match="adds values to the scores"):
        model(**inputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("patch", "options"), PATCHES[1:])
def test_generated_tokens_go_on_from_the_sound(name, patch, options):
    model, inputs = hearing(name)
    patch_model(model, patch, options=options, sliding="global")
    got, whole = generated(model, inputs)
    with torch.no_grad():
        assert close(got, model(**whole, use_cache=False).logits[:, -got.shape[1] :])


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_a_batch_hear_their_own_sound(name):
    model, inputs = hearing(name)
    patch_model(model, "window+gated", options=HYBRID, sliding="global")
    other, tokens = another(inputs), ("input_ids", "attention_mask")
    short = {key: x[:, 5:] if key in tokens else x for key, x in other.items()}
    padded = {key: torch.nn.functional.pad(x, (5, 0)) if key in tokens else x for key, x in short.items()}
    got, _ = generated(model, {key: torch.cat([inputs[key], padded[key]]) for key in inputs})
    want = [generated(model, row)[0] for row in (inputs, short)]
    assert close(got, torch.cat(want))


def test_a_codec_is_not_text():
    model, sound = transcriber()
    text = {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    codes = model.codec_model.encode(sound).audio_codes
    patch_model(model, "softmax1")
    assert patched(model) == text
    patch_model(model, "elu1", sliding="global")
    assert patched(model) == text
    assert torch.equal(model.codec_model.encode(sound).audio_codes, codes)


@pytest.mark.parametrize(("patch", "options"), [*PATCHES, ("softmax1", {})])
def test_a_transcript_goes_on_with_the_sound(patch, options):
    """The codec borrows a method of the model, by which a patch puts its layers into the cache."""
    model, sound = transcriber()
    codes = model.codec_model.encode(sound).audio_codes.mT
    patch_model(model, patch, options=options, sliding="global")
    keep = {"output_logits": True, "return_dict_in_generate": True}
    out = model.generate(input_values=sound, max_new_tokens=12, do_sample=False, **keep)
    heard = torch.cat([torch.full_like(codes[:, :1], model.config.audio_bos_token_id), codes], 1)
    tokens = torch.cat([out.sequences[..., None], heard[:, : out.sequences.shape[1]]], -1)[:, :-1]
    with torch.no_grad():
        want = model(input_ids=tokens, use_cache=False).logits
    assert close(torch.stack(out.logits, 1), want[:, -len(out.logits) :])


def test_the_talker_of_an_omni_model_keeps_its_softmax():
    model, (_, inputs) = omni(), hearing(OMNI)
    patch_model(model, "elu1")
    assert patched(model) == {f"thinker.model.language_model.layers.{layer}.self_attn" for layer in (0, 1)}
    assert not is_linear(model)  # the talker's cache grows
    got, whole = generated(model.thinker, inputs)
    with torch.no_grad():
        assert close(got, model.thinker(**whole, use_cache=False).logits[:, -got.shape[1] :])
    says = {"thinker_max_new_tokens": 4, "talker_max_new_tokens": 4, "talker_do_sample": False}
    patch_model(model, {"thinker.model.language_model": "elu1", "talker": "window+gated"}, options=HYBRID)
    assert is_linear(model)
    text, sound = model.generate(**inputs, **says)
    assert text.shape[1] > inputs["input_ids"].shape[1]
    assert sound.isfinite().all()


@pytest.mark.parametrize("name", ENCODED)
def test_transcripts_equal_the_oracle(name):
    model, inputs = transcribing(name)
    result = check(name, model, inputs, cached=False)
    assert result.status == "right", f"{result.reason} {result.patches}"
    assert result.modules == (6, 6)


@pytest.mark.parametrize("name", ENCODED)
def test_a_decoder_left_out_of_a_plan_looks_back_alone(name):
    """Moonshine's modules say is_causal=False wherever they get a mask."""
    model, inputs = transcribing(name)
    encoder = [site.module for site in find_sites(model) if ".encoder." in site.name]
    with torch.no_grad():
        got = patch_model(model, {"*.encoder.*": "elu1"})(**inputs).logits
        unpatch_model(model)
        with as_oracle(model, "elu1", where=encoder.__contains__):
            assert close(got, model(**inputs).logits)


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize(("patch", "options"), PATCHES)
def test_transcripts_are_generated(name, patch, options):
    model, inputs = transcribing(name)
    patch_model(model, {"*.decoder.*.self_attn": patch}, options=options)
    del inputs["decoder_input_ids"]
    says = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    out = model.generate(**inputs, **says, output_logits=True, return_dict_in_generate=True)
    tokens = out.sequences
    assert torch.equal(model.generate(**inputs, **says)[:, -16:], tokens[:, -16:])
    with torch.no_grad():
        want = model(**inputs, decoder_input_ids=tokens[:, :-1], use_cache=False).logits
    assert close(torch.stack(out.logits, 1), want[:, -len(out.logits) :])


def test_a_cache_that_lost_its_states_is_refused():
    """Whisper cuts the cache that it returns into rows, by keys that states do not have."""
    model, inputs = transcribing("WhisperForConditionalGeneration")
    patch_model(model, {"*.decoder.*.self_attn": "elu1"})
    tokens = inputs.pop("decoder_input_ids")
    past = model.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True).past_key_values
    with pytest.raises(CacheError, match="cut out of one with linear-attention states"):
        model(**inputs, decoder_input_ids=tokens[:, :1], past_key_values=past)


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, of LASR's kernels
@pytest.mark.parametrize("kind", ["Lasr", "Parakeet"])
@pytest.mark.parametrize("padded", [0, 40])
def test_convolutions_that_read_the_mask_get_one_they_can_read(kind, padded):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    sizes |= {"num_mel_bins": 16, "subsampling_conv_channels": 16}
    config = getattr(transformers, f"{kind}EncoderConfig")(**sizes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Encoder")(config).eval()
    sounds, mask = torch.randn(2, 120, 16), torch.ones(2, 120, dtype=torch.long)
    mask[0, 120 - padded :] = 0
    with torch.no_grad():
        want = model(sounds, attention_mask=mask)
        shown = slice(None, (120 - padded) // 8 - 2)  # a frame in eight, and none beside the padding
        got = patch_model(model, "scaled")(sounds, attention_mask=mask).last_hidden_state
        assert close(got[1], want.last_hidden_state[1])
        assert close(got[0, shown], want.last_hidden_state[0, shown])
