"""What is measured, in which order, and what comes of it: nothing that is there already is measured again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

from torch import nn
from tqdm import tqdm

from hf_linattn.errors import OptionError
from hf_linattn.patching.reuse import reusing_layers

from ..common.windows import Bos, encode, plan_windows
from .measure import Evaluator, Key, Measured, Recall, key_of
from .model import OWN, Layer, Spec, layers_of
from .ranking import (
    FEW,
    RANKS,
    Rank,
    Ranking,
    Sense,
    by_recall,
    layer_values,
    noise_threshold,
    numbers_of,
    ordered,
    recalls,
    reference,
    scores_of,
    single_layer,
)


@dataclass
class Schedule:
    """Arrangements of one model, each measured once.

    Attributes:
        layers: of the model.
        evaluator: gives the model with what it is measured on; called when something is missing.
        rows: what was measured.
        save: called after each measurement.
        progress: show a bar on stderr.
    """

    layers: Sequence[Layer]
    evaluator: Callable[[], Evaluator]
    rows: dict[Key, Measured] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None
    progress: bool = False

    def measure(
        self, arrangements: Iterable[Collection[int]], kept: Spec = (OWN, {}), *, recall: bool
    ) -> None:
        """Measure what is missing of these arrangements, each the layers that have `kept` as attention."""
        keys = list(dict.fromkeys(key_of(own, kept[0]) for own in arrangements))
        missing = [key for key in keys if key not in self.rows]
        bare = [key for key in keys if key in self.rows and recall and self.rows[key].recall is None]
        if not missing and not bare:
            return
        evaluator = self.evaluator()
        total = evaluator.size * len(missing)
        reusing = reusing_layers(evaluator.model) if kept[0] == OWN else nullcontext()
        with tqdm(total=total, unit="tok", unit_scale=True, disable=not self.progress) as bar, reusing:
            for own, name in missing:
                bar.set_description(_title(self.layers, own, name))
                self._add(evaluator.measure(own, kept, recall=recall, advance=bar.update))
            for key in bare:
                bar.set_description(f"recall, {_title(self.layers, *key)}")
                self._add(evaluator.with_recall(self.rows[key], kept))

    def _add(self, row: Measured) -> None:
        self.rows[row.key] = row
        self.save()

    def original(self, *, recall: bool) -> Measured:
        """Measure the model with its own attention in every layer."""
        own = reference(self.layers, "replace")
        self.measure([own], recall=recall)
        return self.rows[key_of(own)]

    def ranking(self, rank: Rank | None, sense: Sense, *, recall: bool, force: bool = False) -> Ranking:
        """Measure the layers one by one and rank them.

        Args:
            rank: None takes "kl" where the original cannot recall, "logprob" where it was asked fewer than
                `FEW` questions, else "recall_over_perplexity".
            sense: see `single_layer`.
            recall: whether recall is asked for at all.
            force: rank by recall also where the original has none to speak of.

        Raises:
            OptionError: a rank by recall, of a model that cannot recall.
        """
        original = self.original(recall=recall)
        usable = recall and (force or recalls(original))
        if rank is not None and by_recall(rank) and not usable:
            raise OptionError(
                f"{_why_not(original)}. Take --rank kl or perplexity, or --force-recall"
                if recall
                else f"{rank} needs recall, and no task is measured"
            )
        by_answers: Rank = "logprob" if original.samples < FEW else "recall_over_perplexity"
        chosen = rank or (by_answers if usable else "kl")
        note = f"{_why_not(original)}, so layers are ranked by {chosen}" if recall and not usable else ""
        self.measure([reference(self.layers, sense), (), *single_layer(self.layers, sense)], recall=usable)
        values = layer_values(self.layers, self.rows, sense)
        if not usable:
            values.pop("recall", None)
        scores = scores_of(values, noise_threshold(original), chosen)
        order = ordered(self.layers, scores[chosen], values)
        return Ranking(list(self.layers), chosen, sense, order, scores, values, self.rows, note)

    def tradeoff(
        self, ranking: Ranking, curves: Sequence[str], counts: Sequence[int], kept: Sequence[Spec]
    ) -> list[dict[str, Any]]:
        """Measure so many softmax layers by each curve, and other attentions in them along the chosen rank.

        Args:
            ranking: of the layers.
            curves: ranks, or "even".
            counts: numbers of softmax layers.
            kept: other attentions to try in them.

        Returns:
            A row per curve, kept attention and count: "curve", "kept", "count" and "key" of the measurement.
        """
        recall = "recall" in ranking.layer_values
        points = []
        pairs: list[tuple[str, Spec]] = [(curve, (OWN, {})) for curve in curves]
        for curve, spec in [*pairs, *((ranking.rank, spec) for spec in kept)]:
            sets = {count: ranking.kept(count, curve) for count in counts}
            self.measure(sets.values(), spec, recall=recall)
            for count, own in sets.items():
                key = key_of(own, spec[0])
                points.append({"curve": curve, "kept": spec[0], "count": count, "key": key})
        return points


def _title(layers: Sequence[Layer], own: Collection[int], kept: str) -> str:
    linear = [number for number in numbers_of(layers) if number not in own]
    if not own or not linear:
        return "all linear" if not own else f"all {kept}"
    few, what = (own, kept) if len(own) <= len(linear) else (linear, "linear")
    return f"{what}: {','.join(map(str, few))}"


def _why_not(original: Measured) -> str:
    assert original.accuracy is not None
    assert original.chance is not None
    return (
        f"the original's recall is {100 * original.accuracy:.3g} % in {original.samples} samples "
        f"(chance {100 * original.chance:.2g} %): it cannot do the task, and what a layer costs in it would "
        "be noise"
    )


def rank_layers(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str],
    *,
    rank: Rank | None = None,
    sense: Sense = "replace",
    length: int = 512,
    max_tokens: int | None = 16384,
    recall: Recall | None = None,
    force_recall: bool = False,
    batch_size: int = 1,
    bos: Bos = "auto",
    join: bool = False,
    progress: bool = False,
) -> Ranking:
    """Measure each layer of a model that is linear everywhere, and rank which should stay softmax.

    Args:
        model: patched in every layer, its other weights those of the original; left unchanged.
        tokenizer: its tokenizer.
        documents: held-out texts.
        rank: "recall_over_perplexity", "recall", "logprob", "perplexity" or "kl"; None for the last where the
            original cannot recall, "logprob" where it was asked fewer than 20 questions, else the first.
        sense: "replace" puts the linear form into one layer of the original; "restore" gives one layer of the
            linear model its own attention back.
        length: tokens per window; windows lie side by side.
        max_tokens: tokens read per arrangement; None takes all.
        recall: questions of recall; None for none.
        force_recall: rank by recall also where the original has none to speak of.
        batch_size: windows per forward pass.
        bos: see `windows.encode`.
        join: one document of all.
        progress: show bars on stderr.

    Raises:
        OptionError: a rank by recall that cannot be had; an argument out of its range.
        NotPatchedError, PlanError, UnsupportedModelError: see `layers_of`.
        DataError: the text is too short, or the loss is not finite.
    """
    if rank is not None and rank not in RANKS:
        raise OptionError(f"rank must be one of {', '.join(RANKS)}, got {rank!r}")
    if sense not in get_args(Sense):
        raise OptionError(f"sense must be replace or restore, got {sense!r}")
    layers = layers_of(model)
    texts = encode(tokenizer, documents, bos=bos, join=join)
    plan = plan_windows(texts, [length], stride="full", max_tokens=max_tokens)
    evaluator = Evaluator(model, tokenizer, layers, plan, recall, batch_size)
    schedule = Schedule(layers, lambda: evaluator, progress=progress)
    return schedule.ranking(rank, sense, recall=recall is not None, force=force_recall)
