"""Linear attention over all keys on the CPU: one sum that every query reads, in chunks that stay in cache.

    S = sum_j phi(k_j) v_j^T,  z = sum_j phi(k_j)
    num_i = phi(q_i)^T S,  total_i = phi(q_i)^T z,  output_i = num_i / total_i

("Transformers are RNNs", arXiv:2006.16236, equation 5.) Gradients, with g = dL/dnum and t = dL/dtotal (where
the output was divided: g = dL/do / total, t = -g . o):

    dphi_q = g S^T + t z^T,  R = sum_i phi_q g^T,  r = sum_i t phi_q,  dphi_k = v R^T + r,  dv = phi_k R
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_linattn.ops.eager.buffers import Buffer, Features, head_blocks, write_output
from hf_linattn.ops.types import InputGrads, Inputs, OpConfig, OutputGrads, Outputs, accumulator_dtype

MIN_CHUNK = 16
"""Tokens of a chunk, at least."""


def forward(inputs: Inputs, config: OpConfig, keep: bool, max_numbers: int) -> Outputs:
    """Compute output, totals and the state of all keys.

    Args:
        inputs: queries `[B, H, N, D]` may be more or fewer than keys `[B, Hkv, M, D]`, `valid` is
            `[B, M]`, and there is no state before, decay or document.
        config: which features, and whether to divide.
        keep: S and z are wanted, by `backward`.
        max_numbers: of a buffer, about.
    """
    output, total, S, z = outputs = Outputs.empty(inputs, keep, accumulator_dtype(*inputs[:3]))
    for rows, heads in head_blocks(*inputs.key.shape[:2]):
        query_heads = inputs.query_heads(heads)
        block = _HeadBlock(inputs.head_block(rows, heads), config, max_numbers, total)
        state = block.state_of_all_keys()
        block.read(output[rows, query_heads], total[rows, query_heads].unsqueeze(-1), *state)
        if S is not None and z is not None:
            for whole, part in zip((S, z), state, strict=True):
                target = whole[rows, heads]
                target.copy_(part.view(target.shape))
    return outputs


def backward(
    inputs: Inputs, outputs: Outputs, grads: OutputGrads, config: OpConfig, max_numbers: int
) -> InputGrads:
    """Compute the gradients of `forward`.

    Args:
        inputs: as the forward took them.
        outputs: what it returned, S and z among it.
        grads: gradients of output and totals.
        config: which features, and whether the output was divided.
        max_numbers: of a buffer, about.
    """
    gradients = InputGrads(*(torch.empty_like(x) for x in inputs[:3]))
    for rows, heads in head_blocks(*inputs.key.shape[:2]):
        query_heads = inputs.query_heads(heads)
        block = _HeadBlock(inputs.head_block(rows, heads), config, max_numbers, outputs.total)
        state = (x[rows, heads].reshape(block.batch_heads, block.head_dim, -1) for x in outputs.state)
        block_outputs = Outputs(
            outputs.output[rows, query_heads], outputs.total[rows, query_heads].unsqueeze(-1), *state
        )
        d_total = None if grads.total is None else grads.total[rows, query_heads].unsqueeze(-1)
        state_gradients = block.query_gradients(
            gradients.query[rows, query_heads],
            block_outputs,
            OutputGrads(grads.output[rows, query_heads], d_total),
        )
        block.key_gradients(gradients.key[rows, heads], gradients.value[rows, heads], *state_gradients)
    return gradients


class _HeadBlock:
    """Heads that go through the chunks together.

    Attributes:
        batch_heads: rows times key heads.
        query_shape: `[b, h]`.
        key_shape: `[b, hkv]`.
    """

    def __init__(self, inputs: Inputs, config: OpConfig, max_numbers: int, like: Tensor) -> None:
        self.inputs, self.config, self.max_numbers, self.like = inputs, config, max_numbers, like
        self.query_shape, self.key_shape = inputs.query.shape[:2], inputs.key.shape[:2]
        self.batch_heads, self.head_dim = inputs.key.shape[0] * inputs.key.shape[1], inputs.key.shape[3]
        self.value_dim = inputs.value.shape[3]
        self.maps: dict[tuple[bool, int], Features] = {}
        self.buffers: dict[tuple[str, int], Buffer] = {}

    def buffer(self, name: str, heads: torch.Size, length: int, columns: int) -> Buffer:
        """Get the buffer of a name, for chunks of a length: `[*heads, length, columns]`."""
        if (name, length) not in self.buffers:
            self.buffers[name, length] = Buffer(self.like, (*heads, length, columns), self.batch_heads)
        return self.buffers[name, length]

    def spans(self, x: Tensor, query: bool) -> Iterator[tuple[slice, int, Features]]:
        """Cut `[b, h, N, D]` into chunks, as equal as can be: where, how long, and the feature map."""
        rows, heads, length, _ = x.shape
        step = max(MIN_CHUNK, self.max_numbers // (rows * heads * max(self.head_dim, self.value_dim)))
        step = max(1, -(-length // max(1, -(-length // step))))
        for start in range(0, length, step):
            stop = min(start + step, length)
            index = (query, stop - start)
            if index not in self.maps:
                shape = (rows, heads, stop - start, self.head_dim)
                self.maps[index] = Features(self.config, query, self.like, shape, self.batch_heads)
            yield slice(start, stop), stop - start, self.maps[index]

    def keys(self) -> Iterator[tuple[slice, int, Features, Tensor, Tensor]]:
        """Go through the chunks of keys: features `[b hkv, m, D]` and values, 0 where hidden."""
        inputs, masks_keys = self.inputs, self.inputs.valid is not None
        for span, length, phi in self.spans(inputs.key, query=False):
            values = self.buffer("value", self.key_shape, length, self.value_dim)
            key = phi(inputs.key[:, :, span], masks_keys)
            value = values.load(inputs.value[:, :, span], masks_keys)
            self.zero_hidden(span, phi.mapped, values)
            yield span, length, phi, key, value

    def zero_hidden(self, span: slice, *buffers: Buffer) -> None:
        """Write 0 at hidden keys; not by a product, for they may hold NaN."""
        if self.inputs.valid is not None:
            for buffer in buffers:
                buffer.per_head.masked_fill_(~self.inputs.valid[:, None, span, None], 0)

    def state_of_all_keys(self) -> tuple[Tensor, Tensor]:
        """Sum up S `[b hkv, D, Dv]` and z `[b hkv, D, 1]`."""
        S = self.like.new_zeros(self.batch_heads, self.head_dim, self.value_dim)
        z = self.like.new_zeros(self.batch_heads, self.head_dim, 1)
        for _, _, _, key, value in self.keys():
            S.baddbmm_(key.mT, value)
            z.add_(key.sum(1, True).mT)
        return S, z

    def read(self, output: Tensor, total: Tensor, S: Tensor, z: Tensor) -> None:
        """Let all queries read the state: write output and totals `[b, h, N, 1]`."""
        query = self.inputs.query
        for span, length, phi in self.spans(query, query=True):
            features = phi(query[:, :, span], False)
            numerator = self.buffer("numerator", self.query_shape, length, self.value_dim)
            totals = self.buffer("total", self.query_shape, length, 1)
            torch.bmm(features, S, out=numerator.flat)
            torch.bmm(features, z, out=totals.flat)
            total[:, :, span].copy_(totals.per_head)
            write_output(output[:, :, span], numerator, totals, self.config)

    def query_gradients(self, target: Tensor, outputs: Outputs, grads: OutputGrads) -> tuple[Tensor, Tensor]:
        """Write the gradient of the queries; return R and r."""
        query, (S, z) = self.inputs.query, outputs.state
        R, r = torch.zeros_like(S), torch.zeros_like(z)
        for span, length, phi in self.spans(query, query=True):
            features = phi(query[:, :, span], False)
            g = self.buffer("d_numerator", self.query_shape, length, self.value_dim)
            t = self.buffer("d_total", self.query_shape, length, 1)
            d_query = self.buffer("d_query", self.query_shape, length, self.head_dim)
            if self.config.normalise:
                total = outputs.total[:, :, span]
                torch.div(grads.output[:, :, span], total.masked_fill(total <= 0, torch.inf), out=g.per_head)
                g_o = self.buffer("g_o", self.query_shape, length, self.value_dim).per_head
                torch.mul(g.per_head, outputs.output[:, :, span], out=g_o)
                torch.sum(g_o, -1, True, out=t.per_head).neg_()
            else:
                g.per_head.copy_(grads.output[:, :, span])
                t.per_head.zero_()
            if grads.total is not None:
                t.per_head.add_(grads.total[:, :, span])
            torch.bmm(g.flat, S.mT, out=d_query.flat).baddbmm_(t.flat, z.mT)
            R.baddbmm_(features.mT, g.flat)
            r.baddbmm_(features.mT, t.flat)
            if self.config.kind != "none":
                d_query.flat.mul_(phi.derivative.flat)
            target[:, :, span].copy_(d_query.per_head)
        return R, r

    def key_gradients(self, d_key_target: Tensor, d_value_target: Tensor, R: Tensor, r: Tensor) -> None:
        """Write the gradients of keys and values."""
        for span, length, phi, key, value in self.keys():
            d_key = self.buffer("d_key", self.key_shape, length, self.head_dim)
            d_value = self.buffer("d_value", self.key_shape, length, self.value_dim)
            torch.bmm(value, R.mT, out=d_key.flat).add_(r.mT)
            torch.bmm(key, R, out=d_value.flat)
            if self.config.kind != "none":
                d_key.flat.mul_(phi.derivative.flat)
            self.zero_hidden(span, d_key, d_value)
            d_key_target[:, :, span].copy_(d_key.per_head)
            d_value_target[:, :, span].copy_(d_value.per_head)
