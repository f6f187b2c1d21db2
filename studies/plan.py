"""Bases and rows of the study as bases.yaml and rows.yaml say them, and where their files are."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]

BLOCK, BATCH = 512, 8
STEPS = 245
"""Of 8 x 512 tokens, 1,003,520 in all: what `hf_linattn.convert --preset plain` adds up to."""
SEEDS = (0, 1, 2)
LENGTHS = tuple(BLOCK << power for power in range(7))
"""Tokens per window, 1 to 64 times the training length."""
SCORED = 32768
"""Held-out tokens per length."""


@dataclass(frozen=True)
class Base:
    """A model to convert and its text; see bases.yaml.

    Attributes:
        name: of its folder in the work folder.
        label: what the page calls it.
        model, train, held_out: paths, see `Workspace.path`.
        documents: how texts become documents, see `texts`.
        tables: of rows.yaml.
        measures: what is measured of its rows, by the commands of `commands`.
        seeds: of its main rows; other rows have one.
        main_rows_only: measure only the main rows.
        targets: what was hoped for, see `page`.
    """

    name: str
    label: str
    model: str
    documents: Literal["books", "whole books", "stories", "recalling", "recalling whole books", "code"]
    tables: list[str]
    measures: list[str]
    train: str = ""
    held_out: str = ""
    seeds: int = 1
    main_rows_only: bool = False
    targets: list[Json] = field(default_factory=list)


@dataclass(frozen=True)
class Experiment:
    """One row of a table: the base, trained in one way; see rows.yaml.

    Attributes:
        name: of its folders.
        training: not at all, by `hf_linattn.finetune` or by `hf_linattn.convert`.
        patch, options: as `patch_model` takes them; None leaves the model as it is.
        arguments: more words for the training command.
        rope_scaling: KIND:FACTOR.
        main: also measured of bases with main rows only, with all seeds of its base.
        diagnose: its attention is looked at.
        label: what the page calls it (default: patch and options).
    """

    name: str
    training: Literal["none", "finetune", "convert"]
    patch: str | Json | None = None
    options: Json = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    rope_scaling: str | None = None
    main: bool = False
    diagnose: bool = False
    label: str = ""

    def seeds(self, base: Base) -> tuple[int, ...]:
        """Return the seeds that it is measured with."""
        return SEEDS[: base.seeds if self.main else 1]

    def slot(self, seed: int) -> str:
        """Return the name of its folders for a seed."""
        return self.name if self.training == "none" else f"{self.name}-{seed}"

    @property
    def steps(self) -> int:
        """Updates of the weights."""
        values = dict(zip(self.arguments[::2], self.arguments[1::2], strict=True))
        tokens = sum(int(value) for name, value in values.items() if name.endswith("-tokens"))
        rows = int(values.get("--batch-size", BATCH))
        return int(values.get("--max-steps", max(STEPS * BATCH, tokens // BLOCK) // rows))

    @property
    def last_stage(self) -> str:
        """The stage of a conversion whose folder is the result; "" of a fine-tuning."""
        if self.training != "convert":
            return ""
        if "transfer" in self.arguments:  # of --stages
            return "transfer"
        return "finetune" if "--finetune-tokens" in self.arguments else "distill"


def words(value: Any) -> tuple[str, ...]:
    """Split command-line words in nested lists."""
    if isinstance(value, list):
        return tuple(word for item in value for word in words(item))
    return tuple(shlex.split(value))


def experiment(content: Json) -> Experiment:
    """Make a row from its keys in rows.yaml."""
    return Experiment(**{**content, "arguments": words(content.get("arguments", []))})


BASES = {
    name: Base(name, **content)
    for name, content in yaml.safe_load((HERE / "bases.yaml").read_text(encoding="utf-8")).items()
}
_ROWS: Json = yaml.safe_load((HERE / "rows.yaml").read_text(encoding="utf-8"))
TABLES = {name: [experiment(row) for row in rows] for name, rows in _ROWS["tables"].items()}
KEPT: Json = _ROWS["kept"]
CONTROL = "control"
RANKED = experiment(KEPT["ranked"])
"""The row whose stage `transfer` tells which layers stay softmax."""


def rows_of(base: Base, tables: Iterable[str]) -> list[Experiment]:
    """Return the rows of these tables for a base, each once."""
    rows: dict[str, Experiment] = {}
    for table in (table for table in base.tables if table in tables):
        for row in TABLES[table]:
            if not base.main_rows_only or row.main or row.name == "original":
                rows.setdefault(row.name, row)
    return list(rows.values())


@dataclass(frozen=True)
class Workspace:
    """The files of a base, in the data folder and in the work folder.

    Attributes:
        base: the model to convert.
        data, work: the folders.
        figures: what was measured, as `figures` keeps it.
    """

    base: Base
    data: Path
    work: Path
    figures: Mapping[str, Json] = field(default_factory=dict, repr=False)

    @property
    def folder(self) -> Path:
        """Everything that is made for this base."""
        return self.work / self.base.name

    @property
    def model(self) -> Path:
        """The model to convert."""
        return self.path(self.base.model)

    def path(self, text: str) -> Path:
        """Resolve a path of bases.yaml."""
        kind, _, rest = text.rpartition(":")
        return {"": self.data, "work": self.work, "repo": HERE.parent}[kind] / rest

    def text(self, which: str) -> Path:
        """Return the file of documents, "train" or "held_out", that `texts` writes."""
        return self.folder / f"{which}.jsonl"

    def trained(self, row: Experiment, seed: int) -> Path:
        """Return the folder that training a row leaves."""
        return self.folder / "runs" / row.slot(seed)

    def result(self, row: Experiment, seed: int) -> Path:
        """Return the folder of the model that is measured."""
        return self.model if row.training == "none" else self.trained(row, seed) / row.last_stage

    def key(self, measure: str, row: Experiment, seed: int) -> str:
        """Return the name of a measurement: its folder in the work folder."""
        return f"{self.base.name}/{measure}/{row.slot(seed)}"

    @property
    def layers(self) -> str:
        """The name of the ranking of layers: its folder in the work folder."""
        return f"{self.base.name}/layers"

    def measured(self, measure: str, row: Experiment) -> list[Json]:
        """Return the figures of a row, one per seed."""
        keys = (self.key(measure, row, seed) for seed in row.seeds(self.base))
        return [self.figures[key] for key in keys if key in self.figures]


def kept_rows(workspace: Workspace) -> dict[str, Experiment]:
    """Return rows by name, one per set of layers that some method keeps; none until the layers are ranked."""
    if workspace.layers not in workspace.figures:
        return {}
    ranking = workspace.figures[workspace.layers]
    methods: dict[tuple[int, ...], list[str]] = {}
    for method, kept in ranking["kept"]:
        if len(kept) in KEPT["counts"]:
            methods.setdefault(tuple(kept), []).append(method)
    rows = {}
    for kept, names in sorted(methods.items(), key=lambda item: (len(item[0]), item[0])):
        name = "kept-" + "-".join(map(str, kept))
        linear = ",".join(str(number) for number in ranking["numbers"] if number not in kept)
        label = f"softmax in {', '.join(map(str, kept))}"
        plan: Json = {"patch": {linear: RANKED.patch}, "label": f"{label}: {', '.join(sorted(set(names)))}"}
        rows[name] = experiment({"name": name, "training": "convert", "arguments": KEPT["arguments"], **plan})
        for variant in KEPT["variants"] if {*KEPT["chosen_by"]} & {*names} else ():
            if len(kept) == 1 or "kept" not in variant:
                other = f"{name}-{variant['name']}"
                rows[other] = _variant(other, variant, label, linear, ",".join(map(str, kept)))
    return rows


def _variant(name: str, variant: Json, label: str, linear: str, kept: str) -> Experiment:
    """Make the row of a variant; `linear` and `kept` are layers as `patch_model` takes them."""
    patch: Json = {linear: [variant["patch"], variant["options"]]}
    if "kept" in variant:
        patch[kept] = variant["kept"]
    label += f", `{variant['patch']}` ({variant['options']['feature_map']}) elsewhere"
    label += variant.get("label", "")
    content = {"name": name, "patch": patch, "arguments": variant["arguments"], "label": label}
    return experiment({**content, "training": "convert"})
