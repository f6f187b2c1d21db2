"""What models wrote after the same prompts, and how far they lie apart. No model in here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..common.statistics import ratio_error

NGRAM = 4
ORIGINAL = "original"


@dataclass(frozen=True)
class Continuation:
    """What one model wrote after one prompt.

    Attributes:
        model: its label.
        prompt: index of the prompt.
        ids: tokens written, up to the first that ends a text.
        repetition: share of 4-grams seen before in the continuation; None below 4 tokens.
        agreement: tokens before the first that differs from the original's; None for the original.
        kl: KL(original || this) in nats at every token of the original's continuation; empty for itself.
        top1: whether both would write the same token there.
    """

    model: str
    prompt: int
    ids: list[int]
    repetition: float | None
    agreement: int | None = None
    kl: tuple[float, ...] = ()
    top1: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Positions first <= p <= last of a continuation, counted from 1."""

    first: int
    last: int
    tokens: int
    kl: float
    top1: float


@dataclass(frozen=True)
class Summary:
    """All continuations of one model.

    Attributes:
        model: its label.
        prompts: continuations.
        repetition: mean over continuations; None where all are shorter than 4 tokens.
        agreement: mean tokens before the first difference; None for the original, as all below.
        identical: continuations without any difference.
        kl: mean of KL(original || this), nats per token; kl_stderr: its standard error over prompts.
        top1: share of positions where both would write the same token.
        buckets: the same by position, as powers of two.
    """

    model: str
    prompts: int
    repetition: float | None
    agreement: float | None = None
    identical: int | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    top1: float | None = None
    buckets: tuple[Bucket, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Prompts and the continuations of every model, the original first."""

    prompts: list[list[int]]
    continuations: list[Continuation]

    @property
    def labels(self) -> list[str]:
        """The models in their order."""
        return list(dict.fromkeys(one.model for one in self.continuations))

    def of(self, label: str) -> list[Continuation]:
        """Pick one model's continuations, in the order of the prompts."""
        return [one for one in self.continuations if one.model == label]

    def summaries(self) -> list[Summary]:
        """Summarise each model."""
        originals = self.of(ORIGINAL)
        return [_summarise(self.of(label), originals) for label in self.labels]


def agreement(first: Sequence[int], second: Sequence[int]) -> int:
    """Count tokens before the first difference; where one text ends and the other goes on, they differ."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def repetition(ids: Sequence[int], size: int = NGRAM) -> float | None:
    """Compute 1 - distinct n-grams / n-grams: the share that came before; None where there is none.

    Source: "seq-rep-n" of "Neural Text Generation with Unlikelihood Training", Welleck et al. 2019,
        arXiv:1908.04319.
    """
    grams = [tuple(ids[start : start + size]) for start in range(len(ids) - size + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else None


def _summarise(continuations: Sequence[Continuation], originals: Sequence[Continuation]) -> Summary:
    """Take the means over one model's continuations."""
    repeated = [one.repetition for one in continuations if one.repetition is not None]
    mean = math.fsum(repeated) / len(repeated) if repeated else None
    label = continuations[0].model
    agreed = [one.agreement for one in continuations if one.agreement is not None]
    if not agreed:
        return Summary(label, len(continuations), mean)
    sums, counts = [math.fsum(one.kl) for one in continuations], [len(one.kl) for one in continuations]
    return Summary(
        model=label,
        prompts=len(continuations),
        repetition=mean,
        agreement=sum(agreed) / len(agreed),
        identical=sum(one.ids == first.ids for one, first in zip(continuations, originals, strict=True)),
        kl=math.fsum(sums) / sum(counts),
        kl_stderr=ratio_error(sums, counts),
        top1=sum(sum(one.top1) for one in continuations) / sum(counts),
        buckets=tuple(_buckets(continuations, max(counts))),
    )


def _buckets(continuations: Sequence[Continuation], length: int) -> Iterator[Bucket]:
    """Yield the means at positions 1, 2, 3-4, 5-8, 9-16, ..."""
    first, last = 1, 1
    while first <= length:
        kl = [x for one in continuations for x in one.kl[first - 1 : last]]
        same = [x for one in continuations for x in one.top1[first - 1 : last]]
        yield Bucket(first, min(last, length), len(kl), math.fsum(kl) / len(kl), sum(same) / len(same))
        first, last = last + 1, last * 2
