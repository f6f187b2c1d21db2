"""Which layers stay softmax, in arithmetic alone: worth, scores, orders, plans."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hf_linattn.errors import OptionError

from .measure import Key, Measured, key_of
from .model import OWN, Layer, Spec

Rank = Literal["recall_over_perplexity", "recall", "logprob", "perplexity", "kl"]
RANKS: tuple[Rank, ...] = get_args(Rank)
Sense = Literal["replace", "restore"]
SENSES: tuple[Sense, ...] = get_args(Sense)
EVEN = "even"
CAP = 50.0
"""Highest `recall_over_perplexity`, HALO's."""
LEAST_RECALL = 0.1
"""Recall of the original above chance below which what a layer costs cannot be told from noise."""
LEAST_LOGPROB = 0.1
"""Nats of log-probability of an answer below which a loss does not decide between layers."""
FEW = 20
"""Questions of recall below which their log-probability ranks the layers, and not how many are answered."""
NOTHING = 1e-12
"""Differences of accuracies and nats up to here are rounding."""

Rows = Mapping[Key, Measured]


def by_recall(rank: str) -> bool:
    """Tell whether the rank needs recall."""
    return rank == "logprob" or rank.startswith("recall")


def numbers_of(layers: Sequence[Layer]) -> list[int]:
    """List the layers' numbers, in order."""
    return [layer.number for layer in layers]


def single_layer(layers: Sequence[Layer], sense: Sense) -> list[tuple[int, ...]]:
    """List for each layer which layers have their own attention when it is measured.

    "replace": all but this one. "restore": this one alone.
    """
    numbers = numbers_of(layers)
    if sense == "restore":
        return [(number,) for number in numbers]
    return [tuple(sorted(other for other in numbers if other != number)) for number in numbers]


def reference(layers: Sequence[Layer], sense: Sense) -> tuple[int, ...]:
    """Name the layers with their own attention in the model to compare with: all, or none."""
    return tuple(sorted(numbers_of(layers))) if sense == "replace" else ()


def recalls(original: Measured) -> bool:
    """Tell whether the original's recall is far enough above chance for losses to be seen."""
    if original.accuracy is None or original.chance is None:
        return False
    return original.accuracy - original.chance >= LEAST_RECALL


def layer_values(layers: Sequence[Layer], rows: Rows, sense: Sense) -> dict[str, list[float]]:
    """Compute what each layer's own attention is worth: what its loss costs, or its return brings.

    "perplexity" and "kl" in nats per token, "recall" in accuracy, "logprob" in nats of the right answer's
    log-probability; the last two are absent where none was measured.
    """
    before, sign = rows[key_of(reference(layers, sense))], 1 if sense == "replace" else -1
    after = [rows[key_of(own)] for own in single_layer(layers, sense)]
    values = {
        "perplexity": [sign * (row.nats - before.nats) for row in after],
        "kl": [sign * (row.kl - before.kl) for row in after],
    }
    accuracies = [row.accuracy for row in after]
    if before.accuracy is not None and None not in accuracies:
        values["recall"] = [sign * (before.accuracy - (x or 0.0)) for x in accuracies]
        nats = before.logprob or 0.0
        values["logprob"] = [sign * (nats - (row.logprob or 0.0)) for row in after]
    return values


def noise_threshold(original: Measured) -> float:
    """Compute the recall that a layer must lose for it to count: two standard errors, or one sample.

    The errors are those of the original's recall over its samples.
    """
    rows = original.recall or []
    squares = math.fsum(((row["stderr"] or 0.0) * row["samples"]) ** 2 for row in rows)
    samples = max(original.samples, 1)
    return max(2 * math.sqrt(squares) / samples, 1 / samples)


def beyond_noise(recall: Sequence[float], noise: float) -> list[float]:
    """Compute recall lost beyond the layer that loses least; 0 where it is not more than the noise."""
    least = min(recall)
    return [lost - least if lost - least > max(noise, NOTHING) else 0.0 for lost in recall]


def recall_over_perplexity(
    recall: Sequence[float], perplexity: Sequence[float], noise: float = 0.0
) -> list[float]:
    """Score recall lost over nats lost beyond the layer that loses least: min(50, (r - min r) / (p - min p)).

    HALO's score (arXiv:2601.22156), min(50, (max R - R) / (max C - C)), with R the recall of the model in
    which one layer was replaced, the maximum over those models, and the negative nats per token in the place
    of its C, the accuracy in commonsense questions. What differs: a recall lost that noise explains is 0, and
    so is its score. Else the layer that loses the least nats, whose denominator is 0, would come first for
    one answer of a thousand. Where it does lose recall, its score is 50.
    """
    cheapest = min(perplexity)
    scores = []
    for above, nats in zip(beyond_noise(recall, noise), perplexity, strict=True):
        below = nats - cheapest
        ratio = CAP if below <= NOTHING else min(CAP, above / below)
        scores.append(ratio if above else 0.0)
    return scores


def scores_of(
    values: Mapping[str, Sequence[float]], noise: float = 0.0, chosen: str = ""
) -> dict[str, list[float]]:
    """Score the layers by each rank, highest where softmax should stay; by recall only where there is any.

    Where `chosen` is "logprob", shares of questions say nothing beside it.
    """
    scores: dict[str, list[float]] = {rank: list(values[rank]) for rank in ("perplexity", "kl")}
    if chosen == "logprob":
        lost = [nats if nats > LEAST_LOGPROB else 0.0 for nats in values["logprob"]]
        scores = {"logprob": lost, **scores}
    elif "recall" in values:
        ratio = recall_over_perplexity(values["recall"], values["perplexity"], noise)
        scores = {"recall_over_perplexity": ratio, **scores, "recall": beyond_noise(values["recall"], noise)}
    return scores


def ordered(
    layers: Sequence[Layer], scores: Sequence[float], values: Mapping[str, Sequence[float]]
) -> list[int]:
    """Order the layers' numbers, the first to stay first.

    Equal scores go by what a layer costs the right answers in log-probability, where that is measured and
    more than `LEAST_LOGPROB`; then by KL, then by number. A layer alone seldom turns an answer that is sure.

    Args:
        layers: all of them.
        scores: of each.
        values: as `layer_values` computes them.
    """
    lost = values.get("logprob", [0.0] * len(layers))
    keys = zip(scores, lost, values["kl"], numbers_of(layers), strict=True)
    ranked = sorted(
        (-round(score, 12), -nats if nats > LEAST_LOGPROB else 0.0, -kl, number)
        for score, nats, kl, number in keys
    )
    return [number for *_, number in ranked]


def even(layers: Sequence[Layer], keep: int) -> tuple[int, ...]:
    """Choose so many layers at even distances: places floor((2 i + 1) L / 2 keep)."""
    numbers = numbers_of(layers)
    return tuple(numbers[(2 * i + 1) * len(numbers) // (2 * keep)] for i in range(keep))


@dataclass(frozen=True)
class Ranking:
    """Layers in the order in which they should stay softmax.

    Attributes:
        layers: all of them, as in the model.
        rank, sense: how they were ranked; note: why so, where that was not what was asked for.
        order: numbers of the layers, the first to stay first.
        scores: rank -> score per layer, for every rank that can be had.
        layer_values: measure -> what each layer's own attention is worth.
        rows: everything that was measured.
        most: tokens that softmax layers of the plan keep; None for all.
    """

    layers: list[Layer]
    rank: str
    sense: Sense
    order: list[int]
    scores: dict[str, list[float]]
    layer_values: dict[str, list[float]]
    rows: dict[Key, Measured]
    note: str = ""
    most: int | None = None

    def state_bytes(self, own: Collection[int], tokens: int) -> int | None:
        """Count bytes of one sequence with softmax in the layers `own`; see `state_bytes`."""
        return state_bytes(self.layers, own, tokens, self.most)

    def kept(self, keep: int, curve: str | None = None) -> tuple[int, ...]:
        """Choose the layers that stay, by the chosen rank, another one, or `even`.

        Raises:
            OptionError: there are not so many layers.
        """
        if not 0 <= keep <= len(self.layers):
            raise OptionError(
                f"{keep} softmax layers of {len(self.layers)}: expected 0 to {len(self.layers)}"
            )
        if curve == EVEN:
            return even(self.layers, keep)
        if curve in (None, self.rank):
            return tuple(sorted(self.order[:keep]))
        return tuple(sorted(ordered(self.layers, self.scores[str(curve)], self.layer_values)[:keep]))


def plan_for(ranking: Ranking, keep: int, kept: Spec | str = OWN) -> dict[str, Any]:
    """Make a plan for `patch_model` that keeps so many layers; JSON can hold it.

    Args:
        ranking: of `rank_layers`.
        keep: number of softmax layers.
        kept: their attention: "softmax", or a patch and its options, such as ("nope", {}).

    Raises:
        OptionError: there are not so many layers.
    """
    return plan_of(ranking.layers, ranking.kept(keep), kept)


def plan_of(layers: Sequence[Layer], own: Collection[int], kept: Spec | str = OWN) -> dict[str, Any]:
    """Make a plan such as `{"0,2-5": "hedgehog", "1": "softmax"}`: `kept` in the layers `own`."""
    stays = (kept, {}) if isinstance(kept, str) else kept
    specs = [stays if layer.number in own else (layer.patch, layer.options) for layer in layers]
    plan: dict[str, Any] = {}
    for index, (patch, options) in enumerate(specs):
        if (patch, options) in specs[:index]:
            continue
        members = [layer for layer, spec in zip(layers, specs, strict=True) if spec == (patch, options)]
        value = [patch, options] if any(options.values()) else patch
        if all(layer.key.isdecimal() for layer in members):
            plan[_ranges([layer.number for layer in members])] = value
        else:
            plan.update({layer.key: value for layer in members})
    return plan


def _ranges(numbers: list[int]) -> str:
    """Write numbers as ranges: [0, 2, 3, 4] -> "0,2-4"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def state_bytes(
    layers: Sequence[Layer], own: Collection[int], tokens: int, most: int | None = None
) -> int | None:
    """Count bytes of one sequence's state and cache after so many tokens; None where a layer's are unknown.

    A layer with a window of the model's is counted with all tokens: what its cache holds is its
    implementation's choice.

    Args:
        layers: all of them.
        own: numbers of the softmax layers.
        tokens: of the sequence.
        most: tokens that a softmax layer keeps, for which it has its memory from the first on; None for all.
    """
    total = 0
    for layer in layers:
        linear = layer.number not in own
        if linear and layer.state_bytes is not None:
            total += layer.state_bytes
        elif layer.bytes_per_token is None:
            return None
        else:
            total += layer.bytes_per_token * (tokens if linear or most is None else most)
    return total
