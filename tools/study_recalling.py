"""Text that asks for recall: half of its rows bring something again, as in examples/pretrain_recall.py.

A model that can recall, trained further on prose alone, forgets it; so its conversions are trained on rows of
the kinds that it learned from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from recall_rows import TEXT_SHARE, TRAINED, Ids, ordinary_tokens


def recalling(texts: Sequence[str], tokenizer: Any, length: int) -> list[str]:
    """Rows of `length` tokens, each a text: plain, or one of the kinds of `recall_rows`."""
    rng = np.random.default_rng([*b"recalling"])
    lone, rows = lone_tokens(tokenizer), []
    for text in texts:
        ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int32)
        for row in ids[: len(ids) // length * length].reshape(-1, length):
            if rng.random() >= TEXT_SHARE:
                row, _ = TRAINED[rng.integers(len(TRAINED))](rng, row, lone)
            rows.append(tokenizer.decode(row))
    return rows


def lone_tokens(tokenizer: Any) -> Ids:
    """Ordinary tokens that begin with a space and are read again as they were, also behind each other."""
    found = []
    for token in ordinary_tokens(tokenizer).tolist():
        text = tokenizer.decode([token])
        if text[:1] == " " and text[1:].isalpha():
            again = tokenizer(text, add_special_tokens=False)["input_ids"]
            found += [token] if again == [token] else []
    return np.array(found, dtype=np.int32)
