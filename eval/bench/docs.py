"""Pages of documentation from result folders, one a run: ratios, never absolute times, and their commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_linattn.cli.files import read_json, replacing, writing
from hf_linattn.errors import DataError

from . import tables
from .break_even import names
from .run import FORMAT

MARK = "<!-- bench: written by python -m hf_linattn.bench --docs -->"
INTRODUCTION = """\
Every number here is a ratio that `python -m hf_linattn.bench` measured: the attention as a patched module
runs it, beside the same module under torch's fused softmax attention, in turn within each round; medians
over rounds. Shapes are batch x heads (/ key heads) x head_dim.
"""
PATHS = ("--model", "--output-dir")


def write_pages(folder: Path, runs: Sequence[Path]) -> list[Path]:
    """Write a page for each finished run, named after its `--output-dir`, over an earlier one; return them.

    Raises:
        DataError: a run is not finished, two have one name, or a file of that name is no such page. Nothing
            is written then.
        TrainingError: the folder or a page cannot be written.
    """
    pages: dict[Path, str] = {}
    for run in runs:
        results = _load(run)
        path = folder / f"{_name(results, run)}.md"
        if path in pages:
            raise DataError(f"two runs are called {path.stem}: write one of them into another folder")
        if path.exists() and MARK not in path.read_text(encoding="utf-8"):
            raise DataError(f"{path} was not written by this command and stays as it is: move it")
        pages[path] = _page(results)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path, text in pages.items():
        with replacing(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return list(pages)


def _load(folder: Path) -> dict[str, Any]:
    path = folder / "results.json"
    try:
        results = read_json(path)
    except DataError as error:
        raise DataError(f"{folder} holds no results of this command") from error
    if results.get("format") != FORMAT:
        raise DataError(f"{path} is no file of this command")
    if not results["complete"]:
        raise DataError(f"{folder} holds an unfinished run: the command in it goes on where it stopped")
    return results


def _name(results: dict[str, Any], run: Path) -> str:
    """The last part of `--output-dir`; of the folder where that names none, as `.` does."""
    given = {flag: value for _, flag, value in _paths(shlex.split(results["command"]))}
    return Path(given["--output-dir"]).name or run.resolve().name


def _page(results: dict[str, Any]) -> str:
    rows, run = results["rows"], results["run"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts = [f"# {title(results)}\n", f"{MARK}\n", INTRODUCTION]
    parts.append(f"```text\n{command(results['command'])}\n```\n")
    where = run["machine"] if run["device"] == "cpu" else f"{run['device_name']}, {run['machine']}"
    parts.append(f"{where}; {_threads(run)}; ratios of {run['basis']}; {versions}.\n")
    if results["answers"]:
        parts.append("\n".join(f"* {text}" for text in results["answers"]) + "\n")
    for heading, kinds in (
        ("Times as fast as softmax", tables.speeds(rows)),
        ("Peak memory over softmax's", tables.memories(rows)),
        ("Share of what a matrix product and a copy reach on this machine", tables.shares(rows)),
    ):
        for table in kinds:
            parts += [f"**{heading}**: {table.title}\n", tables.markdown(table)]
    notes = [f"{name}: {note}" for name, note in results["peers"].items()] + tables.refusals(rows)
    if notes:
        parts.append("\n".join(f"* {note}" for note in notes) + "\n")
    return "\n".join(parts)


def title(results: dict[str, Any]) -> str:
    """Return what was measured, on what: `elu1 alone, 1x8x64, float32: AMD EPYC, 1 thread, eager`."""
    arguments, run = results["arguments"], results["run"]
    patches = ", ".join(arguments["patches"] or names(results["rows"]))
    if arguments["model"] is None:
        subject = f"{patches} alone, {', '.join(arguments['shapes'])}, {', '.join(arguments['dtypes'])}"
        subject += ", over all keys" if arguments["bidirectional"] else ""
        subject += ", with other implementations" if arguments["peers"] else ""
    else:
        subject = f"{patches} in the model `{Path(arguments['model']).name}`"
    if run["device"] != "cpu":
        return f"{subject}: {run['device_name']}"
    kernels = "C++" if arguments["cpp"] else "eager"
    return f"{subject}: {run['machine'].split(',')[0]}, {_threads(run)}, {kernels}"


def _threads(run: dict[str, Any]) -> str:
    return f"{run['threads']} thread" + ("" if run["threads"] == 1 else "s")


def command(text: str) -> str:
    """Return a command without folders of the machine: the last part of each path."""
    words = shlex.split(text)
    for index, flag, value in _paths(words):
        if words[index].partition("=")[1]:
            words[index] = f"{flag}={Path(value).name}"
        else:
            words[index : index + 2] = [flag, Path(value).name]
    return shlex.join(words)


def _paths(words: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield the options that name paths: where one stands, its whole name, its value."""
    for index, word in enumerate(words):
        start, equals, value = word.partition("=")
        for flag in PATHS:
            if len(start) > len("--") and flag.startswith(start):  # argparse takes beginnings
                yield index, flag, value if equals else words[index + 1]
