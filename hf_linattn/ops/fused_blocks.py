"""A window cut into blocks of queries, which torch's fused kernel of the CPU takes together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.types import Window

BLOCK = 32
"""Queries per row of the kernel: measured, from 32 to 256."""
BLOCKS_PER_CALL = 16
"""Blocks per call: only their masks take memory."""


class FusedBlocks:
    """A window cut into blocks of queries, each with the columns that it sees.

    Queries and columns are padded to whole blocks, and columns that are missing filled in.

    Attributes:
        size: queries of a block.
        columns: that a block sees.
        count: blocks.
        in_window: boolean `[size, columns]`, which columns a query sees.
    """

    def __init__(self, window: Window) -> None:
        query, key, value, valid, span, _ = window
        length = query.shape[2]
        self.size = min(BLOCK, length)
        self.left, self.right = -span % self.size, -length % self.size
        self.columns, self.before = self.size + span + self.left, self.left + window.n_missing
        self.count = (length + self.right) // self.size
        self.query = self.over_queries(query)
        self.key, self.value = self._over_columns(key), self._over_columns(value)
        self.valid = F.pad(valid, (self.before, self.right)) if self.before or self.right else valid
        row = torch.arange(self.size, device=query.device)[:, None] + self.left
        column = torch.arange(self.columns, device=query.device)
        self.in_window = (column > row) & (column <= row + span)

    def over_queries(self, x: Tensor) -> Tensor:
        """Pad `[B, H, N, ...]` with zeros up to a whole block."""
        if not self.right:
            return x
        return F.pad(x, (*(0, 0) * (x.ndim - 3), 0, self.right))

    def _over_columns(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, self.before, self.right)) if self.before or self.right else x

    def calls(self) -> Iterator[tuple[slice, slice, slice]]:
        """Tell which rows, queries and columns go through the kernel together."""
        if self.count == 1:
            yield slice(None), slice(0, self.size), slice(0, self.columns)
            return
        for row in range(self.query.shape[0]):
            for first in range(0, self.count, BLOCKS_PER_CALL):
                start, end = first * self.size, min(first + BLOCKS_PER_CALL, self.count) * self.size
                yield slice(row, row + 1), slice(start, end), slice(start, end - self.size + self.columns)

    def queries(self, x: Tensor, rows: slice, part: slice) -> Tensor:
        """Cut queries `[B, H, N, ...]` to `[blocks, H, size, ...]`."""
        cut = x[rows, :, part]
        if self.count == 1:
            return cut
        blocks: Tensor = cut[0].unflatten(1, (-1, self.size)).transpose(0, 1)
        return blocks

    def keys(self, x: Tensor, rows: slice, part: slice) -> Tensor:
        """Cut columns `[B, Hkv, columns, D]` to overlapping views `[blocks, Hkv, size + span, D]`."""
        cut = x[rows, :, part]
        if self.count == 1:
            return cut
        return cut[0].unfold(1, self.columns, self.size).permute(1, 0, 3, 2)

    def inputs(self, rows: slice, part: slice, columns: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Cut query, key and value of a call."""
        key, value = (self.keys(x, rows, columns) for x in (self.key, self.value))
        return self.queries(self.query, rows, part), key, value

    def mask(self, rows: slice, part: slice, dtype: torch.dtype) -> Tensor:
        """Make what is added to the scores, `[blocks, 1, size, size + span]`."""
        valid = self.valid[rows, part]
        blocks = valid if self.count == 1 else valid[0].unfold(0, self.columns, self.size)
        seen = self.in_window if bool(valid.all()) else self.in_window & blocks[:, None, None]
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        return mask.expand(blocks.shape[0], 1, -1, -1)

    def add_keys(self, total: Tensor, part: Tensor, rows: slice, columns: slice) -> None:
        """Add `[blocks, Hkv, size + span, D]` up where the columns came from."""
        if self.count == 1:
            total[rows, :, columns] += part
            return
        blocks = part.shape[0]
        for piece in range(self.columns // self.size):
            start = columns.start + piece * self.size
            target = total[rows.start, :, start : start + blocks * self.size].unflatten(
                1, (blocks, self.size)
            )
            target += part[:, :, piece * self.size : (piece + 1) * self.size].transpose(0, 1)

    def without_padding(self, x: Tensor) -> Tensor:
        """Cut columns back to those of the window's keys."""
        return x[:, :, self.before : x.shape[2] - self.right]
