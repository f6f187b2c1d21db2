"""How far what one model gives is from what another gives: predictions, or hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Reading:
    """What two models are compared by.

    Attributes:
        keywords: of their forward, besides token ids.
        given: what is compared, of what a forward gives.
        divergence: of the student's from the teacher's, both as `given`: -> `[B]`.
        unit: of the divergence, for pictures.
    """

    keywords: dict[str, bool]
    given: Callable[[Any], Any]
    divergence: Callable[[Any, Any], Tensor]
    unit: str


def token_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of every token's prediction, in nats: logits `[B, N, V]` -> `[B, N]`."""
    given, wanted = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    return F.kl_div(given, wanted, reduction="none", log_target=True).sum(-1)


def states_error(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error of hidden states over the teacher's variance: `[B, N, D]` each -> `[B]`.

    0 where they are the same, 1 where the student knows no more of a row than the mean of its states.
    """
    given, wanted = student.float(), teacher.float()
    error = (given - wanted).square().sum(-1).mean(1)
    return error / (wanted - wanted.mean(1, keepdim=True)).square().sum(-1).mean(1)


def _predictions_apart(student: Tensor, teacher: Tensor) -> Tensor:
    return token_divergence(student, teacher).mean(1)


def _layers_apart(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """The mean of the layers' errors."""
    return torch.stack([states_error(*pair) for pair in zip(student, teacher, strict=True)]).mean(0)


def _last_apart(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    return states_error(student[-1], teacher[-1])


def predictions(keywords: dict[str, bool]) -> Reading:
    """The probabilities that both give to every token."""
    return Reading(keywords, lambda output: output.logits, _predictions_apart, "nats per token")


def hidden_states(keywords: dict[str, bool], *, last: bool = False) -> Reading:
    """The hidden states after every layer, or after the last alone."""
    return Reading(
        {**keywords, "output_hidden_states": True},
        lambda output: output.hidden_states[1:],
        _last_apart if last else _layers_apart,
        "squared error / variance",
    )
