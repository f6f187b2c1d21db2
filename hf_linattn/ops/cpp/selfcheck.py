"""A small problem for each kernel, against torch's operations: milliseconds, before a library is used."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.cpp import build, delta, linear, window, window_decode
from hf_linattn.ops.eager import delta_rule
from hf_linattn.ops.types import DeltaConfig, DeltaInputs, Inputs, OpConfig, OutputGrads, State, Window

TOKENS, HEADS, KV_HEADS, SIZE, WIDE, SPAN = 70, 2, 1, 20, 12, 24
"""More than a chunk, and no multiple of a vector; one key head, so that no thread is started."""
TOLERANCE = 1e-4
"""Of the largest number, or of 1."""
LINEAR = OpConfig("elu1")


def check(library: CDLL) -> None:
    """Compare all kernels of a library with torch.

    Raises:
        UnsupportedCallError: one of them differs.
    """
    token = build.trial.set(library)
    try:
        for name, got, want in (*_linear(), *_delta(), *_window(), *_decode()):
            error = float((got - want).abs().max())
            if not error < TOLERANCE * float(want.abs().max().clamp_min(1)):  # NaN too
                raise UnsupportedCallError(f"its kernel of {name} is {error:.2g} off")
    finally:
        build.trial.reset(token)


def _numbers(heads: int, length: int, size: int, phase: float) -> Tensor:
    """Make `[1, heads, length, size]` without a random generator, which belongs to the user."""
    count = torch.arange(heads * length * size, dtype=torch.float32, device="cpu")
    return (count * 0.7 + phase).sin().view(1, heads, length, size)


def _tokens(length: int = TOKENS, columns: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _numbers(HEADS, length, SIZE, 0.1),
        _numbers(KV_HEADS, columns, SIZE, 0.5),
        _numbers(KV_HEADS, columns, WIDE, 0.9),
    )


def _gradients(output: Tensor, grad: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, grad)


def _linear() -> Iterator[tuple[str, Tensor, Tensor]]:
    leaves = tuple(x.requires_grad_() for x in _tokens())
    query, key, value = (x.detach() for x in leaves)
    grad = _numbers(HEADS, TOKENS, WIDE, 0.3)
    for causal in (True, False):
        scores = (F.elu(leaves[0]) + 1) @ (F.elu(leaves[1]) + 1).mT
        scores = scores.tril() if causal else scores
        want = (scores @ leaves[2]) / scores.sum(-1, keepdim=True)
        inputs, config = Inputs(query, key, value), LINEAR._replace(causal=causal)
        got = linear.forward(inputs, config, not causal, 64)
        yield "linear attention", got.output, want.detach()
        found = linear.backward(inputs, got, OutputGrads(grad, None), config, 64)
        for mine, its in zip(found[:3], _gradients(want, grad, leaves), strict=True):
            yield "linear attention's gradients", mine, its
    half = Inputs(query.half(), key.half(), value.half())
    one, two = (
        linear.forward(x, LINEAR, False, 64).total for x in (half, Inputs(*(x.float() for x in half[:3])))
    )
    yield "linear attention in half precision", one, two


def _delta() -> Iterator[tuple[str, Tensor, Tensor]]:
    gates = _numbers(KV_HEADS, TOKENS, 2, 0.2)
    leaves = tuple(x.requires_grad_() for x in (*_tokens(), gates))
    query, key, value, logits = leaves
    unit_query, unit_key = (F.normalize(x, dim=-1, eps=delta.EPS) for x in (query, key))
    beta, log_decay = logits[..., 0].sigmoid(), F.logsigmoid(logits[..., 1:]) / 16
    want, state = delta_rule.causal(unit_query, unit_key, value, beta, log_decay, None, None)
    inputs, config = DeltaInputs(*(x.detach() for x in leaves)), DeltaConfig("head", 1.0, 16.0)
    output, after = delta.forward(inputs, config, keep=True)
    assert want is not None
    assert output is not None
    assert after is not None
    yield "the delta rule", output, want.detach()
    yield "the delta rule's state", after, state.detach()
    grad = _numbers(HEADS, TOKENS, WIDE, 0.3)
    found = delta.backward(inputs, config, grad, None)
    for mine, its in zip(found[:4], _gradients(want, grad, leaves), strict=True):
        yield "the delta rule's gradients", mine, its
    token = (x.detach()[:, :, -1:] for x in (*leaves, unit_query, unit_key, beta, log_decay))
    query, key, value, logits, unit_query, unit_key, beta, log_decay = token
    again = delta.forward(DeltaInputs(query, key, value, logits, after.clone()), config, keep=True)[0]
    want = delta_rule.causal(unit_query, unit_key, value, beta, log_decay, after, None)[0]
    assert again is not None
    assert want is not None
    yield "a token of the delta rule", again, want


def _window() -> Iterator[tuple[str, Tensor, Tensor]]:
    leaves = tuple(x.requires_grad_() for x in _tokens(columns=TOKENS + SPAN))
    query, key, value = (x.detach() for x in leaves)
    valid = torch.arange(TOKENS + SPAN, device="cpu")[None] > 5
    row, column = torch.arange(TOKENS, device="cpu")[:, None], torch.arange(TOKENS + SPAN, device="cpu")
    seen = (column > row) & (column <= row + SPAN) & valid
    scores = (leaves[0] @ leaves[1].mT * 0.3).masked_fill(~seen, float("-inf"))
    want, grad = scores.softmax(-1) @ leaves[2], _numbers(HEADS, TOKENS, WIDE, 0.3)
    problem = Window(query, key, value, valid, SPAN, 0.3)
    output, lse = window.forward(problem, None)
    yield "a window", output, want.detach()
    found = window.backward(grad, problem, None, output, lse)
    for mine, its in zip(found, _gradients(want, grad, leaves), strict=True):
        yield "a window's gradients", mine, its


def _decode() -> Iterator[tuple[str, Tensor, Tensor]]:
    query, key, value = _tokens(1, 1)
    keys, values = _tokens(1, SPAN)[1:]
    S, z = _numbers(KV_HEADS, SIZE, WIDE, 0.4), _numbers(KV_HEADS, 1, SIZE, 0.6)[:, :, 0].abs()
    oldest = torch.tensor([3], device="cpu")
    phi = F.elu(keys[:, :, 3]) + 1
    after = State(S + phi[..., None] * values[:, :, 3, None], z + phi)
    now_keys, now_values = keys.clone(), values.clone()
    now_keys[:, :, 3], now_values[:, :, 3] = key[:, :, 0], value[:, :, 0]
    weights, phi_q = (query @ now_keys.mT * 0.3).exp(), F.elu(query) + 1
    total = weights.sum(-1, keepdim=True) + phi_q @ after.z[..., None]
    want = (weights @ now_values + phi_q @ after.S) / total
    valid = torch.ones(1, SPAN, dtype=torch.bool, device="cpu")
    ring = window_decode.RingBuffer(keys, values, valid, oldest)
    tail = window_decode.LinearTail(query, None, S, z, kind="elu1")
    yield "a token behind a window", window_decode.decode(query, key, value, None, ring, 0.3, tail), want
    yield "a token behind a window, its state", S, after.S
