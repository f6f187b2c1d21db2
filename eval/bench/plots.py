"""Draw time and memory over length, a panel per kind of call, break-even points marked; or a cost run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hf_linattn.cli.files import replacing

from ..common.formatting import size
from ..common.plotting import Picture, log2_axis, look, themed
from .break_even import REFERENCES, BreakEven, faster, groups, names, rows_of, smaller
from .config import IN_PLACE

KINDS = {"prefill": "prefill", "train": "forward and backward", "decode": "decode, one token"}
Row = Mapping[str, Any]
Panels = dict[str, dict[str, list[Row]]]
"""Kind -> candidate -> its rows."""
COST_PANELS = {
    "cache_bytes": "cache or state",
    "prefill_tokens_per_second": "prefill, tokens/s",
    "decode_tokens_per_second": "decode, tokens/s",
}


@dataclass(frozen=True)
class Quantity:
    """A column to draw: its name in files, in words, its unit as text, how to find its break-even point."""

    file: str
    column: str
    title: str
    unit: Callable[[float], str]
    break_even: Callable[[Sequence[Row]], BreakEven | None]


def duration(seconds: float) -> str:
    """Write `20 us`, `3 ms`, `1.5 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor * (1 - 1e-9):
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


QUANTITIES = (
    Quantity("time", "time", "time of one call", duration, faster),
    Quantity("memory", "peak_bytes", "peak memory above the inputs", size, smaller),
)


def tokens(value: float) -> str:
    """Write `512`, `8k`, `128k`: k is 1,024."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


def _panels(
    rows: Sequence[Row], group: tuple[Any, ...], quantity: Quantity
) -> dict[str, dict[str, list[Row]]]:
    """Return kind -> candidate -> its rows with a number, without what has none."""
    panels = {}
    for kind in KINDS:
        own = {name: rows_of(rows, group, kind, name) for name in names(rows, references=True)}
        curves = {name: [row for row in own[name] if row[quantity.column]] for name in own}
        if any(curves.values()):
            panels[kind] = {name: curve for name, curve in curves.items() if curve}
    return panels


def _figure(rows: Sequence[Row], quantity: Quantity, panels: Panels) -> Figure:
    figure = Figure(figsize=(1.0 + 4.3 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    handles: dict[str, Any] = {}
    for ax, (kind, curves) in zip(axes, panels.items(), strict=True):
        for name, own in curves.items():
            points = [(row["length"], row[quantity.column]) for row in own]
            # the same in all figures
            looks = look(names(rows).index(name) if name in names(rows) else None)
            looks |= {"linestyle": ":"} if name == IN_PLACE else {}
            (handles[name],) = ax.plot(*zip(*points, strict=True), linewidth=1.8, markersize=4.5, **looks)
            if name in names(rows):
                _mark(ax, quantity.break_even(own), points, looks)
        lengths = {row["length"] for own in curves.values() for row in own}
        _log_axes(ax, lengths, quantity.unit, in_bytes=quantity.file == "memory")
        ax.set_title(f"{KINDS[kind]}: {quantity.title}", fontsize=10)
        ax.set_xlabel("tokens before" if kind == "decode" else "tokens")
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", frameon=False, ncols=5, fontsize=9
    )
    return figure


def _log_axes(ax: Axes, lengths: Collection[int], unit: Callable[[float], str], *, in_bytes: bool) -> None:
    """Make both axes logarithmic, name the lengths, and write values in their unit."""
    log2_axis(ax, sorted(lengths))
    ax.set_yscale("log", base=2 if in_bytes else 10)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    if in_bytes:
        ax.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
    else:
        low, high = ax.get_ylim()
        subs = (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
        ax.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: unit(value)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=8, which="both")
    ax.grid(alpha=0.3)


def _mark(
    ax: Axes, where: BreakEven | None, points: Sequence[tuple[int, float]], looks: Mapping[str, Any]
) -> None:
    """Draw a ring on the curve where its advantage begins, with the number of tokens."""
    if where is None or where.tokens is None or where.everywhere:
        return
    y = _interpolate(points, where.tokens)
    ax.plot([where.tokens], [y], "o", markersize=11, markerfacecolor="none", color=looks["color"], zorder=5)
    ax.annotate(
        f"{where.tokens:,}", (where.tokens, y), xytext=(7, -13), textcoords="offset points",
        fontsize=8, color=looks["color"],
    )  # fmt: skip


def _interpolate(points: Sequence[tuple[int, float]], length: float) -> float:
    """Return the value between measured ones, straight in logarithms."""
    for (a, x), (b, y) in pairwise(points):
        if a <= length <= b:
            share = math.log(length / a) / math.log(b / a)
            return math.exp(math.log(x) + share * (math.log(y) - math.log(x)))
    return points[-1][1]


def group_text(group: tuple[Any, ...]) -> str:
    """Name a group."""
    shape, dtype, causal = group
    return f"{shape}, {dtype}" + ("" if causal else ", both ways")


def save_plots(folder: Path, rows: Sequence[Row]) -> None:
    """Write PNG files, one per shape and quantity."""
    for group, quantity in product(groups(rows), QUANTITIES):
        if panels := _panels(rows, group, quantity):
            figure = _figure(rows, quantity, panels)
            figure.suptitle(group_text(group), fontsize=10)
            name = f"{quantity.file}-{group[0]}-{group[1]}.png".replace("/", "of")
            with replacing(folder / name) as partial:
                figure.savefig(partial, format="png", dpi=130)


def pictures(rows: Sequence[Row], group: tuple[Any, ...]) -> list[Picture]:
    """Return the same figures for a page, in both colour schemes."""
    panels = {quantity: _panels(rows, group, quantity) for quantity in QUANTITIES}
    return [
        themed(
            lambda ink, grid, quantity=quantity: _figure(rows, quantity, panels[quantity]),  # type: ignore[misc]
            f"{quantity.title} by length, {group_text(group)}",
        )
        for quantity in QUANTITIES
        if panels[quantity]
    ]


def save_cost_plot(path: Path, rows: Sequence[Row]) -> None:
    """Write a PNG with the curves of a cost run; hollow marks are computed."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    models: dict[str, list[Row]] = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    draw_cost(figure, [(name, own, look(None if name in REFERENCES else 0)) for name, own in models.items()])
    with replacing(path) as partial:
        figure.savefig(partial, format="png", dpi=130)


def draw_cost(figure: Figure, curves: Sequence[tuple[str, Sequence[Row], Mapping[str, Any]]]) -> None:
    """Draw bytes, prefill and decode over length on an empty figure: (name, rows, style) of each curve."""
    axes = figure.subplots(1, len(COST_PANELS), squeeze=False)[0]
    for ax, (column, title) in zip(axes, COST_PANELS.items(), strict=True):
        for name, rows, style in curves:
            _cost_curve(ax, name, sorted(rows, key=lambda row: row["length"]), column, style)
        lengths = {row["length"] for _, rows, _ in curves for row in rows if row[column] is not None}
        in_bytes = column == "cache_bytes"
        _log_axes(ax, lengths, size if in_bytes else "{:,g}".format, in_bytes=in_bytes)
        ax.yaxis.set_minor_locator(NullLocator())
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("tokens before")
    handles, labels = axes[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside lower center", frameon=False, ncols=4, fontsize=9)


def _cost_curve(ax: Axes, name: str, rows: Sequence[Row], column: str, style: Mapping[str, Any]) -> None:
    points = [row for row in rows if row[column] is not None]
    if not points:
        return
    x, y = [row["length"] for row in points], [row[column] for row in points]
    (line,) = ax.plot(x, y, label=name, linewidth=1.8, markersize=5, **style)
    computed = [(a, b) for a, b, row in zip(x, y, points, strict=True) if not row["measured"]]
    if computed:
        marks = {"marker": style["marker"], "linestyle": "none", "markersize": 5}
        ax.plot(*zip(*computed, strict=True), markerfacecolor="white", color=line.get_color(), **marks)
    if column != "cache_bytes":
        kind = column.removesuffix("_tokens_per_second")
        low, high = [row[f"{kind}_low"] for row in points], [row[f"{kind}_high"] for row in points]
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
