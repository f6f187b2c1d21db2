"""Every causal language model of transformers against the oracle, and the table docs/families.md.

    python tests/families.py --write docs/families.md          all types
    python tests/families.py --only llama,mistral --jobs 2     some, printed

Each type gets a tiny random model (`build`), and each patch is compared with `oracle.py` on the same model
(`check`). `test_families.py` runs a subset of the types, encoders, encoder-decoders and multimodal models.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import multiprocessing
import re
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from oracle import as_oracle
from torch import Tensor, nn
from tqdm import tqdm
from transformers import SiglipVisionConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

from hf_linattn import LinattnError, patch_model, unpatch_model
from hf_linattn.errors import UnsupportedMaskError
from hf_linattn.sites import find_sites

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ("elu1", "softmax1", "logn")
LENGTH, PAD = 70, 9  # tokens, longer than a chunk of 64; padding at the left of row 0
WINDOW = 24  # of sliding and chunked layers, shorter than the batch
CUTS = (0, 40, 41, LENGTH)  # borders of the calls with a cache
SECONDS = 400  # for one type on a busy machine
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
CACHE_TOLERANCE = 1e-4  # many families compute norms in float32, and chunks round them differently


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


class NotBuilt(Exception):
    """No config of ours makes a model of this type that runs."""


class Slow(Exception):
    """A type took longer than its time limit."""


@dataclass
class Result:
    """What was found for one type; errors are differences of logits relative to max(1, largest logit).

    Attributes:
        status: right, refused, wrong, not routed, not built.
        dtype: of the model; patches, cache: patch -> error, or the reason of a refusal or failure.
        sliding: patch -> what patch_model was told about windows.
        own_cache: the unpatched model's error with a cache.
        own: error of the oracle's softmax against the model's own attention.
        modules: attention modules that ran through the interface, and all that can.
        untouched: attention classes beside them that do not route.
    """

    name: str
    status: str = "not built"
    reason: str = ""
    dtype: str = ""
    patches: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    sliding: dict[str, str] = field(default_factory=dict)
    own_cache: Any = None
    own: float | None = None
    modules: tuple[int, int] = (0, 0)
    untouched: list[str] = field(default_factory=list)


def token_batch() -> dict[str, Tensor]:
    """Two rows of tokens, the first padded at the left."""
    ids = torch.randint(3, 120, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :PAD] = 0
    return {"input_ids": ids, "attention_mask": mask}


def main_output(output: Any) -> Tensor:
    """Logits, or the last hidden state."""
    for key in ("logits", "last_hidden_state"):
        if getattr(output, key, None) is not None:
            return output[key]
    return output[0]


def first_line(error: BaseException | str, length: int = 200) -> str:
    """An error as one short line."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:length]


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to max(1, largest value wanted); NaN stays NaN."""
    return float((got - want).abs().max() / want.abs().max().clamp_min(1))


def prepare(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Weights of std 0.2: as initialised, attention would be nearly uniform, and errors small."""
    model = model.to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.std() > 0:
                parameter.mul_(0.2 / parameter.std())
            elif parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.1)  # biases and gates
    return model


def assemble(cls: type[nn.Module], config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of a config, on the implementation of attention that it supports."""
    config._attn_implementation = "sdpa" if getattr(cls, "_supports_sdpa", False) else "eager"
    config._experts_implementation = "eager"  # grouped matrix products do not take float64
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > 3e6:
        raise NotBuilt(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    return prepare(cls(config), dtype)


def build(
    name: str,
    cls: type[nn.Module],
    config_cls: type,
    inputs: dict[str, Any],
    recipes: list[Any] | None = None,
) -> nn.Module:
    """A tiny model that runs, by the type's recipe or the first generic one that fits.

    Raises:
        NotBuilt: with the first error.
    """
    if recipes is None:
        recipes = [RECIPES[name]] if name in RECIPES else GENERIC
    error, unrouted = None, None
    for dtype in (torch.float64, torch.float32):
        for recipe in recipes:
            try:
                config = (
                    recipe(config_cls)
                    if callable(recipe)
                    else config_cls(**known_windows(config_cls, recipe))
                )
                model = assemble(cls, config, dtype)
                with torch.no_grad():
                    model(**cast(inputs, dtype))
                if not find_sites(model):
                    unrouted = unrouted or model
                    continue
                with torch.no_grad(), as_oracle(model, "softmax"):
                    model(**cast(inputs, dtype))
                return model
            except Slow:
                raise
            except Exception as problem:
                error = error or problem
        if unrouted is not None:
            return unrouted
    raise NotBuilt(first_line(error or "no recipe")) from error


def known_windows(config_cls: type, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe without windows that the type does not have: caches would slide all the same."""
    fields = getattr(config_cls, "__dataclass_fields__", {})
    return {key: value for key, value in recipe.items() if key not in WINDOWS or key in fields}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in the model's dtype, nested ones too."""
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def in_chunks(model: nn.Module, inputs: dict[str, Tensor], cuts: tuple[int, ...]) -> Tensor | None:
    """Logits of the same rows, call by call through a cache; None if the model returns no cache."""
    ids, mask, cache, outputs = inputs["input_ids"], inputs["attention_mask"], None, []
    batch = mask.shape[0]
    for start, end in pairwise(cuts):
        output = model(
            input_ids=ids[:, start:end],
            attention_mask=mask[:batch, :end],
            past_key_values=cache,
            use_cache=True,
        )
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            return None
        outputs.append(output.logits)
    return torch.cat(outputs, 1)


def with_cache(model: nn.Module, inputs: dict[str, Any], pick: Callable[[Tensor], Tensor]) -> Any:
    """Logits in chunks through a cache, or what was raised."""
    try:
        output = in_chunks(model, inputs, CUTS)
        return "no cache in the output" if output is None else pick(output)
    except Slow:
        raise
    except Exception as problem:
        return first_line(problem)


def cache_error(got: Any, whole: Tensor, oracle: Callable[[], Any]) -> Any:
    """Error of chunks against the whole at once.

    Where a model does not agree with itself there (many recurrent layers do not continue a padded chunk),
    against the oracle in the same chunks.
    """
    if isinstance(got, str):
        return got
    error = relative(got, whole)
    if error < CACHE_TOLERANCE:
        return error
    want = oracle()
    return error if isinstance(want, str) else min(error, relative(got, want), key=lambda x: (x != x, x))


def fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What unpatching must bring back beside the logits: keys, config, hooks, children."""
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    names = [name for name, _ in model.named_modules()]
    attributes = [sorted(m.__dict__) for m in model.modules()]
    return list(model.state_dict()), model.config.to_dict(), hooks, names, attributes


def untouched(model: nn.Module) -> list[str]:
    """Classes of attention that do not route: no site is above or below them."""
    sites = [site.name for site in find_sites(model)]
    found = set()
    for name, module in model.named_modules():
        related = any(f"{site}.".startswith(f"{name}.") or name.startswith(f"{site}.") for site in sites)
        if not related and name and "Attention" in type(module).__name__:
            found.add(type(module).__name__)
    return sorted(found)


@torch.no_grad()
def check(
    name: str,
    model: nn.Module,
    inputs: dict[str, Any],
    patches: tuple[str, ...] = PATCHES,
    cached: bool = True,
) -> Result:
    """Compare every patch with the oracle, on the positions that are not padded."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    tolerance = TOLERANCE[dtype]
    result = Result(name, dtype=str(dtype).removeprefix("torch."))
    inputs = cast(inputs, dtype)
    text = "input_ids" in inputs
    whole = {**inputs, "use_cache": False} if text else inputs
    live = inputs.get("attention_mask")

    def pick(output: Tensor) -> Tensor:
        fits = live is not None and output.dim() == 3 and output.shape[:2] == live.shape
        return output[live.bool()] if fits else output

    def run() -> Tensor:
        return main_output(model(**whole))

    base = run()
    sites = find_sites(model)
    result.untouched = untouched(model)
    if not sites:
        try:
            patch_model(model, patches[0])
        except LinattnError as error:
            result.status, result.reason = "not routed", first_line(error, 400)
        return result
    with as_oracle(model, "softmax") as seen:
        finite = pick(base).isfinite()  # eager attention makes NaN of padded rows in float64
        result.own = relative(pick(run())[finite], pick(base)[finite])
    result.modules = (len({id(module) for module in seen.calls}), len(sites))
    if not seen.calls:
        result.status, result.reason = (
            "not routed",
            "the text runs through none of its attention modules that route",
        )
        return result
    before = fingerprint(model)
    problems = [] if result.own < 1e-4 else [f"the oracle's softmax is off by {result.own:.1e}"]
    for patch in patches:
        sliding = "global" if patch == "elu1" else "keep"
        try:
            patch_model(model, patch, sliding=sliding)
        except LinattnError as error:
            result.patches[patch] = first_line(error, 400)
            if fingerprint(model) != before:
                problems.append(f"{patch}: the refusal left traces")
            continue
        try:
            try:
                got = pick(run())
            except UnsupportedMaskError:
                if sliding == "keep":
                    raise
                sliding = "keep"  # windows in a mask that the model makes itself cannot be dropped
                patch_model(model, patch, sliding=sliding)
                got = pick(run())
            patched = {site.module for site in sites if "linattn" in site.module._modules}
            chunks = with_cache(model, inputs, pick) if cached and text else None
        except LinattnError as error:
            result.patches[patch] = "at the first call: " + first_line(error, 400)
            continue
        except Slow:
            raise
        except Exception as error:
            problems.append(f"{patch}, call: {first_line(error)}")
            continue
        finally:
            unpatch_model(model)
        result.sliding[patch] = sliding
        with as_oracle(model, patch, windows=sliding == "keep", where=patched.__contains__):
            want = pick(run())
            if chunks is not None:
                result.cache[patch] = cache_error(chunks, got, lambda: with_cache(model, inputs, pick))
        result.patches[patch] = error = relative(got, want)
        if not error <= tolerance:
            problems.append(f"{patch} differs by {error:.1e}")
        if float((got - pick(base)).abs().max()) < 1e-6:
            problems.append(f"{patch} changed nothing")
    after = run()
    if not torch.equal(after.nan_to_num(7e7), base.nan_to_num(7e7)) or fingerprint(model) != before:
        problems.append("unpatching is not exact")
    if cached and text:
        result.own_cache = cache_error(with_cache(model, inputs, pick), pick(after), lambda: "")
        for patch, error in result.cache.items():
            if not _good(error) and _good(result.own_cache):
                problems.append(f"{patch} with a cache: {error}")
    refused = [patch for patch, value in result.patches.items() if isinstance(value, str)]
    result.status = "wrong" if problems else "refused" if refused else "right"
    result.reason = "; ".join(problems)
    return result


def _good(error: Any) -> bool:
    return isinstance(error, float) and error < CACHE_TOLERANCE


def causal_model(name: str) -> nn.Module:
    """The tiny model of a causal type.

    Raises:
        NotBuilt: no class of that name is exported, or no recipe fits.
    """
    cls = getattr(transformers, CAUSAL_LM[name], None)
    if cls is None or name not in CONFIG_MAPPING:
        raise NotBuilt("transformers exports no such class")
    config_cls, inputs = CONFIG_MAPPING[name], causal_inputs(name)
    if cls.config_class in config_cls.sub_configs.values():
        config_cls = cls.config_class  # the type stands for its text part, as in AutoModelForCausalLM
    return build(name, cls, config_cls, {**inputs, "use_cache": False} if "input_ids" in inputs else inputs)


def causal_inputs(name: str) -> dict[str, Any]:
    """Tokens, in the shape that this type takes."""
    batch = token_batch()
    if name.endswith("_assistant"):
        generator = torch.Generator().manual_seed(0)
        kinds = KINDS["layer_types"]
        shared = {kind: tuple(torch.randn(2, 2, 2, LENGTH, 8, generator=generator)) for kind in kinds}
        return {"inputs_embeds": torch.randn(2, LENGTH, 64, generator=generator), "shared_kv_states": shared}
    if name.startswith("musicgen"):
        batch["input_ids"] = batch["input_ids"].repeat_interleave(2, 0)  # two codebooks a row
    return batch


def check_causal(name: str, patches: tuple[str, ...] = PATCHES, cached: bool = True) -> Result:
    """Build and check one causal type."""
    try:
        model = causal_model(name)
    except NotBuilt as error:
        return Result(name, reason=str(error))
    return check(name, model, causal_inputs(name), patches, cached)


# ---------------------------------------------------------------------------------------------- the command


def _limited(job: tuple[str, str]) -> Result:
    name, folder = job
    path = Path(folder) / f"{name}.json"
    if path.exists():
        return Result(**json.loads(path.read_text()))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()

    def stop(*_: Any) -> None:
        raise Slow(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        result = check_causal(name)
    except Slow as error:
        result = Result(name, reason=str(error))
    except Exception as error:
        traceback.print_exc()
        result = Result(name, status="wrong", reason=first_line(error))
    finally:
        signal.alarm(0)
    path.write_text(json.dumps(asdict(result)))
    return result


def _state_folder() -> Path:
    """Results of an interrupted run, valid for these very sources and versions."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for folder in ("hf_linattn", "patches", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if folder != "tests" or path.name in ("families.py", "oracle.py"):
                digest.update(path.read_bytes())
    return Path(tempfile.gettempdir()) / f"hf_linattn-families-{digest.hexdigest()[:16]}"


def main(argv: list[str] | None = None) -> int:
    """Run the check and print or write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the table there instead of printing results"
    )
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--state", type=Path, help="folder of results so far; default: by the sources' checksum"
    )
    arguments = parser.parse_args(argv)
    names = arguments.only.split(",") if arguments.only else sorted(CAUSAL_LM)
    if strange := [name for name in names if name not in CAUSAL_LM]:
        parser.error(f"no causal type {strange[0]!r}")
    if arguments.write and arguments.only:
        parser.error("--write takes all types")
    folder = arguments.state or _state_folder()
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [(name, str(folder)) for name in names]
    results = []
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for result in tqdm(pool.imap_unordered(_limited, jobs), total=len(jobs), file=sys.stderr):
            results.append(result)
            if not arguments.write:
                tqdm.write(summary(result), file=sys.stdout)
    results.sort(key=lambda result: result.name)
    print(dict(Counter(result.status for result in results)))
    if arguments.write:
        arguments.write.write_text(document(results))
    return int(any(result.status == "wrong" for result in results))


def summary(result: Result) -> str:
    """One line for the terminal."""
    values = {k: f"{v:.0e}" if isinstance(v, float) else v[:90] for k, v in result.patches.items()}
    cached = {k: f"{v:.0e}" if isinstance(v, float) else v[:90] for k, v in result.cache.items()}
    own = f"{result.own_cache:.0e}" if isinstance(result.own_cache, float) else result.own_cache
    return (
        f"{result.name}: {result.status} {result.reason} {result.dtype} {values} cache {cached} (own {own}) "
        f"modules {result.modules} {result.untouched or ''}"
    )


REASON = re.compile(r"\) (?:at )?(.*?)(?: \('|, which|, and a cache|: one state|$)")
HEAD = """# Families

Every causal language model type of transformers {transformers}, {count} in all, with each patch.
{command}

{counts}

## How it was checked

One tiny random model of each type (weights scaled to std 0.2, {length} tokens in 2 rows, one padded at the
left by {pad} tokens, windows of {window}, float64 unless said otherwise), on the CPU with torch {torch}:

* **oracle**: `tests/oracle.py` computes the patch's formula in float64, N x N, on the same unpatched model.
  *Right* means that the largest difference of logits is below 1e-7 of the largest logit (1e-4 in float32
  models). The oracle must also agree with the model's own attention when it computes softmax. Largest
  difference in float64: {worst}.
* **unpatching**: bit-identical logits, the same state_dict keys, config, hooks and modules; also after a
  refusal.
* **with cache**: the same rows in chunks of {chunks} tokens through a cache equal the whole at once within
  1e-4. Where the unpatched model does not agree with itself there (marked *own*), the chunks are compared
  with the oracle's chunks.
* elu1 runs with `sliding="global"` and must drop windows; softmax1 and logn must honour them.
* *refused* means that `patch_model` raises with the reason before anything is touched, or, where the remark
  says so, that the first call raises. *not routed* means that no attention of the text goes through
  transformers' attention interface; the remark names its classes.

## What it does not show

Trained weights, long texts, half precision, GPUs, images and sounds: vision and audio towers were built,
but did not run. A model may hold other attentions beside those that route; the remark names them, and the
oracle cannot see them either. Remote code is not covered. "Right" says that the formula is computed, not that
a model is any good with it.

## Types

| type | elu1 | softmax1 | logn | with cache | remark |
|---|---|---|---|---|---|
"""


def document(results: list[Result]) -> str:
    """docs/families.md."""
    worst = max(
        v for r in results if r.dtype == "float64" for v in r.patches.values() if isinstance(v, float)
    )
    counts = {
        "right with every patch": [r for r in results if r.status == "right"],
        "refused by some patch": [r for r in results if r.status == "refused"],
        "not routed": [r for r in results if r.status == "not routed"],
        "not built": [r for r in results if r.status == "not built"],
        "wrong": [r for r in results if r.status == "wrong"],
    }
    lines = ["| | types |", "|---|---|", *(f"| {name} | {len(rows)} |" for name, rows in counts.items())]
    cached = [r for r in results if any(isinstance(value, float) for value in r.cache.values())]
    good = [r for r in cached if all(_good(value) for value in r.cache.values())]
    lines += [f"| right with a cache too | {len(good)} |"]
    head = HEAD.format(
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        count=len(results),
        command="Made by `python tests/families.py --write docs/families.md`.",
        counts="\n".join(lines),
        length=LENGTH,
        pad=PAD,
        window=WINDOW,
        worst=f"{worst:.0e}",
        chunks=", ".join(str(end - start) for start, end in pairwise(CUTS)),
    )
    return head + "".join(_row(result) for result in results)


def _row(result: Result) -> str:
    cells = []
    for patch in PATCHES:
        value = result.patches.get(patch)
        cells.append("" if value is None else "refused" if isinstance(value, str) else "right")
    if result.status in ("not routed", "not built"):
        cells = [result.status] * len(PATCHES)
    errors = list(result.cache.values())
    if not errors:
        cache = ""
    elif all(map(_good, errors)):
        cache = "right" if _good(result.own_cache) else "right (own)"
    else:
        cache = "none" if "no cache" in str(errors[0]) else "raises"
    return f"| {result.name} | {' | '.join(cells)} | {cache} | {_remark(result)} |\n"


def _remark(result: Result) -> str:
    remarks = []
    reasons: dict[str, list[str]] = {}
    for patch, value in result.patches.items():
        if isinstance(value, str):
            found = REASON.search(value)
            text = value if value.startswith("at the") or not found else found[1]
            reasons.setdefault(text, []).append(patch)
    remarks += [f"{', '.join(names)}: {text}" for text, names in reasons.items()]
    if result.status in ("not built", "wrong"):
        remarks.append(result.reason)
    elif result.status == "not routed" and "computes softmax" not in result.reason:
        remarks.append(result.reason.partition("; ")[2] or result.reason)
    if result.untouched:
        remarks.append(
            f"beside it: {', '.join(result.untouched)}" if result.patches else ", ".join(result.untouched)
        )
    if "elu1" in result.sliding and result.sliding["elu1"] == "keep":
        remarks.append("elu1 with sliding='keep': the model makes its windows' masks itself")
    ran, routed = result.modules
    if ran < routed and result.patches:
        remarks.append(f"{ran} of {routed} attention modules ran")
    if result.dtype == "float32":
        remarks.append("float32")
    failed = [value for value in result.cache.values() if isinstance(value, str) and "no cache" not in value]
    if failed:
        remarks.append(f"with a cache: {failed[0]}" + ("" if _good(result.own_cache) else " (unpatched too)"))
    return "; ".join(remarks).replace("|", "/").replace("*", "")


if __name__ == "__main__":
    sys.exit(main())
