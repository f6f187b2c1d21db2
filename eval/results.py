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


def load(folder: Path, arguments: Mapping[str, Any], form: str = FORMAT) -> dict[str, Any] | None:
    """What an earlier run of the same command left in this folder, whole or not; None if there is nothing.

    Args:
        folder: where its results.json is.
        arguments: of this run.
        form: the command's format, as its results name it.

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
    if found.get("format") != form or changed:
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


def curve_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per curve, one column of perplexities per length, as aligned text."""
    labels = list(dict.fromkeys(row["model"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    found = {(row["model"], row["length"]): f"{row['perplexity']:.5g}" for row in rows}
    width = max(map(len, labels))
    lines = [" ".join([f"{'perplexity at':<{max(width, 13)}}", *(f"{length:>9}" for length in lengths)])]
    for label in labels:
        cells = (f"{found.get((label, length), '-'):>9}" for length in lengths)
        lines.append(" ".join([f"{label:<{max(width, 13)}}", *cells]))
    return "\n".join(lines)


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
