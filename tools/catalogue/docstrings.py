"""What the docstring and the attributes of a patch say about it, for its entry in docs/patches.md.

The docstring is a row of paragraphs: a summary of one line; the formula; prose, if any; `Options:` with one
indented `name: text` per option; `Use: ` when to take it; and at the end `Source: `.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

from hf_linattn.attention import Patch
from hf_linattn.errors import LinattnError
from hf_linattn.registry import patches, signature

GROUPS = {
    "feature map": "Linear: a feature map",
    "state that forgets": "Linear: a state that forgets",
    "hybrid": "Hybrids",
    "scores": "Other functions of the scores",
    "sparse": "Sparse",
    "compressed": "Compressed",
    "position": "Positions, beside an attention",
    "floor": "Floors, to compare with",
}
"""The groups that a patch can name, in the order of the page, with their headings."""

AS_JOINED = "as the attention it joins"
DIRECTIONS = {"both": "both", "causal": "causal only", "bidirectional": "bidirectional only"}


class CatalogueError(LinattnError, ValueError):
    """Patches do not say about themselves what the catalogue needs."""


@dataclass(frozen=True)
class Option:
    """One option: its default as Python writes it, and what it does."""

    name: str
    default: str
    text: str


@dataclass(frozen=True)
class Entry:
    """A patch in words; `why` is the reason for one direction only."""

    name: str
    group: str
    summary: str
    formula: str
    use: str
    source: str
    time: str
    directions: str
    why: str = ""
    prose: tuple[str, ...] = ()
    options: tuple[Option, ...] = field(default=())


def read_all() -> dict[str, Entry]:
    """Every registered patch by name.

    Raises:
        CatalogueError: naming every class that lacks something, and what.
    """
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for name, cls in patches().items():
        try:
            entries[name] = read(cls)
        except CatalogueError as error:
            problems.append(str(error))
    if problems:
        raise CatalogueError("\n".join(problems))
    return entries


def read(cls: type[Patch]) -> Entry:
    """The entry of one patch.

    Raises:
        CatalogueError: naming the class and everything it lacks.
    """
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    marked = {mark: _marked(paragraphs, mark) for mark in ("Options:", "Use:", "Source:")}
    prose = [p for p in paragraphs if not p.startswith((*marked, "Shapes:"))]
    options, problems = _options(cls, marked["Options:"])
    for mark in ("Use:", "Source:"):
        if not marked[mark]:
            problems.append(f"no paragraph {mark!r} (one such paragraph)")
    if marked["Source:"] and not paragraphs[-1].startswith("Source:"):
        problems.append("'Source:' is not the last paragraph")
    if not prose or not prose[0] or "\n" in prose[0]:
        problems.append("no summary of one line")
    if len(prose) < 2:
        problems.append("no formula: the paragraph after the summary")
    if cls.group not in GROUPS:
        problems.append(f"group is {cls.group!r}, not one of {', '.join(map(repr, GROUPS))}")
    if cls.directions not in DIRECTIONS:
        problems.append(f"directions is {cls.directions!r}, not one of {', '.join(map(repr, DIRECTIONS))}")
    elif cls.directions != "both" and not cls.why:
        problems.append(f"no `why` for {cls.directions} only")
    if problems:
        raise CatalogueError(f"{cls.__module__}.{cls.__qualname__} ({cls.name!r}): {'; '.join(problems)}")
    return Entry(
        name=cls.name,
        group=cls.group,
        summary=prose[0],
        formula=prose[1],
        use=_joined(marked["Use:"]),
        source=_joined(marked["Source:"]),
        time=_time(cls),
        directions=cls.directions,
        why=cls.why,
        prose=tuple(_joined(p) for p in prose[2:]),
        options=tuple(options),
    )


def _marked(paragraphs: list[str], mark: str) -> str:
    """The one paragraph that begins with the mark, without it; empty if there is none, or several."""
    found = [p.removeprefix(mark) for p in paragraphs if p.startswith(mark)]
    return found[0] if len(found) == 1 else ""


def _joined(text: str) -> str:
    return " ".join(text.split())


def _options(cls: type[Patch], text: str) -> tuple[list[Option], list[str]]:
    """Options in the constructor's order; and what is wrong with their description."""
    told: dict[str, str] = {}
    for line in text.strip("\n").split("\n") if text else []:
        begin = re.fullmatch(r" {4}(\w+): (.+)", line)
        if begin:
            told[begin[1]] = begin[2]
        elif told and re.match(r" {5,}\S", line):
            told[list(told)[-1]] += " " + line.strip()
        else:
            return [], [f"'Options:' has a line that is no indented 'name: text': {line.strip()!r}"]
    known = signature(cls)
    problems = [f"option {name!r} is not described" for name in known if name not in told]
    problems += [f"'Options:' describes {name!r}, which is no option" for name in told if name not in known]
    options = [Option(name, repr(p.default), told.get(name, "")) for name, p in known.items()]
    return options, problems


def _time(cls: type[Patch]) -> str:
    """A modifier costs what the attention it joins costs, unless it says otherwise."""
    own = any("time" in vars(parent) for parent in cls.__mro__ if parent.__module__ != Patch.__module__)
    return cls.time if own or not cls.modifier else AS_JOINED
