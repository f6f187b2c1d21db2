"""Tiny random models that read an image and write text, and a prompt with an image for each."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from helpers.family_configs import GATED, KINDS, nested
from helpers.family_models import assemble, cast

TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids")
"""What a prompt has beside its image."""
IMAGE, BEGIN, END = 100, 101, 102
"""Tokens: one for each feature of the image, and around them."""
ROPE = {"rope_type": "default", "rope_theta": 1e4}
TEXT = {"num_hidden_layers": 2, "rope_parameters": ROPE}
MROPE = {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}
AROUND = {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
PATCHES = {"pixel_values": (16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
PICTURE = {"pixel_values": (1, 3, 28, 28)}
SIGLIP = {"pixel_values": (1, 4, 3 * 14 * 14), "spatial_shapes": torch.tensor([[2, 2]])}

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "LlavaForConditionalGeneration": (TEXT, {}, {}, PICTURE),
    "Qwen2VLForConditionalGeneration": (MROPE, {}, AROUND, PATCHES),
    "Qwen2_5_VLForConditionalGeneration": (
        MROPE,
        {"fullatt_block_indexes": [1], "window_size": 56},
        AROUND,
        PATCHES,
    ),
    "Qwen3VLForConditionalGeneration": (MROPE, {}, AROUND, PATCHES),
    "Qwen3_5ForConditionalGeneration": ({**MROPE, **GATED, "head_dim": 8}, {}, AROUND, PATCHES),
    "SmolVLMForConditionalGeneration": (TEXT, {}, {"scale_factor": 2}, {"pixel_values": (1, 1, 3, 28, 28)}),
    "InternVLForConditionalGeneration": (
        TEXT,
        {"image_size": [28, 28], "patch_size": [14, 14]},
        {"downsample_ratio": 0.5},
        PICTURE,
    ),
    "Lfm2VlForConditionalGeneration": (
        TEXT,
        {},
        {},
        {**SIGLIP, "pixel_attention_mask": torch.ones(1, 4, dtype=torch.long)},
    ),
    "Gemma3ForConditionalGeneration": (
        {**TEXT, **KINDS},
        {},
        {"mm_tokens_per_image": 4, "boi_token_index": BEGIN, "eoi_token_index": END},
        PICTURE,
    ),
}
"""Class -> what differs from the tiny sizes in its text, tower and whole; what it takes for an image."""


def multimodal(name: str, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build a model in float64, or float32 where it must be, and a prompt of some 40 tokens with an image.

    Args:
        name: of the class.
        **sizes: other sizes of its text.
    """
    cls = getattr(transformers, name)
    text, vision, top, image = MODELS[name]
    top = {"image_token_id": IMAGE, "image_token_index": IMAGE, **top}
    config = nested(cls.config_class, top=top, text_config={**text, **sizes}, vision_config=vision)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32):
        model = assemble(cls, config, dtype)
        made = {
            key: value if isinstance(value, Tensor) else torch.randn(value, generator=generator)
            for key, value in image.items()
        }
        inputs = cast(made, dtype)
        try:
            with torch.no_grad():
                inputs |= _prompt(len(image_features(model, inputs)), generator)
                if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
                    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
                model(**inputs)
        except RuntimeError:  # a product of two dtypes: it computes something in float32
            if dtype == torch.float32:
                raise
        else:
            return model, inputs
    raise AssertionError


def image_features(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the tower and what is behind it make of the image, `[features, C]`."""
    found = model.get_image_features(**{key: x for key, x in inputs.items() if key not in TOKENS})
    found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, tuple | list) else [found]
    return torch.cat([part.flatten(0, -2) for part in parts])


def _prompt(features: int, generator: torch.Generator) -> dict[str, Tensor]:
    before, after = torch.randint(3, 90, (2, 16), generator=generator).split(1)
    ids = torch.cat([before[0], torch.tensor([BEGIN, *[IMAGE] * features, END]), after[0]])[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def with_types(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add which tokens are an image's, as Gemma's processor does."""
    return {**inputs, "token_type_ids": (inputs["input_ids"] == IMAGE).long()}


def text_alone(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same prompt with ordinary tokens for the image."""
    ids = inputs["input_ids"]
    return {"input_ids": torch.where(ids >= IMAGE, 7, ids), "attention_mask": torch.ones_like(ids)}


def generated(model: Any, inputs: dict[str, Tensor], new: int = 6) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of new tokens `[1, new, V]`, and the inputs that give them at once, as the last."""
    out = model.generate(
        **inputs,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        suppress_tokens=[IMAGE, BEGIN, END],
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    whole = {**inputs, "input_ids": out.sequences[:, :-1]}
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            whole[name] = nn.functional.pad(inputs[name], (0, new - 1), value=value)
    return torch.stack(out.logits, 1), whole
