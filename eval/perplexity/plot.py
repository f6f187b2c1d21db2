"""How the perplexity command shows its rows: curves over length, as many as there are, and tables."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from ..common.formatting import text_table
from ..common.plotting import log2_axis, look
from .arguments import PerplexityArguments

COLUMNS = (
    *("length", "perplexity", "byte_perplexity", "stderr", "tokens", "model"),
    *("byte_stderr", "bytes", "nats", "windows", "documents", "stderr_over"),
)
"""Of results.csv."""
INSIDE = 5
"""Curves whose names still fit into the plot; those of more stand outside."""


def save_plot(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    train_length: int | None,
    *,
    stream: bool = False,
    reference: Collection[str] = (),
    kind: Literal["png", "svg"] = "png",
) -> None:
    """Draw perplexity over length, both logarithmic, with standard errors and a line at the training length.

    Args:
        path: the file.
        rows: points of all curves, distinguished by "model".
        train_length: where the line stands, if anywhere.
        stream: the lengths are ends of position buckets.
        reference: curves drawn in grey and dashed: the unpatched model.
        kind: of file.
    """
    labels = list(dict.fromkeys(row["model"] for row in rows))
    coloured = [label for label in labels if label not in reference]
    size = (7.0, 4.5)
    if len(labels) > INSIDE:
        size = (7.6 + 0.085 * max(map(len, labels)), max(4.5, 1 + 0.27 * len(labels)))
    # a Figure of its own instead of pyplot leaves the caller's backend and open figures alone
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for label in labels:
        curve = [row for row in rows if row["model"] == label]
        lengths, values = [row["length"] for row in curve], [row["perplexity"] for row in curve]
        errors = [row["stderr"] or 0.0 for row in curve]
        style = look(None if label in reference else coloured.index(label))
        axes.errorbar(lengths, values, errors, capsize=2.5, elinewidth=0.8, label=label, **style)
    if train_length:
        axes.axvline(train_length, color="grey", linestyle=":", label=f"trained at {train_length}")
    log2_axis(axes, () if stream else [row["length"] for row in rows])
    xlabel = "position in the document, up to" if stream else "tokens of context"
    axes.set(xlabel=xlabel, ylabel="perplexity per token", yscale="log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    values = [row["perplexity"] for row in rows]
    narrow = FuncFormatter(lambda value, _: f"{value:.4g}")
    axes.yaxis.set_minor_formatter(narrow if max(values) < 20 * min(values) else NullFormatter())
    axes.grid(alpha=0.3, which="both")
    if len(labels) > INSIDE:
        _legend_beside(figure, axes, {row["model"]: row["perplexity"] for row in rows})
    else:
        axes.legend()
    # an .svg holds random ids and the date otherwise
    with rc_context({"svg.hashsalt": "hf_linattn"}):
        figure.savefig(path, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)


def _legend_beside(figure: Figure, axes: Axes, ends: Mapping[str, float]) -> None:
    """List names in the order of the ends of the curves, where the eye looks for them."""
    pairs = list(zip(*axes.get_legend_handles_labels(), strict=True))
    pairs.sort(key=lambda pair: ends.get(pair[1], 0.0), reverse=True)
    handles, names = zip(*pairs, strict=True)
    figure.legend(handles, names, loc="outside right upper", frameon=False)


def summary(results: Mapping[str, Any], arguments: PerplexityArguments) -> str:
    """Give the table and the sentences one needs to read it."""
    rows, folder = results["rows"], arguments.output_dir
    if arguments.branches:
        files = f"the same {rows[0]['tokens']} tokens at every length; numbers and plot in {folder}"
        split = [exchange(results["run"])] if arguments.context_parallel else []
        return "\n".join([curve_table(rows), *results["sentences"], *split, files])
    data, lines = results["data"], [curve_table(rows) if arguments.compare else _row_table(rows)]
    if arguments.stream:
        lines.append("length: end of a position bucket; the context is all of the document before a token")
        for label in dict.fromkeys(row["model"] for row in rows):
            lines.append(f"{label}, all positions: {_overall([r for r in rows if r['model'] == label]):.5g}")
    elif arguments.stride == "full":
        lines.append("windows side by side; all tokens but the first of each window are scored")
    else:
        lines.append(f"the same tokens at every length: the last {arguments.stride} of each window")
    if "documents_long_enough" in data:
        lines.append(f"{data['documents_long_enough']} of {data['documents']} documents are long enough")
    if arguments.context_parallel:
        lines.append(exchange(results["run"]))
    lines.append(f"stderr over {rows[0]['stderr_over']}; results.json, .csv and a plot in {folder}")
    return "\n".join(lines)


def exchange(run: Mapping[str, Any]) -> str:
    """Say what the processes that shared each window sent each other."""
    parts = ", ".join(f"{label}: {count:,}" for label, count in run["bytes_exchanged"].items())
    return f"each window was split over {run['processes']} processes, which sent each other bytes: {parts}"


def curve_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align the perplexities: a line per curve, a column per length."""
    lengths = sorted({row["length"] for row in rows})
    cells = {(row["model"], row["length"]): f"{row['perplexity']:.5g}" for row in rows}
    labels = dict.fromkeys(row["model"] for row in rows)
    lines = [[label, *(cells.get((label, length), "-") for length in lengths)] for label in labels]
    return text_table(["perplexity at", *map(str, lengths)], lines)


def _row_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Align the rows, a line each."""
    lines = []
    for row in rows:
        stderr = "-" if row["stderr"] is None else f"{row['stderr']:.4g}"
        values = [f"{row['perplexity']:.5g}", stderr, f"{row['byte_perplexity']:.4f}"]
        lines.append([row["model"], str(row["length"]), *values, str(row["tokens"])])
    return text_table(["model", "length", "perplexity", "stderr", "byte_ppl", "tokens"], lines)


def _overall(rows: Sequence[Mapping[str, Any]]) -> float:
    """Compute the perplexity of all tokens of disjoint rows together, as those of a stream."""
    total = math.fsum(row["nats"] * row["tokens"] for row in rows)
    return math.exp(total / sum(row["tokens"] for row in rows))
