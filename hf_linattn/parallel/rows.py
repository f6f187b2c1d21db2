"""The tokens of a part of a row: their ids, their positions in the row, and what each is to predict."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.errors import DataError
from hf_linattn.parallel.shard import Shard


class RowPart(NamedTuple):
    """What one process reads of rows.

    Attributes:
        start: place of its first token in the row.
        ids: `[B, n]`.
        position_ids: likewise, places in the row.
        targets: the token after each, that after the last from the next part; one less in the last part.
    """

    start: int
    ids: Tensor
    position_ids: Tensor
    targets: Tensor


def row_part(ids: Tensor, shard: Shard) -> RowPart:
    """Cut this process's part out of whole rows `[B, N]`.

    Raises:
        DataError: the row cannot be cut into equal parts.
    """
    start, stop = part_bounds(ids.shape[1], shard)
    position_ids = torch.arange(start, stop, device=ids.device).expand(len(ids), -1)
    return RowPart(start, ids[:, start:stop], position_ids, ids[:, start + 1 : stop + 1])


def part_bounds(length: int, shard: Shard) -> tuple[int, int]:
    """Tell where this process's part of a row of so many tokens begins and ends.

    Raises:
        DataError: it cannot be cut into equal parts.
    """
    check_length(length, shard.size)
    each = length // shard.size
    return shard.rank * each, (shard.rank + 1) * each


def check_length(length: int, size: int) -> None:
    """Refuse a row that cannot be cut into equal parts.

    Raises:
        DataError: naming lengths near it that can.
    """
    if length % size or length < 2 * size:
        below, above = length // size * size, -(-length // size) * size
        near = f"{below} or {above}" if 2 * size <= below < above else str(max(above, 2 * size))
        raise DataError(
            f"a row of {length} tokens cannot be split into {size} equal parts of 2 tokens and more: take "
            f"{near} tokens, or another number of processes"
        )
