"""Causal linear attention on the CPU: a loop over chunks whose buffers stay in cache.

    num_i = sum_{j<=i} a_ij (phi(q_i) . phi(k_j)) v_j + a_i0 phi(q_i)^T S_0
    total_i: the same with 1 in place of v_j and z_0 in place of S_0;  output_i = num_i / total_i

Inside a chunk quadratic, between chunks through S and z ("Transformers are RNNs", arXiv:2006.16236, equations
18 to 20). `chunked_backward` has the gradients.
"""

from __future__ import annotations

from copy import copy
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.eager.buffers import Buffer, ChunkDecay, Features, chunk_decay, head_blocks, write_output
from hf_linattn.ops.types import Inputs, OpConfig, Outputs, accumulator_dtype


def forward(inputs: Inputs, config: OpConfig, keep: bool, chunk: int) -> Outputs:
    """Compute output, totals and the state after the last token.

    Args:
        inputs: queries, keys, values, and what came before.
        config: which features, and whether to divide.
        keep: the state after is wanted.
        chunk: tokens per step.
    """
    output, total, S, z = outputs = Outputs.empty(inputs, keep, accumulator_dtype(*inputs[:3]))
    for rows, heads in head_blocks(*inputs.key.shape[:2]):
        query_heads = inputs.query_heads(heads)
        loop = _Forward(inputs.head_block(rows, heads), config, chunk, total)
        state = loop.run(output[rows, query_heads], total[rows, query_heads], keep)
        if S is not None and z is not None:
            state.copy_to(S[rows, heads], z[rows, heads])
    return outputs


class RunningState:
    """The state of a block of heads, updated in place chunk by chunk.

    Attributes:
        S: `[b hkv, D, Dv]`.
        z: `[b hkv, D, 1]`.
        empty: nothing was added yet.
    """

    def __init__(self, loop: ChunkLoop, S: Tensor | None, z: Tensor | None) -> None:
        self.empty = S is None or z is None
        self.S = loop.like.new_zeros(loop.batch_heads, loop.head_dim, loop.value_dim)
        self.z = loop.like.new_zeros(loop.batch_heads, loop.head_dim, 1)
        self.shape = (loop.rows, loop.heads, loop.head_dim, -1)
        if S is not None and z is not None:
            self.S.view(self.shape).copy_(S)
            self.z.view(self.shape).copy_(z.unsqueeze(-1))

    def empty_like(self) -> RunningState:
        """Return memory for another state."""
        other = copy(self)
        other.S, other.z = torch.empty_like(self.S), torch.empty_like(self.z)
        return other

    def apply_decay(self, decay: ChunkDecay, left: RunningState) -> None:
        """Write what a chunk leaves of the state to another one, or to itself."""
        for x, y in (self.S, left.S), (self.z, left.z):
            torch.mul(x.view(self.shape), decay.state, out=y.view(self.shape))

    def copy_to(self, S: Tensor, z: Tensor) -> None:
        """Write the state to S `[b, hkv, D, Dv]` and z `[b, hkv, D]`."""
        S.copy_(self.S.view(self.shape))
        z.copy_(self.z.view(z.shape))


class ChunkBuffers:
    """Buffers for chunks of one length m.

    Attributes:
        query_shape: `[b, h, m]`.
        key_shape: `[b, hkv, m]`.
        grouped_shape: what has `query_shape` seen as `[b, hkv, h / hkv, m, ...]`.
    """

    def __init__(self, loop: ChunkLoop, length: int) -> None:
        query_heads, like, batch_heads = loop.heads * loop.shared, loop.like, loop.batch_heads
        self.query_shape = (loop.rows, query_heads, length)
        self.key_shape = (loop.rows, loop.heads, length)
        self.grouped_shape = (loop.rows, loop.heads, loop.shared, length, -1)
        self.query = Features(loop.config, True, like, (*self.query_shape, loop.head_dim), batch_heads)
        self.key = Features(loop.config, False, like, (*self.key_shape, loop.head_dim), batch_heads)
        self.value = Buffer(like, (*self.key_shape, loop.value_dim), batch_heads)
        self.scores = Buffer(like, (*self.query_shape, length), batch_heads)
        self.numerator = Buffer(like, (*self.query_shape, loop.value_dim), batch_heads)
        self.total = Buffer(like, (*self.query_shape, 1), batch_heads)
        self.key_sum = like.new_empty(batch_heads, 1, loop.head_dim)


class ChunkInputs(NamedTuple):
    """One chunk of `Inputs`.

    Attributes:
        query: `[b, h, m, D]`.
        key: `[b, hkv, m, D]`.
        value: `[b, hkv, m, Dv]`.
        hidden: `[b, 1, m, 1]`.
        log_decay: `[b, hkv, m]`.
        documents: `[b, m]`.
        state_document: the document that the state before belongs to, `[b, 1]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None
    log_decay: Tensor | None
    documents: Tensor | None
    state_document: Tensor | None


class ChunkLoop:
    """One block of heads on its way through the chunks.

    Args:
        inputs: of the block.
        config: which features, and whether to divide.
        chunk: tokens per step.
        like: a tensor in the dtype of sums.

    Attributes:
        batch_heads: rows times key heads of the block.
        shared: query heads of each key head.
    """

    buffers_type: type[ChunkBuffers] = ChunkBuffers

    def __init__(self, inputs: Inputs, config: OpConfig, chunk: int, like: Tensor) -> None:
        self.inputs, self.config, self.chunk, self.like = inputs, config, chunk, like
        self.rows, self.heads, self.length, self.head_dim = inputs.key.shape
        self.value_dim = inputs.value.shape[3]
        self.batch_heads = self.rows * self.heads
        self.shared = inputs.query.shape[1] // self.heads
        self.masks_keys = inputs.valid is not None
        self.has_decay = inputs.log_decay is not None or inputs.documents is not None
        self.buffers_by_length: dict[int, ChunkBuffers] = {}

    def chunks(self, *more: Tensor | None) -> list[tuple[Any, ...]]:
        """List the chunks: `ChunkInputs`, and the cuts of more tensors.

        Args:
            more: tensors `[b, h, N, ...]`, of which each chunk `[:, :, m]` comes along; None for none.
        """
        inputs = self.inputs
        hidden = None if inputs.valid is None else ~inputs.valid[:, None, :, None]
        documents, state_document = inputs.documents, None
        if documents is not None:
            state_document = torch.cat([documents[:, :1], documents[:, self.chunk - 1 : -1 : self.chunk]], 1)
        cuts = [self._cut(x, 2) for x in (*inputs[:3], hidden, inputs.log_decay)]
        cuts += [
            self._cut(documents, 1),
            repeat(None) if state_document is None else state_document.split(1, 1),
        ]
        parts = zip(*cuts, *(self._cut(x, 2) for x in more), strict=False)
        return [(ChunkInputs(*x[: len(cuts)]), *x[len(cuts) :]) for x in parts]

    def buffers(self, chunk: ChunkInputs) -> Any:
        """Return the buffers for a chunk, those of `buffers_type`."""
        length = chunk.key.shape[2]
        if length not in self.buffers_by_length:
            self.buffers_by_length[length] = self.buffers_type(self, length)
        return self.buffers_by_length[length]

    def decay(self, chunk: ChunkInputs) -> ChunkDecay | None:
        """Compute what decay and borders between documents leave of a chunk."""
        if not self.has_decay:
            return None
        return chunk_decay(chunk.log_decay, chunk.documents, chunk.state_document, self.like)

    def _cut(self, x: Tensor | None, axis: int) -> Any:
        return repeat(None) if x is None else x.split(self.chunk, axis)

    def mapped(self, buffers: ChunkBuffers, chunk: ChunkInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Map queries to `[b hkv, shared m, D]`, keys to `[b hkv, m, D]`; 0 at hidden keys and values."""
        return buffers.query(chunk.query, self.has_decay), *self.mapped_keys(buffers, chunk)

    def mapped_keys(self, buffers: ChunkBuffers, chunk: ChunkInputs) -> tuple[Tensor, Tensor]:
        """Map keys, and load their values."""
        key = buffers.key(chunk.key, self.has_decay or self.masks_keys)
        value = buffers.value.load(chunk.value, self.masks_keys)
        self.zero_hidden(chunk, buffers.key.mapped.per_head, buffers.value.per_head)
        return key, value

    def zero_hidden(self, chunk: ChunkInputs, *tensors: Tensor) -> None:
        """Write 0 at hidden keys, `[b, hkv, m, ...]`; not by a product, for they may hold NaN."""
        if chunk.hidden is not None:
            for x in tensors:
                x.masked_fill_(chunk.hidden, 0)

    def masked(self, scores: Buffer, buffers: ChunkBuffers, decay: ChunkDecay | None) -> Tensor:
        """Decay scores `[b hkv, shared m, m]`, and take out those of later keys, in place."""
        if decay is None:
            scores.per_head.tril_()
        else:
            scores.per_head.view(buffers.grouped_shape).mul_(decay.intra)
        return scores.flat

    def advance(
        self,
        before: RunningState,
        after: RunningState,
        buffers: ChunkBuffers,
        key: Tensor,
        value: Tensor,
        decay: ChunkDecay | None,
    ) -> None:
        """Make the state after a chunk, which may be the one before; features of keys are written over."""
        if decay is not None:
            before.apply_decay(decay, after)
            buffers.key.mapped.per_head.mul_(decay.key)
            before = after
        torch.baddbmm(before.S, key.mT, value, out=after.S)
        torch.add(before.z, torch.sum(key, 1, True, out=buffers.key_sum).mT, out=after.z)
        after.empty = False


class _Forward(ChunkLoop):
    def run(self, output: Tensor, total: Tensor, keep: bool) -> RunningState:
        """Write output and totals; return the state after, if it is to be kept."""
        state, remaining = RunningState(self, self.inputs.S, self.inputs.z), self.length
        for chunk, target, total_target in self.chunks(output, total.unsqueeze(-1)):
            buffers, decay = self.buffers(chunk), self.decay(chunk)
            query, key, value = self.mapped(buffers, chunk)
            torch.bmm(query, key.mT, out=buffers.scores.flat)
            scores = self.masked(buffers.scores, buffers, decay)
            numerator = torch.bmm(scores, value, out=buffers.numerator.flat)
            row = torch.sum(scores, -1, True, out=buffers.total.flat)
            if not state.empty:
                if decay is not None:
                    buffers.query.mapped.per_head.view(buffers.grouped_shape).mul_(decay.query)
                numerator.baddbmm_(query, state.S)
                row.baddbmm_(query, state.z)
            total_target.copy_(buffers.total.per_head)
            write_output(target, buffers.numerator, buffers.total, self.config)
            remaining -= key.shape[1]
            if keep or remaining:
                self.advance(state, state, buffers, key, value, decay)
        return state
