"""Gradients of `chunked`, recomputed chunk by chunk in two sweeps.

With g = dL/dnum and t = dL/dtotal (where the output was divided: g = dL/do / total, t = -g . o) and factors
of decay: P of a key for a query of its chunk, a of the state before for a query, b of a key for that after:

    A = (phi_q phi_k^T) P,  dA = (g v^T + t) P
    forward in time:   dphi_q = dA phi_k + a (g S^T + t z)        S, z before the chunk
    backward in time:  dphi_k = dA^T phi_q + b (v R^T + r)        R = dL/dS, r = dL/dz after it
                       dv = A^T g + b phi_k R

The running sum G of the logarithms of decay has dL/dG_i = phi_q,i . dphi_q,i - phi_k,i . dphi_k,i, since P
is a function of differences of G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.eager.buffers import Buffer, head_blocks
from hf_linattn.ops.eager.chunked import ChunkBuffers, ChunkLoop, RunningState
from hf_linattn.ops.types import InputGrads, Inputs, OpConfig, OutputGrads, Outputs


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
    d_total = (torch.zeros_like(total) if grads.total is None else grads.total.clone()).unsqueeze(-1)
    for rows, heads in head_blocks(*inputs.key.shape[:2]):
        query_heads = inputs.query_heads(heads)
        loop = _Backward(inputs.head_block(rows, heads), config, chunk, total)
        loop.d_output, loop.d_total = grads.output[rows, query_heads], d_total[rows, query_heads]
        if inverse_total is not None:
            loop.output, loop.inverse_total = (
                outputs.output[rows, query_heads],
                inverse_total[rows, query_heads],
            )
        d_decay = None if gradients.log_decay is None else gradients.log_decay[rows, heads]
        loop.query_pass(gradients.query[rows, query_heads], d_decay)
        d_state = RunningState(loop, *(None if x is None else x[rows, heads] for x in (grads.S, grads.z)))
        loop.key_pass(gradients.key[rows, heads], gradients.value[rows, heads], d_decay, d_state)
        if gradients.S is not None and gradients.z is not None:
            d_state.copy_to(gradients.S[rows, heads], gradients.z[rows, heads])
    return through_running_sum(gradients, outputs, grads)


def through_running_sum(gradients: InputGrads, outputs: Outputs, grads: OutputGrads) -> InputGrads:
    """Turn gradients of the running sums of `log_decay` into those of `log_decay` itself."""
    if gradients.log_decay is None:
        return gradients
    if grads.S is not None and grads.z is not None:  # the state after ends with all of G
        S, z = outputs.state
        gradients.log_decay[..., -1] += (grads.S * S).sum((2, 3)) + (grads.z * z).sum(2)
    d_log_decay = gradients.log_decay.double().flip(-1).cumsum(-1).flip(-1)
    return gradients._replace(log_decay=d_log_decay.to(gradients.log_decay.dtype))


class _GradientBuffers(ChunkBuffers):
    """Buffers of the forward, and of the gradients."""

    def __init__(self, loop: ChunkLoop, length: int) -> None:
        super().__init__(loop, length)
        like, batch_heads = loop.like, loop.batch_heads
        self.d_numerator, self.d_total = self.numerator, self.total
        self.d_scores = Buffer(like, (*self.query_shape, length), batch_heads)
        self.d_query = Buffer(like, (*self.query_shape, loop.head_dim), batch_heads)
        self.through_state = Buffer(like, (*self.query_shape, loop.head_dim), batch_heads)
        self.d_key = Buffer(like, (*self.key_shape, loop.head_dim), batch_heads)
        self.through_later = Buffer(like, (*self.key_shape, loop.head_dim), batch_heads)
        self.d_value = Buffer(like, (*self.key_shape, loop.value_dim), batch_heads)
        self.g_o = like.new_empty(*self.query_shape, loop.value_dim)


class _Backward(ChunkLoop):
    """The two sweeps.

    Attributes:
        d_output: dL/do, `[b, h, N, Dv]`.
        d_total: t, `[b, h, N, 1]`; before the first sweep dL/dtotal.
        output: o, `[b, h, N, Dv]`, where it was divided; else None.
        inverse_total: 1 / total, `[b, h, N, 1]`, with 0 for 1 / 0; likewise.
    """

    buffers_type = _GradientBuffers
    d_output: Tensor
    d_total: Tensor
    output: Tensor | None = None
    inverse_total: Tensor | None = None

    def query_pass(self, target: Tensor, d_decay: Tensor | None) -> None:
        """Go forward in time: write the gradient of the queries, half of that of the decay, and t."""
        state, remaining = RunningState(self, self.inputs.S, self.inputs.z), self.length
        more: tuple[Tensor, ...] = (target, self.d_output, self.d_total)
        if self.output is not None and self.inverse_total is not None:
            more = (*more, self.inverse_total, self.output)
        for index, (buffers, chunk, decay, d_query, d_output, d_total, *divided) in enumerate(
            self.chunks(*more)
        ):
            query, key, value = self.mapped(buffers, chunk)
            g = self._numerator(buffers, d_output, *divided[:1])
            if divided:
                d_total.sub_(
                    torch.mul(buffers.d_numerator.per_head, divided[1], out=buffers.g_o).sum(-1, True)
                )
            buffers.d_total.per_head.copy_(d_total)
            t = buffers.d_total.flat
            torch.bmm(g, value.mT, out=buffers.d_scores.flat).add_(t)
            query_gradient = torch.bmm(
                self.masked(buffers.d_scores, buffers, decay), key, out=buffers.d_query.flat
            )
            if not state.empty and decay is None:
                query_gradient.baddbmm_(g, state.S.mT).baddbmm_(t, state.z.mT)
            elif not state.empty and decay is not None:
                torch.bmm(g, state.S.mT, out=buffers.through_state.flat).baddbmm_(t, state.z.mT)
                through_state = buffers.through_state.per_head.view(buffers.grouped_shape)
                buffers.d_query.per_head.view(buffers.grouped_shape).addcmul_(through_state, decay.query)
            if d_decay is not None:
                along = (query_gradient * query).view(buffers.grouped_shape).sum((2, 4))
                d_decay[:, :, index * self.chunk : index * self.chunk + along.shape[2]] = along
            if self.config.kind != "none":
                query_gradient.mul_(buffers.query.derivative.flat)
            d_query.copy_(buffers.d_query.per_head)
            remaining -= key.shape[1]
            if remaining:
                self.advance(state, buffers, key, value, decay)

    def key_pass(
        self, d_key_target: Tensor, d_value_target: Tensor, d_decay: Tensor | None, d_state: RunningState
    ) -> None:
        """Go backward in time: write the gradients of keys and values, and the rest of that of the decay.

        Args:
            d_key_target: written, `[b, hkv, N, D]`.
            d_value_target: written, `[b, hkv, N, Dv]`.
            d_decay: gradient of the running sums of `log_decay`, `[b, hkv, N]`, added to; None for none.
            d_state: gradients of the state after; they become those of the state before.
        """
        more: tuple[Tensor, ...] = (d_key_target, d_value_target, self.d_output, self.d_total)
        if self.inverse_total is not None:
            more = (*more, self.inverse_total)
        stop = self.length
        for buffers, chunk, decay, d_key, d_value, d_output, d_total, *divided in self.chunks(
            *more, backward=True
        ):
            query, key, value = self.mapped(buffers, chunk)
            g = self._numerator(buffers, d_output, *divided)
            buffers.d_total.per_head.copy_(d_total)
            t = buffers.d_total.flat
            torch.bmm(query, key.mT, out=buffers.scores.flat)
            value_gradient = torch.bmm(
                self.masked(buffers.scores, buffers, decay).mT, g, out=buffers.d_value.flat
            )
            torch.bmm(g, value.mT, out=buffers.d_scores.flat).add_(t)
            key_gradient = torch.bmm(
                self.masked(buffers.d_scores, buffers, decay).mT, query, out=buffers.d_key.flat
            )
            if not d_state.empty and decay is None:
                key_gradient.baddbmm_(value, d_state.S.mT).add_(d_state.z.mT)
            elif not d_state.empty and decay is not None:
                torch.bmm(value, d_state.S.mT, out=buffers.through_later.flat).add_(d_state.z.mT)
                buffers.d_key.per_head.addcmul_(buffers.through_later.per_head, decay.key)
            start = stop - key.shape[1]
            if d_decay is not None:
                d_decay[:, :, start:stop] -= (key_gradient * key).sum(-1).view(self.rows, self.heads, -1)
            stop = start
            if not d_state.empty:
                if decay is not None:
                    buffers.key.mapped.per_head.mul_(decay.key)
                value_gradient.baddbmm_(key, d_state.S)
            if self.config.kind != "none":
                key_gradient.mul_(buffers.key.derivative.flat)
            self.zero_hidden(chunk, buffers.d_key, buffers.d_value)
            d_key.copy_(buffers.d_key.per_head)
            d_value.copy_(buffers.d_value.per_head)
            if decay is not None:
                d_state.apply_decay(decay)
                buffers.query.mapped.per_head.view(buffers.grouped_shape).mul_(decay.query)
            d_state.S.baddbmm_(query.mT, g)
            d_state.z.baddbmm_(query.mT, t)
            d_state.empty = False

    def _numerator(
        self, buffers: _GradientBuffers, d_output: Tensor, inverse_total: Tensor | None = None
    ) -> Tensor:
        """Compute g, `[b hkv, shared m, Dv]`."""
        if inverse_total is None:
            buffers.d_numerator.per_head.copy_(d_output)
        else:
            torch.mul(d_output, inverse_total, out=buffers.d_numerator.per_head)
        return buffers.d_numerator.flat
