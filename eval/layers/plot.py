"""Pictures of `eval.layers`: what each layer is worth, and what softmax layers buy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from hf_linattn.cli.files import replacing

from ..common.plotting import look
from .model import OWN
from .outputs import Point, label
from .ranking import EVEN, Ranking, numbers_of

TITLES = {
    "recall_over_perplexity": "recall lost over nats lost",
    "recall": "recall lost",
    "logprob": "log-probability of answers lost",
    "perplexity": "nats per token lost",
    "kl": "KL to the original",
}
MIB = 2**20


def save_layers(path: Path, ranking: Ranking) -> None:
    """Draw a bar per layer and rank: its score. The rank that decides is in colour."""
    scores = ranking.scores
    rows = 1 if len(scores) < 3 else 2
    columns = -(-len(scores) // rows)
    width = max(3.6, 1.2 + 0.25 * len(ranking.layers))
    figure = Figure(figsize=(width * columns, 2.9 * rows), layout="constrained")
    numbers = [str(number) for number in numbers_of(ranking.layers)]
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, (rank, values) in zip(grid.flat, scores.items(), strict=False):
        style = look(0 if rank == ranking.rank else None)
        axes.bar(numbers, values, color=style["color"])
        title = TITLES[rank] if ranking.sense == "replace" else TITLES[rank].replace("lost", "gained")
        axes.set(title=title + (" (the rank)" if rank == ranking.rank else ""), xlabel="layer")
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        if len(numbers) > 24:
            axes.xaxis.set_major_locator(MaxNLocator(16, integer=True))
    _save(figure, path)


def save_tradeoff(path: Path, ranking: Ranking, points: Sequence[Point], contexts: Sequence[int]) -> None:
    """Draw perplexity, recall where it was measured, and state, over the number of softmax layers.

    Args:
        path: the file.
        ranking: of the layers.
        points: of `Schedule.tradeoff`.
        contexts: tokens for which the state is drawn.
    """
    recall = "recall" in ranking.layer_values
    figure = Figure(figsize=(4.6 * (3 if recall else 2), 4.0), layout="constrained")
    panels = list(figure.subplots(1, 3 if recall else 2))
    labels = list(dict.fromkeys((point["curve"], point["kept"]) for point in points))
    for index, (curve, kept) in enumerate(labels):
        chosen = [point for point in points if (point["curve"], point["kept"]) == (curve, kept)]
        rows = [ranking.rows[point["key"]] for point in chosen]
        counts = [point["count"] for point in chosen]
        style = look(None if (curve, kept) == (EVEN, OWN) else index)
        name = label(curve, kept)
        # no errors over documents: the curves are of the same tokens
        panels[0].plot(counts, [row.perplexity for row in rows], label=name, **style)
        if recall:
            panels[1].plot(counts, [row.accuracy for row in rows], label=name, **style)
    panels[0].set(ylabel="perplexity per token", yscale="log")
    _plain_numbers(panels[0])
    panels[0].legend()
    if recall:
        chance = next(iter(ranking.rows.values())).chance
        panels[1].set(ylabel="recall", ylim=(-0.03, 1.03))
        if chance is not None:
            panels[1].axhline(chance, color="grey", linestyle=":")
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            panels[1].annotate("chance", (1, chance), (-4, 3), ha="right", fontsize=8, **place)
    _draw_state(panels[-1], ranking, contexts)
    for axes in panels:
        axes.set_xlabel("softmax layers kept")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    _save(figure, path)


def _draw_state(axes: Axes, ranking: Ranking, contexts: Sequence[int]) -> None:
    counts = range(len(ranking.layers) + 1)
    for index, tokens in enumerate(contexts):
        sizes = [ranking.state_bytes(ranking.kept(count), tokens) for count in counts]
        if None not in sizes:
            style = {**look(index), "marker": "", "label": f"{tokens:,} tokens"}
            axes.plot(list(counts), [(size or 0) / MIB for size in sizes], **style)
    axes.set(ylabel="state and cache of a sequence, MiB", yscale="log")
    _plain_numbers(axes)
    if axes.get_lines():
        axes.legend()


def _plain_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axes.get_ylim()
    narrow = FuncFormatter(lambda value, _: f"{value:.3g}")
    axes.yaxis.set_minor_formatter(narrow if high < 8 * low else NullFormatter())


def _save(figure: Figure, path: Path) -> None:
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=100)
