"""The model of a training run: loaded with its tokenizer, patched, with LoRA or frozen parts, checked."""

from __future__ import annotations

import re
import warnings
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import set_seed
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_linattn import describe, from_pretrained, is_patched, patch_model
from hf_linattn.errors import DataError, TrainingError, UnsupportedModelError
from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.patching.causality import require_causal
from hf_linattn.patching.checkpoint import saved_class
from hf_linattn.patching.discovery import find_sites
from hf_linattn.patching.interface import NAME, PATCH_PART
from hf_linattn.patching.loading import explain_gguf, explain_missing, gguf_parts, model_inside, trust
from hf_linattn.patching.module import PatchedAttention
from hf_linattn.registry import patches
from hf_linattn.training.estimate import check_weights_fit
from hf_linattn.training.objectives import Objective

ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Entries of configs."""


def load_config(name: str, option: str = "--model") -> PreTrainedConfig:
    """Read the config of the model, a folder or Hub name, that an option of the command names.

    Raises:
        TrainingError: there is no such model.
    """
    place, keyword = gguf_parts(name)
    message = f"cannot load {option} {name}{model_inside(name)}"
    with explain_gguf(name) if keyword else explain_missing(message, TrainingError):
        config: PreTrainedConfig = AutoConfig.from_pretrained(place, **keyword, **trust())
    return config


def count_parameters(config: PreTrainedConfig) -> int:
    """Count the parameters of a model that its config describes; no weights are read or made."""
    saved: Any = saved_class({"architectures": config.architectures})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **trust()) if saved is None else saved(config)
    return int(model.num_parameters())


def load_model(arguments: FinetuneArguments, objective: Objective) -> PreTrainedModel:
    """Load the model and patch it; new parameters depend on the seed.

    Raises:
        TrainingError: there is no such model.
    """
    set_seed(arguments.seed)  # a bare encoder gets a new head
    check_weights_fit(arguments.model, getattr(torch, arguments.dtype))
    with explain_missing(f"cannot load --model {arguments.model}", TrainingError):
        model: PreTrainedModel = from_pretrained(
            arguments.model, auto_class=objective.auto_class, dtype=getattr(torch, arguments.dtype)
        )
    if arguments.no_dropout:
        switch_off_dropout(model)
    set_seed(arguments.seed)
    if arguments.patch is not None:
        if is_patched(model):
            before = describe(model)
            specs = sorted({row.patch for row in before if row.patch != "softmax"})
            warnings.warn(
                f"--patch replaces the patch of {arguments.model} ({', '.join(specs)}) and its "
                f"{before.parameters:,} weights; leave it out to go on with that patch",
                stacklevel=2,
            )
        patch_model(model, arguments.patch, options=arguments.options, sliding=arguments.sliding)
    return model


def leave_out_attention_dropout(model: PreTrainedModel) -> str:
    """Let patches train that have no attention weights to drop; returns a line that says so, or ""."""
    linear = [m for m in model.modules() if isinstance(m, PatchedAttention) and m.attention.linear]
    for module in linear:
        module.leaves_out_dropout = True
    config = model.config.get_text_config()
    rate = max(getattr(config, name, None) or 0.0 for name in ATTENTION_DROPOUT)
    if not linear or not rate:
        return ""
    return (
        f"attention dropout of {rate} is left out in {len(linear)} layers: {linear[0].spec!r} has no weights "
        "to drop (--no-dropout switches off the other kinds too)\n"
    )


def freeze_beside_text(model: PreTrainedModel) -> str:
    """Freeze what text alone does not reach in a model that reads images or sounds; returns a line, or ""."""
    text = _beside_towers(model)
    if not text:
        return ""
    reached = {id(parameter) for part in text for parameter in part.parameters()}
    beside = [model.get_submodule(name) for name in _parts_with_towers(model)]
    reached -= {id(parameter) for part in beside for parameter in part.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in reached]
    for parameter in others:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in others)
    return f"{count:,} weights for images or sounds stay as they are: text does not reach them\n"


def _beside_towers(model: PreTrainedModel) -> list[nn.Module]:
    """List decoder and head of a model that reads images or sounds; nothing for a model of text alone."""
    if not any(site.tower for site in find_sites(model)):
        return []
    return [part for part in (model.get_decoder(), model.get_output_embeddings()) if part is not None]


def _parts_with_towers(model: PreTrainedModel) -> list[str]:
    """Name the modules around what reads images or sounds, and no text; phi-4's decoder has some."""
    sites = find_sites(model)
    towers, text = ([f"{site.name}." for site in sites if site.tower is tower] for tower in (True, False))
    names = [f"{name}." for name, _ in model.named_modules() if name]
    around = [name for name in names if any(tower.startswith(name) for tower in towers)]
    return [name[:-1] for name in around if not any(site.startswith(name) for site in text)]


def switch_off_dropout(model: nn.Module) -> None:
    """Set every dropout rate that the modules hold to 0; the config keeps its own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):  # llama: self.attention_dropout = config...
                setattr(module, name, 0.0)


def choose_trained(model: PreTrainedModel, arguments: FinetuneArguments, objective: Objective) -> nn.Module:
    """Let everything train, the patch's parameters alone, or LoRA and the patch's parameters.

    Raises:
        TrainingError: only the patch is to be trained, and it has no parameters.
    """
    learned = [name for name, _ in model.named_parameters() if PATCH_PART in name]
    if arguments.lora:
        return _add_lora(model, arguments, objective, with_patch=bool(learned))
    if arguments.train_only_patch:
        if not learned:
            patch = arguments.patch or f"the attention of {arguments.model}"
            others = ", ".join(_patches_with_parameters(model)) or "none of the installed ones"
            raise TrainingError(
                f"--train-only-patch: {patch} has no parameters of its own to train; some have: {others}"
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(PATCH_PART in name)
    return model


def _patches_with_parameters(model: nn.Module) -> list[str]:
    """Names of patches that, with their default options, would bring learned parameters to this model."""
    sites, names = find_sites(model), []
    for name, cls in patches().items() if sites else ():
        try:
            patch = cls(sites[0])
        except (TypeError, ValueError):  # needs options, or other sizes
            continue
        if any(True for _ in patch.parameters()):
            names.append(name)
    return names


def _add_lora(
    model: PreTrainedModel, arguments: FinetuneArguments, objective: Objective, *, with_patch: bool
) -> nn.Module:
    import jinja2  # noqa: F401 - peft saves with it: to be missed before training, not after
    import peft  # takes seconds, and few runs need it

    left_out = [rf".*\.{NAME}(\..*)?"] if is_patched(model) else []  # peft warns of what matches nothing
    if text := _beside_towers(model):
        decoder = next(name for name, module in model.named_modules() if module is text[0])
        left_out.append(rf"(?!{re.escape(decoder)}\.).*")
        left_out += [rf"{re.escape(name)}\..*" for name in _parts_with_towers(model)]
    config = peft.LoraConfig(
        r=arguments.lora,
        lora_alpha=arguments.lora_alpha or 2 * arguments.lora,
        target_modules="all-linear",
        exclude_modules="|".join(left_out) or None,
        modules_to_save=[NAME] if with_patch else None,
        # GPT-2 keeps its weights transposed
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type=objective.peft_task,
    )
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 for a property by its old name
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        return peft.get_peft_model(model, config)


def check_fit(model: PreTrainedModel, objective: Objective, *data: NDArray[np.int32] | None) -> None:
    """See that the model knows every token and position of rows `[blocks, N]`, and is not shown its targets.

    Raises:
        DataError: it does not know them.
        UnsupportedModelError: it is to predict the next token and sees it, or reads more than text.
    """
    try:
        known = len(cast("Tensor", model.get_input_embeddings().weight))
    except (AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no embedding of text alone, so it cannot be trained on text. Give "
            "the part that writes text, saved by itself, or patch the whole in Python: patch_model(model)"
        ) from error
    limit = _positions(model)
    for blocks in data:
        if blocks is None:
            continue
        highest = max(int(blocks.max()), ~int(blocks.min()), objective.highest)  # see data.token_ids
        if highest >= known:
            raise DataError(
                f"the tokenizer gives token {highest}, the model knows {known}: give its own --tokenizer"
            )
        if limit is not None and blocks.shape[1] > limit:
            raise DataError(
                f"rows of {blocks.shape[1]} tokens are longer than the model's {limit} positions: give a "
                "smaller --block-size (of a conversion: or --finetune-length)"
            )
    if objective.name == "causal":
        require_causal(model)


def _positions(model: PreTrainedModel) -> int | None:
    """Tokens in the longest row, or None: rotary models count on beyond the length they were trained at."""
    config = model.config.get_text_config()
    limit: int | None = getattr(config, "max_position_embeddings", None)
    if limit is None or getattr(config, "rope_parameters", None):
        return None
    # RoBERTa and its relatives begin to count behind the index of the padding
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = [table for table in tables if table is not model.get_input_embeddings()]
    skipped = [table.padding_idx for table in tables if table.num_embeddings == limit]
    return limit - max((index + 1 for index in skipped if index is not None), default=0)
