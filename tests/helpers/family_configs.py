"""Configs of tiny models of every type of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from transformers import SiglipVisionConfig

LENGTH, PAD = 70, 9  # tokens, longer than a chunk of 64; padding at the left of row 0
WINDOW = 24  # of sliding and chunked layers, shorter than the batch


def sizes(text: str) -> dict[str, Any]:
    """`name=value` pairs, the values as in JSON."""
    return {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in text.split())}


TINY = sizes("""
    hidden_size=32 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 intermediate_size=64
    vocab_size=128 head_dim=8 max_position_embeddings=256 pad_token_id=0 bos_token_id=1 eos_token_id=2
    moe_intermediate_size=32 num_experts=4 num_local_experts=4 n_routed_experts=4 num_experts_per_tok=2
    n_group=1 topk_group=1 n_shared_experts=1 q_lora_rank=16 kv_lora_rank=16 qk_rope_head_dim=8
    qk_nope_head_dim=8 v_head_dim=8 n_embd=32 n_layer=2 n_head=4 n_positions=256 d_model=32 n_layers=2
    n_heads=4 ffn_dim=64 num_layers=2 rotary_dim=4 encoder_layers=2 decoder_layers=2
    encoder_attention_heads=4 decoder_attention_heads=4 encoder_ffn_dim=64 decoder_ffn_dim=64
    word_embed_proj_dim=32 embedding_size=32 first_k_dense_replace=1 shared_expert_intermediate_size=32
    mamba_d_state=8 mamba_n_heads=4 mamba_d_head=16 mamba_n_groups=1 state_size=8 expert_ffn_hidden_size=32
    num_hash_layers=1 d_ff=64 d_kv=8 num_decoder_layers=2 hidden_dropout=0.0 attention_dropout=0.0
    is_decoder=true full_attention_interval=2 attn_layer_indices=[1] index_topk=16 index_head_dim=16
    index_n_heads=2 keep_window_size=16
""") | {"sliding_window": WINDOW, "attention_chunk_size": WINDOW, "local_attention": 2 * WINDOW}
"""Sizes under all the names that configs give them."""
WINDOWS = ("sliding_window", "local_attention", "attention_chunk_size")


def tiny(*without: str, **changes: Any) -> dict[str, Any]:
    """TINY with some keys left out and others changed."""
    return {**{key: value for key, value in TINY.items() if key not in without}, **changes}


GENERIC: list[dict[str, Any]] = [
    TINY,
    tiny("head_dim"),
    tiny("num_key_value_heads"),
    tiny(num_key_value_heads=4),
    tiny(head_dim=16),
    tiny(num_hidden_layers=4, layer_types=None),
    tiny("num_hidden_layers"),
    tiny("v_head_dim"),
    tiny(layer_types=["mamba", "attention"]),
    tiny(layer_types=["linear_attention", "full_attention"]),
    {"text_config": TINY, "vocab_size": 128},
]
"""Tried in turn for types without a recipe of their own."""

TOWER = sizes("""
    hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=4
    depth=2 num_heads=4 image_size=28 patch_size=14 out_hidden_size=32 num_position_embeddings=16 head_dim=8
    vision_output_dim=32 projector_input_dim=32 projector_output_dim=32 output_channels=16 window_size=2
    global_attn_indexes=[1] mlp_dim=64 position_embedding_size=64 mm_embed_dim=32 mm_posemb_size=16
    output_proj_dims=32 audio_embed_dim=32 num_mel_bins=16 max_source_positions=32 encoder_layers=2
    encoder_attention_heads=4 encoder_ffn_dim=64 d_model=32 embed_dim=32 moe_intermediate_size=32
    num_local_experts=4 num_experts_per_tok=2 adapter_in_dim=32 adapter_out_dim=32 adapter_input_size=32
    downsample_hidden_size=8 feature_size=16 crop_size=28 deepstack_visual_indexes=[1] feature_layer=-1
    base_channels=32 codebook_size=64 mlp_bias=false num_blocks=2 nemo_conv_channels=16
    ext_pw_out_channel=32 input_size=16 num_res_blocks=1 channel_multiplier=[1,1] attn_resolutions=[]
    hidden_channels=8 spatial_merge_size=2 subsampling_conv_channels=[8,4] conv_num_filters=8
    sscp_conv_channel_size=[8,4]
""")
"""Sizes of vision and audio towers, which run with images and sounds only."""


def fields(cls: Any) -> dict[str, Any]:
    """The fields of a config class."""
    return getattr(cls, "__dataclass_fields__", {})


def nested(config_cls: Any, top: dict[str, Any] | None = None, **changes: dict[str, Any]) -> Any:
    """A config of configs: TINY for the text, TOWER for the rest, cut to the fields that each class has.

    Args:
        config_cls: the outer class.
        top: arguments of the outer config.
        changes: sub-config -> other values.
    """
    arguments = {}
    try:
        default = {key: type(getattr(config_cls(), key)) for key in config_cls.sub_configs}
    except Exception:  # a validator that its own defaults do not pass
        default = config_cls.sub_configs
    for key, cls in default.items():  # where sub_configs names AutoConfig, the defaults know the class
        if cls is type(None):
            continue
        sizes = TINY if "text" in key or "decoder" in key else TOWER
        values = {name: value for name, value in sizes.items() if name in fields(cls)}
        arguments[key] = cls(**{**values, **changes.get(key, {})})
    outer = {name: value for name, value in TINY.items() if name in fields(config_cls)}
    return config_cls(**{**outer, **arguments, **(top or {})})


def fitting(*without: str, **changes: Any) -> Callable[[Any], Any]:
    """A config from those of TINY that the class has as fields, some left out and some changed."""

    def make(cls: Any) -> Any:
        values = {name: value for name, value in TINY.items() if name in fields(cls) and name not in without}
        return cls(**{**values, **changes})

    return make


GATED = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GATED |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8}
ALTUP = {**PER_LAYER, "laurel_rank": 8, "activation_sparsity_pattern": None, "intermediate_size": 64}
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * KINDS["layer_types"]}

QWEN4 = {**GATED, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16}
QWEN4 |= {"indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8}

INKLING2 = {
    "unpadded_vocab_size": 100,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
}
INKLING2 |= {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 1,
    "d_rel": 4,
    "rel_extent": 16,
}
INKLING2 |= {
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
    "sliding_window_size": 24,
}


def assistant(cls: Any, changes: dict[str, Any]) -> Any:
    """A model that drafts for another one, and takes all keys and values from it."""
    text = cls.sub_configs_defaults["text_config"]
    sizes = {
        **tiny("attention_chunk_size"),
        **KINDS,
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        **changes,
    }
    return cls(backbone_hidden_size=32, text_config={"model_type": text.model_type, **sizes})


def without_timm(cls: Any) -> Any:
    """The vision tower, which text does not reach, is another one: its own needs the package timm."""
    config = nested(cls, text_config={**ALTUP, **SHARED})
    tower = {name: value for name, value in TOWER.items() if name in fields(SiglipVisionConfig)}
    vision = SiglipVisionConfig(**tower)
    for name in ("vocab_offset", "vocab_size", "rms_norm_eps"):
        vision.__dict__[name] = getattr(config.vision_config, name)
    config.__dict__["vision_config"] = vision
    return config


RECIPES: dict[str, Any] = {
    "bailing_hybrid": lambda cls: cls(**tiny(layer_types=GATED["layer_types"], num_key_value_heads=4)),
    "blt": lambda cls: nested(
        cls,
        {"encoder_hash_byte_group_vocab": 64, "patch_in_forward": False},
        encoder_config={"hidden_size_global": 32},
        decoder_config={"hidden_size_global": 32},
    ),
    "cohere_compass_text": fitting(
        **KINDS,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS["layer_types"]},
    ),
    "dbrx": lambda cls: cls(
        **tiny("num_key_value_heads"),
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    "dory": fitting(num_hidden_layers=4, n_input_layers=1, n_output_layers=1),
    "dots3_note": fitting(num_key_value_heads=4),
    "falcon_h1": fitting(mamba_d_ssm=64),
    "gemma3": lambda cls: nested(cls, {"mm_tokens_per_image": 4}),
    "gemma3n": without_timm,
    "gemma3n_text": fitting(**{**ALTUP, **SHARED}),
    "gemma4": lambda cls: nested(cls, text_config={**PER_LAYER, **KINDS, "global_head_dim": 16}),
    "gemma4_text": fitting(**PER_LAYER, **KINDS, global_head_dim=16),
    "gemma4_assistant": lambda cls: assistant(
        cls, {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    ),
    "gemma4_unified_assistant": lambda cls: assistant(cls, {}),
    "inkling2_loop": lambda cls: nested(cls, text_config=INKLING2),
    "inkling2_loop_text": fitting(**INKLING2),
    "gemma4_unified": lambda cls: nested(cls, text_config={**KINDS, "global_head_dim": 16}),
    "git": lambda cls: nested(cls),
    "got_ocr2": lambda cls: nested(cls),
    "gpt_neo": fitting(attention_types=[[["global", "local"], 1]], window_size=WINDOW, num_heads=4),
    "kimi_linear": fitting(
        linear_head_dim=8, linear_num_heads=4, layer_types=GATED["layer_types"], num_key_value_heads=4
    ),
    "lfm2_moe": fitting(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba2": fitting(num_heads=4, head_dim=16, n_groups=1),
    "moss_transcribe_diarize": nested,
    "musicgen": fitting(num_codebooks=2),
    "musicgen_melody": fitting(num_codebooks=2),
    "phi4_multimodal": nested,
    "prophetnet": fitting(num_encoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4),
    "qwen3_5": fitting(**GATED),
    "qwen3_5_moe": fitting(**GATED),
    "qwen4_exp": fitting(**QWEN4),
    "qwen4_exp_text": fitting(**QWEN4),
    "reformer": fitting(
        axial_pos_embds_dim=[16, 16],
        axial_pos_shape=[8, 16],
        attention_head_size=8,
        feed_forward_size=64,
        attn_layers=["local", "lsh"],
        num_buckets=4,
    ),
    "roc_bert": fitting(
        pronunciation_vocab_size=16, pronunciation_embed_dim=8, shape_vocab_size=16, shape_embed_dim=8
    ),
    "xlnet": lambda cls: cls(vocab_size=128, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "xmod": fitting(default_language="en_XX"),
    "zamba": lambda cls: cls(
        **tiny(num_hidden_layers=5, layer_types=["mamba", "mamba", "hybrid", "mamba", "hybrid"])
    ),
    "zamba2": lambda cls: cls(
        **tiny(num_hidden_layers=5, layers_block_type=["mamba", "mamba", "hybrid", "mamba", "hybrid"])
    ),
    "zaya": fitting(num_experts_per_tok=1),
}
"""Causal type -> a function from its config class to a config; other types try GENERIC."""


def first_line(error: BaseException | str, length: int = 200) -> str:
    """An error as one short line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:length]


def known_windows(config_cls: type, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without windows that the type does not have: caches would slide all the same."""
    fields = getattr(config_cls, "__dataclass_fields__", {})
    return {key: value for key, value in recipe.items() if key not in WINDOWS or key in fields}
