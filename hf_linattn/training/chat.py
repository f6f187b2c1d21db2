"""Blocks of which some tokens are read and not learned: what others than the assistant say in a chat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_linattn.data import count_targets, token_ids
from hf_linattn.training.divergence import NO_TARGET, target_losses
from hf_linattn.training.head import predict
from hf_linattn.training.loop import next_tokens
from hf_linattn.training.objectives import CACHELESS, Objective


def fit_objective(objective: Objective, *data: NDArray[np.int32] | None) -> Objective:
    """Leave out of the losses the tokens of blocks that are not to be predicted, where there are such.

    Args:
        objective: of next tokens; any other comes back, as its blocks have none.
        data: the blocks, `[blocks, N]`.
    """
    if not any(blocks is not None and blocks.min() < 0 for blocks in data):
        return objective
    return replace(
        objective,
        description="conversations as the tokenizer's chat template writes them, joined in order and cut "
        "into blocks; attention crosses their borders; the assistant's tokens alone are learned",
        losses=chosen_losses,
        targets=next_targets,
        prepare=prepare,
        chosen=predictions_of_targets,
        count_targets=count_targets,
    )


def prepare(blocks: NDArray[np.int32], row_ids: NDArray[np.int64], step: int) -> NDArray[np.int32]:
    """Take blocks [B, N] apart: what the model reads, and the targets, `NO_TARGET` for none: [B, 2, N]."""
    return np.stack([token_ids(blocks), np.where(blocks < 0, np.int32(NO_TARGET), blocks)], axis=1)


def next_targets(batch: Tensor) -> Tensor:
    """Tell what each position is to predict, `NO_TARGET` for nothing: [B, 2, N] -> [B, N]."""
    return next_tokens(batch[:, 1])


def predictions_of_targets(batch: Tensor) -> Tensor:
    """Tell which positions predict a target, the one behind them: [B, 2, N] -> bool [B, N]."""
    return next_targets(batch) != NO_TARGET


def chosen_losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of every row's targets, in nats: [B, 2, N] -> [B]."""
    return target_losses(predict(model, batch[:, 0], **CACHELESS), next_targets(batch))
