"""The output folder of a training command: checked before anything slow begins, and cleared for a new run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linattn.cli.arguments import differences, flag_of
from hf_linattn.cli.files import read_json, writing
from hf_linattn.errors import TrainingError
from hf_linattn.training.arguments import TrainingArguments

INPUTS = ("model", "teacher", "tokenizer", "data", "eval_data", "cache_teacher")
"""Options that may name a file or folder to read."""

_LOCKS: set[int] = set()
"""Descriptors that hold the folders of this process."""


@dataclass(frozen=True)
class RunFolder:
    """An output folder and what a run may leave in it.

    Attributes:
        path: the folder.
        noun: what it holds: "run", "conversion".
        record: name of the JSON file that says what the run began with.
        contents: patterns of everything else that a run leaves, which --overwrite deletes.
        signs: patterns of files that, without a record, belong to something else.
        settings_key: the entry of the record that holds the settings; None where it holds nothing else.
    """

    path: Path
    noun: str
    record: str
    contents: tuple[str, ...]
    signs: tuple[str, ...]
    settings_key: str | None = None

    @property
    def record_path(self) -> Path:
        """Where the record is, or will be."""
        return self.path / self.record

    @contextmanager
    def leaving_nothing(self, *files: str) -> Iterator[None]:
        """Delete what a call that fails before its record is written has made.

        Args:
            *files: that it may write before, or folders; the output folder goes if it is empty then.
        """
        new = [path for path in (self.path / name for name in files) if not path.exists()]
        folders = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            yield
        except BaseException:
            if not self.record_path.exists():
                with suppress(OSError):  # a folder that is not empty, and so all above it, stays
                    for path in new:
                        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
                    for path in folders:
                        path.rmdir()
            raise

    @contextmanager
    def held(self, main: bool = True) -> Iterator[None]:
        """Make the folder, and keep other runs out of it; it goes if the block fails and leaves nothing.

        Args:
            main: False in the processes that work with another one, which holds it for all.

        Raises:
            TrainingError: it cannot be made, or another run is at work in it.
        """
        with self.leaving_nothing():
            if not main:
                yield
                return
            with writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
            lock = _lock(self.path)
            try:
                yield
            finally:
                if lock is not None:
                    _LOCKS.discard(lock)
                    os.close(lock)

    def check(self, arguments: TrainingArguments, settings: Mapping[str, Any]) -> None:
        """Make the folder, and see that this run can use it; resumed, it must have the same settings.

        Raises:
            TrainingError: it cannot; the message says what to do.
        """
        path, noun = self.path, self.noun
        if path.exists() and Path(arguments.model).exists() and path.samefile(arguments.model):
            raise TrainingError(f"--output-dir {path} is --model itself: choose another directory")
        if arguments.overwrite:
            self._check_inputs_stay(arguments)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
        if not self.record_path.exists():
            strange = [pattern for pattern in self.signs if any(path.glob(pattern))]
            if strange:
                holds = f"{', '.join(strange)} but no {noun} of this command"
                raise TrainingError(f"{path} holds {holds}: choose another directory")
        elif arguments.resume:
            self.check_settings(type(arguments), settings)
        elif not arguments.overwrite:
            raise TrainingError(
                f"{path} already holds a {noun}: give --resume, --overwrite or another directory"
            )

    def _check_inputs_stay(self, arguments: TrainingArguments) -> None:
        """See that `clear` deletes nothing that the run reads.

        Raises:
            TrainingError: it would.
        """
        left = self._left()
        deleted = {path.resolve() for path in (*left, self.record_path)}
        for name in INPUTS:
            value = getattr(arguments, name, None)
            source = None if value is None else Path(value).expanduser().resolve()
            # of a folder of texts all that lies below it is read
            below = name in ("data", "eval_data") and any(source in path.resolve().parents for path in left)
            if source is not None and (below or not deleted.isdisjoint((source, *source.parents))):
                raise TrainingError(
                    f"--overwrite would delete {flag_of(name)} {value}: choose another --output-dir"
                )

    def check_settings(self, options: type[TrainingArguments], settings: Mapping[str, Any]) -> None:
        """Hold settings against those in the record; the class has defaults for those it does not name.

        Raises:
            TrainingError: the run began with others.
        """
        record = read_json(self.record_path)
        before = record if self.settings_key is None else record.get(self.settings_key, {})
        if changed := differences(options, before, dict(settings)):
            raise TrainingError(
                f"cannot resume the {self.noun} in {self.path}: it began with other {', '.join(changed)}"
            )

    def clear(self) -> None:
        """Delete what a run has left, its record last.

        Raises:
            TrainingError: something cannot be deleted.
        """
        with writing(self.path):
            for path in self._left():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            self.record_path.unlink(missing_ok=True)

    def _left(self) -> list[Path]:
        """List what a run has left beside its record."""
        return [path for pattern in self.contents for path in self.path.glob(pattern)]


def _lock(folder: Path) -> int | None:
    """Lock a folder itself, so that no file is left; None where the system or its disk has no such locks.

    Raises:
        TrainingError: another run holds it.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # it may be written and not read
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise TrainingError(
                f"another run is at work in {folder}: wait for it, or choose another directory"
            ) from error
        return None
    _LOCKS.add(descriptor)
    return descriptor


def _close_locks() -> None:
    """Leave the folders to the process that was forked from: a fork that outlives it would hold them."""
    while _LOCKS:
        os.close(_LOCKS.pop())


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_close_locks)
