"""What a model learns to predict: the next token, masked tokens, or the hidden states of an original."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Literal, cast

import numpy as np
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from hf_linattn.data import document_separator, load_blocks
from hf_linattn.errors import TrainingError
from hf_linattn.training.divergence import ComparisonTarget, compare_hidden_states, compare_predictions
from hf_linattn.training.loop import (
    LossFunction,
    Preparation,
    TargetCount,
    next_token_losses,
    next_tokens,
)
from hf_linattn.training.masked_lm import Masking, masked_losses, masked_tokens

ObjectiveName = Literal["causal", "mlm", "states"]

CACHELESS = {"use_cache": False}
"""Keywords of a forward for models that predict the next token; encoders may not take them."""


@dataclass(frozen=True)
class Objective:
    """Everything in a run that depends on what is learned.

    Attributes:
        name: as in the command.
        load_blocks: (source, column=, split=, stream=, limit=, file=) -> blocks [blocks, N].
        description: what is done with documents, for the record.
        keywords: of a forward, besides token ids.
        comparison: what of an original and its student is compared.
        losses, prepare: for the training loop; None where nothing is predicted, or nothing prepared.
        targets: batch -> what each position is to predict [B, N], `NO_TARGET` for nothing; None likewise.
        chosen: batch -> the positions [B, N] whose predictions are learned; None for all.
        count_targets: blocks -> how many tokens of each are learned [B]; None where all have as many.
        highest: the largest token id that `prepare` may bring in.
        auto_class: for `hf_linattn.from_pretrained`; None: the class the checkpoint was saved from.
        peft_task: peft's name of the task, None where it has none.
    """

    name: ObjectiveName
    load_blocks: Callable[..., NDArray[np.int32]]
    description: str
    keywords: dict[str, bool]
    comparison: ComparisonTarget
    losses: LossFunction | None = None
    targets: Callable[[Tensor], Tensor] | None = None
    prepare: Preparation | None = None
    chosen: Callable[[Tensor], Tensor] | None = None
    count_targets: TargetCount | None = None
    highest: int = 0
    auto_class: Any = None
    peft_task: str | None = None

    def input_ids(self, batch: Tensor) -> Tensor:
        """Take the token ids that the model reads, `[B, N]`, from a batch as `prepare` leaves it."""
        return batch if self.prepare is None else batch[:, 0]


def choose_objective(option: str, config: PreTrainedConfig) -> ObjectiveName:
    """Tell what `--objective` means for a model with this config.

    `auto` is `mlm` for checkpoints saved from a masked-LM class, and for other classes (a bare encoder) of
    types that have such a class, unless the config says `is_decoder` or the type has a causal-LM class only.

    Raises:
        TrainingError: masked-language modelling of a model that has no class for it.
    """
    masked = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    if config.is_encoder_decoder:
        masked = None  # their "masked" classes are trained on text that a decoder writes again
    if option == "mlm" and masked is None:
        raise TrainingError(
            f"--objective mlm: transformers has no masked-LM encoder for the model type {config.model_type!r}"
        )
    if option != "auto":
        return cast("ObjectiveName", option)
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    saved = (config.architectures or [""])[0]
    if masked is None or (causal is not None and saved == causal):
        return "causal"
    if causal is None or saved == masked:
        return "mlm"
    return "causal" if getattr(config, "is_decoder", False) else "mlm"


def build_objective(
    name: ObjectiveName, tokenizer: PreTrainedTokenizerBase, block_size: int, seed: int
) -> Objective:
    """Build the objective "causal" or "mlm".

    Args:
        name: of the objective.
        tokenizer: of the text.
        block_size: tokens per row.
        seed: of the masks in training.

    Raises:
        DataError: masked-language modelling with a tokenizer that has no mask token.
    """
    if name == "causal":
        return Objective(
            name,
            partial(load_blocks, tokenizer=tokenizer, block_size=block_size),
            f"{document_separator(tokenizer)[1]}; joined in order and cut into blocks; "
            "attention crosses their borders",
            CACHELESS,
            compare_predictions(CACHELESS),
            losses=next_token_losses,
            targets=next_tokens,
            peft_task="CAUSAL_LM",
        )
    masking = Masking.of(tokenizer, block_size, seed)
    return Objective(
        name,
        masking.load_blocks,
        masking.description,
        {},
        compare_predictions({}),
        losses=masked_losses,
        targets=masked_tokens,
        prepare=masking.prepare,
        highest=max(len(tokenizer) - 1, cast("int", tokenizer.mask_token_id)),
        auto_class=AutoModelForMaskedLM,
    )


def build_states_objective(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> Objective:
    """Build the objective "states", for models that predict nothing; rows as for "mlm", without masks.

    Args:
        config: of the model, which tells its class.
        tokenizer: of the rows.
        block_size: tokens per row.

    Raises:
        DataError: a row has no room for text between the tokenizer's special tokens.
    """
    masking = Masking.of(tokenizer, block_size, 0, masks=False)
    name = (config.architectures or [""])[0]
    forward = getattr(getattr(transformers, name, AutoModel), "forward", None)
    keywords = CACHELESS if forward is not None and "use_cache" in signature(forward).parameters else {}
    return Objective(
        "states",
        masking.load_blocks,
        masking.description,
        keywords,
        compare_hidden_states(keywords),
        auto_class=None if name else AutoModel,
    )
