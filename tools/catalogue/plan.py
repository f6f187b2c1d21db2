"""Decide what is measured for docs/patches/, with which settings, and when a measurement still counts."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_linattn.attention import Patch
from hf_linattn.registry import find, patches

ORIGINAL, CONTROL = "original", "control"

COMPOSITIONS = {
    "window+elu1": "Exact attention to what is near, a linear state for the rest.",
    "window+hedgehog": "Exact attention to what is near; the rest by features trained to resemble softmax.",
    "softmax1+logn": "Scores that stay sharp in long contexts, and a head that may attend to nothing.",
    "elu1+logn": "Log-n scaling in front of a feature map, for which it was not made.",
    "alibi+softmax1": "Distances on the scores, and a head that may attend to nothing.",
}
"""Compositions worth an entry, with a sentence on each; those of unregistered patches are left out."""

NEAR = {"size": 64, "sinks": 4}
OPTIONS: dict[str, dict[str, Any]] = {
    "window": NEAR,
    "window+elu1": NEAR,
    "window+hedgehog": NEAR,
    "h2o": {"size": 64, "heavy": 64, "sinks": 4},
    "local": {"size": 64},
    "strided": {"stride": 64},
    "topk": {"k": 32},
}
"""Options that a patch or composition is measured with, where its defaults change
little in 512 tokens."""


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """How all subjects are fine-tuned and measured, the same for each."""

    steps: int = _setting(150, "updates of the weights")
    batch_size: int = _setting(2, "rows per update")
    block_size: int = _setting(512, "tokens per row")
    lr: float = _setting(1e-3, "peak learning rate")
    length: int = _setting(512, "tokens per window of the perplexity")
    max_tokens: int = _setting(32768, "held-out tokens to read")
    seed: int = _setting(0, "of new weights and of the order of the rows")


@dataclass(frozen=True)
class Subject:
    """One thing to measure: original, control, patch or composition; `patch` is None for the first two."""

    name: str
    patch: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> list[type[Patch]]:
        """Return the patches that it consists of."""
        return [find(part) for part in self.patch.split("+")] if self.patch else []


def compositions() -> dict[str, str]:
    """Return those of `COMPOSITIONS` whose parts are all registered."""
    known = patches()
    return {spec: text for spec, text in COMPOSITIONS.items() if all(p in known for p in spec.split("+"))}


def subjects() -> dict[str, Subject]:
    """List everything to measure, by name, without the patches that a causal model cannot have."""
    names = [name for name, cls in patches().items() if cls.directions != "bidirectional"]
    plain = {ORIGINAL: Subject(ORIGINAL), CONTROL: Subject(CONTROL)}
    return plain | {spec: Subject(spec, spec, OPTIONS.get(spec, {})) for spec in (*names, *compositions())}


def key_of(subject: Subject, settings: Settings, model: str, data: str) -> dict[str, Any]:
    """Return what a measurement depends on: options, settings, and the code of the patches' own files.

    Documentation in those files does not count. The core does not count either: it is the same for all, and
    `--again` measures again.
    """
    sources = {
        f"{cls.__module__}.{cls.__qualname__}": _code_hash(cls)
        for part in subject.parts
        for cls in part.__mro__
        if issubclass(cls, Patch) and cls.__module__ != Patch.__module__
    }
    return {
        "patch": subject.patch,
        "options": subject.options,
        "settings": asdict(settings),
        "model": Path(model).name,
        "data": Path(data).name,
        "sources": dict(sorted(sources.items())),
    }


def _code_hash(cls: type[Patch]) -> str:
    """Hash a class's file without comments and docstrings."""
    path = inspect.getsourcefile(cls)
    assert path is not None
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [item for item in body if not _is_text(item)] or [ast.Pass()]  # type: ignore[attr-defined]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def load_result(work: Path, name: str) -> dict[str, Any] | None:
    """Read the result of a subject, at whatever key; None if there is none."""
    try:
        result: dict[str, Any] = json.loads((work / "subjects" / name / "result.json").read_text("utf-8"))
    except FileNotFoundError:
        return None
    return result


def load_results(work: Path, settings: Settings, model: str, data: str) -> dict[str, dict[str, Any]]:
    """Read the results that still count, by subject."""
    valid = {}
    for name, subject in subjects().items():
        result = load_result(work, name)
        if result is not None and result["key"] == key_of(subject, settings, model, data):
            valid[name] = result
    return valid


def save_json(path: Path, content: Any) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
