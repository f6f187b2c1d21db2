"""Decide what may stand side by side: results measured alike share a group; others say how they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .discover import ResultFolder

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass
class Groups:
    """Settings of one kind of results, in the order of their appearance."""

    settings: list[dict[str, Any]] = field(default_factory=list)

    def index(self, settings: Mapping[str, Any]) -> int:
        """Return the number of the group with these settings; new settings make a new group."""
        wanted = json.loads(json.dumps(settings))
        if wanted not in self.settings:
            self.settings.append(wanted)
        return self.settings.index(wanted)

    def letter(self, group: int | None) -> str:
        """Return the letter of a group where there are several, else nothing."""
        return "" if group is None or len(self.settings) < 2 else _letter(group)

    def describe(self) -> list[tuple[str, str]]:
        """Return (letter, text): the first with all its settings, others by what differs from it."""
        lines = []
        for group, settings in enumerate(self.settings):
            first = self.settings[0]
            if group == 0:
                texts = [f"{name} {_value(value)}" for name, value in first.items() if value is not None]
            else:
                texts = [
                    f"{name} {_value(settings.get(name))} where {_letter(0)} has {_value(first.get(name))}"
                    for name in first | settings
                    if settings.get(name) != first.get(name)
                ]
            lines.append((_letter(group), ", ".join(texts)))
        return lines


def _letter(group: int) -> str:
    """Return `a`, `b`, ..., `z`, `a2`, ..."""
    again, place = divmod(group, len(LETTERS))
    return LETTERS[place] + (str(again + 1) if again else "")


def _value(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_value, value))
    return "none" if value is None else str(value)


def settings_of(folder: ResultFolder, original: str | None = None) -> dict[str, Any]:
    """Return how something was measured, apart from the model; `original` is what a generation is of."""
    content, arguments = folder.content, folder.content["arguments"]
    if folder.kind == "perplexity":
        facts = content.get("data", {})
        names = ["stride", "max_tokens", "bos", "join", "stream", "column", "split"]
        names += ["segment"] if arguments.get("stream") else []
        counts = {row["length"]: row["tokens"] for row in content["rows"]}
        return {
            "data": _name(arguments.get("data")),
            **{f"{name} of the text": facts.get(name) for name in ("documents", "tokens", "bytes")},
            # which tokens are scored depends on the longest length too
            "lengths": sorted(counts),
            "tokens scored": sorted(set(counts.values())),
            **{name: arguments.get(name) for name in names},
        }
    if folder.kind == "recall":
        names = ["lengths", "depths", "samples", "bos", "seed", "cases"]
        return {name: arguments.get(name) for name in names}
    if folder.kind == "generation":
        text = hashlib.sha256(json.dumps(content.get("prompts")).encode()).hexdigest()[:8]
        return {
            "beside": original,
            "prompts": f"{len(content.get('prompts', []))} (sha256 {text})",
            "new tokens": arguments.get("new_tokens"),
        }
    run = content["run"]
    return {
        "batch": arguments.get("batch_size"),
        "new tokens": arguments.get("new_tokens"),
        **{name: run.get(name) for name in ("dtype", "device", "machine", "threads")},
        **{name: content["versions"].get(name) for name in ("torch", "transformers")},
    }


def _name(source: Any) -> Any:
    return Path(source).name if isinstance(source, str) else source


def training_of(folder: ResultFolder, base: str) -> dict[str, Any]:
    """Return how a model was trained, apart from patch and output folder; `base` is what it began with."""
    content, arguments = folder.content, folder.content["arguments"]
    if folder.kind == "convert":
        return {"command": "convert", "model": base, "data": _name(arguments.get("data"))}
    plain = ("block_size", "lr", "lora", "seed", "train_only_patch")
    return {
        "command": "finetune",
        "model": base,
        "data": _name(arguments.get("data")),
        "tokens": content["tokens"],
        "batch": content.get("global_batch"),
        **{name: arguments.get(name) for name in plain},
    }
