"""Blocks of tokens: documents tokenized, joined and cut into rows, in memory or in a file that is mapped.

A token that is read and not to be predicted (what a user says in a chat) stands in its block as ~token, a
number below 0: see `token_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.utils import tqdm
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from hf_linattn.cli.files import replacing
from hf_linattn.data.chat import ChatTokens
from hf_linattn.data.documents import CHAT, Table, TextFiles, open_source
from hf_linattn.errors import DataError

GATHERED = 2**16
"""Tokens, about, that are cut into rows together."""

Tokens = NDArray[np.int32]

_IDS = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})


def tokenize_documents(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Tokenize every document, without special tokens: a dataset with the column `input_ids` (int32)."""
    return documents.map(
        lambda batch: {"input_ids": _tokenize(batch["text"], tokenizer)},
        batched=True,
        batch_size=64,
        remove_columns=documents.column_names,
        features=_IDS,
        desc="tokenize",
    )


def _tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False: a document longer than the model's context is what we want, not a reason to warn
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def document_separator(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, str]:
    """Choose the token before every document (the BOS, else the EOS, else none), with a sentence about it."""
    for kind in ("bos", "eos"):
        token = getattr(tokenizer, f"{kind}_token_id")
        if token is not None:
            text = tokenizer.convert_ids_to_tokens(token)
            return int(token), f"each document is preceded by the {kind.upper()} token {text!r} ({token})"
    return None, "documents follow each other without a separator: the tokenizer has no BOS and no EOS token"


def read_tokens(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
    column: str = "text",
    split: str = "train",
    stream: bool = False,
    chat: bool = False,
) -> Iterator[Tokens]:
    """Tokenize the documents of a source one after the other, without special tokens.

    Args:
        source: texts, a file, a folder, a table or a dataset's name, see `open_source`.
        tokenizer: of the model.
        before: token ids in front of every document.
        after: token ids behind it.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.
        stream: read documents when they are asked for, about `PIECE` characters of a file at once; else all
            are tokenized first, and `datasets` keeps the result on the disk.
        chat: also take conversations, which neither `before` nor `after` surrounds: their template does.

    Yields:
        Token ids [tokens].

    Raises:
        DataError: there is nothing to read, or it is no text.
    """
    opened = open_source(source, column=column, split=split, stream=stream)
    head, tail = np.asarray(before, dtype=np.int32), np.asarray(after, dtype=np.int32)
    if chat and isinstance(opened, Table) and opened.is_chat:
        encode = ChatTokens(tokenizer)
        if not (stream or opened.streamed):
            yield from _arrays(_encode_all(opened, encode))
            return
        for name, messages in opened.values(CHAT):
            yield from encode(messages, name)
    elif stream or (isinstance(opened, Table) and opened.streamed):
        yield from _stream(opened, tokenizer, head, tail)
    else:
        for ids in _arrays(tokenize_documents(opened.documents(), tokenizer)):
            if len(ids):
                yield from (head, ids, tail)


def _arrays(tokenized: datasets.Dataset) -> Iterator[Tokens]:
    for batch in tokenized.with_format("numpy").iter(batch_size=1000):
        yield from (np.asarray(ids, dtype=np.int32) for ids in batch["input_ids"])


def _encode_all(table: Table, encode: ChatTokens) -> datasets.Dataset:
    """Encode all conversations of a table, as `tokenize_documents` does with texts."""
    source = table.source

    def encode_batch(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, list[Any]]:
        rows = zip(numbers, batch[CHAT], strict=True)
        return {"input_ids": [ids for number, row in rows for ids in encode(row, f"{source}[{number}]")]}

    return table.rows.map(
        encode_batch,
        with_indices=True,
        batched=True,
        batch_size=64,
        remove_columns=table.rows.column_names,
        features=_IDS,
        desc="tokenize",
    )


def _stream(
    opened: TextFiles | Table, tokenizer: PreTrainedTokenizerBase, head: Tokens, tail: Tokens
) -> Iterator[Tokens]:
    """Tokenize pieces of documents, each read only when its turn comes."""
    inside = False
    pieces = iter(opened.pieces())
    while batch := list(islice(pieces, 1 if isinstance(opened, TextFiles) else 64)):
        encoded = _tokenize([text for text, _ in batch], tokenizer)
        for (_, begins), ids in zip(batch, encoded, strict=True):
            if begins and inside:
                yield tail
            inside = inside and not begins
            if ids:
                yield from (np.asarray(ids, dtype=np.int32),) if inside else (head, np.asarray(ids, np.int32))
                inside = True
    if inside:
        yield tail


def cut(pieces: Iterable[Tokens], size: int) -> Iterator[Tokens]:
    """Join pieces of tokens and cut them into rows, some at a time `[rows, size]`; the rest is dropped."""
    waiting: list[Tokens] = []
    count = 0
    for piece in pieces:
        waiting.append(piece)
        count += len(piece)
        if count >= max(size, GATHERED):
            tokens, whole = np.concatenate(waiting), count // size * size
            yield tokens[:whole].reshape(-1, size)
            waiting, count = [tokens[whole:]], count - whole
    if count >= size:
        yield np.concatenate(waiting)[: count // size * size].reshape(-1, size)


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
    head = [] if separator is None else [separator]
    pieces = (np.array([*head, *ids], dtype=np.int32) for ids in documents if len(ids))
    return np.concatenate([np.empty((0, block_size), np.int32), *cut(pieces, block_size)])


@dataclass(frozen=True)
class BlockFile:
    """A file that blocks are written to as they are read, and then mapped: they never are in memory.

    Attributes:
        path: of the file: int32, row after row.
        keep: take what is there already, which another process or a run before has written.
    """

    path: Path
    keep: bool = False

    def open(self, width: int) -> Tokens | None:
        """Map the blocks `[blocks, width]`, read-only; None where there are none to be kept."""
        if not (self.keep and self.path.exists()):
            return None
        return self._mapped(width)

    def fill(self, batches: Iterable[Tokens], width: int) -> Tokens:
        """Write rows `[rows, width]`, and map them.

        Raises:
            TrainingError: they cannot be written; a file that was there is there still.
        """
        with replacing(self.path) as partial, partial.open("wb") as file:
            for rows in batches:
                file.write(rows.tobytes())
        return self._mapped(width)

    def _mapped(self, width: int) -> Tokens:
        return np.memmap(self.path, dtype=np.int32, mode="r").reshape(-1, width)


def build_blocks(
    pieces: Iterable[Tokens],
    size: int,
    *,
    source: Any,
    dress: Callable[[Tokens], Tokens] = lambda rows: rows,
    width: int | None = None,
    limit: int | None = None,
    file: BlockFile | None = None,
) -> Tokens:
    """Join pieces of tokens and cut them into blocks.

    Args:
        pieces: token ids [tokens].
        size: tokens of the text in a block.
        source: of the text, for the message.
        dress: makes blocks of rows `[rows, size]` of the text; it may leave some out.
        width: tokens per block behind it; None for `size`.
        limit: blocks at most; no more is read.
        file: where they are written to; None keeps them in memory.

    Returns:
        Token ids [blocks, width].

    Raises:
        DataError: the text is shorter than one block.
    """
    width = size if width is None else width
    kept = None if file is None else file.open(width)
    if kept is not None:
        return kept
    read = 0

    def counted() -> Iterator[Tokens]:
        nonlocal read
        for piece in pieces:
            read += len(piece)
            yield piece

    def batches() -> Iterator[Tokens]:
        left, some = limit, False
        with tqdm(total=limit, desc="blocks", unit="block", disable=file is None or None) as bar:
            for rows in cut(counted(), size):
                blocks = dress(rows)[:left]
                some = some or len(blocks) > 0
                yield blocks
                bar.update(len(blocks))
                if left is not None and (left := left - len(blocks)) == 0:
                    return
        if not some:
            where = source if isinstance(source, str | Path) else "the data"
            raise DataError(
                f"{where} holds {read} tokens, fewer than one block of {width}: "
                "give more text or a smaller block size"
            )

    return np.concatenate(list(batches())) if file is None else file.fill(batches(), width)


def load_blocks(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    column: str = "text",
    split: str = "train",
    stream: bool = False,
    limit: int | None = None,
    file: BlockFile | None = None,
) -> NDArray[np.int32]:
    """Load, tokenize and pack a text, or conversations, whose blocks have at least one token to predict.

    Args:
        source: texts, a file, a folder, a table or a dataset's name, see `open_source`.
        tokenizer: of the model.
        block_size: tokens per block.
        column: the column that holds the text of a table or dataset.
        split: the split of a dataset that is named.
        stream: see `read_tokens`.
        limit: blocks at most; a stream is read no further.
        file: where the blocks are written to; None keeps them in memory (4 bytes per token).

    Returns:
        Token ids [blocks, block_size]; ~token where it is not to be predicted.

    Raises:
        DataError: there is nothing to read, it is no text, or it is shorter than one block.
    """
    separator, _ = document_separator(tokenizer)
    pieces = read_tokens(
        source,
        tokenizer,
        before=() if separator is None else (separator,),
        column=column,
        split=split,
        stream=stream,
        chat=True,
    )
    return build_blocks(
        pieces,
        block_size,
        source=source,
        dress=lambda rows: rows[count_targets(rows) > 0],
        limit=limit,
        file=file,
    )


def token_ids(blocks: NDArray[np.int32]) -> NDArray[np.int32]:
    """Take the tokens that are read, those that are not to be predicted among them.

    >>> import numpy as np
    >>> token_ids(np.array([[~7, 8, 9]], dtype=np.int32))
    array([[7, 8, 9]], dtype=int32)
    """
    return np.where(blocks < 0, ~blocks, blocks)


def count_targets(blocks: NDArray[np.int32]) -> NDArray[np.int64]:
    """Count the tokens of each block that are to be predicted from those before: [B, N] -> [B]."""
    counts: NDArray[np.int64] = (blocks[:, 1:] >= 0).sum(1)
    return counts
