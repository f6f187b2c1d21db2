"""The points of a perplexity curve and their standard errors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_linattn.errors import DataError

from .formatting import NOT_FINITE
from .windows import Texts, Window


@dataclass(frozen=True)
class Bucket:
    """The scored tokens at positions start <= p < end; p counts the tokens before them in their window."""

    start: int
    end: int
    tokens: int
    nats: float
    perplexity: float


@dataclass(frozen=True)
class Row:
    """One point of a curve.

    Attributes:
        length: tokens per window; in a stream, the end of a position bucket.
        perplexity: exp(nats).
        byte_perplexity: exp(total nats / bytes of the scored text).
        stderr: standard error of `perplexity` over the groups of `stderr_over`; None for a single group.
        byte_stderr: standard error of `byte_perplexity`.
        tokens: scored tokens.
        bytes: UTF-8 bytes of the scored tokens.
        nats: mean negative log-likelihood per token.
        windows: windows scored; in a stream, documents that reach the bucket.
        documents: documents they come from.
        stderr_over: "documents" where there are at least two, else "windows".
        buckets: the same by position.
    """

    length: int
    perplexity: float
    byte_perplexity: float
    stderr: float | None
    byte_stderr: float | None
    tokens: int
    bytes: int
    nats: float
    windows: int
    documents: int
    stderr_over: str
    buckets: list[Bucket] = field(default_factory=list)


@dataclass(frozen=True)
class WindowScore:
    """What one window, or one document's part of a bucket, adds to a row; nats are its sum."""

    document: int
    tokens: int
    bytes: int
    nats: float


def score_windows(texts: Texts, windows: Sequence[Window], nats: Sequence[float]) -> list[WindowScore]:
    """Put the nats of every window beside its tokens and bytes."""
    scores = []
    for window, total in zip(windows, nats, strict=True):
        size = texts.documents[window.document].bytes_between(window.end - window.scored, window.end)
        scores.append(WindowScore(window.document, window.scored, size, total))
    return scores


def in_groups(scores: Sequence[WindowScore]) -> list[list[WindowScore]]:
    """Group scores by document, or each by itself where there is one document only."""
    documents = len({score.document for score in scores})
    groups: dict[int, list[WindowScore]] = defaultdict(list)
    for index, score in enumerate(scores):
        groups[score.document if documents > 1 else index].append(score)
    return list(groups.values())


def make_row(length: int, scores: Sequence[WindowScore], buckets: list[Bucket]) -> Row:
    """Total the scores of windows, with errors over documents or, if there is only one, over windows.

    Raises:
        DataError: the nats are not finite.
    """
    total = math.fsum(score.nats for score in scores)
    if not math.isfinite(total):
        raise DataError(f"the model's loss is not finite at length {length}: {NOT_FINITE}")
    documents, groups = len({score.document for score in scores}), in_groups(scores)
    nats = [math.fsum(score.nats for score in group) for group in groups]
    tokens = [sum(score.tokens for score in group) for group in groups]
    sizes = [sum(score.bytes for score in group) for group in groups]
    perplexity, stderr = _exponential(nats, tokens)
    byte_perplexity, byte_stderr = _exponential(nats, sizes)
    return Row(
        length=length,
        perplexity=perplexity,
        byte_perplexity=byte_perplexity,
        stderr=stderr,
        byte_stderr=byte_stderr,
        tokens=sum(tokens),
        bytes=sum(sizes),
        nats=total / sum(tokens),
        windows=len(scores),
        documents=documents,
        stderr_over="documents" if documents > 1 else "windows",
        buckets=buckets,
    )


def _exponential(nats: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """Compute exp(m) and its standard error exp(m) * se(m),  m = sum(nats) / sum(counts)."""
    value = math.exp(math.fsum(nats) / max(sum(counts), 1))
    error = ratio_error(nats, counts)
    return value, None if error is None else value * error


def ratio_error(sums: Sequence[float], counts: Sequence[int]) -> float | None:
    """Compute sqrt(G / (G - 1) * sum_g (s_g - m n_g)^2) / sum_g n_g,  m = sum(s) / sum(n).

    The standard error of a ratio over G sampled groups, each with a sum s_g over n_g tokens or bytes; None
    for a single group.
    """
    groups, count = len(sums), sum(counts)
    if groups < 2 or not count:
        return None
    mean = math.fsum(sums) / count
    squares = math.fsum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return math.sqrt(groups / (groups - 1) * squares) / count
