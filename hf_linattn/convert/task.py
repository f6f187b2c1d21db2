"""What a converted model learns, by what it was saved with: a head that predicts tokens, or none."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from hf_linattn.convert.__main__ import ConvertArguments
from hf_linattn.errors import TrainingError
from hf_linattn.finetune.run import chosen_objective
from hf_linattn.patching.loading import explain_missing
from hf_linattn.training.objectives import Objective, choose, states

SELF = "self"
"""In the place of a text: what the model writes itself."""


def chosen_task(arguments: ConvertArguments, tokenizer: Any) -> Objective:
    """What the model learns.

    Raises:
        TrainingError: no such model; one without a head that should predict; or one that should write text
            and cannot.
    """
    name = arguments.teacher or arguments.model
    with explain_missing(f"cannot load {name}", TrainingError):
        config = AutoConfig.from_pretrained(name)
    if arguments.objective == "states" or (arguments.objective == "auto" and _headless(config)):
        return _states_task(name, config, arguments, tokenizer)
    task = chosen_objective(arguments, tokenizer)
    if task.name == "mlm" and SELF in (arguments.data, arguments.eval_data):
        raise TrainingError(f"{name} predicts masked tokens and writes no text: give --data a text of yours")
    if task.name == "mlm" and _headless(config):
        raise TrainingError(
            f"{name} was saved as {config.architectures[0]}, without a head that predicts masked tokens: "
            "leave --objective out, and it learns the hidden states, or give it a head with "
            "hf_linattn.finetune --objective mlm"
        )
    return task


def _headless(config: Any) -> bool:
    """Whether a model was saved without a head that predicts tokens, bare or with another one."""
    saved, bare = (config.architectures or [""])[0], MODEL_MAPPING_NAMES.get(config.model_type, "")
    if not saved or saved in ((bare,) if isinstance(bare, str) else bare):
        return bool(saved)
    head = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    return choose("auto", config) == "mlm" and saved != head


def _states_task(name: str, config: Any, arguments: ConvertArguments, tokenizer: Any) -> Objective:
    refused = {
        "--data self": SELF in (arguments.data, arguments.eval_data),
        "stage finetune (give --finetune-tokens 0)": "finetune" in arguments.chosen_stages(),
        "--ce-weight": bool(arguments.ce_weight),
    }
    for what, given in refused.items():
        if given:
            raise TrainingError(f"{name} gives hidden states and predicts no text, so there is no {what}")
    return states(config, tokenizer, arguments.block_size)
