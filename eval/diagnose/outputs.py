"""What a diagnosis leaves behind: diagnose.json, diagnose.csv, pictures and matrices; and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_linattn.cli.files import replacing, write_json, writing
from hf_linattn.errors import DataError

from ..common.formatting import text_table
from ..common.results import save_csv
from .plot import FIGURES, save
from .results import Diagnosis, Head

FORMAT = "hf_linattn.diagnose/1"
COLUMNS = [field.name for field in fields(Head) if field.name not in ("curve", "top")]


def write(
    folder: Path, content: Mapping[str, Any], diagnosis: Diagnosis, chosen: Sequence[tuple[int, int]]
) -> None:
    """Write all files, each whole or not at all; diagnose.json last, as it says that the others are there.

    Args:
        folder: that gets them.
        content: of diagnose.json.
        diagnosis: that is in it.
        chosen: layer and head of the matrices to draw and keep.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    matrices: dict[str, Any] = {f"{layer}:{head}": diagnosis.matrices[layer, head] for layer, head in chosen}
    with replacing(folder / "matrices.npz") as partial, partial.open("wb") as file:
        np.savez_compressed(file, **matrices)
    rows = []
    for head in diagnosis.heads:
        layer = diagnosis.layers[head.layer]
        rows.append({"module": layer.module, "attention": layer.attention, **asdict(head)})
    save_csv(folder / "diagnose.csv", rows, ["module", "attention", *COLUMNS])
    for name, draw in FIGURES.items():
        with replacing(folder / f"{name}.png") as partial:
            save(draw, diagnosis, matrices, partial)
    write_json(folder / "diagnose.json", content)


def read(folder: Path) -> tuple[dict[str, Any], Diagnosis, dict[str, NDArray[np.float32]]]:
    """Read diagnose.json, the diagnosis in it, and the matrices to draw, by `layer:head`.

    Raises:
        DataError: a file is missing, damaged or of another command.
    """
    try:
        content: dict[str, Any] = json.loads((folder / "diagnose.json").read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')!r}, not {FORMAT!r}")
        if missing := {"label", "command", "arguments", "versions"} - content.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
        with np.load(folder / "matrices.npz", allow_pickle=False) as stored:
            matrices = {name: stored[name] for name in stored.files}
        return content, Diagnosis.from_dict(content), matrices
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{folder} holds no diagnosis that can be read: {error}") from error


def table(diagnosis: Diagnosis) -> str:
    """Align the means over the heads of each layer, a line each."""
    names = ("relative_entropy", "effective_share", "keys90", "mass", "sink", "rank", "block_rank")
    titles = ("H/log n", "share", "keys90", "mass", "sink", "rank", "block")
    columns = [np.ma.masked_invalid(diagnosis.grid(name)).mean(1) for name in names]
    lines = []
    for layer in diagnosis.layers:
        means = [column[layer.layer] for column in columns]
        values = [None if np.ma.is_masked(mean) else float(mean) for mean in means]
        values += [layer.kurtosis, layer.inf_norm]
        cells = ["-" if value is None else format(value, ".4g") for value in values]
        lines.append([str(layer.layer), layer.attention, *cells])
    return text_table(["layer", "attention", *titles, "kurtosis", "inf norm"], lines, left=2)
