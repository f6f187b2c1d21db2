"""What a perplexity run leaves behind: results.json, from which it resumes, a csv and a plot."""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_linattn.errors import DataError

FORMAT = "hf_linattn.perplexity/1"
COLUMNS = (
    "length",
    "perplexity",
    "byte_perplexity",
    "stderr",
    "tokens",
    "model",
    "byte_stderr",
    "bytes",
    "nats",
    "windows",
    "documents",
    "stderr_over",
)
PACKAGES = ("hf-linattn", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make the numbers."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def load(folder: Path, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run of the same command left in this folder, whole or not; None if there is nothing.

    Raises:
        DataError: the folder holds results of other arguments, or a file that is none of ours.
    """
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        earlier = dict(found["arguments"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no file of this command; choose another --output-dir") from error
    wanted = json.loads(json.dumps(arguments))
    changed = sorted(key for key in earlier.keys() | wanted.keys() if earlier.get(key) != wanted.get(key))
    if found.get("format") != FORMAT or changed:
        names = ", ".join("--" + key.replace("_", "-") for key in changed) or "format"
        raise DataError(f"{folder} holds a run with other arguments ({names}); choose another --output-dir")
    return found


def save(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1, allow_nan=False)
    temporary = folder / "results.json.tmp"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(folder / "results.json")


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per curve and length."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def save_plot(path: Path, rows: Sequence[Mapping[str, Any]], train_length: int | None, stream: bool) -> None:
    """Perplexity over length, both logarithmic, with standard errors and a line at the training length."""
    # a Figure of its own instead of pyplot leaves the caller's backend and open figures alone
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for label in dict.fromkeys(row["model"] for row in rows):
        curve = [row for row in rows if row["model"] == label]
        lengths = [row["length"] for row in curve]
        values = [row["perplexity"] for row in curve]
        axes.errorbar(
            lengths, values, [row["stderr"] or 0.0 for row in curve], marker="o", capsize=3, label=label
        )
    if train_length:
        axes.axvline(train_length, color="grey", linestyle=":", label=f"trained at {train_length}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    values = [row["perplexity"] for row in rows]
    if max(values) < 20 * min(values):
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    else:
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(
        xlabel="position in the document, up to" if stream else "tokens of context",
        ylabel="perplexity per token",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as aligned text."""
    width = max([len("model"), *(len(row["model"]) for row in rows)])
    lines = [
        f"{'model':<{width}} {'length':>9} {'perplexity':>11} {'stderr':>9} {'byte_ppl':>9} {'tokens':>9}"
    ]
    for row in rows:
        error = "-" if row["stderr"] is None else f"{row['stderr']:.4g}"
        lines.append(
            f"{row['model']:<{width}} {row['length']:>9} {row['perplexity']:>11.5g} {error:>9} "
            f"{row['byte_perplexity']:>9.4f} {row['tokens']:>9}"
        )
    return "\n".join(lines)


def overall(rows: Sequence[Mapping[str, Any]]) -> float:
    """Perplexity of all tokens of the rows together; meaningful where rows are disjoint, as in a stream."""
    return math.exp(
        math.fsum(row["nats"] * row["tokens"] for row in rows) / sum(row["tokens"] for row in rows)
    )
