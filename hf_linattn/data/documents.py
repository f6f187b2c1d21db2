"""Documents: from a file, a folder, a table or a dataset's name; whole, or streamed.

Text files are read as UTF-8 as Python and `datasets` read them: line endings become LF and a leading byte
order mark goes (a model that was trained on LF loses much on CR LF). The texts of tables, lists and datasets
are kept as they are.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_linattn.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".raw")
"""Endings of text files inside a folder. A file named itself may have any ending but a table's."""

TABLE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

PACKED = (".gz", ".xz", ".bz2", ".zst", ".zip", ".tar", ".tgz", ".7z")

CHAT = "messages"
"""The column of conversations, a list of {role, content} in each row."""

STREAM_ABOVE = 2**30
"""Bytes of text on the disk from which on a training command streams it without being asked to."""

PIECE = 2**18
"""Characters of a text file that are read and tokenized at once when it is streamed."""

_FEATURES = datasets.Features(
    # A plain Arrow string column holds 2 GiB at most.
    {"name": datasets.Value("string"), "text": datasets.Value("large_string")}
)


@dataclass(frozen=True)
class TextFiles:
    """Text files, one document each; `root` is what their names are relative to."""

    files: list[Path]
    root: Path

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Read the files in pieces, which end with a line: (text, whether it begins a document).

        Raises:
            DataError: a file cannot be read.
        """
        for path in self.files:
            with _reading(path, whole=False), path.open(encoding="utf-8-sig") as file:
                first = True
                while text := file.read(PIECE):
                    yield text + file.readline(PIECE), first
                    first = False

    def documents(self) -> datasets.Dataset:
        """Read all files into memory.

        Raises:
            DataError: a file cannot be read, or all are empty.
        """
        names, texts = [], []
        for path in self.files:
            with _reading(path):
                text = path.read_text(encoding="utf-8-sig")
            if text:
                names.append(path.relative_to(self.root).as_posix())
                texts.append(text)
        if not texts:
            raise DataError(f"{self.files[0] if len(self.files) == 1 else self.root} is empty")
        return datasets.Dataset.from_dict({"name": names, "text": texts}, features=_FEATURES)


@dataclass(frozen=True)
class Table:
    """Rows of a table or dataset, in memory, on the disk or streamed; `source` names it in messages."""

    rows: datasets.Dataset | datasets.IterableDataset
    source: str
    column: str

    @property
    def streamed(self) -> bool:
        """Whether the rows can only be read in order."""
        return isinstance(self.rows, datasets.IterableDataset)

    @property
    def is_chat(self) -> bool:
        """Whether the rows hold conversations: the column `messages` is asked for, or there is no other."""
        names = self._column_names()
        return CHAT in names and (self.column == CHAT or self.column not in names)

    def _column_names(self) -> list[str]:
        names: list[str] | None = self.rows.column_names
        if names is None:  # a stream knows them by its first row
            with _loading(self.source):
                names = list(next(iter(self.rows), {}))
        return names

    def values(self, column: str) -> Iterator[tuple[str, Any]]:
        """Read a column row by row: (the row's name, its value).

        Raises:
            DataError: the data cannot be read.
        """
        with _loading(self.source):
            for number, row in enumerate(self.rows.select_columns([column])):
                yield f"{self.source}[{number}]", row[column]

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Read the texts one by one: (text, True).

        Raises:
            DataError: there is no such column, or it holds no text.
        """
        self._require_column()
        for name, text in self.values(self.column):
            if text is not None and not isinstance(text, str):
                raise DataError(f"column {self.column!r} of {name} holds {type(text).__name__}, not text")
            if text:
                yield text, True

    def _require_column(self) -> None:
        if self.column not in (names := self._column_names()):
            raise DataError(f"{self.source} has no column {self.column!r}; it has {', '.join(names)}")

    def documents(self) -> datasets.Dataset:
        """Take the texts as documents.

        Raises:
            DataError: there is no such column, or it holds no text.
        """
        table, source, column = self.rows, self.source, self.column
        self._require_column()
        kind = getattr(table.features[column], "dtype", "nested values")
        if kind not in ("string", "large_string"):
            raise DataError(f"column {column!r} of {source} holds {kind}, not text")
        documents = table.select_columns([column])
        if column != "text":
            documents = documents.rename_column(column, "text")
        kept = [row for row, text in enumerate(documents["text"]) if text]
        if not kept:
            raise DataError(f"column {column!r} of {source} is empty")
        if len(kept) < len(documents):
            rows = f"{len(documents) - len(kept):,} of {len(documents):,} rows"
            warnings.warn(f"{source}: column {column!r} is empty in {rows}, which are left out", stacklevel=3)
            documents = documents.select(kept)
        names = [f"{source}[{row}]" for row in kept]
        return documents.add_column("name", names).select_columns(["name", "text"])


def load_documents(source: Any, *, column: str = "text", split: str = "train") -> datasets.Dataset:
    """Load documents as a dataset with the columns `name` and `text`; empty ones are left out.

    Args:
        source: a list of texts or a `datasets.Dataset`, one document per row; a text file (one document); a
            folder (every file below it that ends like `TEXT_SUFFIXES` and is not hidden, in sorted order, one
            document each); a .jsonl, .json, .parquet or .csv file (one document per row); otherwise a dataset
            for `datasets.load_dataset`, as `name` or `name:config`.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.

    Raises:
        DataError: there is nothing to read, it is no UTF-8 text, or the column is missing.
    """
    opened = open_source(source, column=column, split=split)
    if isinstance(opened, Table) and opened.streamed:
        raise DataError(f"{opened.source} is streamed, and all documents are wanted at once: give a Dataset")
    return opened.documents()


def open_source(
    source: Any, *, column: str = "text", split: str = "train", stream: bool = False
) -> TextFiles | Table:
    """Find out what a source is; only streams and tables on the disk are opened.

    Args:
        source: as for `load_documents`; or a `datasets.IterableDataset`.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.
        stream: tables and datasets are read row by row, neither converted nor downloaded before.

    Raises:
        DataError: there is nothing to read.
    """
    if isinstance(source, list):
        strange = next((text for text in source if not isinstance(text, str)), None)
        if not source:
            raise DataError("the list of texts is empty")
        if strange is not None:
            raise DataError(f"the list of texts holds {type(strange).__name__}, not only strings")
        kind = datasets.Features({column: datasets.Value("large_string")})
        source = datasets.Dataset.from_dict({column: source}, features=kind)
    if isinstance(source, datasets.Dataset | datasets.IterableDataset):
        return Table(source, "the dataset", column)
    if not isinstance(source, str | Path):
        hint = ": choose one of its splits" if isinstance(source, dict) else ""  # a DatasetDict is one
        given = f"{type(source).__name__}{hint}"
        raise DataError(f"text is a path, a dataset's name, a list of strings or a Dataset, not {given}")
    if source == "":  # as of a variable that is not set; a path of no name is the folder one is in
        raise DataError("the path of the text is empty")
    path = Path(source).expanduser()
    if path.is_dir():
        files = _text_files(path)
        _note_others(path)
        return TextFiles(files, path)
    if path.is_file() and path.suffix.lower() in PACKED:
        raise DataError(f"{path} is packed: unpack it first")
    if path.is_file() and path.suffix.lower() not in TABLE_BUILDERS:
        return TextFiles([path], path.parent)
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        builder = TABLE_BUILDERS[path.suffix.lower()]
        # pandas would read the words "NA" and "null" as missing
        extra: dict[str, Any] = {"keep_default_na": False} if builder == "csv" else {}
        extra |= {"data_files": str(path), "split": "train", "streaming": stream}
        if builder == "csv" and _header(path).count(column) > 1:  # pandas would take the first
            raise DataError(f"{path} has several columns {column!r}: name each differently")
        return Table(_load_dataset(str(source), builder, **extra), str(source), column)
    if path.exists():
        raise DataError(f"{source} is neither a file nor a folder")
    if str(source).startswith((".", "/", "~")) or path.suffix.lower() in (*TEXT_SUFFIXES, *TABLE_BUILDERS):
        raise DataError(f"no such file or folder: {source}")
    name, _, config = str(source).partition(":")
    table = _load_dataset(str(source), name, config or None, split=split, streaming=stream)
    return Table(table, str(source), column)


def _header(path: Path) -> list[str]:
    with _reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        return next(csv.reader(file), [])


def streams(source: Any) -> bool:
    """Tell whether a source is streamed without being asked to: a stream, or more than `STREAM_ABOVE`."""
    if isinstance(source, datasets.IterableDataset):
        return True
    if not isinstance(source, str | Path):
        return False
    path = Path(source).expanduser()
    files = _text_files(path) if path.is_dir() else [path] if path.is_file() else []
    return sum(file.stat().st_size for file in files) > STREAM_ABOVE


def files_below(folder: Path, suffixes: Container[str]) -> list[Path]:
    """List, sorted, the files below a folder with such endings; neither hidden ones nor hidden folders."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.is_file()
    )


def _text_files(folder: Path) -> list[Path]:
    files = files_below(folder, TEXT_SUFFIXES)
    if not files:
        raise DataError(
            f"no text in the folder {folder}: looked for files ending in {', '.join(TEXT_SUFFIXES)}"
        )
    return files


def _note_others(folder: Path) -> None:
    """Warn of tables and packed files beside the texts: a dataset's README would pass for the dataset."""
    # .json files are settings of some program more often than text
    others = files_below(folder, {*TABLE_BUILDERS, *PACKED} - {".json"})
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        warnings.warn(
            f"{folder} is read as a folder of text files, without its other files "
            f"({others[0].relative_to(folder).as_posix()}{more}): to read a table, name the file itself; "
            "unpack what is packed",
            stacklevel=3,
        )


@contextmanager
def _reading(path: Path, *, whole: bool = True) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        where = f": byte {error.start} does not decode" if whole else ""  # else counted from some piece on
        raise DataError(f"{path} is not UTF-8 text{where}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _loading(source: str, hint: str = "") -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
        datasets.exceptions.DatasetGenerationError,
    ) as error:
        # the generator's own message says only that something went wrong
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        if "corresponds to no data" in reason or "BatchSize must be greater than 0" in reason:
            raise DataError(f"{source} has no rows") from error
        raise DataError(f"cannot load the data {source!r}{hint}: {reason}") from error


def _load_dataset(source: str, *args: Any, **kwargs: Any) -> Any:
    tried = "" if "data_files" in kwargs else " (no file or folder, so taken as the name of a dataset)"
    with _loading(source, tried):
        return datasets.load_dataset(*args, **kwargs)
