"""Causal linear attention on the CPU: a loop over chunks whose buffers stay in cache, and its backward.

    num_i = sum_{j<=i} a_ij (phi(q_i) . phi(k_j)) v_j + a_i0 phi(q_i)^T S_0
    total_i: the same with 1 in place of v_j and z_0 in place of S_0;  output_i = num_i / total_i

Inside a chunk quadratic, between chunks through S and z ("Transformers are RNNs", arXiv:2006.16236, equations
18 to 20). `ops.loop_backward` has the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.eager.buffers import Buffer, Features, Links, groups, links
from hf_linattn.ops.types import How, Inputs, Outputs, accumulator


def causal(inputs: Inputs, how: How, keep: bool, chunk: int) -> Outputs:
    """Output, totals and the state after.

    Args:
        inputs: what is summed up.
        how: which features, and whether to divide.
        keep: the state after is wanted.
        chunk: tokens per step.
    """
    output, total, S, z = outputs = Outputs.empty(inputs, keep, accumulator(*inputs[:3]))
    for rows, some in groups(*inputs.key.shape[:2]):
        queries = inputs.queries(some)
        loop = _Forward(inputs.part(rows, some), how, chunk, total)
        sums = loop.run(output[rows, queries], total[rows, queries], keep)
        if S is not None and z is not None:
            sums.write(S[rows, some], z[rows, some])
    return outputs


class Sums:
    """A state that is written over: S `[pairs, D, Dv]` and z `[pairs, D, 1]`.

    Attributes:
        empty: nothing was added yet.
    """

    def __init__(self, loop: Loop, S: Tensor | None, z: Tensor | None) -> None:
        self.empty = S is None or z is None
        self.S = loop.like.new_zeros(loop.pairs, loop.size, loop.wide)
        self.z = loop.like.new_zeros(loop.pairs, loop.size, 1)
        self.heads = (loop.rows, loop.heads, loop.size, -1)
        if S is not None and z is not None:
            self.S.view(self.heads).copy_(S)
            self.z.view(self.heads).copy_(z.unsqueeze(-1))

    def outlive(self, link: Links) -> None:
        """What is left of it behind a chunk."""
        self.S.view(self.heads).mul_(link.surviving)
        self.z.view(self.heads).mul_(link.surviving)

    def write(self, S: Tensor, z: Tensor) -> None:
        """In the shape of a state."""
        S.copy_(self.S.view(self.heads))
        z.copy_(self.z.view(z.shape))


class Work:
    """Buffers for chunks of one length; the linked ones are seen by key head as well."""

    def __init__(self, loop: Loop, length: int) -> None:
        queries, like, pairs = loop.heads * loop.shared, loop.like, loop.pairs
        self.rows_of_queries = (loop.rows, queries, length)
        self.rows_of_keys = (loop.rows, loop.heads, length)
        self.by_head = (loop.rows, loop.heads, loop.shared, length, -1)
        self.query = Features(loop.how, True, like, (*self.rows_of_queries, loop.size), pairs)
        self.key = Features(loop.how, False, like, (*self.rows_of_keys, loop.size), pairs)
        self.value = Buffer(like, (*self.rows_of_keys, loop.wide), pairs)
        self.scores = Buffer(like, (*self.rows_of_queries, length), pairs)
        self.numerator = Buffer(like, (*self.rows_of_queries, loop.wide), pairs)
        self.total = Buffer(like, (*self.rows_of_queries, 1), pairs)
        self.key_sum = like.new_empty(pairs, 1, loop.size)


class Chunk(NamedTuple):
    """One chunk of `Inputs`, hidden as `[b, 1, m, 1]`; before: the document of the state, `[b, 1]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None
    log_decay: Tensor | None
    documents: Tensor | None
    before: Tensor | None


class Loop:
    """One group of heads on its way through the chunks.

    Args:
        inputs: of the group.
        how, chunk: as `causal`.
        like: a tensor in the dtype of sums.

    Attributes:
        pairs: its rows times its key heads.
        shared: query heads of each key head.
    """

    work_type: type[Work] = Work

    def __init__(self, inputs: Inputs, how: How, chunk: int, like: Tensor) -> None:
        self.inputs, self.how, self.chunk, self.like = inputs, how, chunk, like
        self.rows, self.heads, self.length, self.size = inputs.key.shape
        self.wide = inputs.value.shape[3]
        self.pairs = self.rows * self.heads
        self.shared = inputs.query.shape[1] // self.heads
        self.hides = inputs.hidden is not None
        self.linked = inputs.log_decay is not None or inputs.documents is not None
        self.works: dict[int, Work] = {}

    def chunks(self, *more: Tensor, backward: bool = False) -> Iterator[tuple[Any, ...]]:
        """Buffers, `Chunk` and `Links` of each chunk, and that part `[:, :, m]` of more tensors."""
        inputs = self.inputs
        hidden = None if inputs.hidden is None else inputs.hidden[:, None, :, None]
        documents, before = inputs.documents, None
        if documents is not None:
            before = torch.cat([documents[:, :1], documents[:, self.chunk - 1 : -1 : self.chunk]], 1)
        cut = [self._cut(x, 2) for x in (*inputs[:3], hidden, inputs.log_decay)]
        cut += [self._cut(documents, 1), repeat(None) if before is None else before.split(1, 1)]
        parts = list(zip(*cut, *(self._cut(x, 2) for x in more), strict=False))
        for part in reversed(parts) if backward else parts:
            chunk = Chunk(*part[: len(cut)])
            length = chunk.key.shape[2]
            if length not in self.works:
                self.works[length] = self.work_type(self, length)
            link = links(chunk.log_decay, chunk.documents, chunk.before, self.like) if self.linked else None
            yield (self.works[length], chunk, link, *part[len(cut) :])

    def _cut(self, x: Tensor | None, axis: int) -> Any:
        return repeat(None) if x is None else x.split(self.chunk, axis)

    def mapped(self, work: Work, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries `[pairs, shared m, D]` and keys `[pairs, m, D]`, and values, 0 where hidden."""
        query = work.query(chunk.query, self.linked)
        key = work.key(chunk.key, self.linked or self.hides)
        value = work.value.load(chunk.value, self.hides)
        self.hide(chunk, work.key.found, work.value)
        return query, key, value

    def hide(self, chunk: Chunk, *buffers: Buffer) -> None:
        """0 at hidden keys; not by a product, for they may hold NaN."""
        if chunk.hidden is not None:
            for buffer in buffers:
                buffer.apart.masked_fill_(chunk.hidden, 0)

    def visible(self, scores: Buffer, work: Work, link: Links | None) -> Tensor:
        """Scores `[pairs, shared m, m]` without those of later keys, and decayed."""
        if link is None:
            scores.apart.tril_()
        else:
            scores.apart.view(work.by_head).mul_(link.inside)
        return scores.flat

    def advance(self, sums: Sums, work: Work, key: Tensor, value: Tensor, link: Links | None) -> None:
        """Add a chunk to the state; the features of its keys are used up."""
        if link is not None:
            sums.outlive(link)
            work.key.found.apart.mul_(link.entering)
        sums.S.baddbmm_(key.mT, value)
        sums.z.add_(torch.sum(key, 1, True, out=work.key_sum).mT)
        sums.empty = False


class _Forward(Loop):
    def run(self, output: Tensor, total: Tensor, keep: bool) -> Sums:
        """Write output and totals; the state after comes back, where it is to be kept."""
        sums, left = Sums(self, self.inputs.S, self.inputs.z), self.length
        for work, chunk, link, to, to_total in self.chunks(output, total.unsqueeze(-1)):
            query, key, value = self.mapped(work, chunk)
            torch.bmm(query, key.mT, out=work.scores.flat)
            scores = self.visible(work.scores, work, link)
            numerator = torch.bmm(scores, value, out=work.numerator.flat)
            row = torch.sum(scores, -1, True, out=work.total.flat)
            if not sums.empty:
                if link is not None:
                    work.query.found.apart.view(work.by_head).mul_(link.reading)
                numerator.baddbmm_(query, sums.S)
                row.baddbmm_(query, sums.z)
            to_total.copy_(work.total.apart)
            if not self.how.normalise:
                to.copy_(work.numerator.apart)
            else:
                if self.how.kind == "none":
                    row.masked_fill_(row <= 0, 1)
                else:  # never negative, and 0 where the numerator is
                    row.clamp_min_(torch.finfo(row.dtype).tiny)
                torch.div(work.numerator.apart, work.total.apart, out=to)
            left -= key.shape[1]
            if keep or left:
                self.advance(sums, work, key, value, link)
        return sums
