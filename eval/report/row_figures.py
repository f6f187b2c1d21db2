"""Figures of the report over result folders: heatmaps of recall, losses of every stage, cost over length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ..common.plotting import Picture, look, themed
from ..cost import plot as cost_plot
from ..cost.measure import UNPATCHED
from ..recall import plot as recall_plot
from .rows import Compared, Row
from .summary import Run, Summary

OLDER = "loss"
"""The unit of runs whose results.json does not tell it."""
PANELS_IN_A_ROW = 2


def places(compared: Compared) -> dict[str, int | None]:
    """Row -> index of its colour in every figure; None for the original."""
    others = [row.name for row in compared.rows if row.role == "patch"]
    return {row.name: others.index(row.name) if row.name in others else None for row in compared.rows}


def style(compared: Compared, row: Row, ink: str) -> dict[str, Any]:
    """Colour, marker and line of a row, the same in all figures."""
    if row.role == "control":
        return {"color": ink, "marker": "o", "linestyle": "-"}
    return look(places(compared)[row.name])


def summary_of(compared: Compared, group: int) -> Summary:
    """The length curves that may stand in one figure, as the other figures and sentences take them."""
    place = places(compared)
    runs = [
        Run(row.name, row.role, None, row.points, None, [], {}, [], [], row.name, place[row.name])
        for row in compared.rows
        if row.groups.get("perplexity") == group
    ]
    first = next(row for row in compared.rows if row.groups.get("perplexity") == group)
    content = first.found["perplexity"].content
    return Summary(
        runs=runs,
        train_length=content.get("train_length"),
        data=content.get("data", {}),
        measuring=content["arguments"],
        versions={},
        prompts=[],
        alike=False,
    )


def recall_maps(compared: Compared) -> list[tuple[str, str, Picture]]:
    """(task, letter of what was asked, heatmap with the rows side by side), one per task and group."""
    found = []
    groups = compared.groups["recall"]
    for group in range(len(groups.settings)):
        rows = [row for row in compared.rows if row.groups.get("recall") == group]
        for task in dict.fromkeys(line["task"] for row in rows for line in row.recall):
            lines = [{**ln, "model": row.name} for row in rows for ln in row.recall if ln["task"] == task]
            verdict = compared.verdicts.get(task)
            shown = "; ".join(f"{row.name}: {_accuracies(row, task)}" for row in rows)
            picture = themed(
                lambda ink, grid, lines=lines, verdict=verdict: recall_plot.heatmap(lines, verdict),  # type: ignore[misc]
                f"Recall of {task} by length and depth. {shown}.",
            )
            found.append((task, groups.mark(group), picture))
    return found


def _accuracies(row: Row, task: str) -> str:
    lengths = sorted({line["length"] for line in row.recall if line["task"] == task})
    means = []
    for length in lengths:
        own = [ln["accuracy"] for ln in row.recall if ln["task"] == task and ln["length"] == length]
        means.append(f"{100 * math.fsum(own) / len(own):.1f} % at {length:,}")
    return ", ".join(means) or "not asked"


def loss_curves(compared: Compared) -> Picture | None:
    """Training and validation loss over tokens, a panel per kind of stage, as their units differ."""
    curves: dict[tuple[str, str], list[tuple[Row, list[dict[str, str]]]]] = {}
    for row in compared.rows:
        for stage in row.stages:
            name = stage.name if "convert" in row.found else "fine-tuning"
            unit = stage.results.get("label", OLDER)
            curves.setdefault((name, unit), []).append((row, stage.losses))
    if not curves:
        return None

    def build(ink: str, grid: str) -> Figure:
        columns = min(PANELS_IN_A_ROW, len(curves))
        lines = math.ceil(len(curves) / columns)
        figure = Figure(figsize=(1.4 + 4.4 * columns, 3.4 * lines + 0.5), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False)
        for ax in axes.flat[len(curves) :]:
            ax.set_axis_off()
        handles: dict[str, Any] = {}
        for ax, ((name, unit), runs) in zip(axes.flat, curves.items(), strict=False):
            for row, losses in runs:
                look_ = style(compared, row, ink)
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
    found = [(int(row["tokens"]), float(row[name])) for row in losses if row.get(name)]
    return [tokens for tokens, _ in found], [value for _, value in found]


def cost_curves(compared: Compared) -> list[tuple[str, Picture]]:
    """(letter of the machine and settings, curves), the unpatched model of each run pale beside its row."""
    found = []
    groups = compared.groups["cost"]
    for group in range(len(groups.settings)):
        rows = [row for row in compared.rows if row.groups.get("cost") == group]

        def build(ink: str, grid: str, rows: list[Row] = rows) -> Figure:
            figure = Figure(figsize=(11.5, 3.9 + 0.2 * (len(rows) // 2)), layout="constrained")
            curves: list[tuple[str, Sequence[Mapping[str, Any]], Mapping[str, Any]]] = []
            for row in rows:
                look_ = style(compared, row, ink)
                if row.beside:
                    pale = {**look_, "linestyle": "--", "alpha": 0.4}
                    curves.append((f"{row.name}, {UNPATCHED}", row.beside, pale))
                curves.append((row.name, row.cost, look_))
            cost_plot.draw(figure, curves)
            return figure

        shown = "; ".join(
            f"{row.name}: "
            + ", ".join(f"{line['cache_bytes']:,} B at {line['length']:,}" for line in row.cost)
            for row in rows
        )
        alt = f"Bytes of the cache and tokens per second by length. {shown}."
        found.append((groups.mark(group), themed(build, alt)))
    return found
