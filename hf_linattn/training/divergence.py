"""How far a model's output is from a text, or from another's output: by predictions, or by hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.training.head import Predictions, predict, token_losses


@dataclass(frozen=True)
class ComparisonTarget:
    """What of two models is compared, a student's against a teacher's, and how.

    Attributes:
        run: (model, token ids `[B, N]`) -> what is compared: predictions as of `predict`, or hidden states.
        divergence: (the student's, the teacher's), both as `run` gives them -> `[B]`; where predictions are
            compared also (..., chosen): of the positions alone that are True in it, `[B, N]`.
        unit: of the divergence, for pictures.
    """

    run: Callable[[nn.Module, Tensor], Any]
    divergence: Callable[..., Tensor]
    unit: str


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the negative log-likelihood of targets `[...]` by logits `[..., V]`, in nats: -> `[...]`."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def token_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Compute KL(teacher || student) of every token's prediction, in nats: logits `[B, N, V]` -> `[B, N]`."""
    ours, target = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    return F.kl_div(ours, target, reduction="none", log_target=True).sum(-1)


def states_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Divide the squared error of hidden states by the teacher's variance: `[B, N, D]` each -> `[B]`.

    0 where they are the same, 1 where the student knows no more of a row than the mean of its states.
    """
    ours, target = student.float(), teacher.float()
    error = (ours - target).square().sum(-1).mean(1)
    return error / (target - target.mean(1, keepdim=True)).square().sum(-1).mean(1)


def mean_of_chosen(values: Tensor, chosen: Tensor) -> Tensor:
    """Take the mean of each row's values, which stand in order of the True places of `chosen` [B, N]: [B]."""
    rows = values.new_zeros(chosen.shape).masked_scatter(chosen, values)
    return rows.sum(1) / chosen.sum(1)


def _prediction_divergence(
    student: Predictions, teacher: Predictions, chosen: Tensor | None = None
) -> Tensor:
    if chosen is not None:
        values = token_losses(token_divergence, student[chosen], teacher[chosen])
        return mean_of_chosen(values, chosen)
    return token_losses(token_divergence, student, teacher).mean(1)


def _mean_layer_error(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The mean of the layers' errors."""
    return torch.stack([states_error(*pair) for pair in zip(student, teacher, strict=True)]).mean(0)


def _last_layer_error(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    return states_error(student[-1], teacher[-1])


def compare_predictions(keywords: dict[str, bool]) -> ComparisonTarget:
    """Compare the probabilities that both models give to every token."""
    return ComparisonTarget(
        lambda model, ids: predict(model, ids, **keywords), _prediction_divergence, "nats per token"
    )


def compare_hidden_states(keywords: dict[str, bool], *, last: bool = False) -> ComparisonTarget:
    """Compare the hidden states after every layer, or after the last alone."""
    return ComparisonTarget(
        lambda model, ids: model(input_ids=ids, output_hidden_states=True, **keywords).hidden_states[1:],
        _last_layer_error if last else _mean_layer_error,
        "squared error / variance",
    )
