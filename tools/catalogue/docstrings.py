"""Read what the docstring and the attributes of a patch say, for its entry in docs/patches/.

A docstring has these paragraphs in this order: a summary of one line; the formula; prose, if any; `Options:`
with one indented `name: text` per option; `Use: ` when to take it; and at the end `Source: `.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field

from hf_linattn.attention import Patch
from hf_linattn.errors import LinattnError
from hf_linattn.registry import patches, signature


@dataclass(frozen=True)
class Group:
    """One page of docs/patches/: its heading, its file, and what its patches have in common."""

    title: str
    page: str
    summary: str


GROUPS = {
    "feature map": Group(
        "Linear: a feature map",
        "feature-maps.md",
        "Linear attention, O(n), with a state of constant size. The patches differ in the feature map phi.",
    ),
    "state that forgets": Group(
        "Linear: a state that forgets",
        "decay.md",
        "Linear attention whose state decays, so that old tokens count less.",
    ),
    "hybrid": Group(
        "Hybrids",
        "hybrids.md",
        "Exact softmax over the nearest tokens, in constant memory; a linear attention can sum up the rest.",
    ),
    "scores": Group(
        "Other functions of the scores",
        "scores.md",
        "Attention over all keys, as softmax is, with other weights or other scores.",
    ),
    "sparse": Group(
        "Sparse",
        "sparse.md",
        "Softmax over fewer keys. These are masks: they show the quality of a pattern and gain no speed.",
    ),
    "compressed": Group(
        "Compressed",
        "compressed.md",
        "Softmax over fewer keys and values, each of which stands for many tokens.",
    ),
    "position": Group(
        "Positions",
        "positions.md",
        "How distance changes the scores of another attention, with RoPE left on or switched off.",
    ),
    "floor": Group(
        "Floors, to compare with",
        "floors.md",
        "No attention at all. What a model does better than this is what its attention carries.",
    ),
}
"""The groups that a patch can name, in the order of the index."""

AS_JOINED = "as the attention it joins"
DIRECTIONS = {"both": "both", "causal": "causal only", "bidirectional": "bidirectional only"}


class CatalogueError(LinattnError, ValueError):
    """A docstring lacks what the catalogue needs."""


@dataclass(frozen=True)
class Option:
    """One option: its default as Python writes it, and what it does."""

    name: str
    default: str
    text: str


@dataclass(frozen=True)
class Entry:
    """A patch as its page describes it; `why` is the reason for one direction only."""

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
    """Read every registered patch, by name.

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
    """Read one patch.

    Raises:
        CatalogueError: naming the class and everything it lacks.
    """
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    sections = {mark: _section(paragraphs, mark) for mark in ("Options:", "Use:", "Source:")}
    prose = [p for p in paragraphs if not p.startswith((*sections, "Shapes:"))]
    options, problems = _options(cls, sections["Options:"])
    for mark in ("Use:", "Source:"):
        if not sections[mark]:
            problems.append(f"no paragraph {mark!r} (one such paragraph)")
    if sections["Source:"] and not paragraphs[-1].startswith("Source:"):
        problems.append("'Source:' is not the last paragraph")
    if not prose or not prose[0] or "\n" in prose[0]:
        problems.append("no summary of one line")
    if len(prose) < 2:
        problems.append("no formula: the paragraph after the summary")
    if cls.group not in GROUPS:
        problems.append(f"group is {cls.group!r}, not one of {', '.join(map(repr, GROUPS))}")
    if cls.directions not in DIRECTIONS:
        problems.append(f"directions is {cls.directions!r}, not one of {', '.join(map(repr, DIRECTIONS))}")
    elif cls.directions != "both" and not cls.direction_reason:
        problems.append(f"no `direction_reason` for {cls.directions} only")
    if problems:
        raise CatalogueError(f"{cls.__module__}.{cls.__qualname__} ({cls.name!r}): {'; '.join(problems)}")
    return Entry(
        name=cls.name,
        group=cls.group,
        summary=prose[0],
        formula=prose[1],
        use=_joined(sections["Use:"]),
        source=_joined(sections["Source:"]),
        time=_time(cls),
        directions=cls.directions,
        why=cls.direction_reason,
        prose=tuple(_joined(p) for p in prose[2:]),
        options=tuple(options),
    )


def _section(paragraphs: list[str], mark: str) -> str:
    """Return the one paragraph that begins with the mark, without it; empty if there is none, or several."""
    matches = [p.removeprefix(mark) for p in paragraphs if p.startswith(mark)]
    return matches[0] if len(matches) == 1 else ""


def _joined(text: str) -> str:
    return " ".join(text.split())


def _options(cls: type[Patch], text: str) -> tuple[list[Option], list[str]]:
    """Read the options, in the constructor's order; and list what is wrong with their description."""
    texts: dict[str, str] = {}
    for line in text.strip("\n").split("\n") if text else []:
        begin = re.fullmatch(r" {4}(\w+): (.+)", line)
        if begin:
            texts[begin[1]] = begin[2]
        elif texts and re.match(r" {5,}\S", line):
            texts[list(texts)[-1]] += " " + line.strip()
        else:
            return [], [f"'Options:' has a line that is no indented 'name: text': {line.strip()!r}"]
    known = signature(cls)
    problems = [f"option {name!r} is not described" for name in known if name not in texts]
    problems += [f"'Options:' describes {name!r}, which is no option" for name in texts if name not in known]
    options = [Option(name, repr(p.default), texts.get(name, "")) for name, p in known.items()]
    return options, problems


def _time(cls: type[Patch]) -> str:
    """Return the time a patch takes; a modifier without its own takes that of the attention it joins."""
    own = any("time" in vars(parent) for parent in cls.__mro__ if parent.__module__ != Patch.__module__)
    return cls.time if own or not cls.modifier else AS_JOINED
