"""Models as the evaluation commands take them: a folder, a patch to try on it, a scaling of its RoPE."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from hf_linattn import from_pretrained, is_patched, patch_model, unpatch_model
from hf_linattn.cli.processor import note_slow
from hf_linattn.errors import CheckpointError, OptionError
from hf_linattn.patching.loading import first_line
from hf_linattn.patching.loading import load_config as load_config
from hf_linattn.patching.loading import load_tokenizer as load_tokenizer

from .cli import parse_rope_scaling
from .windows import Texts, encode

UNPATCHED = "unpatched"


@dataclass(frozen=True)
class ModelSpec:
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


def set_seed(seed: int) -> None:
    """Seed Python, NumPy and torch, as transformers does, whose module for it loads peft."""
    from transformers import set_seed

    set_seed(seed)


def load_model(curve: ModelSpec, *, dtype: str = "auto", device: torch.device | str = "cpu") -> nn.Module:
    """Load, patch and move a model.

    Raises:
        CheckpointError: there is no model at the source.
        OptionError: the RoPE scaling is unknown or does not suit the model.
        LinattnError: the patch is unknown or does not suit the model.
    """
    torch_dtype = dtype if dtype == "auto" else getattr(torch, dtype)
    try:
        model: Any = from_pretrained(curve.source, dtype=torch_dtype)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"no model at {curve.source!r}: {first_line(error)}") from error
    if curve.rope_scaling is not None:
        for name, module in scaled_rotaries(model, curve.rope_scaling).items():
            model.set_submodule(name, module)
    if curve.patch == UNPATCHED and is_patched(model):
        unpatch_model(model)
    elif curve.patch not in (None, UNPATCHED):
        patch_model(model, curve.patch, options=curve.options)
    note_slow(torch.device(device), model.dtype, "--dtype float32")
    return model.to(device)  # type: ignore[no-any-return]


def name_of(source: str) -> str:
    """Name a model by its folder without the way to it."""
    return Path(source).name or source


def load_texts(args: Any, tokenizer: Any) -> tuple[list[str], Texts]:
    """Read --data and cut it into tokens, as --column, --split, --bos and --join say.

    Raises:
        DataError: the text is missing or empty.
        OptionError: --bos asks for a BOS that the tokenizer has not.
    """
    import datasets

    from hf_linattn.data import load_documents

    datasets.disable_progress_bars()
    documents = list(load_documents(args.data, column=args.column, split=args.split)["text"])
    return documents, encode(tokenizer, documents, bos=args.bos, join=args.join)


def train_length(source: str) -> int | None:
    """Tell how many tokens of context the model was pretrained on, as far as its configuration says."""
    config = load_config(source).get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    length = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
    return int(length) if length else None


def scaled_rotaries(model: nn.Module, rope_scaling: str) -> dict[str, nn.Module]:
    """Build the RoPE of a model from its configuration with another scaling: dotted name -> module.

    Where layer types have RoPEs of their own, that of full attention is scaled: others never see more than a
    window. The model stays as it is.

    Raises:
        OptionError: the model has no RoPE, or one that is scaled already.
    """
    kind, factor = parse_rope_scaling(rope_scaling)
    rotaries = {name: module for name, module in model.named_modules() if hasattr(module, "rope_type")}
    if not rotaries:
        raise OptionError(f"{type(model).__name__} has no RoPE to scale")
    scaled: dict[str, nn.Module] = {}
    for name, module in rotaries.items():
        config = copy.deepcopy(module.config)
        parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
        if parameters["rope_type"] != "default":
            raise OptionError(
                f"the RoPE of this model is scaled already ({parameters['rope_type']}); another scaling "
                "would replace that"
            )
        parameters.update(rope_type=kind, factor=factor)
        if kind == "yarn":
            parameters["original_max_position_embeddings"] = config.max_position_embeddings
        scaled[name] = type(module)(config=config)
    return scaled
