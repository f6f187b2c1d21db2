"""What a measuring command leaves behind: results.json, from which it resumes, and tables as csv."""

from __future__ import annotations

import csv
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hf_linattn.cli.files import replacing, writing
from hf_linattn.errors import DataError
from hf_linattn.ops.dispatch import kernels

from .contents import digests, refuse_changes
from .formatting import NOT_FINITE

PACKAGES = ("hf-linattn", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Name versions of Python and of the packages that make the numbers, as far as they are installed."""
    installed = {"python": platform.python_version()}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def machine() -> str:
    """Name the processor, AVX2 where it has no more, the number of cores and the system."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        name += " (AVX2)"
    return f"{name}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"


def default_device() -> torch.device:
    """Choose the accelerator if there is one and accelerate may use it (ACCELERATE_USE_CPU), else the CPU."""
    from accelerate.utils import parse_flag_from_env

    if parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def recorded(args: Any, *without: str) -> dict[str, Any]:
    """Tell the arguments as results.json keeps them: all but --output-dir and those of `without`."""
    return {key: value for key, value in vars(args).items() if key not in ("output_dir", *without)}


class ResumableRun:
    """A run that renews results.json after every row, and goes on where an earlier start of it ended.

    The docstring of this package shows how it is used. Nothing is written before the first `save`.

    Args:
        folder: where the files go.
        arguments: of this run, which must be those that the folder was begun with.
        form: the command's format, as results.json names it.
        command: how the run was started, for the record.
        device: where the models are; None for `default_device`.
        writes: whether this process writes the files.

    Attributes:
        complete: the folder holds a finished run; its content is `results`.
        results: content of results.json; empty before `begin`.
        rows: what was measured, that of an earlier start first.
        seconds: label -> seconds that its measurement took.

    Raises:
        DataError: the folder holds results of other arguments, of a text or model that has changed since, or
            a file that is none of ours.
        TrainingError: nothing can be written in the folder.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Mapping[str, Any],
        form: str,
        command: str,
        *,
        device: torch.device | None = None,
        writes: bool = True,
    ) -> None:
        contents = digests(arguments)
        earlier = load(folder, arguments, form, contents)
        self.folder, self.writes, self.device = folder, writes, device or default_device()
        self.complete = earlier is not None and bool(earlier.get("complete"))
        self.results: dict[str, Any] = earlier if earlier is not None and self.complete else {}
        self.earlier: dict[str, Any] = earlier or {}
        self.rows: list[dict[str, Any]] = self.earlier.get("rows", [])
        self.seconds: dict[str, float] = self.earlier.get("run", {}).get("seconds", {})
        self._head: dict[str, Any] = {"format": form, "complete": False, "command": command}
        self._head |= {"arguments": dict(arguments), "seed": arguments.get("seed"), "versions": versions()}
        self._head["contents"] = contents
        if not self.complete:
            check_writable(folder)

    def begin(self, facts: Mapping[str, Any], where: Mapping[str, Any] | None = None) -> None:
        """Say what stands in results.json besides the rows; in `where` beside device, threads and kernels."""
        here = {"device": str(self.device), "threads": torch.get_num_threads(), "kernels": kernels()}
        run = {**here, **(where or {}), "seconds": self.seconds}
        self.results = {**self._head, **facts, "rows": self.rows, "run": run}

    @contextmanager
    def timed(self, label: str) -> Iterator[None]:
        """Note the seconds that this takes, unless it fails."""
        start = time.perf_counter()
        yield
        self.seconds[label] = round(time.perf_counter() - start, 3)

    def lacks(self, *names: str) -> bool:
        """Tell whether one of these files is missing and this process is to write it."""
        return self.writes and not all((self.folder / name).exists() for name in names)

    def save(self) -> None:
        """Renew results.json."""
        self.results["run"]["kernels"] = kernels()  # compiled by now, where that was asked for
        if self.writes:
            save(self.folder, self.results)

    def finish(self, table: str | None = None, columns: Sequence[str] | None = None) -> None:
        """Write the rows as a table, and results.json last: it says that all files are there."""
        self.save()  # refused where another run's is there, whose table stays then
        self.results["complete"] = True
        if self.writes and table is not None:
            save_csv(self.folder / table, self.rows, columns)
        self.save()


def check_writable(folder: Path) -> None:
    """Refuse, before the work, a folder that could not be written after it; nothing is made.

    Raises:
        TrainingError: it cannot be made, or nothing can be written in it.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with writing(folder):
        tempfile.TemporaryFile(dir=there).close()


def load(
    folder: Path, arguments: Mapping[str, Any], form: str, contents: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Read what an earlier run of this command, by its format, left in the folder, finished or not.

    Raises:
        DataError: the folder holds results of other arguments, or of files that have changed since, or a file
            that is none of ours.
    """
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if earlier["format"] != form:
            raise ValueError(f"its format is {earlier['format']!r}")
        before = dict(earlier["arguments"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} is no file of this command; choose another --output-dir") from error
    now = json.loads(json.dumps(arguments))
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        names = ", ".join("--" + key.replace("_", "-") for key in changed)
        raise DataError(f"{folder} holds a run with other arguments ({names}); choose another --output-dir")
    refuse_changes(folder, before, earlier.get("contents", {}), contents or {})
    return earlier


def save(folder: Path, results: Mapping[str, Any]) -> None:
    """Write results.json whole or not at all.

    Raises:
        TrainingError: it cannot be written.
        DataError: a number in it is not finite, or the file is meanwhile that of other arguments; it is left
            as it was.
    """
    load(folder, results["arguments"], results["format"])  # another run may have begun there since
    try:
        text = json.dumps(results, indent=1, allow_nan=False)
    except ValueError as error:
        raise DataError(
            f"a figure for {folder / 'results.json'} is no finite number: {NOT_FINITE}; see "
            "whether the unpatched model has them too"
        ) from error
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "results.json") as partial:
        partial.write_text(text + "\n", encoding="utf-8")


def save_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> None:
    """Write a line per row, whole or not at all; by default all that rows have, in the order of coming.

    Raises:
        TrainingError: it cannot be written.
    """
    names = columns or list(dict.fromkeys(name for row in rows for name in row))
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        # no lineterminator="\n": a "\r" in a text would then go unquoted, and end its line
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
