"""Colours, markers and pictures that all figures share."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

COLOURS = (
    *("#1f86c7", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#a6761d"),
    *("#2a3fd6", "#66b81a", "#882233", "#e01fd0"),
)
"""The first eight are distinct also for the colour-blind (Okabe and Ito); the 13th curve has another line."""
MARKERS = "sD^vP*Xo<>hp"
LINES = ("-", "-.", ":")
GREY = "#8a93a1"
MAP = "viridis"
WORDY = 120
"""Cells up to which a heatmap also shows its numbers."""
THEMES = {"light": ("#1d2430", "#d8dde6", "#3c4656"), "dark": ("#e8ecf2", "#39424f", "#c3cad5")}
"""Ink, grid lines, small text."""
SVG: dict[str, Any] = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
"""How pictures for a page are saved."""


@dataclass(frozen=True)
class Picture:
    """An image for a page: data URIs for both colour schemes, and a description."""

    light: str
    dark: str
    alt: str


def look(index: int | None) -> dict[str, Any]:
    """Choose colour, marker and line of the curve with this index; None is the unpatched model."""
    if index is None:
        return {"color": GREY, "marker": "o", "linestyle": "--"}
    again, place = divmod(index, len(COLOURS))
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": LINES[again % len(LINES)]}


def themed(build: Callable[[str, str], Figure], alt: str) -> Picture:
    """Draw a figure in both colour schemes; `build` gets the colours of ink and of grid lines."""
    ink, grid, small = THEMES["light"]
    settings: Any = {"svg.hashsalt": "hf_linattn", "font.size": 10}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), small)
    settings |= dict.fromkeys(("axes.edgecolor", "grid.color"), grid)
    with rc_context(settings):
        figure = build(ink, grid)
        file = io.BytesIO()
        figure.savefig(file, **SVG)
    return in_both_schemes(file.getvalue(), alt)


def in_both_schemes(drawn: bytes, alt: str) -> Picture:
    """Make a picture of an SVG in the light colours; `alt` is what it shows, in words."""
    light = dark = drawn.decode()
    # drawing takes seconds, and the schemes differ by these colours alone
    for ours, theirs in zip(THEMES["light"], THEMES["dark"], strict=True):
        dark = dark.replace(ours, theirs)
    light, dark = (base64.b64encode(text.encode()).decode() for text in (light, dark))
    start = "data:image/svg+xml;base64,"
    return Picture(start + light, start + dark, alt)


def log2_axis(axes: Axes, lengths: Sequence[int] = (), form: str = "{:g}") -> None:
    """Make the horizontal axis logarithmic, its numbers written out, with ticks at these lengths."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    if lengths:
        axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
        axes.xaxis.set_minor_locator(NullLocator())


def write_cells(
    axes: Axes,
    values: NDArray[np.float64],
    text: Callable[[float], str],
    is_light: Callable[[float], bool],
    size: float,
) -> None:
    """Write numbers into a heatmap, unless it has too many cells.

    Args:
        axes: of the heatmap.
        values: `[rows, columns]`; cells that are not finite stay empty.
        text: of a number.
        is_light: whether its colour is light, so that the text is black.
        size: of the font.
    """
    if values.size > WORDY:
        return
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            colour = "black" if is_light(value) else "white"
            axes.text(column, row, text(value), ha="center", va="center", color=colour, fontsize=size)
