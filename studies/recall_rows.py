"""The rows of `pretrain_recall.py`: what a model learns to recall from.

    python studies/recall_rows.py DIR   # a row of each kind, in the words of this folder's tokenizer

A row is made from a row of text, random numbers and the ordinary tokens of a tokenizer (all but special
ones). With it goes which of its tokens follow from those before them: these are learned and measured. Random
tokens are drawn uniformly from all ordinary ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_linattn.eval.common.models import load_tokenizer

Ids = NDArray[np.int32]
Row = tuple[Ids, NDArray[np.bool_]]
"""Token ids [N], and which of them are known."""

Kind = Callable[[np.random.Generator, Ids, Ids], Row]
"""(random numbers, a row of text [N], the ordinary tokens) -> a row; the row of text is left as it is."""

NO_TARGET = -100
NARROWEST = 16
"""Tokens per row at the start."""
CURRICULUM = 0.25
"""Part of the steps in which the rows grow; those of `NARROWEST` take twice as many as each width after."""
TEXT_SHARE = 0.5
"""Part of the rows that are plain text."""


def plain_text(rng: np.random.Generator, text: Ids, ordinary: Ids) -> Row:
    """Text as it comes; every token but the first is learned."""
    known = np.ones(len(text), dtype=bool)
    known[0] = False
    return text, known


def random_repeats(rng: np.random.Generator, text: Ids, ordinary: Ids) -> Row:
    """Random tokens in which one segment comes again and again until the row is full.

    The segment has N/8 to N/2 tokens. In half of the rows its copies touch; in the others there are random
    tokens before each copy, new ones every time, as many as are drawn once for the row. All of a copy but its
    first token is known.
    """
    n = len(text)
    ids, known = rng.choice(ordinary, n), np.zeros(n, dtype=bool)
    size = int(rng.integers(max(2, n // 8), n // 2 + 1))
    gap = int(rng.integers(0, n - 2 * size + 1)) * int(rng.integers(2))
    first = int(rng.integers(0, n - 2 * size - gap + 1))
    for start in range(first + size + gap, n, size + gap):
        stop = min(start + size, n)
        ids[start:stop] = ids[first : first + stop - start]
        known[start + 1 : stop] = True
    return ids, known


def text_repeats(rng: np.random.Generator, text: Ids, ordinary: Ids) -> Row:
    """Text in which stretches are overwritten by earlier stretches of the row.

    From N/4 on: a copy of 4 to N/4 tokens (log-uniform), then up to as many tokens of the text as it was, and
    so on. All of a copy but its first two tokens is known: a single token of text may have come often.
    """
    n = len(text)
    ids, known = text.copy(), np.zeros(n, dtype=bool)
    start = n // 4
    while start <= n - 4:
        size = min(int(4 * (n / 16) ** rng.random()), n - start, start)
        source = int(rng.integers(0, start - size + 1))
        ids[start : start + size] = ids[source : source + size]
        known[start + 2 : start + size] = True
        start += size + int(rng.integers(0, size + 1))
    return ids, known


def key_values(rng: np.random.Generator, text: Ids, ordinary: Ids) -> Row:
    """A list of pairs of key and value, then the pairs again in random orders until the row is full.

    Keys and values have one or two tokens each, the same number in the whole row. Keys of two share tokens
    with other keys, so both must be read. One token may stand between key and value and one after each pair,
    as `:` and `,` in a written list. Rows below 64 tokens have none of this: one token each. In half of the
    rows text, of any length, lies between the list and what is asked. Keys, values and marks have no token in
    common. A value is known when its key comes again.
    """
    n = len(text)
    key, value, colon, comma = (1, 1, 0, 0) if n < 64 else rng.integers([1, 1, 0, 0], [3, 3, 2, 2])
    size = int(key + colon + value + comma)
    pairs = int(rng.integers(2, max(2, min(n // (2 * size), len(ordinary) // 4)) + 1))
    tokens = rng.permutation(ordinary)
    marks, pool, others = np.split(tokens, [2, 2 + max(pairs, 2)])
    # a number without repetition, written in the digits of the pool: a key of one token or of two
    numbers = rng.choice(len(pool) ** key, pairs, replace=False)
    keys = pool[np.stack([numbers // len(pool) ** i % len(pool) for i in range(key)], axis=1)]
    values = rng.choice(others, (pairs, value))
    ends = [np.broadcast_to(mark, (pairs, count)) for mark, count in zip(marks, (colon, comma), strict=True)]
    written = np.concatenate([keys, ends[0], values, ends[1]], axis=1)
    begin = pairs * size
    begin += int(rng.integers(0, max(1, n - begin - size))) * int(rng.integers(2))
    asked = np.concatenate([rng.permutation(pairs) for _ in range(n // begin * n // size // pairs + 1)])
    ids, known = text.copy(), np.zeros(n, dtype=bool)
    ids[: pairs * size] = written.ravel()
    ids[begin:] = written[asked].ravel()[: n - begin]
    answer = np.zeros(size, dtype=bool)
    answer[key + colon : key + colon + value] = True
    known[begin:] = np.resize(answer, n - begin)
    return ids, known


def second_copy(rng: np.random.Generator, text: Ids, ordinary: Ids) -> Row:
    """N/2 random tokens, twice: the usual measure of induction. All of the second but its first is known."""
    half = rng.choice(ordinary, len(text) // 2)
    known = np.zeros(len(text), dtype=bool)
    known[len(half) + 1 :] = True
    return np.concatenate([half, half]), known


TRAINED: tuple[Kind, ...] = (random_repeats, text_repeats, key_values)
"""What the rows are that are no plain text, each equally often."""


def with_targets(row: Row) -> Ids:
    """[2, N]: the tokens, and the known ones again with `NO_TARGET` in place of the others."""
    ids, known = row
    return np.stack([ids, np.where(known, ids, NO_TARGET)])


def ordinary_tokens(tokenizer: Any) -> Ids:
    """All tokens but special and added ones, sorted."""
    unusual = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    return np.array(sorted({*tokenizer.get_vocab().values()} - unusual), dtype=np.int32)


@dataclass(frozen=True)
class Rows:
    """Makes the rows of a step from blocks of text; they depend on seed, step and block number alone.

    Attributes:
        ordinary: see `ordinary_tokens`.
        context: tokens per block, `NARROWEST` or that doubled some times.
        steps: of the whole run.
        seed: of all rows.
    """

    ordinary: Ids
    context: int
    steps: int
    seed: int

    def width(self, step: int) -> int:
        """Tokens per row: `NARROWEST`, then twice as many again and again up to the context."""
        doublings = int(math.log2(self.context // NARROWEST))
        stage = int(step / (CURRICULUM * self.steps) * (doublings + 1))
        return min(self.context, NARROWEST * 2 ** max(0, stage - 1))

    def prepare(self, blocks: Ids, numbers: NDArray[np.int64], step: int) -> Ids:
        """[B, context] text -> [B * context / width, 2, width]: what is read, what is learned.

        Step 0 (validation) gives the text itself, [B, 2, context].
        """
        made = []
        for block, number in zip(blocks, numbers, strict=True):
            # the name keeps these numbers apart from those that order the blocks
            rng = np.random.default_rng([*b"recall", self.seed, step, int(number)])
            for text in block.reshape(-1, self.width(step) if step else self.context):
                plain = step == 0 or rng.random() < TEXT_SHARE
                kind = plain_text if plain else TRAINED[rng.integers(len(TRAINED))]
                made.append(with_targets(kind(rng, text, self.ordinary)))
        return np.stack(made)


def main(folder: str) -> None:
    """Print a row of each kind; known tokens stand in [brackets]."""
    tokenizer = load_tokenizer(folder)
    text = tokenizer(Path(__file__).read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)
    ids = np.array(text["input_ids"][:64], dtype=np.int32)
    for kind in (plain_text, *TRAINED, second_copy):
        row, known = kind(np.random.default_rng(0), ids, ordinary_tokens(tokenizer))
        tokens = tokenizer.convert_ids_to_tokens(row.tolist())
        print(f"{kind.__name__}:", *(f"[{t}]" if k else t for t, k in zip(tokens, known, strict=True)), "\n")


if __name__ == "__main__":
    main(sys.argv[1])
