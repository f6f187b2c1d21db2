"""Packed documents side by side: each a row of its own, for attentions that cannot tell them apart in one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DocumentRows(NamedTuple):
    """Where the tokens of packed rows `[B, N]` go and come from, in rows that are joined end to end.

    Attributes:
        groups: `[documents, L]` each, tokens of documents of like lengths, a row each; behind its end a
            document has its last token again, which no token before it sees.
        back: `[B, N]`, where each token is in the groups, joined likewise.
    """

    groups: list[Tensor]
    back: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> DocumentRows:
        """Group documents of which the longest has at most one and a half times the shortest's tokens.

        Waits for the device once.

        Args:
            labels: `[B, N]`, ascending in each row: another number is another document.
        """
        found = labels.cpu()
        first = torch.ones_like(found, dtype=torch.bool)
        first[:, 1:] = found[:, 1:] != found[:, :-1]
        starts = first.flatten().nonzero().flatten()
        lengths = torch.diff(starts, append=starts.new_tensor([found.numel()]))
        room = 2 ** lengths.double().log2().ceil().long()
        room = torch.where(lengths * 4 <= room * 3, room * 3, room * 4)
        groups, back, offset = [], torch.empty(found.numel(), dtype=torch.long), 0
        for size in room.unique():
            start, length = starts[room == size, None], lengths[room == size, None]
            order = torch.arange(int(length.max()))
            places = start + torch.minimum(order, length - 1)
            inside = order < length
            back[places[inside]] = (offset + torch.arange(places.numel()).view_as(places))[inside]
            offset += places.numel()
            groups.append(places.to(labels.device))
        return cls(groups, back.view_as(found).to(labels.device))
