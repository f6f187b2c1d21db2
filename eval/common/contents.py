"""Digests of the files that a run's arguments name: it may go on only where they are what they were."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_linattn.errors import DataError

MODELS = ("model", "original", "baseline", "tokenizer")
TEXTS = ("data", "prompts")
MODEL_FILES = (
    *("config.json", "adapter_config.json", "*.safetensors", "*.bin", "*.gguf"),
    *("tokenizer*", "vocab*", "merges.txt"),
)
"""What decides the numbers of a model in a folder; logs and cards do not."""
PIECE = 2**16
"""Bytes that are read at once."""
PIECES = 2**10
"""Pieces of a file that are read, evenly spread, and its end: all of one up to 64 MiB."""


def digests(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Digest what the arguments name as far as it lies on the disk: name of the argument -> digest.

    Raises:
        DataError: a file cannot be read.
    """
    found = {}
    for name in (*MODELS, *TEXTS):
        given = arguments.get(name)
        digest = hashlib.sha256()
        files = [file for source in _sources(given) for file in _files(name, source)]
        for file in files:
            _read(file, digest)
        if files:
            found[name] = digest.hexdigest()
    return found


def refuse_changes(
    folder: Path, arguments: Mapping[str, Any], before: Mapping[str, str], now: Mapping[str, str]
) -> None:
    """Refuse to go on with rows of other files; what one of both does not know is passed over.

    Raises:
        DataError: naming the argument.
    """
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise DataError(
                f"{folder} holds numbers of what --{name} {arguments[name]} was before it changed; choose "
                "another --output-dir"
            )


def _sources(given: Any) -> list[Path]:
    values = given if isinstance(given, list | tuple) else [given]
    return [Path(value).expanduser() for value in values if isinstance(value, str | Path)]


def _files(name: str, path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    elif path.is_dir() and name in MODELS:
        yield from sorted({file for glob in MODEL_FILES for file in path.glob(glob) if file.is_file()})
    elif path.is_dir():
        from hf_linattn.data import documents  # which loads datasets, and bench does without

        yield from documents.files_below(path, documents.TEXT_SUFFIXES)


def _read(file: Path, digest: Any) -> None:
    try:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for start in (*range(0, size, max(PIECE, size // PIECES)), max(0, size - PIECE)):
                content.seek(start)
                digest.update(content.read(PIECE))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
