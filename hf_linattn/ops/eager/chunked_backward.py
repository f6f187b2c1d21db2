"""Gradients of `ops.loop`, recomputed chunk by chunk in two sweeps.

With g = dL/dnum and t = dL/dtotal (where the output was divided: g = dL/do / total, t = -g . o), P what a
query takes of a key of its chunk, a of the state before the chunk, b what the state behind it takes of a key:

    A = (phi_q phi_k^T) P,  dA = (g v^T + t) P
    forward in time:   dphi_q = dA phi_k + a (g S^T + t z)        S, z before the chunk
    backward in time:  dphi_k = dA^T phi_q + b (v R^T + r)        R = dL/dS, r = dL/dz behind it
                       dv = A^T g + b phi_k R

The running sum G of the logarithms of decay has dL/dG_i = phi_q,i . dphi_q,i - phi_k,i . dphi_k,i, since P
is a function of differences of G.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.eager.buffers import Buffer, groups
from hf_linattn.ops.eager.chunked import Loop, Sums, Work
from hf_linattn.ops.types import Given, Gradients, How, Inputs, Outputs


def backward(inputs: Inputs, outputs: Outputs, given: Given, how: How, chunk: int) -> Gradients:
    """Gradients.

    Args:
        inputs: as `loop.causal` had them.
        outputs: what it gave; S and z are read only where there is decay.
        given: the loss by these.
        how: as there.
        chunk: as there.
    """
    found = Gradients(*(None if x is None else torch.empty_like(x) for x in inputs.learned))  # type: ignore[arg-type]
    total = outputs.total
    inverse = torch.where(total > 0, total.reciprocal(), 0).unsqueeze(-1) if how.normalise else None
    shift = (torch.zeros_like(total) if given.total is None else given.total.clone()).unsqueeze(-1)
    for rows, some in groups(*inputs.key.shape[:2]):
        queries = inputs.queries(some)
        loop = _Backward(inputs.part(rows, some), how, chunk, total)
        loop.d_output, loop.shift = given.output[rows, queries], shift[rows, queries]
        if inverse is not None:
            loop.output, loop.inverse = outputs.output[rows, queries], inverse[rows, queries]
        d_decay = None if found.log_decay is None else found.log_decay[rows, some]
        loop.by_queries(found.query[rows, queries], d_decay)
        after = [None if x is None else x[rows, some] for x in (given.S, given.z)]
        sums = loop.by_keys(found.key[rows, some], found.value[rows, some], d_decay, Sums(loop, *after))
        if found.S is not None and found.z is not None:
            sums.write(found.S[rows, some], found.z[rows, some])
    return decayed(found, outputs, given)


def decayed(found: Gradients, outputs: Outputs, given: Given) -> Gradients:
    """The loss by the logarithms of decay, where `found` has it by their running sums."""
    if found.log_decay is None:
        return found
    if given.S is not None and given.z is not None:  # the state after ends with all of G
        S, z = outputs.after
        found.log_decay[..., -1] += (given.S * S).sum((2, 3)) + (given.z * z).sum(2)
    by_decay = found.log_decay.double().flip(-1).cumsum(-1).flip(-1)
    return found._replace(log_decay=by_decay.to(found.log_decay.dtype))


class _Work(Work):
    """Buffers of the forward, and of the gradients."""

    def __init__(self, loop: Loop, length: int) -> None:
        super().__init__(loop, length)
        like, pairs = loop.like, loop.pairs
        self.d_numerator, self.d_total = self.numerator, self.total
        self.d_scores = Buffer(like, (*self.rows_of_queries, length), pairs)
        self.d_query = Buffer(like, (*self.rows_of_queries, loop.size), pairs)
        self.read = Buffer(like, (*self.rows_of_queries, loop.size), pairs)
        self.d_key = Buffer(like, (*self.rows_of_keys, loop.size), pairs)
        self.later = Buffer(like, (*self.rows_of_keys, loop.size), pairs)
        self.d_value = Buffer(like, (*self.rows_of_keys, loop.wide), pairs)
        self.g_o = like.new_empty(*self.rows_of_queries, loop.wide)


class _Backward(Loop):
    """The two sweeps.

    Attributes:
        d_output: dL/do.
        output, inverse: o, and 1 / total `[b, h, N, 1]` with 0 for 0, where that divides; else None.
        shift: t, `[b, h, N, 1]`; at first dL/dtotal.
    """

    work_type = _Work
    d_output: Tensor
    shift: Tensor
    output: Tensor | None = None
    inverse: Tensor | None = None

    def by_queries(self, to: Tensor, d_decay: Tensor | None) -> None:
        """Forward in time: write the gradient of the queries, half of that by the decay, and t."""
        sums, left = Sums(self, self.inputs.S, self.inputs.z), self.length
        more: tuple[Tensor, ...] = (to, self.d_output, self.shift)
        if self.output is not None and self.inverse is not None:
            more = (*more, self.inverse, self.output)
        for place, (work, chunk, link, d_query, d_output, shift, *divided) in enumerate(self.chunks(*more)):
            query, key, value = self.mapped(work, chunk)
            g = self._numerator(work, d_output, *divided[:1])
            if divided:
                shift.sub_(torch.mul(work.d_numerator.apart, divided[1], out=work.g_o).sum(-1, True))
            work.d_total.apart.copy_(shift)
            t = work.d_total.flat
            torch.bmm(g, value.mT, out=work.d_scores.flat).add_(t)
            found = torch.bmm(self.visible(work.d_scores, work, link), key, out=work.d_query.flat)
            if not sums.empty and link is None:
                found.baddbmm_(g, sums.S.mT).baddbmm_(t, sums.z.mT)
            elif not sums.empty and link is not None:
                torch.bmm(g, sums.S.mT, out=work.read.flat).baddbmm_(t, sums.z.mT)
                read = work.read.apart.view(work.by_head)
                work.d_query.apart.view(work.by_head).addcmul_(read, link.reading)
            if d_decay is not None:
                along = (found * query).view(work.by_head).sum((2, 4))
                d_decay[:, :, place * self.chunk : place * self.chunk + along.shape[2]] = along
            if self.how.kind != "none":
                found.mul_(work.query.slope.flat)
            d_query.copy_(work.d_query.apart)
            left -= key.shape[1]
            if left:
                self.advance(sums, work, key, value, link)

    def by_keys(self, to_key: Tensor, to_value: Tensor, d_decay: Tensor | None, sums: Sums) -> Sums:
        """Backward in time: write the gradients of keys and values, and the rest of that by the decay.

        `sums`, dL/dS and dL/dz of the state after, become those of the state before.
        """
        more: tuple[Tensor, ...] = (to_key, to_value, self.d_output, self.shift)
        if self.inverse is not None:
            more = (*more, self.inverse)
        stop = self.length
        for work, chunk, link, d_key, d_value, d_output, shift, *divided in self.chunks(*more, backward=True):
            query, key, value = self.mapped(work, chunk)
            g = self._numerator(work, d_output, *divided)
            work.d_total.apart.copy_(shift)
            t = work.d_total.flat
            torch.bmm(query, key.mT, out=work.scores.flat)
            by_value = torch.bmm(self.visible(work.scores, work, link).mT, g, out=work.d_value.flat)
            torch.bmm(g, value.mT, out=work.d_scores.flat).add_(t)
            by_key = torch.bmm(self.visible(work.d_scores, work, link).mT, query, out=work.d_key.flat)
            if not sums.empty and link is None:
                by_key.baddbmm_(value, sums.S.mT).add_(sums.z.mT)
            elif not sums.empty and link is not None:
                torch.bmm(value, sums.S.mT, out=work.later.flat).add_(sums.z.mT)
                work.d_key.apart.addcmul_(work.later.apart, link.entering)
            start = stop - key.shape[1]
            if d_decay is not None:
                d_decay[:, :, start:stop] -= (by_key * key).sum(-1).view(self.rows, self.heads, -1)
            stop = start
            if not sums.empty:
                if link is not None:
                    work.key.found.apart.mul_(link.entering)
                by_value.baddbmm_(key, sums.S)
            if self.how.kind != "none":
                by_key.mul_(work.key.slope.flat)
            self.hide(chunk, work.d_key, work.d_value)
            d_key.copy_(work.d_key.apart)
            d_value.copy_(work.d_value.apart)
            if link is not None:
                sums.outlive(link)
                work.query.found.apart.view(work.by_head).mul_(link.reading)
            sums.S.baddbmm_(query.mT, g)
            sums.z.baddbmm_(query.mT, t)
            sums.empty = False
        return sums

    def _numerator(self, work: _Work, d_output: Tensor, inverse: Tensor | None = None) -> Tensor:
        """g, `[pairs, shared m, Dv]`."""
        if inverse is None:
            work.d_numerator.apart.copy_(d_output)
        else:
            torch.mul(d_output, inverse, out=work.d_numerator.apart)
        return work.d_numerator.flat
