"""Gradients of `chunked`, recomputed chunk by chunk, from the last to the first.

With g = dL/dnum and t = dL/dtotal (where the output was divided: g = dL/do / total, t = -g . o) and factors
of decay: P of a key for a query of its chunk, a of the state before for a query, b of a key for that after:

    A = (phi_q phi_k^T) P,  dA = (g v^T + t) P
    dphi_q = dA phi_k + a (g S^T + t z)        S, z before the chunk
    dphi_k = dA^T phi_q + b (v R^T + r)        R = dL/dS, r = dL/dz after it
    dv = A^T g + b phi_k R

S and z go forward in time, so those before the chunks of a span are made before its gradients.

The running sum G of the logarithms of decay has dL/dG_i = phi_q,i . dphi_q,i - phi_k,i . dphi_k,i, since P
is a function of differences of G.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_linattn.ops.eager.buffers import Buffer, Features, head_blocks
from hf_linattn.ops.eager.chunked import ChunkBuffers, ChunkInputs, ChunkLoop, RunningState
from hf_linattn.ops.types import InputGrads, Inputs, OpConfig, OutputGrads, Outputs

SPAN = 16
"""Chunks, at most, whose states are all kept; of more, there are as many in a span as spans."""


def backward(
    inputs: Inputs, outputs: Outputs, grads: OutputGrads, config: OpConfig, chunk: int
) -> InputGrads:
    """Compute the gradients of `chunked.forward`.

    Args:
        inputs: as the forward took them.
        outputs: what it returned; S and z are read only where there is decay.
        grads: gradients of these.
        config: which features, and whether the output was divided.
        chunk: tokens per step.
    """
    gradients = InputGrads(*(None if x is None else torch.empty_like(x) for x in inputs.differentiable))  # type: ignore[arg-type]
    total = outputs.total
    inverse_total = torch.where(total > 0, total.reciprocal(), 0).unsqueeze(-1) if config.normalise else None
    d_total = (torch.zeros_like(total) if grads.total is None else grads.total).unsqueeze(-1)
    for rows, heads in head_blocks(*inputs.key.shape[:2]):
        query_heads = inputs.query_heads(heads)
        loop = _Backward(inputs.head_block(rows, heads), config, chunk, total)
        d_state = RunningState(loop, *(None if x is None else x[rows, heads] for x in (grads.S, grads.z)))
        of_queries = [x[rows, query_heads] for x in (gradients.query, grads.output, d_total)]
        if inverse_total is not None:
            of_queries += [x[rows, query_heads] for x in (inverse_total, outputs.output)]
        of_keys = [x[rows, heads] for x in (gradients.key, gradients.value)]
        d_decay = None if gradients.log_decay is None else gradients.log_decay[rows, heads]
        loop.run(d_state, d_decay, *of_keys, *of_queries)
        if gradients.S is not None and gradients.z is not None:
            d_state.copy_to(gradients.S[rows, heads], gradients.z[rows, heads])
    return through_running_sum(gradients, outputs, grads)


def through_running_sum(gradients: InputGrads, outputs: Outputs, grads: OutputGrads) -> InputGrads:
    """Turn gradients of the running sums of `log_decay` into those of `log_decay` itself."""
    if gradients.log_decay is None:
        return gradients
    last = of_state_after(outputs, grads)
    if last is not None:
        gradients.log_decay[..., -1] += last
    d_log_decay = gradients.log_decay.double().flip(-1).cumsum(-1).flip(-1)
    return gradients._replace(log_decay=d_log_decay.to(gradients.log_decay.dtype))


def of_state_after(outputs: Outputs, grads: OutputGrads) -> Tensor | None:
    """Compute what the state after, which ends with all of G, adds to the last, `[B, Hkv]`; None for 0."""
    if grads.S is None or grads.z is None:
        return None
    S, z = outputs.state
    return (grads.S * S).sum((2, 3)) + (grads.z * z).sum(2)


class _GradientBuffers(ChunkBuffers):
    """Buffers of the forward, and of the gradients."""

    def __init__(self, loop: ChunkLoop, length: int) -> None:
        super().__init__(loop, length)
        like, batch_heads = loop.like, loop.batch_heads
        self.d_numerator, self.d_total, self.d_scores = self.numerator, self.total, self.scores
        of_queries, of_keys = (*self.query_shape, loop.head_dim), (*self.key_shape, loop.head_dim)
        self.d_query, self.d_key = Buffer(like, of_queries, batch_heads), Buffer(like, of_keys, batch_heads)
        if loop.has_decay:
            self.through_state = Buffer(like, of_queries, batch_heads)
            self.through_later = Buffer(like, of_keys, batch_heads)
        self.d_value = Buffer(like, (*self.key_shape, loop.value_dim), batch_heads)
        self.g_o = like.new_empty(*self.query_shape, loop.value_dim)


class _Backward(ChunkLoop):
    """The gradients of a block of heads."""

    buffers_type = _GradientBuffers

    def run(self, d_state: RunningState, *tensors: Tensor | None) -> None:
        """Write the gradients of all chunks.

        Args:
            d_state: gradients of the state after; they become those of the state before.
            tensors: as `_gradients` takes them, of all tokens.
        """
        chunks = self.chunks(*tensors)
        size = len(chunks) if len(chunks) <= SPAN else math.isqrt(len(chunks))
        spans = [chunks[start : start + size] for start in range(0, len(chunks), size)]
        firsts = [RunningState(self, self.inputs.S, self.inputs.z)]
        for span in spans[:-1]:
            firsts.append(self._states(span, firsts[-1])[-1])
        for span in reversed(spans):
            first = firsts.pop()
            states = [first, *self._states(span[:-1], first)]
            for chunk, *parts in reversed(span):
                self._gradients(chunk, states.pop(), d_state, *parts)

    def _states(self, chunks: Sequence[tuple[Any, ...]], state: RunningState) -> list[RunningState]:
        """Compute the state after each of these chunks."""
        found = []
        for chunk, *_ in chunks:
            buffers, after = self.buffers(chunk), state.empty_like()
            self.advance(state, after, buffers, *self.mapped_keys(buffers, chunk), self.decay(chunk))
            found.append(after)
            state = after
        return found

    def _gradients(
        self,
        chunk: ChunkInputs,
        state: RunningState,
        d_state: RunningState,
        d_decay: Tensor | None,
        d_key_target: Tensor,
        d_value_target: Tensor,
        d_query_target: Tensor,
        d_output: Tensor,
        d_total: Tensor,
        *divided: Tensor,
    ) -> None:
        """Write the gradients of a chunk.

        Args:
            chunk: the tokens.
            state: before it.
            d_state: gradients of the state after; they become those of the state before.
            d_decay: written, gradient of the running sums of `log_decay`, `[b, hkv, m]`; None for none.
            d_key_target: written, `[b, hkv, m, D]`.
            d_value_target: written, `[b, hkv, m, Dv]`.
            d_query_target: written, `[b, h, m, D]`.
            d_output: dL/do, `[b, h, m, Dv]`.
            d_total: dL/dtotal, `[b, h, m, 1]`.
            divided: 1 / total, `[b, h, m, 1]`, with 0 for 1 / 0, and o, `[b, h, m, Dv]`; none for numerators.
        """
        buffers: _GradientBuffers = self.buffers(chunk)
        decay = self.decay(chunk)
        query, key, value = self.mapped(buffers, chunk)
        g, t = buffers.d_numerator.flat, buffers.d_total.flat
        if not divided:
            buffers.d_numerator.per_head.copy_(d_output)
            buffers.d_total.per_head.copy_(d_total)
        else:
            inverse_total, output = divided
            torch.mul(d_output, inverse_total, out=buffers.d_numerator.per_head)
            g_o = torch.mul(buffers.d_numerator.per_head, output, out=buffers.g_o).sum(-1, True)
            torch.sub(d_total, g_o, out=buffers.d_total.per_head)
        torch.bmm(query, key.mT, out=buffers.scores.flat)
        scores = self.masked(buffers.scores, buffers, decay)
        value_gradient = torch.bmm(scores.mT, g, out=buffers.d_value.flat)
        torch.bmm(g, value.mT, out=buffers.d_scores.flat).add_(t)
        d_scores = self.masked(buffers.d_scores, buffers, decay)
        query_gradient = torch.bmm(d_scores, key, out=buffers.d_query.flat)
        key_gradient = torch.bmm(d_scores.mT, query, out=buffers.d_key.flat)
        if not state.empty and decay is None:
            query_gradient.baddbmm_(g, state.S.mT).baddbmm_(t, state.z.mT)
        elif not state.empty and decay is not None:
            torch.bmm(g, state.S.mT, out=buffers.through_state.flat).baddbmm_(t, state.z.mT)
            through_state = buffers.through_state.per_head.view(buffers.grouped_shape)
            buffers.d_query.per_head.view(buffers.grouped_shape).addcmul_(through_state, decay.query)
        if not d_state.empty and decay is None:
            key_gradient.baddbmm_(value, d_state.S.mT).add_(d_state.z.mT)
        elif not d_state.empty and decay is not None:
            torch.bmm(value, d_state.S.mT, out=buffers.through_later.flat).add_(d_state.z.mT)
            buffers.d_key.per_head.addcmul_(buffers.through_later.per_head, decay.key)
        if d_decay is not None:
            of_queries = (query_gradient * query).view(buffers.grouped_shape).sum((2, 4))
            torch.sub(of_queries, (key_gradient * key).sum(-1).view_as(of_queries), out=d_decay)
        if not d_state.empty:
            if decay is not None:
                buffers.key.mapped.per_head.mul_(decay.key)
            value_gradient.baddbmm_(key, d_state.S)
        self._through_map(buffers.d_query, buffers.query, d_query_target)
        self._through_map(buffers.d_key, buffers.key, d_key_target)
        d_value_target.copy_(buffers.d_value.per_head)
        self.zero_hidden(chunk, d_key_target, d_value_target)
        if decay is not None:
            d_state.apply_decay(decay, d_state)
            buffers.query.mapped.per_head.view(buffers.grouped_shape).mul_(decay.query)
        d_state.S.baddbmm_(query.mT, g)
        d_state.z.baddbmm_(query.mT, t)
        d_state.empty = False

    def _through_map(self, gradient: Buffer, features: Features, target: Tensor) -> None:
        if self.config.kind == "none":
            target.copy_(gradient.per_head)
        else:
            torch.mul(gradient.per_head, features.derivative.per_head, out=target)
