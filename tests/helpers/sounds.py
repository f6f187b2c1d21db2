"""Tiny random models that hear and write text, and a prompt with a sound for each."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Gemma4AudioConfig, MimiConfig

from helpers.family_configs import KINDS, PER_LAYER, TINY, TOWER, fields, nested
from helpers.family_models import assemble, cast, prepare
from helpers.multimodal import BEGIN, END, IMAGE, MROPE, TEXT

GEMMA = "Gemma4ForConditionalGeneration"
SOUND = IMAGE
"""Token: one for each feature of the sound."""
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
MEL, SEEN = {"input_features": (1, 16, 64)}, torch.ones(1, 64, dtype=torch.long)
AROUND = {
    "vision_start_token_id": 103,
    "vision_end_token_id": 104,
    "image_token_id": 105,
    "video_token_id": 106,
}
AROUND |= {"audio_start_token_id": BEGIN, "audio_end_token_id": END}
OMNI = {"text_config": MROPE, "audio_config": {"n_window": 16, "output_dim": 32, "max_source_positions": 32}}
CONFORMER = {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "dim_head": 8}
CONFORMER |= {"context_size": 8, "max_pos_emb": 16, "output_dim": 8, "conv_kernel_size": 3}
QFORMER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def fitted(config_cls: Any) -> dict[str, Any]:
    """The sizes of towers that a config has."""
    return {name: value for name, value in TOWER.items() if name in fields(config_cls)}


MODELS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], dict[str, Any], int]] = {
    "VoxtralForConditionalGeneration": ({}, {"audio_config": {"intermediate_size": 64}}, MEL, 16),
    "Qwen2_5OmniThinkerForConditionalGeneration": (AROUND, OMNI, {**MEL, "feature_attention_mask": SEEN}, 16),
    "GraniteSpeechForConditionalGeneration": (
        {"has_lora_adapter": False, "downsample_rate": 2, "window_size": 4},
        {"encoder_config": CONFORMER, "projector_config": {**QFORMER, "encoder_hidden_size": 32}},
        {"input_features": (1, 24, 16)},
        12,
    ),
    GEMMA: (
        {"audio_config": {**fitted(Gemma4AudioConfig), "subsampling_conv_channels": [128, 4]}},
        {"text_config": {**PER_LAYER, **KINDS, "global_head_dim": 8}},
        {"input_features": (1, 48, 128), "input_features_mask": torch.ones(1, 48, dtype=torch.bool)},
        12,
    ),
    "Phi4MultimodalForCausalLM": (
        {"sliding_window": None},
        {
            "audio_config": {
                "depthwise_separable_out_channel": 32,
                "audio_token_id": SOUND,
                "feature_layer": -1,
            }
        },
        {"audio_input_features": (1, 64, 16), "audio_embed_sizes": torch.tensor([8])},
        8,
    ),
}
"""Class -> what differs from the tiny sizes in whole and parts; what it takes for a sound; its features."""


def hearing(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model in float64, or float32 where it must be, and a prompt of some 50 tokens with a sound."""
    cls = getattr(transformers, name)
    top, parts, sound, features = MODELS[name]
    config_cls = cls.config_class
    marks = {key: SOUND for key in ("audio_token_id", "audio_token_index") if key in fields(config_cls)}
    config = nested(config_cls, {**marks, **top}, **{"text_config": TEXT, **parts})
    dtype = torch.float32 if name == GEMMA else torch.float64
    torch.manual_seed(0)
    model = prepare(cls(config), dtype)  # each part on the implementation that it supports
    generator = torch.Generator().manual_seed(0)
    made = {
        key: value if isinstance(value, Tensor) else torch.randn(value, generator=generator)
        for key, value in sound.items()
    }
    before, after = torch.randint(3, 90, (2, 16), generator=generator).split(1)
    ids = torch.cat([before[0], torch.tensor([BEGIN, *[SOUND] * features, END]), after[0]])[None]
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **cast(made, dtype)}


def codec() -> MimiConfig:
    """A tiny codec, which writes sounds as two tokens every 16 samples, and reads them."""
    sizes = {"num_filters": 4, "upsampling_ratios": [4, 2], "codebook_size": 16, "codebook_dim": 16}
    sizes |= {"vector_quantization_hidden_dimension": 16, "num_quantizers": 2, "upsample_groups": 32}
    return MimiConfig(**{**fitted(MimiConfig), **sizes, "sliding_window": 8})


def transcriber() -> tuple[nn.Module, Tensor]:
    """Build Kyutai's model, which hears a codec's tokens beside its text, and a sound of 20 frames."""
    cls = transformers.KyutaiSpeechToTextForConditionalGeneration
    sizes = {name: value for name, value in TINY.items() if name in fields(cls.config_class)}
    sizes |= {"num_codebooks": 2, "codebook_vocab_size": 17, "audio_bos_token_id": 16}
    config = cls.config_class(**{**sizes, "audio_pad_token_id": 161, "codec_config": codec()})
    sound = torch.randn(1, 1, 20 * config.frame_size, generator=torch.Generator().manual_seed(0))
    return assemble(cls, config, torch.float64), sound.double()


def omni() -> nn.Module:
    """Build Qwen2.5-Omni as a whole: a thinker that writes text, and a talker that says it."""
    cls = transformers.Qwen2_5OmniForConditionalGeneration
    kinds = cls.config_class.sub_configs
    thinker = nested(kinds["thinker_config"], {**AROUND, "audio_token_index": SOUND}, **OMNI)
    names = inspect.signature(kinds["talker_config"]).parameters
    talker = {name: 110 + place for place, name in enumerate(names) if name.startswith("tts_")}
    sizes = {name: value for name, value in TINY.items() if name in names} | MROPE | talker | AROUND
    flow = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "emb_dim": 16}
    flow |= {"num_embeds": 128, "mel_dim": 16, "enc_emb_dim": 16, "enc_dim": 16, "enc_attention_channels": 8}
    flow |= {
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
        "dropout": 0.0,
    }
    flow |= {"look_ahead_layers": [1], "look_backward_layers": [0]}
    config = cls.config_class(
        thinker_config=thinker,
        talker_config=kinds["talker_config"](**sizes, audio_token_index=SOUND),
        token2wav_config={
            "dit_config": flow,
            "bigvgan_config": {"mel_dim": 16, "upsample_initial_channel": 64},
        },
    )
    torch.manual_seed(0)
    model: Any = prepare(cls(config), torch.float64)
    model.token2wav.float()
    model.speaker_map = {
        "Chelsie": {"bos_token": 110, "cond": torch.randn(1, 16), "ref_mel": torch.randn(1, 40, 16)}
    }
    return model


ENCODED: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "WhisperForConditionalGeneration": (
        {"num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
        MEL,
    ),
    "MoonshineForConditionalGeneration": (
        {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in LAYERS.items()},
        {"input_values": (1, 4000)},
    ),
}
"""Encoder-decoders that hear: class -> what differs from the tiny sizes, and what it takes for a sound."""


def transcribing(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build an encoder-decoder in float64, a sound and 24 tokens of its transcript."""
    cls = getattr(transformers, name)
    changes, sound = ENCODED[name]
    sizes = {key: value for key, value in TINY.items() if key in fields(cls.config_class)}
    sizes |= {"decoder_start_token_id": 1, "is_decoder": False}
    torch.manual_seed(0)
    model = prepare(cls(cls.config_class(**{**sizes, **changes})), torch.float64)
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    tokens = torch.randint(3, 90, (1, 24))
    return model, {"decoder_input_ids": tokens, **{key: torch.randn(x).double() for key, x in sound.items()}}
