"""Where the files of docs/results.md are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from study_bases import Base
from study_row import Json, Row


def slot(row: Row, seed: int) -> str:
    """The name of a row's folder for a seed."""
    return row.name if row.how == "none" else f"{row.name}-{seed}"


@dataclass(frozen=True)
class Place:
    """Where a base's files are: the data folder, and the work folder.

    Attributes:
        base: the model to convert.
        data, work: the folders.
        figures: what was measured, as `study_figures` keeps it.
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
        """The model as it comes."""
        return self.path(self.base.model)

    def path(self, given: str) -> Path:
        """A path of the base."""
        if given.startswith("repo:"):
            return Path(__file__).resolve().parent.parent / given[5:]
        return self.work / given[5:] if given.startswith("work:") else self.data / given

    def text(self, which: str) -> Path:
        """The documents "train" or "held_out", as `study_texts` writes them."""
        return self.folder / f"{which}.jsonl"

    def trained(self, row: Row, seed: int) -> Path:
        """The folder that training a row leaves."""
        return self.folder / "runs" / slot(row, seed)

    def key(self, what: str, row: Row, seed: int) -> str:
        """The name of a measurement: its folder in the work folder."""
        return f"{self.base.name}/{what}/{slot(row, seed)}"

    def measured(self, what: str, row: Row, seed: int) -> Path:
        """The folder of a measurement."""
        return self.work / self.key(what, row, seed)

    @property
    def layers(self) -> str:
        """The name of the ranking of layers: its folder in the work folder."""
        return f"{self.base.name}/layers"

    def found(self, what: str, row: Row) -> list[Json]:
        """The figures of a row, one per seed."""
        keys = (self.key(what, row, seed) for seed in row.seeds(self.base))
        return [self.figures[key] for key in keys if key in self.figures]
