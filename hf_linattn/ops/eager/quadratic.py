"""Linear attention of short inputs: all scores at once, in as few operations as possible.

Below some 200 tokens the loop of `ops.loop` is one chunk or a few, and calling its operations costs more than
what they compute; so is the sum of `ops.both_ways`, below some 130. Nothing before, no decay, no documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.types import Given, Gradients, How, Inputs, Outputs, accumulator

TINY = {dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}


def forward(inputs: Inputs, how: How, keep: bool) -> Outputs:
    """As `loop.causal`, or as `both_ways.forward`."""
    query, key, value, _, _ = _mapped(inputs, how)
    scores = torch.bmm(query, key.mT)
    if how.causal:
        _squares(scores, inputs).tril_()
    total, numerator = scores.sum(-1, True), torch.bmm(scores, value)
    (batch, heads, length, _), kv_heads = inputs.query.shape, inputs.key.shape[1]
    output = inputs.value.new_empty(batch, length, heads, value.shape[2]).transpose(1, 2)
    if how.normalise:
        safe = torch.where(total > 0, total, 1) if how.kind == "none" else total.clamp_min(TINY[total.dtype])
        torch.div(numerator.view(output.shape), safe.view(batch, heads, length, 1), out=output)
    else:
        output.copy_(numerator.view(output.shape))
    total = total.view(batch, heads, length)
    if not keep:
        return Outputs(output, total)
    S = torch.bmm(key.mT, value).view(batch, kv_heads, -1, value.shape[2])
    return Outputs(output, total, S, key.sum(1).view(batch, kv_heads, -1))


def _squares(scores: Tensor, inputs: Inputs) -> Tensor:
    length = inputs.key.shape[2]
    return scores if scores.shape[1] == length else scores.view(-1, length, length)


def _mapped(inputs: Inputs, how: How) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Features of queries `[pairs, shared N, D]` and keys `[pairs, N, D]`, values, and the slopes of both."""
    pairs, dtype = inputs.key.shape[0] * inputs.key.shape[1], accumulator(*inputs[:3])
    query, key, value = (_flat(x, pairs, dtype) for x in inputs[:3])
    query_slope = key_slope = None
    if how.kind == "elu1":
        query_slope = query.clamp(max=0)
        query_slope.sub_(query_slope.amax(-1, True)).exp_()
        key_slope = key.clamp(max=0).exp_()
        query, key = query.clamp(min=0).add_(query_slope), key.clamp(min=0).add_(key_slope)
    elif how.kind == "relu":
        query_slope, key_slope = query > 0, key > 0
        query, key = query.relu().add_(how.eps), key.relu().add_(how.eps)
    if inputs.hidden is not None:  # of features: a key of 0 has some
        key, value = (_shown(x, inputs) for x in (key, value))
    return query, key, value, query_slope, key_slope


def _shown(x: Tensor, inputs: Inputs) -> Tensor:
    """`[pairs, N, D]` with 0 at hidden keys; a product would keep their NaN."""
    assert inputs.hidden is not None
    rows = inputs.key.shape[:2]
    found: Tensor = x.unflatten(0, rows).masked_fill(inputs.hidden[:, None, :, None], 0).flatten(0, 1)
    return found


def _flat(x: Tensor, pairs: int, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x[0] if x.shape[0] == 1 and x.shape[1] == pairs else x.reshape(pairs, -1, x.shape[3])


def backward(inputs: Inputs, outputs: Outputs, given: Given, how: How) -> Gradients:
    """As `loop_backward.backward`, or as `both_ways.backward`."""
    query, key, value, query_slope, key_slope = _mapped(inputs, how)
    pairs, dtype = key.shape[0], key.dtype
    g = given.output
    t = None if given.total is None else given.total.reshape(pairs, -1, 1)
    if how.normalise:
        total = outputs.total.unsqueeze(-1)
        g = g / torch.where(total > 0, total, torch.inf)
        own = (g * outputs.output).sum(-1).view(pairs, -1, 1)
        t = -own if t is None else t - own
    g = _flat(g, pairs, dtype)
    scores, d_scores = torch.bmm(query, key.mT), torch.bmm(g, value.mT)
    if t is not None:
        d_scores.add_(t)
    if how.causal:
        _squares(scores, inputs).tril_()
        _squares(d_scores, inputs).tril_()
    d_query, d_key = torch.bmm(d_scores, key), torch.bmm(d_scores.mT, query)
    d_value = torch.bmm(scores.mT, g)
    if given.S is not None and given.z is not None:
        S, z = given.S.view(pairs, *given.S.shape[2:]), given.z.view(pairs, 1, -1)
        d_key.baddbmm_(value, S.mT).add_(z)
        d_value.baddbmm_(key, S)
    if query_slope is not None and key_slope is not None:
        d_query.mul_(query_slope)
        d_key.mul_(key_slope)
    if inputs.hidden is not None:
        d_key, d_value = _shown(d_key, inputs), _shown(d_value, inputs)
    found = zip((d_query, d_key, d_value), inputs[:3], strict=True)
    return Gradients(*(x.view(of.shape).to(of.dtype) for x, of in found))
