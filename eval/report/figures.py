"""The report's figures as SVG, each in a light and a dark version."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..common.plotting import Picture, look, themed
from .summary import Run, Summary


def style(summary: Summary, run: Run, ink: str) -> dict[str, Any]:
    """Colour, marker and line of a run, the same in all figures."""
    if run.role == "control":
        return {"color": ink, "marker": "o", "linestyle": "-"}
    if run.role == "original":
        return look(None)
    return look(summary.patched.index(run) if run.place is None else run.place)


def length_curves(summary: Summary) -> Picture | None:
    """Perplexity over tokens of context, both logarithmic."""
    runs = [run for run in summary.runs if run.points]
    if not runs:
        return None

    def draw(axes: Axes, ink: str, grid: str) -> None:
        ends = []
        for run in runs:
            look = style(summary, run, ink)
            lengths = [point.length for point in run.points]
            values = [point.perplexity for point in run.points]
            errors = [point.stderr or 0.0 for point in run.points]
            axes.errorbar(
                lengths, values, errors, **look, linewidth=2, markersize=5.5, capsize=2.5, elinewidth=1
            )
            ends.append((run.label, lengths[-1], values[-1], str(look["color"])))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _length_axis(axes, summary.lengths)
        _value_axis(axes)
        _mark_train_length(axes, summary, grid)
        axes.set(xlabel="tokens of context", ylabel="perplexity per token (lower is better)")
        _label_ends(axes, ends)

    shown = "; ".join(
        f"{run.label}: " + ", ".join(f"{p.perplexity:.4g} at {p.length:,}" for p in run.points)
        for run in runs
    )
    return _picture(draw, f"Perplexity against context length. {shown}.", (9.6, 5.2))


def loss_curves(summary: Summary) -> Picture | None:
    """Training and validation loss over tokens."""
    runs = [run for run in summary.runs if run.losses]
    if not runs:
        return None

    def draw(axes: Axes, ink: str, grid: str) -> None:
        ends = []
        for run in runs:
            colour = str(style(summary, run, ink)["color"])
            tokens, losses = _column(run, "loss")
            axes.plot(tokens, losses, color=colour, linewidth=1, alpha=0.35)
            tokens, losses = _column(run, "eval_loss")
            axes.plot(tokens, losses, color=colour, marker=style(summary, run, ink)["marker"], linewidth=2)
            if tokens:
                ends.append((run.label, tokens[-1], losses[-1], colour))
        axes.set(xlabel="tokens of fine-tuning", ylabel="loss (nats per token)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _label_ends(axes, ends)

    shown = "; ".join(
        f"{run.label}: {run.tuning['eval_loss_before']:.3f} to {run.tuning['eval_loss']:.3f}"
        for run in runs
        if run.tuning and run.tuning.get("eval_loss") is not None
    )
    return _picture(draw, f"Loss during fine-tuning; validation loss of {shown or 'no run'}.", (9.6, 4.4))


def bucket_curves(summary: Summary) -> Picture | None:
    """Perplexity by position in the longest window; None where windows are scored at their ends only."""
    runs = [run for run in summary.runs if run.points and len(run.points[-1].buckets) > 2]
    if not runs:
        return None

    def draw(axes: Axes, ink: str, grid: str) -> None:
        ends = []
        for run in runs:
            look = style(summary, run, ink)
            buckets = run.points[-1].buckets
            positions = [math.sqrt(max(b["start"], 1) * b["end"]) for b in buckets]
            values = [b["perplexity"] for b in buckets]
            axes.plot(positions, values, **look, linewidth=2, markersize=5)
            ends.append((run.label, positions[-1], values[-1], str(look["color"])))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        _length_axis(axes, [b["end"] for b in runs[0].points[-1].buckets])
        _value_axis(axes)
        _mark_train_length(axes, summary, grid)
        axes.set(xlabel="position in the window", ylabel="perplexity per token")
        _label_ends(axes, ends)

    return _picture(draw, "Perplexity by the position of a token in the longest window.", (9.6, 4.6))


def _column(run: Run, name: str) -> tuple[list[int], list[float]]:
    points = [(int(row["tokens"]), float(row[name])) for row in run.losses if row.get(name)]
    return [tokens for tokens, _ in points], [value for _, value in points]


def _length_axis(axes: Axes, lengths: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(FixedLocator(list(lengths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _value_axis(axes: Axes) -> None:
    low, high = axes.get_ylim()
    # few decades want more numbers on the axis than the powers of ten
    subs: tuple[float, ...] = (1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)
    if high < 8 * low:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _mark_train_length(axes: Axes, summary: Summary, grid: str) -> None:
    if not summary.train_length:
        return
    colour = axes.xaxis.label.get_color()
    axes.axvline(summary.train_length, color=colour, linewidth=1, linestyle=":", zorder=1)
    axes.annotate(
        f"trained at {summary.train_length:,}",
        (summary.train_length, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(5, -12),
        textcoords="offset points",
        fontsize=9,
    )


def _label_ends(axes: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names at the ends of the lines, moved apart where they would overlap."""
    if not ends:
        return
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
        axes.annotate(
            name,
            (x, y),
            xytext=(12, spot - place - excess),
            textcoords="offset points",
            color=colour,
            va="center",
            fontsize=10,
            annotation_clip=False,
        )


def _picture(draw: Callable[[Axes, str, str], None], alt: str, size: tuple[float, float]) -> Picture:
    def build(ink: str, grid: str) -> Figure:
        figure = Figure(figsize=size)
        figure.subplots_adjust(left=0.08, right=0.76, bottom=0.12, top=0.97)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=3)
        axes.grid(linewidth=0.7)
        axes.set_axisbelow(True)
        draw(axes, ink, grid)
        return figure

    return themed(build, alt)
