"""Models as the evaluation commands take them: a folder, a patch to try on it, a scaling of its RoPE."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from hf_linattn.errors import CheckpointError, DataError, NotPatchedError, OptionError

from .options import parse_rope_scaling


@dataclass(frozen=True)
class Curve:
    """A model to measure and the name of its curve.

    Attributes:
        label: name in tables and plots.
        source: folder or name for `from_pretrained`.
        patch: patch put on after loading; "unpatched" takes off the one that the folder has.
        options: options of the patch.
        rope_scaling: KIND:FACTOR, or None for the model's own.
    """

    label: str
    source: str
    patch: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    rope_scaling: str | None = None


def load_model(curve: Curve, *, dtype: str = "auto", device: torch.device | str = "cpu") -> nn.Module:
    """Load, patch and move a model.

    Raises:
        CheckpointError: there is no model at the source.
        OptionError: the RoPE scaling is unknown or does not suit the model.
        LinattnError: the patch is unknown or does not suit the model.
    """
    from hf_linattn import from_pretrained, patch_model, unpatch_model

    kwargs: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    if curve.rope_scaling is not None:
        kwargs["config"] = scaled_config(curve.source, curve.rope_scaling)
    try:
        model = from_pretrained(curve.source, **kwargs)
    except OSError as error:
        raise CheckpointError(f"no model at {curve.source!r}: {_first_line(error)}") from error
    if curve.patch == "unpatched":
        with suppress(NotPatchedError):  # then there is nothing to take off
            unpatch_model(model)
    elif curve.patch is not None:
        patch_model(model, curve.patch, options=curve.options)
    return model.to(device)


def load_config(source: str) -> Any:
    """The model's configuration.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no model at {source!r}: {_first_line(error)}") from error


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a folder.

    Raises:
        DataError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # transformers 5 raises any of these for a folder without tokenizer files
        raise DataError(
            f"no tokenizer at {source!r} ({_first_line(error)}); name one with --tokenizer"
        ) from error


def train_length(source: str) -> int | None:
    """Tokens of context the model was pretrained on, as far as its configuration says."""
    config = load_config(source).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    length = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    return int(length) if length else None


def scaled_config(source: str, rope_scaling: str) -> Any:
    """The configuration with its RoPE scaled; where layer types differ, only full attention is scaled.

    Raises:
        OptionError: the model has no RoPE, or one that is scaled already.
    """
    kind, factor = parse_rope_scaling(rope_scaling)
    config = load_config(source)
    text_config = config.get_text_config()
    rope = getattr(text_config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if "rope_theta" not in rope:
        raise OptionError(f"{source} has no RoPE to scale (model type {config.model_type})")
    if rope.get("rope_type", "default") != "default":
        raise OptionError(
            f"{source} scales its RoPE already ({rope['rope_type']}); --rope-scaling would replace it"
        )
    rope.update(rope_type=kind, factor=factor)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = text_config.max_position_embeddings
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
