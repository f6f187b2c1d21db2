"""Make the report's section about attention: diagnoses compared in a table, in sentences and in pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_linattn.errors import DataError

from ..diagnose.outputs import read
from ..diagnose.plot import FIGURES, picture
from ..diagnose.results import Diagnosis

SINK = 0.3
"""Mass on the first token from which a head counts as a sink (Gu et al. 2024, arXiv:2410.10781)."""
COLUMNS = {
    "relative_entropy": "entropy / log n",
    "effective_share": "effective share of keys",
    "keys90": "keys for 90 % of the mass",
    "mass": "mass of a row",
    "sink": "mass on the first token",
    "block_rank": "rank of the block",
}
"""Numbers of `Head` in the table, as means over all heads."""
TITLES = {
    "heads": "Entropy, effective share, rank and first token of every head",
    "entropy": "Entropy against the number of keys seen",
    "attention": "Attention matrices",
    "activations": "Activations that enter each layer",
}
"""What the pictures show."""


def collect(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Read and draw diagnoses; models with their own attention in every layer come first.

    Returns:
        What the page shows of each: `label`, `command`, `windows` and `length` of the text; `numbers` of
        `COLUMNS`, None where nothing was measured, then the largest kurtosis and norm; the `sentence` that
        says what they mean; `pictures` by the names of `FIGURES`.

    Raises:
        DataError: one of them cannot be read, or they are of different texts.
    """
    contents = {folder: read(folder) for folder in folders}
    _check_same_text({folder: content for folder, (content, *_) in contents.items()})
    labels = [str(content["label"]) for content, *_ in contents.values()]
    sections = []
    for label, (folder, (content, diagnosis, matrices)) in zip(labels, contents.items(), strict=True):
        name = label if labels.count(label) == 1 else f"{label} ({folder.name})"
        largest = [_largest(diagnosis, "kurtosis"), _largest(diagnosis, "inf_norm")]
        pictures = {
            key: picture(draw, diagnosis, matrices, f"{TITLES[key]}, {name}. {_described(diagnosis, key)}")
            for key, draw in FIGURES.items()
        }
        section = {
            "label": name,
            "command": content["command"],
            "windows": diagnosis.windows,
            "length": diagnosis.length,
            "numbers": [_mean(diagnosis, number) for number in COLUMNS] + largest,
            "sentence": _sentence(diagnosis),
            "pictures": pictures,
        }
        patched = any(layer.attention != "softmax" for layer in diagnosis.layers)
        sections.append((patched, section))
    return [section for _, section in sorted(sections, key=lambda pair: pair[0])]


def _check_same_text(contents: Mapping[Path, Mapping[str, Any]]) -> None:
    """Refuse numbers in one table that are of different windows."""
    names = ("data", "column", "split", "length", "windows", "bos", "join")
    if not contents:
        return
    (first, known), *others = contents.items()
    for folder, content in others:
        pairs = ((n, known["arguments"].get(n), content["arguments"].get(n)) for n in names)
        if different := [f"--{name}" for name, a, b in pairs if a != b]:
            raise DataError(
                f"{first.name} and {folder.name} were diagnosed with different {', '.join(different)}: their "
                "numbers cannot stand in one table"
            )


def _mean(diagnosis: Diagnosis, name: str) -> float | None:
    values = diagnosis.grid(name)
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def _largest(diagnosis: Diagnosis, name: str) -> float | None:
    values = [value for layer in diagnosis.layers if (value := getattr(layer, name)) is not None]
    return max(values, default=None)


def _described(diagnosis: Diagnosis, key: str) -> str:
    """Return the picture in words, for those who do not see it."""
    if key == "activations":
        return "Kurtosis by layer: " + ", ".join(
            "none" if layer.kurtosis is None else f"{layer.kurtosis:.3g}" for layer in diagnosis.layers
        )
    values = diagnosis.grid("relative_entropy")
    rows = [f"{np.nanmean(row):.2f}" if np.isfinite(row).any() else "none" for row in values]
    return f"Mean entropy over log n by layer: {', '.join(rows)}"


def _sentence(diagnosis: Diagnosis) -> str:
    share, relative = _mean(diagnosis, "effective_share"), _mean(diagnosis, "relative_entropy")
    text = ""
    if share is not None and relative is not None:
        text = (
            f"On average a query spreads its attention over {100 * share:.0f} % of the keys it sees (entropy "
            f"{relative:.2f} log n). "
        )
    grid = diagnosis.grid("block_rank")
    if np.isfinite(grid).any():
        top, half = float(np.nanmax(grid)), diagnosis.length - diagnosis.length // 2
        text += f"No block of later queries over earlier keys has a rank above {top:.0f} of {half}"
        sizes = {layer.head_dim for layer in diagnosis.layers}
        text += (
            f": within the {max(sizes)} dimensions of a head, as linear attention must be. "
            if top <= max(sizes) < half
            else ". "
        )
    sinks = int((diagnosis.grid("sink") > SINK).sum())
    who = f"{sinks or 'None'} of {len(diagnosis.heads)} heads {'gives' if sinks == 1 else 'give'}"
    text += f"{who} the first token more than {100 * SINK:.0f} % of the mass."
    mass = _mean(diagnosis, "mass")
    if mass is not None and mass < 0.9995:
        text += f" A row's weights sum to {mass:.3g}; the rest goes to a sink or to nothing."
    kurtosis = _largest(diagnosis, "kurtosis")
    if kurtosis is not None:
        text += f" The largest kurtosis of what enters a layer is {kurtosis:.3g}; 3 would be normal."
    return text
