"""How the recall command shows its rows: heatmaps length x depth, curves over length, and tables."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hf_linattn.cli.files import replacing

from ..common.formatting import text_table
from ..common.plotting import GREY, MAP, log2_axis, look, write_cells
from .measure import Row
from .verdict import over_depths, percent

COLUMNS = ("task", "model", *(field.name for field in fields(Row) if field.name != "task"))
"""Of results.csv."""
IN_A_ROW = 4
"""Panels in a row."""
Rows = Sequence[Mapping[str, Any]]


def save_pictures(
    folder: Path, rows: Rows, verdicts: Sequence[Mapping[str, Any]], train_length: int | None
) -> None:
    """Write `heatmap-TASK.png` for each task, and `curves.png`; each whole or not at all.

    Args:
        folder: that gets them.
        rows: of results.json.
        verdicts: on the unpatched model, for the titles.
        train_length: length to mark, if any.
    """
    by_task = {verdict["task"]: verdict for verdict in verdicts}
    for name, task in pictures_of(rows).items():
        if task is None:
            figure = _curves(rows, by_task, train_length)
        else:
            figure = heatmap([row for row in rows if row["task"] == task], by_task.get(task))
        with replacing(folder / name) as partial:
            figure.savefig(partial, format="png", dpi=110)


def pictures_of(rows: Rows) -> dict[str, str | None]:
    """Name the pictures of rows: file -> its task, None for the curves of all."""
    files: dict[str, str | None] = {"curves.png": None}
    for task in dict.fromkeys(row["task"] for row in rows):
        # the name of a user's own cases may hold anything
        safe = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in task)
        files[f"heatmap-{safe}.png"] = task
    return files


def heatmap(rows: Rows, verdict: Mapping[str, Any] | None) -> Figure:
    """Draw the accuracy of one task by length (to the right) and depth (downwards), a panel per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows}, key=lambda depth: (depth is None, depth or 0.0))
    columns = min(IN_A_ROW, len(models))
    lines = math.ceil(len(models) / columns)
    size = (1.6 + columns * max(2.2, 0.55 * len(lengths) + 0.9), 1.1 + lines * (1.1 + 0.36 * len(depths)))
    figure = Figure(figsize=(max(5.0, size[0]), size[1]), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    norm = Normalize(0, 1)
    for ax in axes.flat[len(models) :]:
        ax.set_axis_off()
    for index, (ax, model) in enumerate(zip(axes.flat, models, strict=False)):
        values = np.full((len(depths), len(lengths)), np.nan)
        for row in rows:
            if row["model"] == model:
                values[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
        image = ax.imshow(values, cmap=MAP, norm=norm, aspect="auto", interpolation="nearest")
        ax.set_title("\n".join(textwrap.wrap(model, 28)), fontsize=9)
        ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        names = ["-" if depth is None else f"{depth:g}" for depth in depths]
        ax.set_yticks(range(len(depths)), names, fontsize=8)
        ax.set_xlabel("tokens", fontsize=8)
        if index % columns == 0:
            ax.set_ylabel("depth (0: start)", fontsize=8)
        write_cells(ax, values, lambda value: f"{100 * value:.0f}", lambda value: value > 0.6, 8)
    bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02, label="accuracy (%)")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    figure.suptitle(_title(rows, verdict, int(12 * figure.get_figwidth())), fontsize=10)
    return figure


def _curves(rows: Rows, verdicts: Mapping[str, Mapping[str, Any]], train_length: int | None) -> Figure:
    """Draw accuracy over length, mean over depths, with standard errors and chance; a panel per task."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = min(2, len(tasks))
    lines = math.ceil(len(tasks) / columns)
    figure = Figure(figsize=(1.8 + 4.6 * columns, 0.7 + 3.3 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for ax in axes.flat[len(tasks) :]:
        ax.set_axis_off()
    for ax, task in zip(axes.flat, tasks, strict=False):
        own = [row for row in rows if row["task"] == task]
        for index, model in enumerate(models):
            points = over_depths([row for row in own if row["model"] == model])
            style = look(None if index == 0 else index - 1)
            x, y = [point["length"] for point in points], [100 * point["accuracy"] for point in points]
            errors = [100 * (point["stderr"] or 0.0) for point in points]
            ax.errorbar(x, y, errors, capsize=2.5, elinewidth=0.8, label=model, **style)
        chances = over_depths([row for row in own if row["model"] == models[0]])
        x, y = [point["length"] for point in chances], [100 * point["chance"] for point in chances]
        ax.plot(x, y, color=GREY, linestyle=":", label="chance")
        if train_length:
            name = f"trained at {train_length}"
            ax.axvline(train_length, color=GREY, linestyle="-.", linewidth=0.8, label=name)
        log2_axis(ax, [row["length"] for row in own], "{:,.0f}")
        ax.set(xlabel="tokens", ylabel="accuracy (%)", ylim=(-3, 103))
        ax.grid(alpha=0.3)
        ax.set_title(_title(own, verdicts.get(task), 62), fontsize=9)
    named = axes.flat[0].get_legend_handles_labels()
    figure.legend(*named, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _title(rows: Rows, verdict: Mapping[str, Any] | None, width: int) -> str:
    """Give the verdict where the unpatched model does not do the task well; else its name and chance."""
    if verdict is not None and verdict["able"] != "yes":
        return "\n".join(textwrap.wrap(verdict["text"], width))
    chances = [row["chance"] for row in rows]
    low, high = percent(min(chances)), percent(max(chances))
    return f"{rows[0]['task']} (chance {low if low == high else f'{low} to {high}'})"


def summary(results: Mapping[str, Any], folder: Path) -> str:
    """Give the verdicts, the tables and what one needs to read them."""
    rows = results["rows"]
    lines = [verdict["text"] for verdict in results["verdicts"]]
    for task in dict.fromkeys(row["task"] for row in rows):
        lines += ["", _table([row for row in rows if row["task"] == task])]
    lines += [
        "",
        "accuracy: answers right as a whole under greedy decoding; mean over depths +- standard error",
    ]
    return "\n".join([*lines, f"results.json, results.csv and pictures in {folder}"])


def _table(rows: Rows) -> str:
    """Align the accuracies of one task (means over depths): a line per model, a column per length."""
    lengths = sorted({row["length"] for row in rows})
    lines, chances = [], {}
    for model in dict.fromkeys(row["model"] for row in rows):
        points = {p["length"]: p for p in over_depths([row for row in rows if row["model"] == model])}
        chances.update({length: point["chance"] for length, point in points.items()})
        lines.append([model, *(_cell(points.get(length)) for length in lengths)])
    lines.append(["chance", *(percent(chances[length]) for length in lengths)])
    return text_table([rows[0]["task"], *map(str, lengths)], lines)


def _cell(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "-"
    error = "" if point["stderr"] is None else f" +- {100 * point['stderr']:.1f}"
    return f"{100 * point['accuracy']:.1f}{error} %"
