"""The picture of a cost run: bytes, reading and writing over length, the unpatched model dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from ..common.formatting import size
from ..common.plotting import look
from .measure import UNPATCHED

BYTES = "cache_bytes"
PANELS = (
    (BYTES, "cache or state"),
    ("prefill_tokens_per_second", "prefill, tokens/s"),
    ("decode_tokens_per_second", "decode, tokens/s"),
)
Rows = Sequence[Mapping[str, Any]]


def save_plot(path: Path, rows: Rows) -> None:
    """Write a PNG; hollow marks are computed."""
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    styles = {
        name: look(None if name == UNPATCHED else 0) for name in dict.fromkeys(row["model"] for row in rows)
    }
    draw(figure, [(name, [r for r in rows if r["model"] == name], style) for name, style in styles.items()])
    figure.savefig(path, format="png", dpi=130)


def draw(figure: Figure, curves: Sequence[tuple[str, Rows, Mapping[str, Any]]]) -> None:
    """Three panels on an empty figure: (name, rows, style) of each curve."""
    axes = figure.subplots(1, len(PANELS), squeeze=False)[0]
    for ax, (column, title) in zip(axes, PANELS, strict=True):
        for name, rows, style in curves:
            _curve(ax, name, sorted(rows, key=lambda row: row["length"]), column, style)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2 if column == BYTES else 10)
        lengths = {row["length"] for _, rows, _ in curves for row in rows if row[column] is not None}
        ax.xaxis.set_major_locator(FixedLocator(sorted(lengths)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tokens(value)))
        if column == BYTES:
            ax.yaxis.set_major_locator(LogLocator(base=2, numticks=8))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
            ax.yaxis.set_minor_locator(NullLocator())
        else:
            low, high = ax.get_ylim()
            subs = (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
            ax.yaxis.set_major_locator(LogLocator(base=10, subs=subs))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("tokens before")
        ax.tick_params(labelsize=8, which="both")
        ax.grid(alpha=0.3)
    handles, names = axes[0].get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="outside lower center", frameon=False, ncols=4, fontsize=9)


def _curve(ax: Axes, name: str, rows: Rows, column: str, style: Mapping[str, Any]) -> None:
    points = [row for row in rows if row[column] is not None]
    if not points:
        return
    x, y = [row["length"] for row in points], [row[column] for row in points]
    (line,) = ax.plot(x, y, label=name, linewidth=1.8, markersize=5, **style)
    empty = [(a, b) for a, b, row in zip(x, y, points, strict=True) if not row["measured"]]
    if empty:
        marks = {"marker": style["marker"], "linestyle": "none", "markersize": 5}
        ax.plot(*zip(*empty, strict=True), markerfacecolor="white", color=line.get_color(), **marks)
    if column != BYTES:
        kind = column.removesuffix("_tokens_per_second")
        low, high = [row[f"{kind}_low"] for row in points], [row[f"{kind}_high"] for row in points]
        ax.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def _tokens(value: float) -> str:
    """`512`, `8k`, `128k`: k is 1,024."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"
