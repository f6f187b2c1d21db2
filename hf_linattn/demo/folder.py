"""What the commands of the demo share: the claim on an output folder, the machine, the table on stdout."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from hf_linattn.cli.files import write_json
from hf_linattn.errors import DataError, LinattnError


def fingerprint(folder: Path) -> str | None:
    """Hash a model's files (the first 16 MiB of each), so that another model there is noticed."""
    if not folder.exists():
        return None
    digest = hashlib.sha256()
    files = folder.iterdir() if folder.is_dir() else [folder]
    for path in sorted(p for p in files if p.suffix in (".json", ".safetensors", ".bin", ".gguf")):
        with path.open("rb") as file:
            digest.update(path.name.encode() + file.read(1 << 24))
    return digest.hexdigest()[:16]


def claim(folder: Path, settings: dict[str, Any]) -> None:
    """Record the settings, or see that they are those of the demo in this folder.

    Raises:
        DataError: the folder holds something else.
    """
    path, settings = folder / "demo.json", json.loads(json.dumps(settings))
    try:
        earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if earlier is None:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise DataError(f"{folder} is not empty and holds no demo: choose another --output-dir")
            write_json(path, settings)
            return
    except (OSError, ValueError) as error:
        if isinstance(error, LinattnError):
            raise
        raise DataError(f"cannot use --output-dir {folder}: {error}") from error
    changed = [name for name in settings if earlier.get(name) != settings[name]]
    if changed:
        what = ", ".join(f"{name} {earlier.get(name)!r} then, {settings[name]!r} now" for name in changed)
        raise DataError(
            f"{folder} holds a demo with other settings ({what}): choose another --output-dir "
            "(OUT=... of make), or delete the folder"
        )


def device(cpu: bool) -> str:
    """Tell where models of a demo run: "gpu" or "cpu". Apple's GPUs have no kernels of ours: "cpu"."""
    import torch

    return "gpu" if torch.cuda.is_available() and not cpu else "cpu"


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summary(page: Path, took: str) -> str:
    """Say what the command found, how long it took and where its page is, beside which lies results.csv."""
    text = f"\nperplexity per token at each length of context, in {took}\n"
    return table(page.parent / "results.csv") + text + f"report: {page.resolve()}\n"


def table(path: Path) -> str:
    """Return the rows and their perplexities, from results.csv, as aligned text."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name.startswith("perplexity_")]
    lengths = [name for name in names if name.removeprefix("perplexity_").isdecimal()]
    lines = [["run", *(name.removeprefix("perplexity_") for name in lengths)]]
    lines += [[row["row"], *(f"{float(row[n]):.4g}" if row[n] else "-" for n in lengths)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ""
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        text += "  ".join([first.ljust(widths[0]), *cells]) + "\n"
    return text
