"""Write files and folders so that a crash leaves the old one or the new one, never half of one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hf_linattn.errors import DataError, LinattnError, TrainingError


@contextmanager
def writing(path: Path, kind: type[LinattnError] = TrainingError) -> Iterator[None]:
    """Turn a full disk or a read-only folder into one clear error about `path`.

    Raises:
        LinattnError: of that kind; the block failed to write.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, FileExistsError):
            reason = "a file of this name is in its place"
        elif isinstance(error, FileNotFoundError):
            reason = "its folder is gone, or another run writes it"
        raise kind(f"cannot write {path}: {reason}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; once written it becomes `path` in one step. Errors leave `path` alone."""
    partial = path.with_name(f"{path.name}.partial")
    with writing(path):
        try:
            yield partial
            flush_to_disk(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders; it keeps the order of renames itself
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON atomically."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def filling(folder: Path, kind: type[LinattnError] = TrainingError) -> Iterator[Path]:
    """Yield an empty folder to write to; its files then replace those of `folder`, each in one step.

    The config, without which nothing loads, comes last.

    Raises:
        LinattnError: of that kind; the block failed to write.
    """
    partial = folder / "saving.partial"
    with writing(folder, kind):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            written = [path for path in partial.rglob("*") if path.is_file()]
            for path in sorted(written, key=lambda path: (path.name == "config.json", path)):
                target = folder / path.relative_to(partial)
                target.parent.mkdir(exist_ok=True, parents=True)
                flush_to_disk(path)
                path.replace(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        flush_to_disk(folder)
