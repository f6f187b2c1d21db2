"""Find result folders: each recognised by what lies in it, read, and checked to be whole."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_linattn.cli.files import read_json
from hf_linattn.errors import DataError

KINDS = {
    "finetune": "hf_linattn.finetune",
    "convert": "hf_linattn.convert",
    "perplexity": "hf_linattn.eval.perplexity",
    "recall": "hf_linattn.eval.recall",
    "generation": "hf_linattn.eval.generation",
    "branches": "hf_linattn.eval.branches",
    "diagnose": "hf_linattn.eval.diagnose",
    "cost": "hf_linattn.bench --cost",
}
"""What can stand on the page, and the command that leaves it."""

FORMATS = {f"hf_linattn.{kind}/1": kind for kind in KINDS}
LEVELS = 2
"""How deep below a folder results are looked for."""
NEEDED = {
    "finetune": ("arguments", "command", "tokens", "versions"),
    "perplexity": ("arguments", "command", "models", "rows", "versions"),
    "recall": ("arguments", "command", "models", "rows", "verdicts", "versions"),
    "generation": ("arguments", "command", "models", "original", "summaries", "versions"),
    "branches": ("arguments", "command", "rows", "sentences", "versions"),
    "cost": ("arguments", "command", "models", "rows", "run", "versions"),
    "convert": ("arguments", "command", "stages"),
}
OWN_PAGE = "hf_linattn.summary/1"
"""results.json of the report itself, as in a demo's folder: nothing measured."""


@dataclass(frozen=True)
class Stage:
    """One training run: its name, results.json and the rows of train.csv."""

    name: str
    results: dict[str, Any]
    losses: list[dict[str, str]]


@dataclass(frozen=True)
class ResultFolder:
    """One folder with results.

    Attributes:
        kind: one of `KINDS`.
        folder: its path.
        content: its results.json, or plan.json of a conversion.
        stages: training runs, one for a fine-tuning.
        validation: of a conversion: nats per token, by stage.
    """

    kind: str
    folder: Path
    content: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)
    validation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Discovery:
    """All result folders, and sentences about those whose results the page does not show."""

    folders: list[ResultFolder]
    not_shown: list[str]


def discover(folders: Sequence[Path]) -> Discovery:
    """Read every result folder among these, and up to `LEVELS` levels below them.

    Raises:
        DataError: a folder does not exist, holds nothing that is known, or results that are unfinished or
            damaged.
    """
    results: dict[Path, ResultFolder] = {}
    not_shown: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise DataError(f"no such folder: {folder}")
        known, others = [], []
        for path in _below(folder, LEVELS):
            kind = _kind(path)
            if kind in KINDS:
                known.append(path)
                if path.resolve() not in results:
                    results[path.resolve()] = _read(kind, path)
            elif kind is not None:
                others.append(f"{path} holds results of {kind}, which this page does not show")
        if not known:
            raise DataError(others[0] if others else _nothing(folder))
        not_shown += others
    return Discovery(list(results.values()), list(dict.fromkeys(not_shown)))


def _nothing(folder: Path) -> str:
    commands = ", ".join(command.removeprefix("hf_linattn.") for command in KINDS.values())
    return (
        f"{folder} holds no results: looked there and {LEVELS} levels below for results.json, plan.json or "
        f"diagnose.json of {commands}"
    )


def _below(folder: Path, levels: int) -> Iterator[Path]:
    """Yield the folder, and those below it except the stages of a conversion."""
    yield folder
    if levels and not (folder / "plan.json").is_file():
        for path in sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."):
            yield from _below(path, levels - 1)


def _kind(folder: Path) -> str | None:
    """Return one of `KINDS`, or the command of another known format, or None where there are no results."""
    if (folder / "diagnose.json").is_file():
        return "diagnose"
    if (folder / "plan.json").is_file():
        return "convert"
    path = folder / "results.json"
    if not path.is_file():
        if (folder / "run.json").is_file():
            raise DataError(f"{folder} is a fine-tuning that is not finished: run.json, but no results.json")
        return None
    content = read_json(path)
    form = content.get("format")
    if form is None and {"steps", "tokens", "arguments"} <= content.keys():
        return "finetune"
    if form == OWN_PAGE:
        return None
    if form in FORMATS:
        return FORMATS[form]
    if form == "hf_linattn.bench/1":
        return "hf_linattn.bench without --cost"
    if isinstance(form, str) and form.startswith("hf_linattn.") and form.count("/") == 1:
        return "hf_linattn.eval." + form.removeprefix("hf_linattn.").partition("/")[0]
    raise DataError(f"{path} is no file of this package: its format is {form!r}; known: {', '.join(FORMATS)}")


def _read(kind: str, folder: Path) -> ResultFolder:
    if kind == "diagnose":  # read where it is drawn
        return ResultFolder(kind, folder, read_json(folder / "diagnose.json"))
    if kind == "convert":
        plan = _checked(kind, folder / "plan.json")
        path = folder / "validation.json"
        validation = read_json(path) if path.is_file() else {}
        missing = [name for name in plan["stages"] if not (folder / name / "results.json").is_file()]
        if missing:
            names = ", ".join(missing)
            raise DataError(
                f"{folder} is a conversion that is not finished: no results.json of stage {names}"
            )
        stages = [_stage(folder / name) for name in plan["stages"]]
        return ResultFolder(kind, folder, plan, stages, validation)
    content = _checked(kind, folder / "results.json")
    return ResultFolder(kind, folder, content, [_stage(folder)] if kind == "finetune" else [])


def _checked(kind: str, path: Path) -> dict[str, Any]:
    content = read_json(path)
    if content.get("complete") is False:
        raise DataError(f"{path} is not finished: start its command again ({content.get('command')})")
    missing = [name for name in NEEDED[kind] if name not in content]
    if missing:
        raise DataError(f"{path} is no whole result of {KINDS[kind]}: it lacks {', '.join(missing)}")
    if kind not in ("finetune", "convert") and not content.get("rows", content.get("summaries")):
        raise DataError(f"{path} holds no rows: start its command again")
    return content


@contextmanager
def reading(folder: ResultFolder) -> Iterator[None]:
    """Turn a missing key or a wrong type in the results into one error that names the folder.

    Raises:
        DataError: the block failed on what is in the results.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise DataError(
            f"{folder.folder} holds no whole results of {KINDS[folder.kind]}: {type(error).__name__} {error}"
        ) from error


def _stage(folder: Path) -> Stage:
    results, path = _checked("finetune", folder / "results.json"), folder / "train.csv"
    if not path.is_file():
        raise DataError(f"{folder} has results.json but no train.csv: a fine-tuning leaves both")
    with path.open(encoding="utf-8", newline="") as file:
        return Stage(folder.name, results, list(csv.DictReader(file)))
