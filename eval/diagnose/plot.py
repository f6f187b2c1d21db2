"""Pictures of a diagnosis: numbers over layers and heads, entropy curves, matrices, activations."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from PIL import Image

from ..common.plotting import MAP, SVG, THEMES, Picture, in_both_schemes, log2_axis, write_cells
from .results import Diagnosis

Matrices = Mapping[str, NDArray[np.float32]]
Draw = Callable[[Figure, Diagnosis, Matrices, str], None]
"""Draws on an empty figure of the right size; the string is the colour of grey lines."""

FAINTEST = 1e-4
"""Weights below this look like it: the dark end of the colours in pictures of matrices."""
PANEL, PANELS_IN_A_ROW = 2.3, 4
"""Inches of a picture of one matrix."""


def _heads(figure: Figure, diagnosis: Diagnosis, matrices: Matrices, grey: str) -> None:
    """Draw heatmaps layers x heads: entropy, effective share, rank of the block, mass on the first token."""
    axes = figure.subplots(1, 4, squeeze=False)[0]
    half = max(1, diagnosis.length // 2)
    panels: list[tuple[str, str, Normalize, str]] = [
        ("relative_entropy", "entropy / log n", Normalize(0, 1), "{:.2f}"),
        ("effective_share", "effective share of keys", Normalize(0, 1), "{:.2f}"),
        ("block_rank", f"rank of the block (of {half})", Normalize(0, half), "{:.0f}"),
        ("sink", "mass on the first token", LogNorm(FAINTEST, 1, clip=True), "{:.1g}"),
    ]
    for ax, (name, title, norm, form) in zip(axes, panels, strict=True):
        values = diagnosis.grid(name)
        image = ax.imshow(values, cmap=MAP, norm=norm, aspect="auto", interpolation="nearest")
        ax.set(title=title, xlabel="head")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True))
        write_cells(ax, values, partial(_short, form), partial(_is_light, norm), 7)
        figure.colorbar(image, ax=ax, fraction=0.05, pad=0.03)
    axes[0].set_ylabel("layer")


def _is_light(norm: Normalize, value: float) -> bool:
    return bool(norm(value) > 0.6)  # the upper end of the colours is light


def _short(form: str, value: float) -> str:
    return form.format(value).removeprefix("0") or "0"


def _entropy(figure: Figure, diagnosis: Diagnosis, matrices: Matrices, grey: str) -> None:
    """Draw entropy over the number of keys seen, a line per head; and the same relative to log n."""
    left, right = figure.subplots(1, 2)
    last = max(1, len(diagnosis.layers) - 1)
    longest = 2.0
    for head in diagnosis.heads:
        points = [point for point in head.curve if point["relative_entropy"] is not None]
        keys = [point["keys"] for point in points]
        longest = max([longest, *keys])
        colour = colormaps[MAP](0.9 * head.layer / last)
        look: dict[str, Any] = {"color": colour, "linewidth": 1, "alpha": 0.8}
        left.plot(keys, [point["entropy"] for point in points], **look)
        right.plot(keys, [point["relative_entropy"] for point in points], **look)
    ends = np.array([2, longest])
    left.plot(ends, np.log(ends), color=grey, linestyle="--")
    end = (longest, math.log(longest))
    left.annotate("log n", end, xytext=(-12, 2), textcoords="offset points", ha="right")
    right.axhline(1, color=grey, linestyle="--")
    right.set_ylim(0, 1.05)
    for ax, label in ((left, "entropy (nats)"), (right, "entropy / log n")):
        log2_axis(ax, form="{:,.0f}")
        ax.set(xlabel="keys that a query sees", ylabel=label)
        ax.grid(alpha=0.4)
    scale = ScalarMappable(Normalize(0, last / 0.9), MAP)  # the last tenth is too light for lines
    bar = figure.colorbar(scale, ax=[left, right], fraction=0.03, pad=0.02, label="layer")
    bar.ax.set_ylim(0, last)
    bar.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))


def _attention(figure: Figure, diagnosis: Diagnosis, matrices: Matrices, grey: str) -> None:
    """Draw matrices of chosen heads, queries downwards, keys to the right, colours logarithmic."""
    columns = min(PANELS_IN_A_ROW, len(matrices))
    rows = math.ceil(len(matrices) / columns)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    image = None
    for ax, (name, weights) in zip(axes.flat, matrices.items(), strict=False):
        layer, _, head = name.partition(":")
        shown = np.ma.masked_less_equal(weights, 0)
        image = ax.imshow(
            shown, cmap=MAP, norm=LogNorm(FAINTEST, 1.0, clip=True), interpolation="nearest",
            extent=(0, diagnosis.length, diagnosis.length, 0),
        )  # fmt: skip
        ax.set_axis_on()
        ax.set_title(f"layer {layer}, head {head}", fontsize=9)
        ax.set(xticks=[0, diagnosis.length], yticks=[0, diagnosis.length])
        ax.tick_params(labelsize=7, length=2)
    if image is not None:
        figure.colorbar(image, ax=list(axes.flat), fraction=0.03, pad=0.02, label="weight")


def _activations(figure: Figure, diagnosis: Diagnosis, matrices: Matrices, grey: str) -> None:
    """Draw kurtosis and infinity norm of what enters each layer."""
    left, right = figure.subplots(1, 2)
    labels = {"kurtosis": "kurtosis (3: normal distribution)", "inf_norm": "largest |x|"}
    for ax, (name, label) in zip((left, right), labels.items(), strict=True):
        points = [(x.layer, value) for x in diagnosis.layers if (value := getattr(x, name)) is not None]
        ax.bar([x for x, _ in points], [value for _, value in points], color="#1f86c7", width=0.7)
        ax.set(xlabel="layer", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        ax.grid(axis="y", alpha=0.4)
        ax.set_axisbelow(True)
    left.axhline(3, color=grey, linestyle="--")


FIGURES: dict[str, Draw] = {
    "heads": _heads,
    "entropy": _entropy,
    "attention": _attention,
    "activations": _activations,
}
"""Name of a file -> what draws it."""


def _size(draw: Draw, diagnosis: Diagnosis, matrices: Matrices) -> tuple[float, float]:
    """Choose the size of a picture in inches."""
    if draw is _heads:
        return 12, min(14, max(2.4, 1.2 + 0.28 * len(diagnosis.layers)))
    if draw is _attention:
        columns = min(PANELS_IN_A_ROW, len(matrices))
        return 1 + PANEL * columns, PANEL * math.ceil(len(matrices) / columns)
    return 10, 3.4


def _drawn(draw: Draw, diagnosis: Diagnosis, matrices: Matrices, **form: Any) -> bytes:
    """Draw a picture in light colours; `form` is that of the file."""
    ink, grid, small = THEMES["light"]
    settings: Any = {
        "svg.hashsalt": "hf_linattn",
        "text.color": ink,
        "axes.labelcolor": small,
        "axes.titlecolor": small,
        "axes.titlesize": 10,
        "axes.edgecolor": grid,
        "axes.facecolor": "none",
        "xtick.color": small,
        "ytick.color": small,
        "grid.color": grid,
        "font.size": 9,
    }
    with rc_context(settings):
        # a Figure of its own instead of pyplot leaves the caller's backend and open figures alone
        figure = Figure(figsize=_size(draw, diagnosis, matrices), layout="constrained")
        draw(figure, diagnosis, matrices, small)
        file = io.BytesIO()
        figure.savefig(file, **form)
    return file.getvalue()


def save(draw: Draw, diagnosis: Diagnosis, matrices: Matrices, path: Path) -> None:
    """Write one picture as a PNG.

    Args:
        draw: of `FIGURES`.
        diagnosis: to draw.
        matrices: of the chosen heads.
        path: the file.
    """
    image = _drawn(draw, diagnosis, matrices, format="png", dpi=100, facecolor="white")
    # 256 colours are enough for one colour map, and a third of the bytes
    Image.open(io.BytesIO(image)).convert("RGB").quantize(256).save(path, format="png", optimize=True)


def picture(draw: Draw, diagnosis: Diagnosis, matrices: Matrices, alt: str) -> Picture:
    """Draw one picture for a page: SVG for both colour schemes.

    Args:
        draw: of `FIGURES`.
        diagnosis: to draw.
        matrices: of the chosen heads.
        alt: what the picture shows, in words.
    """
    return in_both_schemes(_drawn(draw, diagnosis, matrices, **SVG), alt)
