"""How far a model's output is from a text, or from another's output: by predictions, or by hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.ops.second_order import only_once
from hf_linattn.training.head import Predictions, predict, token_losses

NO_TARGET = -100
"""Target of a position that predicts nothing; transformers' own number."""


@dataclass(frozen=True)
class ComparisonTarget:
    """What of two models is compared, a student's against a teacher's, and how.

    Attributes:
        run: (model, token ids `[B, N]`) -> what is compared: predictions as of `predict`, or hidden states.
        divergence: (the student's, the teacher's), both as `run` gives them -> `[B]`; where predictions are
            compared the teacher's may be `TopPredictions`, `chosen` `[B, N]` is True at the positions that
            alone count, and the loss of a `text` is added, of the same logits.
        unit: of the divergence, for pictures.
    """

    run: Callable[[nn.Module, Tensor], Any]
    divergence: Callable[..., Tensor]
    unit: str


class Text(NamedTuple):
    """What predictions are compared with beside a teacher.

    Attributes:
        targets: what each position is to predict, `[B, N]`; `NO_TARGET` where that is nothing.
        weight: of the mean negative log-likelihood of a row's targets, added to its mean divergence.
    """

    targets: Tensor
    weight: float


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the negative log-likelihood of targets `[...]` by logits `[..., V]`, in nats: -> `[...]`."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


def token_divergence(
    student: Tensor, teacher: Tensor, targets: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Compute KL(teacher || student) of every token's prediction, in nats, and what the text adds.

    With p and q the teacher's and the student's probabilities, t a target and w its weight:

        sum_i p_i (log p_i - log q_i) - w log q_t

    Args:
        student: logits `[..., V]`; gradients go there alone.
        teacher: likewise.
        targets: token ids `[...]`; None for no text.
        weights: `[...]`, 0 where there is no target.

    Returns:
        `[...]`, float32.
    """
    values: Tensor = _Divergence.apply(student, teacher, targets, weights)  # type: ignore[no-untyped-call]
    return values


class _Divergence(torch.autograd.Function):
    """`token_divergence`; the forward makes its gradient, (1 + w) q - p - w [i = t], in place of log q."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, targets: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        ours, theirs = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
        probabilities = theirs.exp()
        values: Tensor = torch.linalg.vecdot(probabilities, theirs.sub_(ours))
        if targets is not None and weights is not None:
            places = targets.clamp_min(0)[..., None]
            values -= weights * ours.gather(-1, places)[..., 0]
        if ctx.needs_input_grad[0]:
            gradient = ours.exp_()
            if targets is not None and weights is not None:
                gradient *= 1 + weights[..., None]
                gradient.scatter_add_(-1, places, -weights[..., None])
            ctx.save_for_backward(gradient.sub_(probabilities).to(student.dtype))
        return values

    @staticmethod
    @only_once
    def backward(ctx: Any, of_values: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_values[..., None].to(gradient.dtype), None, None, None


@dataclass(frozen=True)
class TopPredictions:
    """The likeliest tokens of every prediction, and what is left for all others.

    Attributes:
        ids: of tokens, `[B, N, K]`.
        log_probs: theirs, and behind them that of all other tokens together, `[B, N, K + 1]`.
    """

    ids: Tensor
    log_probs: Tensor


def top_predictions(logits: Tensor, count: int) -> TopPredictions:
    """Keep the `count` likeliest tokens of logits `[..., V]`, fewer than V; the likeliest first."""
    log_probs = F.log_softmax(logits.float(), -1)
    kept, ids = log_probs.topk(count)
    rest = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return TopPredictions(ids, torch.cat((kept, rest), -1))


def top_divergence(
    student: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    targets: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Compute KL(teacher || student) of predictions that say of K tokens how likely they are, in nats.

    With p the teacher's probabilities, q the student's and R all tokens but the K:

        sum_{i in ids} p_i (log p_i - log q_i) + p_R (log p_R - log q_R),  q_R = sum_{j in R} q_j

    This is at most the divergence over all tokens, and equals it where p_j / q_j is the same for all j in R.

    Args:
        student: logits `[..., V]`.
        ids: the K tokens, `[..., K]`.
        log_probs: of the K tokens and of R by the teacher, `[..., K + 1]`, whose exponentials sum to 1.
        targets: as in `token_divergence`.
        weights: likewise.

    Returns:
        `[...]`.
    """
    logits = student.float()
    rest = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    parts = torch.cat((logits.gather(-1, ids), rest), -1)
    total = parts.logsumexp(-1, keepdim=True)
    values = F.kl_div(parts - total, log_probs, reduction="none", log_target=True).sum(-1)
    if targets is not None and weights is not None:
        values = values + weights * (total - logits.gather(-1, targets.clamp_min(0)[..., None]))[..., 0]
    return values


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


def target_losses(predictions: Predictions, targets: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of every row's targets, in nats: -> `[B]`.

    Args:
        predictions: of every token, `[B, N]`.
        targets: what each position is to predict, `[B, N]`; `NO_TARGET` where that is nothing.
    """
    chosen = targets != NO_TARGET
    return mean_of_chosen(token_losses(cross_entropy, predictions[chosen], targets[chosen]), chosen)


def _prediction_divergence(
    student: Predictions,
    teacher: Predictions | TopPredictions,
    chosen: Tensor | None = None,
    text: Text | None = None,
) -> Tensor:
    loss: Callable[..., Tensor] = token_divergence
    others: tuple[Predictions, ...]
    if isinstance(teacher, TopPredictions):
        loss, others = top_divergence, (teacher.ids, teacher.log_probs)
    else:
        others = (teacher,)
    if text is not None:
        there = text.targets != NO_TARGET
        counted = there.shape[1] if chosen is None else chosen.sum(1)
        others = (*others, text.targets, there * (text.weight * counted / there.sum(1))[:, None])
    if chosen is not None:
        values = token_losses(loss, student[chosen], *(other[chosen] for other in others))
        return mean_of_chosen(values, chosen)
    return token_losses(loss, student, *others).mean(1)


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
