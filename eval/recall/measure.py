"""How much of what it read a model finds again: one teacher-forced pass per sample, equal to greedy decoding.

rows = measure_recall(model, tokenizer, ("induction", "passkey"), (512, 1024), samples=20)
print(rows[0].accuracy, rows[0].chance)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_linattn.errors import DataError, OptionError
from hf_linattn.patching.causality import require_causal

from ..common.formatting import NOT_FINITE
from ..common.nll import embedding_rows, scoring, window_logits
from ..common.statistics import ratio_error
from ..common.windows import Document, Texts, Window
from .tasks import TASKS, build
from .vocabulary import Sample, Vocabulary

BATCH_TOKENS = 8192
"""Tokens per forward pass unless a batch size is given."""


@dataclass(frozen=True)
class Row:
    """One task at one length and depth.

    Attributes:
        task: its name.
        length: tokens of a sample: BOS, prompt and answer.
        depth: where in the context the thing is, from 0 to 1; None where a case does not say.
        samples: rows read.
        accuracy: share of answers all of whose tokens are the most probable of the whole vocabulary.
        stderr: standard error of `accuracy` over samples; None for a single sample.
        logprob: mean log-probability of an answer, in nats.
        chance: accuracy of a guesser who knows what kind of answer is wanted.
        choice: accuracy where only candidates may be said, token by token; None without candidates.
        choice_chance: the same with random choices.
        answers: scored in all samples together.
    """

    task: str
    length: int
    depth: float | None
    samples: int
    accuracy: float
    stderr: float | None
    logprob: float
    chance: float
    choice: float | None
    choice_chance: float | None
    answers: int


@dataclass(frozen=True)
class Outcome:
    """Sums over the answers of one sample."""

    answers: int
    right: int
    chosen: int
    logprob: float


def measure_recall(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str] = ("induction",),
    lengths: Sequence[int] = (512,),
    *,
    depths: Sequence[float] = (0.0, 0.5, 1.0),
    samples: int = 20,
    seed: int = 0,
    batch_size: int | None = None,
    bos: Literal["auto", "yes", "no"] = "auto",
) -> list[Row]:
    """Ask the same questions of any model: a row per task, length and depth, in this order.

    Args:
        model: a causal language model, patched or not; left unchanged.
        tokenizer: its tokenizer.
        tasks: names from `tasks.TASKS`.
        lengths: tokens per sample.
        depths: places in the context, from 0 (start) to 1 (end).
        samples: per task, length and depth.
        seed: of the samples; they depend on nothing else but task, length and tokenizer.
        batch_size: samples per forward pass; None takes as many as make 8,192 tokens.
        bos: BOS before every sample: as the tokenizer does, yes, no.

    Raises:
        OptionError: a task is unknown, a number is out of its range, or a length is too short for a task.
        DataError: the tokenizer is too small for a task, or the model's logits are not finite.
        UnsupportedModelError: the model sees later tokens (an encoder), or cannot read such lengths.
    """
    _check_options(tasks, lengths, depths, samples=samples, batch_size=batch_size)
    require_causal(model)
    vocabulary = Vocabulary(tokenizer, embedding_rows(model), bos)
    check_fit(vocabulary, tasks, lengths)
    rows = []
    for task, length, depth in product(dict.fromkeys(tasks), sorted(set(lengths)), sorted(set(depths))):
        asked = [build(task, vocabulary, length, depth, seed, index) for index in range(samples)]
        rows.append(make_row(task, length, depth, asked, score(model, asked, batch_size)))
    return rows


def _check_options(
    tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float], **counts: int | None
) -> None:
    """Refuse what cannot be measured, before anything is loaded; `counts` must be at least 1, or None."""
    if isinstance(tasks, str) or not tasks:
        raise OptionError(f"tasks must be a list of names, got {tasks!r}; known: {', '.join(TASKS)}")
    for task in tasks:
        if task not in TASKS:
            raise OptionError(f"unknown task {task!r}; known: {', '.join(TASKS)}")
    if not lengths or min(lengths) < 1:
        raise OptionError(f"lengths must be whole numbers of at least 1 token, got {list(lengths)}")
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise OptionError(f"depths must be numbers from 0 (start) to 1 (end), got {list(depths)}")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise OptionError(f"{name} must be at least 1, got {count}")


def check_fit(vocabulary: Vocabulary, tasks: Iterable[str], lengths: Iterable[int]) -> None:
    """Build a sample of everything.

    Raises:
        OptionError: a length is too short for a task.
        DataError: the tokenizer is too small for one.
    """
    for task in tasks:
        for length in lengths:
            build(task, vocabulary, length, 0.0, 0, 0)


def score(
    model: nn.Module,
    samples: Sequence[Sample],
    batch_size: int | None = None,
    advance: Callable[[int], object] = lambda tokens: None,
) -> list[Outcome]:
    """Read all samples, those of one length together.

    Args:
        model: a causal language model.
        samples: to read.
        batch_size: samples per forward pass; None for 8,192 tokens' worth.
        advance: is called with the tokens read.

    Raises:
        DataError: the logits are not finite.
        UnsupportedModelError: the model cannot read that many tokens.
    """
    outcomes: dict[int, Outcome] = {}
    by_length: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        by_length.setdefault(len(sample.ids), []).append(index)
    with scoring(model):
        for length, members in by_length.items():
            size = batch_size or max(1, BATCH_TOKENS // length)
            for first in range(0, len(members), size):
                batch = members[first : first + size]
                outcomes.update(zip(batch, _read(model, [samples[index] for index in batch]), strict=True))
                advance(length * len(batch))
    return [outcomes[index] for index in range(len(samples))]


def make_row(
    task: str, length: int, depth: float | None, samples: Sequence[Sample], outcomes: Sequence[Outcome]
) -> Row:
    """Take the means over all answers, their error over samples.

    Args:
        task: its name.
        length: tokens of a sample.
        depth: where in the context the thing is, None where that is not known.
        samples: that were read.
        outcomes: one for each sample.
    """
    counts = [outcome.answers for outcome in outcomes]
    answers = sum(counts)
    chances = [
        sample.candidates.chance(tuple(sample.ids[start:end].tolist()))
        for sample in samples
        if sample.candidates is not None
        for start, end in sample.answers
    ]
    chosen = len(chances) == answers  # candidates for all or for none
    return Row(
        task=task,
        length=length,
        depth=depth,
        samples=len(samples),
        accuracy=sum(outcome.right for outcome in outcomes) / answers,
        stderr=ratio_error([outcome.right for outcome in outcomes], counts),
        logprob=math.fsum(outcome.logprob for outcome in outcomes) / answers,
        chance=math.fsum(s.chance * o.answers for s, o in zip(samples, outcomes, strict=True)) / answers,
        choice=sum(outcome.chosen for outcome in outcomes) / answers if chosen else None,
        choice_chance=math.fsum(chances) / answers if chosen else None,
        answers=answers,
    )


def _read(model: nn.Module, samples: list[Sample]) -> list[Outcome]:
    length = len(samples[0].ids)
    scored = length - min(sample.answers[0][0] for sample in samples)
    documents = [Document(sample.ids, torch.zeros_like(sample.ids)) for sample in samples]
    windows = [Window(index, 0, length, scored) for index in range(len(samples))]
    logits, _ = window_logits(model, Texts(documents, None), windows)
    return [_outcome(sample, row, length - scored) for sample, row in zip(samples, logits, strict=True)]


def _outcome(sample: Sample, logits: Tensor, first: int) -> Outcome:
    """Judge the answers by the logits `[scored, V]` of the tokens from `first` on."""
    right = chosen = 0
    logprob = 0.0
    for start, end in sample.answers:
        answer: tuple[int, ...] = tuple(sample.ids[start:end].tolist())
        steps = logits[start - first : end - first].float().cpu()
        own = steps.log_softmax(1).gather(1, torch.tensor(answer)[:, None]).double()
        logprob += float(own.sum())
        right += steps.argmax(1).tolist() == list(answer)
        if sample.candidates is not None:
            following = [sample.candidates.following(answer[:place]) for place in range(len(answer))]
            best = [tokens[step[tokens].argmax()] for step, tokens in zip(steps, following, strict=True)]
            chosen += [int(token) for token in best] == list(answer)
    if not math.isfinite(logprob):
        raise DataError(f"the model's logits are not finite: {NOT_FINITE}")
    return Outcome(len(sample.answers), right, chosen, logprob)
