"""Tell which results are of the same model: sources as results files record them, one key a model."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linattn.patching.interface import NAME

from ..common.models import UNPATCHED
from .discover import ResultFolder, reading

AS_IT_IS = ""
"""Variant of a model with the attention that its folder has."""
UP = 3
"""How many levels above a results folder a relative source is looked for, after the current directory."""


@dataclass(frozen=True)
class ModelResult:
    """One model in one results file.

    Attributes:
        folder: the results.
        label: what the model is called there.
        key: of the model's folder, the same in all results files.
        variant: `AS_IT_IS`, "unpatched", or the patch put on at measuring, with options and scaling of RoPE.
        main: the file is about this model; others stand in it to be compared with.
    """

    folder: ResultFolder
    label: str
    key: str
    variant: str
    main: bool


class Models:
    """Give each source of a model its key.

    A source that is a folder is that folder; one that a training run recorded as its output folder is that
    run; else the only model known by the same folder name; else its own text.
    """

    def __init__(self, folders: Sequence[ResultFolder]) -> None:
        self.notes: list[str] = []
        self.unpatched: set[str] = set()  # known to have their own attention although the folder is gone
        self.shown: dict[str, Path] = {}  # folder whose name a row gets
        self._recorded: dict[str, set[str]] = defaultdict(set)
        for item in folders:
            with reading(item):
                item.content["arguments"].items()
                list(_sources(item))
            if item.kind in ("finetune", "convert"):
                last = item.folder if item.kind == "finetune" else item.folder / item.stages[-1].name
                key = str(last.resolve())
                self.shown[key] = item.folder
                arguments = (item.content["arguments"], item.stages[-1].results["arguments"])
                for text in (item.folder.resolve(), *(known.get("output_dir") for known in arguments)):
                    self._recorded[str(text)].add(key)
        self._known: dict[str, set[str]] = defaultdict(set)  # folder name -> keys that are there
        sources = [(source, item) for item in folders for source in _sources(item)]
        for there in [*self.shown, *(self._there(source, item.folder) for source, item in sources)]:
            if there is not None:
                self._known[self.folder(there).name].add(there)
        lost: dict[str, set[str]] = defaultdict(set)
        for source, item in sources:
            if self._there(source, item.folder) is None:
                lost[Path(source).name].add(source)
        self._lost = {name: sorted(texts) for name, texts in lost.items()}
        for name, texts in self._lost.items():
            same = self._known.get(name, set())
            if len(same) == 1 or (not same and len(texts) > 1):
                what = f"{', '.join(texts)} not found; taken for the model of the same folder name"
                self.notes.append(f"{name}: {what}")

    def key(self, source: str, near: Path) -> str:
        """Return the key of a source that is named by results in the folder `near`."""
        if there := self._there(source, near):
            return there
        name = Path(source).name
        same = self._known.get(name, set())
        return _only(same) or (source if same else self._lost.get(name, [source])[0])

    def _there(self, source: str, near: Path) -> str | None:
        if recorded := _only(self._recorded.get(source, set())):
            return recorded
        path, near = Path(source).expanduser(), near.resolve()
        above = [near, *near.parents][: UP + 1]
        places = [path] if path.is_absolute() else [folder / path for folder in (Path.cwd(), *above)]
        for place in places:
            if (place / "config.json").is_file() or (place / "plan.json").is_file():
                text = str(place.resolve())
                return _only(self._recorded.get(text, set())) or text
        return None

    def folder(self, key: str) -> Path:
        """Return the folder whose name stands for this key."""
        return self.shown.get(key, Path(key))

    def patched(self, key: str) -> bool | None:
        """Tell whether the folder has a patch; None where that cannot be known."""
        try:
            config = json.loads((Path(key) / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False if key in self.unpatched else None
        return NAME in config


def _only(keys: set[str]) -> str | None:
    """Return the key of a set that has just one."""
    return next(iter(keys)) if len(keys) == 1 else None


def _sources(item: ResultFolder) -> Iterable[str]:
    """Yield every model that a results file names."""
    arguments = item.content["arguments"]
    models = item.content.get("models")
    if item.kind in ("finetune", "convert", "branches"):
        yield str(arguments["model"])
    elif item.kind != "diagnose" and models:
        yield from (str(model["source"]) for model in models)
        if item.kind == "generation":
            yield str(item.content["original"]["source"])


def model_results(item: ResultFolder, models: Models) -> list[ModelResult]:
    """Return the models in a results file, the one that it is about first."""
    arguments = item.content["arguments"]
    if item.kind in ("finetune", "convert"):
        last = item.stages[-1].results["arguments"].get("output_dir")
        own = next(key for key, folder in models.shown.items() if folder == item.folder)
        base = models.key(str(arguments["model"]), item.folder)
        if arguments.get("patch") and base != own:
            models.unpatched.add(base)  # a patch is put on a model that has none
        return [ModelResult(item, str(last), own, AS_IT_IS, True)]
    if item.kind == "branches":
        fields = {name: arguments.get(name) for name in ("patch", "options")}
        curves: list[dict[str, Any]] = [{"label": "", "source": arguments["model"], **fields}]
    else:
        curves = [dict(model) for model in item.content.get("models", [])]
    if item.kind == "generation":
        source = item.content["original"]["source"]
        curves.append({"label": "original", "source": source, "patch": UNPATCHED})
    if item.kind == "recall" and curves[0]["label"] == Path(curves[0]["source"]).name:
        # the command calls a patched folder's original "... unpatched"
        models.unpatched.add(models.key(str(curves[0]["source"]), item.folder))
    results = []
    for place, curve in enumerate(curves):
        key = models.key(str(curve["source"]), item.folder)
        as_is = any(c.get("patch") is None and c["source"] == curve["source"] for c in curves)
        variant = _variant(curve, models.patched(key), as_is)
        main = place == 0 if item.kind != "generation" else curve["label"] != "original"
        results.append(ModelResult(item, str(curve["label"]), key, variant, main))
    return results


def _variant(curve: Mapping[str, Any], patched: bool | None, as_is: bool) -> str:
    patch, scaling = curve.get("patch"), curve.get("rope_scaling")
    at = f"@{scaling}" if scaling else ""
    if patch is None:
        return at or AS_IT_IS
    if patch in (UNPATCHED, "softmax") and not curve.get("options") and not scaling:
        both = patched or (patched is None and as_is)
        return UNPATCHED if both else AS_IT_IS
    pairs = [f"{name}={json.dumps(value)}" for name, value in sorted((curve.get("options") or {}).items())]
    return ":".join([str(patch), *pairs]) + at


def names(pairs: Sequence[tuple[str, str]], models: Models) -> dict[tuple[str, str], str]:
    """Return (key, variant) -> a name, as short as tells them apart."""
    keys = list(dict.fromkeys(key for key, _ in pairs))
    folders = {key: models.folder(key) for key in keys}
    longest = max((len(folder.parts) for folder in folders.values()), default=1)
    short: dict[str, str] = {}
    for key in keys:
        for count in range(1, longest + 1):
            tail = folders[key].parts[-count:]
            if sum(folder.parts[-count:] == tail for folder in folders.values()) == 1 or count == longest:
                short[key] = "/".join(tail)
                break
    return {(key, variant): " ".join(filter(None, [short[key], variant])) for key, variant in pairs}
