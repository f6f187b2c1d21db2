"""Tiny random models of every causal type, and inputs for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

from helpers.family_configs import GENERIC, KINDS, LENGTH, PAD, RECIPES, first_line, known_windows
from helpers.oracle import as_oracle
from hf_linattn.patching.discovery import find_sites


class Slow(Exception):
    """A type took longer than its time limit."""


class NotBuilt(Exception):
    """No config of ours makes a model of this type that runs."""


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


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in the model's dtype, nested ones too."""
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(cast(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


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
