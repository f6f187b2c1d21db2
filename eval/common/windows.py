"""Which tokens are scored: texts become tokens with their bytes, and windows over them. No model in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hf_linattn.errors import DataError, OptionError

Stride = int | Literal["full"]
Bos = Literal["auto", "yes", "no", "window"]

FIRST_BUCKET = 64
"""Position buckets are [1, 64), [64, 128), [128, 256), ...: one bucket below, then powers of two."""


@dataclass(frozen=True)
class Document:
    """One contiguous text as tokens.

    Attributes:
        ids: [n] token ids, the tokenizer's BOS first where it is prepended.
        byte_ends: [n] bytes of the text up to and including each token, never decreasing.
    """

    ids: Tensor
    byte_ends: Tensor

    def __len__(self) -> int:
        """Count the tokens."""
        return len(self.ids)

    def bytes_between(self, start: int, end: int) -> int:
        """Count UTF-8 bytes of the tokens start <= i < end; a split character counts in its first token."""
        before = int(self.byte_ends[start - 1]) if start else 0
        return int(self.byte_ends[end - 1]) - before


@dataclass(frozen=True)
class Window:
    """Tokens start <= i < end of a document are read; the last `scored` of them count."""

    document: int
    start: int
    end: int
    scored: int


@dataclass(frozen=True)
class Texts:
    """The tokenized documents and the token that begins a window, if any (`bos="window"`)."""

    documents: list[Document]
    window_bos: int | None

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(len, self.documents))


def encode(tokenizer: Any, texts: Iterable[str], *, bos: Bos = "auto", join: bool = False) -> Texts:
    """Tokenize each text as one document.

    Args:
        tokenizer: a transformers tokenizer.
        texts: one string per document.
        bos: "yes" puts the tokenizer's BOS before each document, "no" never, "auto" where the tokenizer does
            so itself. "window" is "yes", and BOS also replaces the first token of every window.
        join: make one document of all, in order, each part with its own BOS where there is one.

    Raises:
        OptionError: BOS is asked for, but the tokenizer has none.
        DataError: there is no text with a token in it.
    """
    prefix = _bos_ids(tokenizer, bos)
    documents = [_document(tokenizer, text, prefix) for text in texts]
    documents = [document for document in documents if len(document) > len(prefix)]
    if not documents:
        raise DataError("the data hold no text: every document is empty")
    if join:
        shifts = np.cumsum([0] + [int(document.byte_ends[-1]) for document in documents[:-1]]).tolist()
        ends = [document.byte_ends + shift for document, shift in zip(documents, shifts, strict=True)]
        documents = [Document(torch.cat([document.ids for document in documents]), torch.cat(ends))]
    return Texts(documents, prefix[0] if bos == "window" else None)


def _bos_ids(tokenizer: Any, bos: Bos) -> list[int]:
    """Choose the tokens before a document: [BOS] or []."""
    bos_id = tokenizer.bos_token_id
    if bos == "auto":
        return [bos_id] if bos_id is not None and tokenizer("a")["input_ids"][:1] == [bos_id] else []
    if bos == "no":
        return []
    if bos_id is None:
        raise OptionError(f"bos={bos!r}, but the tokenizer has no BOS token; use 'no' or 'auto'")
    return [bos_id]


def _document(tokenizer: Any, text: str, prefix: list[int]) -> Document:
    encoded = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast, verbose=False
    )
    ids = encoded["input_ids"]
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
    if tokenizer.is_fast and ids:
        # offsets skip blanks and repeat split characters: a running maximum gives each byte to one token
        ends = np.maximum.accumulate(np.array(encoded["offset_mapping"], dtype=np.int64)[:, 1])
        byte_ends = bytes_before[ends]
    else:
        # a tokenizer in Python knows no offsets: every token counts as the average one
        byte_ends = np.arange(1, len(ids) + 1) * int(bytes_before[-1]) // max(len(ids), 1)
    return Document(
        torch.tensor(prefix + ids, dtype=torch.long),
        torch.cat([torch.zeros(len(prefix), dtype=torch.long), torch.from_numpy(byte_ends)]),
    )


@dataclass(frozen=True)
class Plan:
    """The windows of every length.

    With a number as stride, windows of all lengths end at the same tokens and the last `stride` tokens of
    each are scored: the same tokens, each with more context as the length grows. With "full" the windows of
    a length lie side by side from the start of each document and all but their first token are scored.
    """

    texts: Texts
    lengths: list[int]
    stride: Stride
    max_tokens: int | None

    def windows(self, length: int) -> list[Window]:
        """List the windows of one length, ordered by document and position.

        A budget is spread evenly: the first windows of all documents, then the second ones, and so on.
        """
        first, step = (length, length) if self.stride == "full" else (self.lengths[-1], self.stride)
        scored = length - 1 if self.stride == "full" else self.stride
        turns = sorted(
            (turn, index)
            for index, document in enumerate(self.texts.documents)
            for turn in range((len(document) - first) // step + 1)
        )
        budget = None if self.max_tokens is None else self.max_tokens // step
        ends = sorted((index, first + turn * step) for turn, index in turns[:budget])
        return [Window(index, end - length, end, scored) for index, end in ends]


def plan_windows(
    texts: Texts, lengths: Sequence[int], *, stride: Stride = 256, max_tokens: int | None = 65536
) -> Plan:
    """Check the lengths against the texts.

    Args:
        texts: what `encode` gives.
        lengths: tokens per window; sorted, duplicates dropped.
        stride: scored tokens per window, or "full".
        max_tokens: scored tokens per length (with "full": tokens read per length); None takes all.

    Raises:
        OptionError: a length, the stride or the budget is out of its range.
        DataError: no document is as long as the longest length.
    """
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 2:
        raise OptionError(f"lengths must be whole numbers of at least 2 tokens, got {list(lengths)}")
    if stride != "full" and not 1 <= stride < lengths[0]:
        raise OptionError(
            f"stride {stride} must be at least 1 and below the smallest length, {lengths[0]}, so that every "
            "scored token has context; or use 'full' for windows side by side"
        )
    per_window = lengths[-1] if stride == "full" else stride
    if max_tokens is not None and max_tokens < per_window:
        raise OptionError(f"max_tokens {max_tokens} is less than one window needs: {per_window} tokens")
    if texts.longest < lengths[-1]:
        fitting = [length for length in lengths if length <= texts.longest]
        largest = f"the longest of the lengths that fits is {fitting[-1]}" if fitting else "no length fits"
        count = sum(len(document) >= lengths[0] for document in texts.documents)
        raise DataError(
            f"0 of {len(texts.documents)} documents reach {lengths[-1]} tokens: the longest has "
            f"{texts.longest}, {count} reach {lengths[0]}; {largest}. Take shorter lengths, or join the "
            "documents (--join)"
        )
    return Plan(texts, lengths, stride, max_tokens)


def side_by_side(texts: Texts, length: int, count: int) -> Tensor:
    """Cut texts into `[count or fewer, length]` tokens: windows side by side, in turn from every document.

    Raises:
        DataError: no document is that long.
    """
    plan = plan_windows(texts, [length], stride="full", max_tokens=length * count)
    ids = torch.stack([texts.documents[w.document].ids[w.start : w.end] for w in plan.windows(length)])
    if texts.window_bos is not None:
        ids[:, 0] = texts.window_bos
    return ids


def bucket_edges(first: int, last: int) -> list[int]:
    """List the edges of buckets over the positions first <= p < last: first, powers of two between, last."""
    edges = [first]
    power = FIRST_BUCKET
    while power < last:
        if power > first:
            edges.append(power)
        power *= 2
    return [*edges, last]
