"""What a measuring command leaves behind: results.json, from which it resumes, and tables as csv."""

from __future__ import annotations

import csv
import errno
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_linattn.cli.files import replacing, writing
from hf_linattn.errors import DataError

PACKAGES = ("hf-linattn", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that make the numbers."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def check_writable(folder: Path) -> None:
    """Refuse, before the work, a folder that could not be written after it; nothing is made.

    Raises:
        TrainingError: it cannot be made, or nothing can be written in it.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with writing(folder):
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def load(folder: Path, arguments: Mapping[str, Any], form: str) -> dict[str, Any] | None:
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
        if found["format"] != form:
            raise ValueError(f"its format is {found['format']!r}")
        earlier = dict(found["arguments"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no file of this command; choose another --output-dir") from error
    wanted = json.loads(json.dumps(arguments))
    changed = sorted(key for key in earlier.keys() | wanted.keys() if earlier.get(key) != wanted.get(key))
    if changed:
        names = ", ".join("--" + key.replace("_", "-") for key in changed)
        raise DataError(f"{folder} holds a run with other arguments ({names}); choose another --output-dir")
    return found


def save(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json whole or not at all.

    Raises:
        TrainingError: it cannot be written.
        DataError: a number in it is not finite; the file is left as it was.
    """
    try:
        text = json.dumps(results, indent=1, allow_nan=False)
    except ValueError as error:
        raise DataError(
            f"a figure for {folder / 'results.json'} is no finite number: the outputs overflow or are "
            "NaN; try --dtype float32, and see whether the model as it came has them too"
        ) from error
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "results.json") as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write a table whole or not at all.

    Args:
        path: the file.
        rows: a line each; what a row lacks stays empty.
        columns: of the file; by default all that the rows have, in the order in which they come first.

    Raises:
        TrainingError: it cannot be written.
    """
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        # no lineterminator="\n": a "\r" in a text would then go unquoted, and end its line
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
