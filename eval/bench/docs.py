"""A page of documentation from result folders: ratios, never absolute times, and their commands."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_linattn.errors import DataError

from ..common.markdown import between, write_between
from . import tables
from .run import FORMAT

MARKS = "<!-- bench: written by python -m hf_linattn.bench --docs -->", "<!-- end of bench -->"
HEAD = "# Speed and memory\n\n"
INTRODUCTION = """\
Every number here is a ratio that `python -m hf_linattn.bench` measured: the attention as a patched module
runs it, beside the same module under torch's fused softmax attention, in turn within each round; medians
over rounds. Shapes are batch x heads (/ key heads) x head_dim.
"""
PATHS = ("--model", "--output-dir")


def write_page(path: Path, folders: Sequence[Path]) -> None:
    """Put a section for each run into the page, and leave everything else as it is.

    A section takes the place of that of a run with the same `--output-dir`; others stay, new ones come last.

    Raises:
        DataError: a folder holds no finished run, or the page has no place for the tables.
    """
    new = [section(load(folder)) for folder in folders]
    old = between(path, MARKS).split("\n## ")[1:]
    sections = {_name(text): text for text in (*(f"## {text}" for text in old), *new)}
    text = "\n".join([INTRODUCTION, *(text.strip() + "\n" for text in sections.values())])
    write_between(path, MARKS, text, HEAD)


def _name(section: str) -> str:
    found = re.search(r"--output-dir[= ](\S+)", section)
    return found[1] if found else section


def load(folder: Path) -> dict[str, Any]:
    """The results of a finished run.

    Raises:
        DataError: there are none.
    """
    path = folder / "results.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} holds no results of this command") from error
    if found.get("format") != FORMAT:
        raise DataError(f"{path} is no file of this command")
    if not found["complete"]:
        raise DataError(f"{folder} holds an unfinished run: the command in it goes on where it stopped")
    return found


def section(results: dict[str, Any]) -> str:
    """One run as Markdown."""
    rows, told = results["rows"], results["run"]
    threads = f"{told['threads']} thread" + ("" if told["threads"] == 1 else "s")
    where = told["machine"] if told["device"] == "cpu" else f"{told['device_name']}, {told['machine']}"
    what = results["arguments"]["model"]
    title = "The attention alone" if what is None else f"A whole model: `{Path(what).name}`"
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    parts = [f"## {title}\n", f"```text\n{command(results['command'])}\n```\n"]
    parts.append(f"{where}; {threads}; ratios of {told['basis']}; {versions}.\n")
    if results["answers"]:
        parts.append("\n".join(f"* {text}" for text in results["answers"]) + "\n")
    for heading, found in (
        ("Times as fast as softmax", tables.speeds(rows)),
        ("Peak memory over softmax's", tables.memories(rows)),
        ("Share of what a matrix product and a copy reach on this machine", tables.shares(rows)),
    ):
        for table in found:
            parts += [f"**{heading}**: {table.title}\n", tables.markdown(table)]
    notes = [f"{name}: {note}" for name, note in results["peers"].items()] + tables.refusals(rows)
    if notes:
        parts.append("\n".join(f"* {note}" for note in notes) + "\n")
    return "\n".join(parts)


def command(text: str) -> str:
    """Without folders of the machine: the last part of each path."""
    words = shlex.split(text)
    for index, word in enumerate(words):
        if index and words[index - 1] in PATHS:
            words[index] = Path(word).name
        flag, found, value = word.partition("=")
        if found and flag in PATHS:
            words[index] = f"{flag}={Path(value).name}"
    return shlex.join(words)
