"""The models that docs/results.md converts, and their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Base:
    """A model to convert, and its text.

    Attributes:
        name: of its folder in the work folder.
        told: what it is, for the page.
        model, train, held_out: paths; below the data folder, or with "work:" below the work folder, or with
            "repo:" below this repository. The standard library's source has none.
        documents: how texts become documents, see `study_texts`.
        tables: what is measured of it.
        length: the training length.
        scored: held-out tokens per length.
        recalls: whether it can recall, so that recall is measured.
        mains_only: measure the main rows only, with one seed.
    """

    name: str
    told: str
    model: str
    train: str
    held_out: str
    documents: Literal["books", "whole books", "stories", "recalling", "recalling whole books", "code"]
    tables: tuple[str, ...]
    length: int = 512
    scored: int = 32768
    recalls: bool = False
    mains_only: bool = False

    @property
    def lengths(self) -> str:
        """1x to 64x the training length."""
        return f"{self.length},{2 * self.length},...,{64 * self.length}"


BOOKS = ("models/books-1m", "text/books/train", "text/books/eval/Emma.md")
BASES = {
    base.name: base
    for base in (
        Base(
            "books",
            "`books-1m`: Llama, 1.43 M parameters, trained at 512 tokens on 15 novels",
            *BOOKS,
            documents="books",
            tables=("lengths", "stages"),
        ),
        Base(
            "recall",
            "the base of `examples/pretrain_recall.py`: `books-1m` after 7.4 M tokens with repeats in them; "
            "trained further on such rows",
            "work:recall-base",
            *BOOKS[1:],
            documents="recalling",
            tables=("lengths", "kept"),
            recalls=True,
        ),
        Base(
            "stories",
            "`stories260k`: Llama, 0.26 M parameters, trained at 512 tokens on short stories",
            "models/stories260k",
            "text/tinystories/train_sample.txt",
            "text/tinystories/val.txt",
            documents="stories",
            tables=("lengths",),
            mains_only=True,
        ),
        Base(
            "demo",
            "the demo's base, `examples/base`: Llama, 1.44 M parameters, trained at 512 tokens on Python's "
            "standard library",
            "repo:examples/base",
            "",
            "",
            documents="code",
            tables=("lengths",),
            mains_only=True,
        ),
        Base(
            "long",
            "`books-1m` again, with ten times the tokens",
            *BOOKS,
            documents="whole books",
            tables=("long",),
        ),
        Base(
            "recall-long",
            "the base of `examples/pretrain_recall.py` again, with ten times the tokens",
            "work:recall-base",
            *BOOKS[1:],
            documents="recalling whole books",
            tables=("recall-long",),
            recalls=True,
        ),
        Base(
            "scratch",
            "`books-1m` from scratch: its configuration with new weights, 4 M tokens at 3e-3",
            "work:scratch-base",
            *BOOKS[1:],
            documents="whole books",
            tables=("scratch",),
        ),
    )
}
