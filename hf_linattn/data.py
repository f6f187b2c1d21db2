"""Text for training and evaluation: from a file, a folder, a table or a dataset's name to packed blocks.

    documents = load_documents("books/")  # columns: name, text
    blocks = load_blocks("books/", tokenizer, 512)  # int32 [blocks, 512]

Text files are read as UTF-8 as Python and `datasets` read them: line endings become LF and a leading byte
order mark goes (a model that was trained on LF loses much on CR LF). The texts of tables, lists and datasets
are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hf_linattn.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".py", ".rst", ".raw")
"""Endings of text files inside a folder. A file named itself may have any ending but a table's."""

TABLE_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}

_FEATURES = datasets.Features(
    # A plain Arrow string column holds 2 GiB at most.
    {"name": datasets.Value("string"), "text": datasets.Value("large_string")}
)


def load_documents(source: Any, *, column: str = "text", split: str = "train") -> datasets.Dataset:
    """Load documents as a dataset with the columns `name` and `text`; empty ones are left out.

    Args:
        source: a list of texts or a `datasets.Dataset`, one document per row; a text file (one document); a
            folder (every file below it that ends like `TEXT_SUFFIXES`, in sorted order, one document each); a
            .jsonl, .json, .parquet or .csv file (one document per row); otherwise a dataset for
            `datasets.load_dataset`, as `name` or `name:config`.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.

    Raises:
        DataError: there is nothing to read, it is no UTF-8 text, or the column is missing.
    """
    if isinstance(source, list):
        strange = next((text for text in source if not isinstance(text, str)), None)
        if strange is not None:
            raise DataError(f"the list of texts holds {type(strange).__name__}, not only strings")
        kind = datasets.Features({column: datasets.Value("large_string")})
        source = datasets.Dataset.from_dict({column: source}, features=kind)
    if isinstance(source, datasets.Dataset):
        return _from_table(source, "the dataset", column)
    path = Path(source).expanduser()
    if path.is_dir():
        return _from_files(_text_files(path), root=path)
    if path.is_file() and path.suffix.lower() not in TABLE_BUILDERS:
        return _from_files([path], root=path.parent)
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"{path} is empty")
        builder = TABLE_BUILDERS[path.suffix.lower()]
        # pandas would read the words "NA" and "null" as missing
        extra = {"keep_default_na": False} if builder == "csv" else {}
        table = _load_dataset(str(source), builder, data_files=str(path), split="train", **extra)
        return _from_table(table, str(source), column)
    if str(source).startswith((".", "/", "~")) or path.suffix.lower() in (*TEXT_SUFFIXES, *TABLE_BUILDERS):
        raise DataError(f"no such file or folder: {source}")
    name, _, config = str(source).partition(":")
    return _from_table(_load_dataset(str(source), name, config or None, split=split), str(source), column)


def tokenize_documents(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Tokenize every document, without special tokens: a dataset with the column `input_ids` (int32)."""

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        # verbose=False: a document longer than the model's context is what we want, not a reason to warn
        encoded = tokenizer(
            batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return {"input_ids": encoded["input_ids"]}

    return documents.map(
        tokenize,
        batched=True,
        batch_size=64,
        remove_columns=documents.column_names,
        features=datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))}),
        desc="tokenize",
    )


def document_separator(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, str]:
    """Choose the token before every document (the BOS, else the EOS, else none), with a sentence about it."""
    for kind in ("bos", "eos"):
        token = getattr(tokenizer, f"{kind}_token_id")
        if token is not None:
            text = tokenizer.convert_ids_to_tokens(token)
            return int(token), f"each document is preceded by the {kind.upper()} token {text!r} ({token})"
    return None, "documents follow each other without a separator: the tokenizer has no BOS and no EOS token"


def pack_blocks(
    documents: Iterable[Sequence[int] | NDArray[np.integer[Any]]], block_size: int, separator: int | None
) -> NDArray[np.int32]:
    """Join documents in order, each after the separator, and cut them into blocks; the rest is dropped.

    Args:
        documents: token ids, a sequence per document.
        block_size: tokens per block.
        separator: token before every document; None for none.

    Returns:
        [blocks, block_size]; no rows when there are fewer than `block_size` tokens.

    Example:
        >>> from hf_linattn.data import pack_blocks
        >>> pack_blocks([[1, 2, 3], [4, 5]], 3, separator=0)
        array([[0, 1, 2],
               [3, 0, 4]], dtype=int32)
    """
    head = np.array([] if separator is None else [separator], dtype=np.int32)
    pieces = [part for ids in documents if len(ids) for part in (head, np.asarray(ids, dtype=np.int32))]
    tokens = np.concatenate([head[:0], *pieces])
    blocks = len(tokens) // block_size
    return tokens[: blocks * block_size].reshape(blocks, block_size)


def load_blocks(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    column: str = "text",
    split: str = "train",
) -> NDArray[np.int32]:
    """Load, tokenize and pack a text; all blocks stay in memory (4 bytes per token).

    Args:
        source: texts, a file, a folder, a table or a dataset's name, see `load_documents`.
        tokenizer: of the model.
        block_size: tokens per block.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.

    Returns:
        Token ids [blocks, block_size].

    Raises:
        DataError: there is nothing to read, it is no text, or it is shorter than one block.
    """
    documents = load_tokens(source, tokenizer, column=column, split=split)
    separator, _ = document_separator(tokenizer)
    blocks = pack_blocks(documents, block_size, separator)
    if len(blocks) == 0:
        count = sum(len(ids) + (separator is not None) for ids in documents if len(ids))
        raise short_text(source, count, block_size)
    return blocks


def load_tokens(
    source: Any, tokenizer: PreTrainedTokenizerBase, *, column: str = "text", split: str = "train"
) -> list[NDArray[np.int32]]:
    """Load documents and tokenize them, without special tokens.

    Args:
        source: texts, a file, a folder, a table or a dataset's name, see `load_documents`.
        tokenizer: of the model.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.

    Returns:
        Token ids [tokens] of every document.

    Raises:
        DataError: there is nothing to read, or it is no text.
    """
    tokenized = tokenize_documents(load_documents(source, column=column, split=split), tokenizer)
    batches = tokenized.with_format("numpy").iter(batch_size=1000)
    return [ids for batch in batches for ids in batch["input_ids"]]


def short_text(source: Any, tokens: int, block_size: int) -> DataError:
    """Make the error for a text that does not fill one block."""
    where = source if isinstance(source, str | Path) else "the data"
    return DataError(
        f"{where} holds {tokens} tokens, fewer than one block of {block_size}: "
        "give more text or a smaller block size"
    )


def _text_files(folder: Path) -> list[Path]:
    files = sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES and path.is_file()
    )
    if not files:
        raise DataError(
            f"no text in the folder {folder}: looked for files ending in {', '.join(TEXT_SUFFIXES)}"
        )
    return files


def _from_files(files: list[Path], root: Path) -> datasets.Dataset:
    names, texts = [], []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: byte {error.start} does not decode") from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        if text:
            names.append(path.relative_to(root).as_posix())
            texts.append(text)
    if not texts:
        raise DataError(f"{files[0] if len(files) == 1 else root} is empty")
    return datasets.Dataset.from_dict({"name": names, "text": texts}, features=_FEATURES)


def _load_dataset(source: str, *args: Any, **kwargs: Any) -> datasets.Dataset:
    try:
        return datasets.load_dataset(*args, **kwargs)
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
        datasets.exceptions.DatasetGenerationError,
    ) as error:
        # the generator's own message says only that something went wrong
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        tried = "" if "data_files" in kwargs else " (no file or folder, so taken as the name of a dataset)"
        raise DataError(f"cannot load the data {source!r}{tried}: {reason}") from error


def _from_table(table: datasets.Dataset, source: str, column: str) -> datasets.Dataset:
    if column not in table.column_names:
        raise DataError(f"{source} has no column {column!r}; it has {', '.join(table.column_names)}")
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
        documents = documents.select(kept)
    return documents.add_column("name", [f"{source}[{row}]" for row in kept]).select_columns(["name", "text"])
