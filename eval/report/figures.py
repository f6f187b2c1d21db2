"""Draw the report's figures as SVG, each in a light and a dark version."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..bench.plots import draw_cost
from ..common.models import UNPATCHED
from ..common.plotting import Picture, log2_axis, look, themed
from ..recall import plot as recall_plot
from .rows import Comparison, Curves, ModelRow

OLDER = "loss"
"""The unit of runs whose results.json does not tell it."""
PANELS_IN_A_ROW = 2


def style(comparison: Comparison, row: ModelRow, ink: str) -> dict[str, Any]:
    """Return colour, marker and line of a row, the same in all figures."""
    if row.role == "control":
        return {"color": ink, "marker": "o", "linestyle": "-"}
    others = [each.name for each in comparison.rows if each.role == "patch"]
    return look(others.index(row.name) if row.role == "patch" else None)


def length_curves(comparison: Comparison, curves: Curves) -> Picture:
    """Draw perplexity over tokens of context, both logarithmic."""

    def draw(axes: Axes, row: ModelRow, looks: dict[str, Any]) -> tuple[float, float]:
        lengths = [point.length for point in row.points]
        values = [point.perplexity for point in row.points]
        errors = [point.stderr or 0.0 for point in row.points]
        axes.errorbar(
            lengths, values, errors, **looks, linewidth=2, markersize=5.5, capsize=2.5, elinewidth=1
        )
        return lengths[-1], values[-1]

    shown = "; ".join(
        f"{row.name}: " + ", ".join(f"{p.perplexity:.4g} at {p.length:,}" for p in row.points)
        for row in curves.rows
    )

    def finish(axes: Axes) -> None:
        _log_axes(axes, curves.lengths, curves.train_length)
        axes.set(xlabel="tokens of context", ylabel="perplexity per token (lower is better)")

    build = partial(_curves, comparison, curves.rows, draw, finish, 5.2)
    return themed(build, f"Perplexity against context length. {shown}.")


def bucket_curves(comparison: Comparison, curves: Curves) -> Picture | None:
    """Draw perplexity by position in the longest window; None where windows are scored at their ends only."""
    rows = [row for row in curves.rows if len(row.points[-1].buckets) > 2]
    if not rows:
        return None

    def draw(axes: Axes, row: ModelRow, looks: dict[str, Any]) -> tuple[float, float]:
        buckets = row.points[-1].buckets
        positions = [math.sqrt(max(bucket["start"], 1) * bucket["end"]) for bucket in buckets]
        values = [bucket["perplexity"] for bucket in buckets]
        axes.plot(positions, values, **looks, linewidth=2, markersize=5)
        return positions[-1], values[-1]

    def finish(axes: Axes) -> None:
        _log_axes(axes, [bucket["end"] for bucket in rows[0].points[-1].buckets], curves.train_length)
        axes.set(xlabel="position in the window", ylabel="perplexity per token")

    build = partial(_curves, comparison, rows, draw, finish, 4.6)
    return themed(build, "Perplexity by the position of a token in the longest window.")


def _curves(
    comparison: Comparison,
    rows: Sequence[ModelRow],
    draw: Callable[[Axes, ModelRow, dict[str, Any]], tuple[float, float]],
    finish: Callable[[Axes], None],
    height: float,
    ink: str,
    grid: str,
) -> Figure:
    """Draw a curve per row, its name at its end; `draw` returns where that is."""
    figure = Figure(figsize=(9.6, height))
    figure.subplots_adjust(left=0.08, right=0.76, bottom=0.12, top=0.97)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)
    axes.grid(linewidth=0.7)
    axes.set_axisbelow(True)
    ends = []
    for row in rows:
        looks = style(comparison, row, ink)
        ends.append((row.name, *draw(axes, row, looks), str(looks["color"])))
    finish(axes)
    _label_ends(axes, ends)
    return figure


def recall_maps(comparison: Comparison) -> list[tuple[str, str, Picture]]:
    """Return (task, letter of its group, heatmap with the rows side by side), one per task and group."""
    pictures = []
    for letter, rows in comparison.grouped("recall"):
        for task in dict.fromkeys(line["task"] for row in rows for line in row.recall):
            lines = [{**ln, "model": row.name} for row in rows for ln in row.recall if ln["task"] == task]
            verdict = comparison.verdicts.get(task)
            shown = "; ".join(f"{row.name}: {_accuracies(row, task)}" for row in rows)
            picture = themed(
                lambda ink, grid, lines=lines, verdict=verdict: recall_plot.heatmap(lines, verdict),  # type: ignore[misc]
                f"Recall of {task} by length and depth. {shown}.",
            )
            pictures.append((task, letter, picture))
    return pictures


def _accuracies(row: ModelRow, task: str) -> str:
    by_length: dict[int, list[float]] = {}
    for line in row.recall:
        if line["task"] == task:
            by_length.setdefault(line["length"], []).append(line["accuracy"])
    means = [f"{100 * fmean(own):.1f} % at {length:,}" for length, own in sorted(by_length.items())]
    return ", ".join(means) or "not asked"


def loss_curves(comparison: Comparison) -> Picture | None:
    """Draw training and validation loss over tokens, a panel per kind of stage, as their units differ."""
    curves: dict[tuple[str, str], list[tuple[ModelRow, list[dict[str, str]]]]] = {}
    for row in comparison.rows:
        for stage in row.stages:
            name = stage.name if "convert" in row.results else "fine-tuning"
            unit = stage.results.get("label", OLDER)
            curves.setdefault((name, unit), []).append((row, stage.losses))
    if not curves:
        return None

    def build(ink: str, grid: str) -> Figure:
        columns = min(PANELS_IN_A_ROW, len(curves))
        lines = math.ceil(len(curves) / columns)
        size = (9.6, 4.4) if len(curves) == 1 else (1.4 + 4.4 * columns, 3.4 * lines + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for ax in axes.flat[len(curves) :]:
            ax.set_axis_off()
        handles: dict[str, Any] = {}
        for ax, ((name, unit), runs) in zip(axes.flat, curves.items(), strict=False):
            for row, losses in runs:
                look_ = style(comparison, row, ink)
                ax.plot(*_column(losses, "loss"), color=look_["color"], linewidth=1, alpha=0.35)
                (line,) = ax.plot(*_column(losses, "eval_loss"), linewidth=1.8, markersize=5, **look_)
                handles.setdefault(row.name, line)
            ax.set(title=f"stage {name}" if name != "fine-tuning" else name, xlabel="tokens", ylabel=unit)
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            ax.tick_params(labelsize=8)
            ax.grid(linewidth=0.7)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", frameon=False, ncols=4
        )
        return figure

    shown = []
    for (name, _), runs in curves.items():
        for row, losses in runs:
            _, values = _column(losses, "eval_loss")
            values = values or _column(losses, "loss")[1]
            shown += [f"{row.name}, {name}: {values[0]:.4g} to {values[-1]:.4g}"] if values else []
    return themed(build, f"Losses of every training stage. {'; '.join(shown)}.")


def _column(losses: Sequence[Mapping[str, str]], name: str) -> tuple[list[int], list[float]]:
    points = [(int(row["tokens"]), float(row[name])) for row in losses if row.get(name)]
    return [tokens for tokens, _ in points], [value for _, value in points]


def cost_curves(comparison: Comparison) -> list[tuple[str, Picture]]:
    """Return (letter of its group, figure), the unpatched model of each run pale next to its row."""
    pictures = []
    for letter, rows in comparison.grouped("cost"):

        def build(ink: str, grid: str, rows: list[ModelRow] = rows) -> Figure:
            figure = Figure(figsize=(11.5, 3.9 + 0.2 * (len(rows) // 2)), layout="constrained")
            curves: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Any]]] = []
            for row in rows:
                look_ = style(comparison, row, ink)
                if row.unpatched_cost:
                    pale = {**look_, "linestyle": "--", "alpha": 0.4}
                    curves.append((f"{row.name}, {UNPATCHED}", row.unpatched_cost, pale))
                curves.append((row.name, row.cost, look_))
            draw_cost(figure, curves)
            return figure

        shown = "; ".join(
            f"{row.name}: "
            + ", ".join(f"{line['cache_bytes']:,} B at {line['length']:,}" for line in row.cost)
            for row in rows
        )
        alt = f"Bytes of the cache and tokens per second by length. {shown}."
        pictures.append((letter, themed(build, alt)))
    return pictures


def _log_axes(axes: Axes, lengths: Sequence[int], train_length: int | None) -> None:
    """Make both axes logarithmic, name the lengths, and mark the length that the model was trained at."""
    log2_axis(axes, lengths, "{:,.0f}")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # few decades want more numbers on the axis than the powers of ten
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    if high < 8 * low:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if train_length:
        colour = axes.xaxis.label.get_color()
        axes.axvline(train_length, color=colour, linewidth=1, linestyle=":", zorder=1)
        place: Any = {"xycoords": ("data", "axes fraction"), "xytext": (5, -12)}
        text = f"trained at {train_length:,}"
        axes.annotate(text, (train_length, 1.0), **place, textcoords="offset points", fontsize=9)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Write names at the ends of the lines, moved apart where they would overlap."""
    axes.get_ylim()  # settles the limits, on which the transformation rests
    height = float(axes.get_window_extent().height) * 72 / float(axes.figure.dpi)  # points
    places = []
    for name, x, y, colour in ends:
        at = axes.transLimits.transform(axes.transScale.transform((x, y)))
        places.append((float(at[1]) * height, name, x, y, colour))
    places.sort()
    gap, last = 13.5, -math.inf
    spots = []
    for place, *_ in places:
        last = max(place, last + gap)
        spots.append(last)
    # down again by half of what the uppermost was moved up, so that the names stay around their lines
    excess = (spots[-1] - places[-1][0]) / 2
    for spot, (place, name, x, y, colour) in zip(spots, places, strict=True):
        offset: Any = {"xytext": (12, spot - place - excess), "textcoords": "offset points"}
        axes.annotate(name, (x, y), **offset, color=colour, va="center", fontsize=10, annotation_clip=False)
