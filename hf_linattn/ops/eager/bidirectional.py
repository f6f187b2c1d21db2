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

from hf_linattn.ops.eager.buffers import Buffer, Features, groups
from hf_linattn.ops.types import Given, Gradients, How, Inputs, Outputs, accumulator

LEAST = 16
"""Tokens of a chunk, at least."""


def forward(inputs: Inputs, how: How, keep: bool, numbers: int) -> Outputs:
    """Output, totals and the sums over all keys.

    Args:
        inputs: what is summed up; queries `[B, H, N, D]` may be others than keys `[B, Hkv, M, D]`, `hidden`
            is `[B, M]`, and there is no state, decay or document.
        how: which features, and whether to divide.
        keep: S and z are wanted, by `backward`.
        numbers: in a buffer.
    """
    output, total, S, z = outputs = Outputs.empty(inputs, keep, accumulator(*inputs[:3]))
    for rows, some in groups(*inputs.key.shape[:2]):
        queries = inputs.queries(some)
        group = _Group(inputs.part(rows, some), how, numbers, total)
        sums = group.summed()
        group.read(output[rows, queries], total[rows, queries].unsqueeze(-1), *sums)
        if S is not None and z is not None:
            for whole, part in zip((S, z), sums, strict=True):
                to = whole[rows, some]
                to.copy_(part.view(to.shape))
    return outputs


def backward(inputs: Inputs, outputs: Outputs, given: Given, how: How, numbers: int) -> Gradients:
    """Gradients; arguments as `forward` had them, what it gave, and the loss by its output and totals."""
    found = Gradients(*(torch.empty_like(x) for x in inputs[:3]))
    for rows, some in groups(*inputs.key.shape[:2]):
        queries = inputs.queries(some)
        group = _Group(inputs.part(rows, some), how, numbers, outputs.total)
        sums = (x[rows, some].reshape(group.pairs, group.size, -1) for x in outputs.after)
        own = Outputs(outputs.output[rows, queries], outputs.total[rows, queries].unsqueeze(-1), *sums)
        d_total = None if given.total is None else given.total[rows, queries].unsqueeze(-1)
        by_sums = group.by_queries(
            found.query[rows, queries], own, Given(given.output[rows, queries], d_total)
        )
        group.by_keys(found.key[rows, some], found.value[rows, some], *by_sums)
    return found


class _Group:
    """Heads that go together, chunk by chunk.

    Attributes:
        pairs: rows times key heads.
        of_queries, of_keys: rows and heads, as tensors have them.
    """

    def __init__(self, inputs: Inputs, how: How, numbers: int, like: Tensor) -> None:
        self.inputs, self.how, self.numbers, self.like = inputs, how, numbers, like
        self.of_queries, self.of_keys = inputs.query.shape[:2], inputs.key.shape[:2]
        self.pairs, self.size = inputs.key.shape[0] * inputs.key.shape[1], inputs.key.shape[3]
        self.wide = inputs.value.shape[3]
        self.maps: dict[tuple[bool, int], Features] = {}
        self.buffers: dict[tuple[str, int], Buffer] = {}

    def buffer(self, name: str, heads: torch.Size, length: int, columns: int) -> Buffer:
        """Of this name, for chunks of this length."""
        if (name, length) not in self.buffers:
            self.buffers[name, length] = Buffer(self.like, (*heads, length, columns), self.pairs)
        return self.buffers[name, length]

    def spans(self, x: Tensor, query: bool) -> Iterator[tuple[slice, int, Features]]:
        """Chunks of `[b, h, N, D]`, as equal as can be, and their feature maps."""
        rows, heads, length, _ = x.shape
        step = max(LEAST, self.numbers // (rows * heads * max(self.size, self.wide)))
        step = max(1, -(-length // max(1, -(-length // step))))
        for start in range(0, length, step):
            stop = min(start + step, length)
            here = (query, stop - start)
            if here not in self.maps:
                shape = (rows, heads, stop - start, self.size)
                self.maps[here] = Features(self.how, query, self.like, shape, self.pairs)
            yield slice(start, stop), stop - start, self.maps[here]

    def keys(self) -> Iterator[tuple[slice, int, Features, Tensor, Tensor]]:
        """Features `[pairs, m, D]` and values of each chunk of keys, 0 where hidden; NaN may be there."""
        inputs, hides = self.inputs, self.inputs.hidden is not None
        for span, length, phi in self.spans(inputs.key, query=False):
            values = self.buffer("value", self.of_keys, length, self.wide)
            key = phi(inputs.key[:, :, span], hides)
            value = values.load(inputs.value[:, :, span], hides)
            self.hide(span, phi.found, values)
            yield span, length, phi, key, value

    def hide(self, span: slice, *buffers: Buffer) -> None:
        """0 at hidden keys."""
        if self.inputs.hidden is not None:
            for buffer in buffers:
                buffer.apart.masked_fill_(self.inputs.hidden[:, None, span, None], 0)

    def summed(self) -> tuple[Tensor, Tensor]:
        """S `[pairs, D, Dv]` and z `[pairs, D, 1]`."""
        S = self.like.new_zeros(self.pairs, self.size, self.wide)
        z = self.like.new_zeros(self.pairs, self.size, 1)
        for _, _, _, key, value in self.keys():
            S.baddbmm_(key.mT, value)
            z.add_(key.sum(1, True).mT)
        return S, z

    def read(self, output: Tensor, total: Tensor, S: Tensor, z: Tensor) -> None:
        """Write output and totals `[b, h, N, 1]`."""
        query = self.inputs.query
        for span, length, phi in self.spans(query, query=True):
            features = phi(query[:, :, span], False)
            numerator = self.buffer("numerator", self.of_queries, length, self.wide)
            row = self.buffer("total", self.of_queries, length, 1)
            torch.bmm(features, S, out=numerator.flat)
            torch.bmm(features, z, out=row.flat)
            total[:, :, span].copy_(row.apart)
            if not self.how.normalise:
                output[:, :, span].copy_(numerator.apart)
                continue
            if self.how.kind == "none":
                row.flat.masked_fill_(row.flat <= 0, 1)
            else:  # never negative, and 0 where the numerator is
                row.flat.clamp_min_(torch.finfo(row.flat.dtype).tiny)
            torch.div(numerator.apart, row.apart, out=output[:, :, span])

    def by_queries(self, to: Tensor, own: Outputs, given: Given) -> tuple[Tensor, Tensor]:
        """Write the gradient of the queries; R and r come back."""
        query, (S, z) = self.inputs.query, own.after
        R, r = torch.zeros_like(S), torch.zeros_like(z)
        for span, length, phi in self.spans(query, query=True):
            features = phi(query[:, :, span], False)
            g = self.buffer("d_numerator", self.of_queries, length, self.wide)
            t = self.buffer("d_total", self.of_queries, length, 1)
            d_query = self.buffer("d_query", self.of_queries, length, self.size)
            if self.how.normalise:
                total = own.total[:, :, span]
                torch.div(given.output[:, :, span], total.masked_fill(total <= 0, torch.inf), out=g.apart)
                g_o = self.buffer("g_o", self.of_queries, length, self.wide).apart
                torch.mul(g.apart, own.output[:, :, span], out=g_o)
                torch.sum(g_o, -1, True, out=t.apart).neg_()
            else:
                g.apart.copy_(given.output[:, :, span])
                t.apart.zero_()
            if given.total is not None:
                t.apart.add_(given.total[:, :, span])
            torch.bmm(g.flat, S.mT, out=d_query.flat).baddbmm_(t.flat, z.mT)
            R.baddbmm_(features.mT, g.flat)
            r.baddbmm_(features.mT, t.flat)
            if self.how.kind != "none":
                d_query.flat.mul_(phi.slope.flat)
            to[:, :, span].copy_(d_query.apart)
        return R, r

    def by_keys(self, to_key: Tensor, to_value: Tensor, R: Tensor, r: Tensor) -> None:
        """Write the gradients of keys and values."""
        for span, length, phi, key, value in self.keys():
            d_key = self.buffer("d_key", self.of_keys, length, self.size)
            d_value = self.buffer("d_value", self.of_keys, length, self.wide)
            torch.bmm(value, R.mT, out=d_key.flat).add_(r.mT)
            torch.bmm(key, R, out=d_value.flat)
            if self.how.kind != "none":
                d_key.flat.mul_(phi.slope.flat)
            self.hide(span, d_key, d_value)
            to_key[:, :, span].copy_(d_key.apart)
            to_value[:, :, span].copy_(d_value.apart)
