"""Linear attention of short inputs: all scores at once, in as few operations as possible.

Below some 200 tokens the loop of `chunked` is one chunk or a few, and calling its operations costs more than
what they compute; below some 130 so does the sum of `bidirectional`. It takes no state before, no decay, no
documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.types import InputGrads, Inputs, OpConfig, OutputGrads, Outputs, accumulator_dtype

TINY = {dtype: torch.finfo(dtype).tiny for dtype in (torch.float32, torch.float64)}


def forward(inputs: Inputs, config: OpConfig, keep: bool) -> Outputs:
    """Compute output, totals and the state after, causal or over all keys.

    Args:
        inputs: queries, keys and values; nothing before, no decay, no documents.
        config: which features, which keys, and whether to divide.
        keep: the state after is wanted.
    """
    query, key, value, _, _ = _mapped(inputs, config)
    scores = torch.bmm(query, key.mT)
    if config.causal:
        _squares(scores, inputs).tril_()
    total, numerator = scores.sum(-1, True), torch.bmm(scores, value)
    (batch, heads, length, _), kv_heads = inputs.query.shape, inputs.key.shape[1]
    output = inputs.value.new_empty(batch, length, heads, value.shape[2]).transpose(1, 2)
    if config.normalise:
        safe = (
            torch.where(total > 0, total, 1) if config.kind == "none" else total.clamp_min(TINY[total.dtype])
        )
        torch.div(numerator.view(output.shape), safe.view(batch, heads, length, 1), out=output)
    else:
        output.copy_(numerator.view(output.shape))
    total = total.view(batch, heads, length)
    if not keep:
        return Outputs(output, total)
    S = torch.bmm(key.mT, value).view(batch, kv_heads, -1, value.shape[2])
    return Outputs(output, total, S, key.sum(1).view(batch, kv_heads, -1))


def _squares(scores: Tensor, inputs: Inputs) -> Tensor:
    """View scores `[b hkv, shared N, N]` as one square `[N, N]` a query head."""
    length = inputs.key.shape[2]
    return scores if scores.shape[1] == length else scores.view(-1, length, length)


def _mapped(inputs: Inputs, config: OpConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Map queries to `[b hkv, shared N, D]`, keys to `[b hkv, N, D]`: these, values, and both derivatives."""
    batch_heads, dtype = inputs.key.shape[0] * inputs.key.shape[1], accumulator_dtype(*inputs[:3])
    query, key, value = (_flat(x, batch_heads, dtype) for x in inputs[:3])
    query_derivative = key_derivative = None
    if config.kind == "elu1":
        query_derivative = query.clamp(max=0)
        query_derivative.sub_(query_derivative.amax(-1, True)).exp_()
        key_derivative = key.clamp(max=0).exp_()
        query, key = query.clamp(min=0).add_(query_derivative), key.clamp(min=0).add_(key_derivative)
    elif config.kind == "relu":
        query_derivative, key_derivative = query > 0, key > 0
        query, key = query.relu().add_(config.eps), key.relu().add_(config.eps)
    if inputs.valid is not None:  # of features: a key of 0 has some
        key, value = (_zero_hidden(x, inputs) for x in (key, value))
    return query, key, value, query_derivative, key_derivative


def _zero_hidden(x: Tensor, inputs: Inputs) -> Tensor:
    """Put 0 at the hidden keys of `[b hkv, N, D]`; a product would keep their NaN."""
    assert inputs.valid is not None
    rows = inputs.key.shape[:2]
    shown: Tensor = x.unflatten(0, rows).masked_fill(~inputs.valid[:, None, :, None], 0).flatten(0, 1)
    return shown


def _flat(x: Tensor, batch_heads: int, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x[0] if x.shape[0] == 1 and x.shape[1] == batch_heads else x.reshape(batch_heads, -1, x.shape[3])


def backward(inputs: Inputs, outputs: Outputs, grads: OutputGrads, config: OpConfig) -> InputGrads:
    """Compute the gradients of `forward`.

    Args:
        inputs: as the forward took them.
        outputs: what it returned.
        grads: gradients of these.
        config: which features, which keys, and whether the output was divided.
    """
    query, key, value, query_derivative, key_derivative = _mapped(inputs, config)
    batch_heads, dtype = key.shape[0], key.dtype
    g = grads.output
    t = None if grads.total is None else grads.total.reshape(batch_heads, -1, 1)
    if config.normalise:
        total = outputs.total.unsqueeze(-1)
        g = g / torch.where(total > 0, total, torch.inf)
        g_o = (g * outputs.output).sum(-1).view(batch_heads, -1, 1)
        t = -g_o if t is None else t - g_o
    g = _flat(g, batch_heads, dtype)
    scores, d_scores = torch.bmm(query, key.mT), torch.bmm(g, value.mT)
    if t is not None:
        d_scores.add_(t)
    if config.causal:
        _squares(scores, inputs).tril_()
        _squares(d_scores, inputs).tril_()
    d_query, d_key = torch.bmm(d_scores, key), torch.bmm(d_scores.mT, query)
    d_value = torch.bmm(scores.mT, g)
    if grads.S is not None and grads.z is not None:
        S, z = grads.S.view(batch_heads, *grads.S.shape[2:]), grads.z.view(batch_heads, 1, -1)
        d_key.baddbmm_(value, S.mT).add_(z)
        d_value.baddbmm_(key, S)
    if query_derivative is not None and key_derivative is not None:
        d_query.mul_(query_derivative)
        d_key.mul_(key_derivative)
    if inputs.valid is not None:
        d_key, d_value = _zero_hidden(d_key, inputs), _zero_hidden(d_value, inputs)
    gradients = zip((d_query, d_key, d_value), inputs[:3], strict=True)
    return InputGrads(*(x.view(of.shape).to(of.dtype) for x, of in gradients))
