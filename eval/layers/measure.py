"""One arrangement of linear layers and softmax layers, measured: perplexity, KL to the original, recall."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn import bypassed
from hf_linattn.errors import OptionError

from ..common.nll import LOSS_CHUNK, scoring, window_logits
from ..common.statistics import in_groups, make_row, ratio_error, score_windows
from ..common.windows import Plan
from .model import OWN, Layer, Spec, with_own

Key = tuple[tuple[int, ...], str]
"""What tells arrangements apart: numbers of the layers that are not linear, and what they are."""


@dataclass(frozen=True)
class Measured:
    """What one arrangement does.

    Attributes:
        own: numbers of the layers that do not have their linear form.
        kept: the attention of those: "softmax", or a patch such as "nope+logn".
        tokens: scored; nats: mean negative log-likelihood per token; perplexity: exp(nats); stderr: of that,
            over documents, or windows of a single one.
        kl: KL(original || this) in nats per token; kl_stderr: over the same groups.
        recall: rows of `eval.recall`, None where it was not measured.
    """

    own: tuple[int, ...]
    kept: str
    tokens: int
    nats: float
    perplexity: float
    stderr: float | None
    kl: float
    kl_stderr: float | None
    recall: list[dict[str, Any]] | None = None

    @property
    def key(self) -> Key:
        """What tells arrangements apart."""
        return self.own, self.kept

    @property
    def samples(self) -> int:
        """Questions of recall."""
        return sum(row["samples"] for row in self.recall or [])

    @property
    def accuracy(self) -> float | None:
        """Share of the questions of recall that are answered."""
        return _mean("accuracy", self.recall or [])

    @property
    def chance(self) -> float | None:
        """Share that guessing answers."""
        return _mean("chance", self.recall or [])

    @property
    def logprob(self) -> float | None:
        """Mean log-probability of the right answers, in nats."""
        return _mean("logprob", self.recall or [])

    def accuracy_at(self, length: int) -> float | None:
        """Compute `accuracy` among the questions of one length."""
        return _mean("accuracy", [row for row in self.recall or [] if row["length"] == length])


def _mean(name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    samples = sum(row["samples"] for row in rows)
    return math.fsum(row[name] * row["samples"] for row in rows) / samples if samples else None


def key_of(own: Collection[int], kept: str = OWN) -> Key:
    """Make the `Measured.key` of an arrangement; without layers there is nothing to keep."""
    return tuple(sorted(own)), kept if own else OWN


@dataclass(frozen=True)
class Recall:
    """Arguments of `eval.recall.measure_recall`."""

    tasks: tuple[str, ...] = ("induction",)
    lengths: tuple[int, ...] = (512,)
    samples: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Evaluator:
    """A model and what it is measured on.

    Attributes:
        model: patched in every layer; left unchanged.
        tokenizer: its tokenizer.
        layers: of `layers_of`.
        plan: windows of one length.
        recall: None for none.
        batch_size: windows per forward pass.
    """

    model: nn.Module
    tokenizer: Any
    layers: Sequence[Layer]
    plan: Plan
    recall: Recall | None = field(default_factory=Recall)
    batch_size: int = 1

    def __post_init__(self) -> None:
        """Refuse what no measurement could use."""
        if self.batch_size < 1:
            raise OptionError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def size(self) -> int:
        """Tokens read for one arrangement, by the original and by what is measured."""
        length = self.plan.lengths[0]
        return 2 * length * len(self.plan.windows(length))

    def measure(
        self,
        own: Collection[int],
        kept: Spec,
        *,
        recall: bool,
        advance: Callable[[int], object] = lambda tokens: None,
    ) -> Measured:
        """Measure one arrangement.

        Args:
            own: numbers of the layers that do not have their linear form.
            kept: the attention of those.
            recall: whether to ask for recall too.
            advance: is called with the tokens read.

        Raises:
            DataError: the loss is not finite.
            LinattnError: `kept` does not suit the model.
        """
        key = key_of(own, kept[0])
        with with_own(self.model, self.layers, own, kept) as names:
            asked = self._recall(names) if recall else None  # first: it may refuse what was asked for
            row, kl, kl_stderr = self._text(names, advance)
        return Measured(*key, row.tokens, row.nats, row.perplexity, row.stderr, kl, kl_stderr, asked)

    def with_recall(self, row: Measured, kept: Spec) -> Measured:
        """Add the recall to a row that was measured without it."""
        with with_own(self.model, self.layers, row.own, kept) as names:
            return replace(row, recall=self._recall(names))

    def _text(self, names: list[str], advance: Callable[[int], object]) -> tuple[Any, float, float | None]:
        length = self.plan.lengths[0]
        windows = self.plan.windows(length)
        nats, divergences = [], []
        with scoring(self.model):
            for start in range(0, len(windows), self.batch_size):
                batch = windows[start : start + self.batch_size]
                with bypassed(self.model):
                    original, targets = window_logits(self.model, self.plan.texts, batch)
                advance(len(batch) * length)
                with bypassed(self.model, names):
                    logits, _ = window_logits(self.model, self.plan.texts, batch)
                advance(len(batch) * length)
                sums = _sums(original, logits, targets)
                nats += sums[0]
                divergences += sums[1]
        row = make_row(length, score_windows(self.plan.texts, windows, nats), [])
        groups = in_groups(score_windows(self.plan.texts, windows, divergences))
        sums_of = [math.fsum(score.nats for score in group) for group in groups]
        tokens = [sum(score.tokens for score in group) for group in groups]
        return row, math.fsum(divergences) / row.tokens, ratio_error(sums_of, tokens)

    def _recall(self, names: list[str]) -> list[dict[str, Any]] | None:
        if self.recall is None:
            return None
        from ..recall import measure_recall

        with bypassed(self.model, names):
            rows = measure_recall(self.model, self.tokenizer, **vars(self.recall))
        return [asdict(row) for row in rows]


def _sums(original: Tensor, other: Tensor, targets: Tensor) -> tuple[list[float], list[float]]:
    """Sum nats of `other` and KL(original || other) by row, from logits `[B, N, V]`, tokens `[B, N]`."""
    # in float64 on the CPU: Apple's GPUs do not have it
    nats = torch.zeros(len(targets), dtype=torch.float64)
    divergences = torch.zeros_like(nats)
    parts = zip(*(x.split(LOSS_CHUNK, 1) for x in (original, other, targets)), strict=True)
    for first, second, tokens in parts:
        log_p, log_q = (x.float().log_softmax(-1) for x in (first, second))
        nats -= log_q.gather(-1, tokens[..., None])[..., 0].cpu().double().sum(1)
        p = log_p.exp()
        # a token that the model rules out has no part in the sum, and -inf - -inf is no number
        divergences += torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1).cpu().double().sum(1)
    return nats.tolist(), divergences.tolist()
