"""A small problem for each kernel, against torch's operations: milliseconds, before a library is used."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.cpp import build, delta, heavy, linear, softmax_map, window, window_decode
from hf_linattn.ops.eager import delta_rule
from hf_linattn.ops.types import (
    DeltaConfig,
    DeltaInputs,
    HeavyColumns,
    HeavyPlaces,
    HeavyState,
    Inputs,
    OpConfig,
    OutputGrads,
    ScaledSums,
    State,
    Window,
    WindowSinks,
)

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
        for name, got, want in (
            *(*_linear(), *_softmax_map(), *_delta()),
            *(*_window(), *_sinks(), *_decode(), *_heavy()),
        ):
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
    rounded = Inputs(query.bfloat16(), key.bfloat16(), value.bfloat16())
    grads = [OutputGrads(grad.to(dtype), None) for dtype in (torch.bfloat16, torch.float32)]
    both = []
    for each, output_grads in zip((rounded, Inputs(*(x.float() for x in rounded[:3]))), grads, strict=True):
        outputs = linear.forward(each, LINEAR, False, 64)
        both.append([outputs.output, *linear.backward(each, outputs, output_grads, LINEAR, 64)[:3]])
    yield from _coarse("linear attention in bfloat16", *both)


def _coarse(name: str, fewer: list[Tensor], more: list[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Compare results of bfloat16, of which factors of products are rounded too, less closely."""
    for few, many in zip(fewer, more, strict=True):
        near = (few.float() - many).abs() < 2e-2 * many.abs().max().clamp_min(1)
        yield name, torch.where(near, many, few.float()), many


def _delta() -> Iterator[tuple[str, Tensor, Tensor]]:
    decays: tuple[tuple[Literal["head", "channel"], int], ...] = (("head", 1), ("channel", SIZE))
    for decay, count in decays:
        gates = _numbers(KV_HEADS, TOKENS, 1 + count, 0.2)
        leaves = tuple(x.requires_grad_() for x in (*_tokens(), gates))
        query, key, value, logits = leaves
        unit_query, unit_key = (F.normalize(x, dim=-1, eps=delta.EPS) for x in (query, key))
        beta, log_decay = logits[..., 0].sigmoid(), F.logsigmoid(logits[..., 1:]) / 16
        want, state = delta_rule.causal(unit_query, unit_key, value, beta, log_decay, None, None)
        inputs, config = DeltaInputs(*(x.detach() for x in leaves)), DeltaConfig(decay, 1.0, 16.0)
        output, after = delta.forward(inputs, config, keep=True)
        assert want is not None
        assert output is not None
        assert after is not None
        yield f"the delta rule, decay by {decay}", output, want.detach()
        yield f"the delta rule's state, decay by {decay}", after, state.detach()
        grad = _numbers(HEADS, TOKENS, WIDE, 0.3)
        found = delta.backward(inputs, config, grad, None)
        for mine, its in zip(found[:4], _gradients(want, grad, leaves), strict=True):
            yield f"the delta rule's gradients, decay by {decay}", mine, its
        short = [x.detach().bfloat16() for x in leaves[:3]]
        both = []
        for three in (short, [x.float() for x in short]):
            each = DeltaInputs(three[0], three[1], three[2], inputs.gates)
            first = delta.forward(each, config, keep=False)[0]
            assert first is not None
            both.append([first, *delta.backward(each, config, grad.to(each.value.dtype), None)[:4]])
        yield from _coarse(f"the delta rule in bfloat16, decay by {decay}", *both)
        token = (x.detach()[:, :, -1:] for x in (*leaves, unit_query, unit_key, beta, log_decay))
        query, key, value, logits, unit_query, unit_key, beta, log_decay = token
        again = delta.forward(DeltaInputs(query, key, value, logits, after.clone()), config, keep=True)[0]
        want = delta_rule.causal(unit_query, unit_key, value, beta, log_decay, after, None)[0]
        assert again is not None
        assert want is not None
        yield f"a token of the delta rule, decay by {decay}", again, want


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
    short = [x.bfloat16() for x in (query, key, value, grad)]
    both = []
    for query, key, value, grad in (short, [x.float() for x in short]):
        problem = Window(query, key, value, valid, SPAN, 0.3)
        output, lse = window.forward(problem, None)
        both.append([output, *window.backward(grad, problem, None, output, lse)])
    yield from _coarse("a window in bfloat16", *both)


def _softmax_map() -> Iterator[tuple[str, Tensor, Tensor]]:
    x, weight = _tokens()[0], _numbers(HEADS, WIDE, SIZE, 0.2)[0]
    grad = _numbers(HEADS, TOKENS, 2 * WIDE, 0.3)
    leaves = x.requires_grad_(), weight.requires_grad_()
    want = _features(*leaves)
    x, weight = (each.detach() for each in leaves)
    yield "a learned map", softmax_map.forward(x, weight, 0.0, torch.float32), want.detach()
    found = softmax_map.backward(grad, x, weight, 0.0)
    for mine, its in zip(found, _gradients(want, grad, leaves), strict=True):
        yield "a learned map's gradients", mine, its
    both = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = (each.detach().bfloat16().to(dtype) for each in leaves)
        both.append([softmax_map.forward(x, weight, 0.0, dtype), *softmax_map.backward(grad, x, weight, 0.0)])
    yield from _coarse("a learned map in bfloat16", *both)


def _sinks() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Sinks of a window, which queries meet turned, with sums of the last queries."""
    alone, count = 30, 3
    leaves = tuple(
        x.requires_grad_()
        for x in (*_tokens(columns=TOKENS + SPAN), *(x + 0.1 for x in _tokens(columns=count)[1:]))
    )
    query, key, value, sink_key, sink_value = (x.detach() for x in leaves)
    cos, sin = _numbers(TOKENS, 1, 8, 0.3)[0, :, 0][None], _numbers(TOKENS, 1, 8, 0.8)[0, :, 0][None]
    ranks = torch.arange(TOKENS, device="cpu")[None]
    valid = torch.ones(1, TOKENS + SPAN, dtype=torch.bool, device="cpu")
    first, second = leaves[0][..., :4], leaves[0][..., 4:8]
    turned = leaves[0][..., :8] * cos + torch.cat([-second, first], -1) * sin
    met = torch.cat([turned, leaves[0][..., 8:]], -1)
    row, column = ranks[0][:, None], torch.arange(TOKENS + SPAN, device="cpu")
    inside = (leaves[0] @ leaves[1].mT * 0.3).masked_fill(
        ~((column > row) & (column <= row + SPAN)), float("-inf")
    )
    beside = (met @ leaves[3].mT * 0.3).masked_fill(torch.arange(count, device="cpu") > row, float("-inf"))
    weights = torch.cat([inside, beside], -1).exp()
    total = _numbers(HEADS, TOKENS - alone, 1, 0.6)[..., 0].abs()
    values = _numbers(HEADS, TOKENS - alone, WIDE, 0.4)
    others = F.pad(values, (0, 0, alone, 0)), F.pad(total, (alone, 0))
    numerator = weights @ torch.cat([leaves[2], leaves[4]], 2) + others[0]
    want, grad = numerator / (weights.sum(-1) + others[1]).unsqueeze(-1), _numbers(HEADS, TOKENS, WIDE, 0.3)
    problem = Window(query, key, value, valid, SPAN, 0.3)
    sinks = WindowSinks(sink_key, sink_value, valid[:, :count], ranks, (cos, sin))
    sums = ScaledSums(values, total, torch.zeros_like(total))
    output, lse = window.forward(problem, sums, sinks)
    yield "sinks of a window", output, want.detach()
    found = window.backward(grad, problem, sums, output, lse, sinks)
    found = [*found[:3], *found[-2:]]
    for mine, its in zip(found, _gradients(want, grad, leaves), strict=True):
        yield "sinks' gradients", mine, its


def _decode() -> Iterator[tuple[str, Tensor, Tensor]]:
    maps = _numbers(HEADS, SIZE, SIZE, 0.2)[0], _numbers(KV_HEADS, SIZE, SIZE, 0.7)[0]
    for learned in (None, maps):
        query, key, value = _tokens(1, 1)
        keys, values = _tokens(1, SPAN)[1:]
        count = SIZE if learned is None else 2 * SIZE
        S, z = _numbers(KV_HEADS, count, WIDE, 0.4), _numbers(KV_HEADS, 1, count, 0.6)[:, :, 0].abs()
        oldest = torch.tensor([3], device="cpu")
        phi_q = _features(query, learned and learned[0])
        phi = _features(keys[:, :, 3:4], learned and learned[1])
        after = State(S + phi.mT @ values[:, :, 3:4], z + phi[:, :, 0])
        now_keys, now_values = keys.clone(), values.clone()
        now_keys[:, :, 3], now_values[:, :, 3] = key[:, :, 0], value[:, :, 0]
        scores, sinks, mix = query @ now_keys.mT * 0.3, None, None
        valid = torch.ones(1, SPAN, dtype=torch.bool, device="cpu")
        ring = window_decode.RingBuffer(keys, values, valid, oldest)
        numerator, total = phi_q @ after.S, phi_q @ after.z[..., None]
        if learned is None:
            weights = scores.exp()
            want = (weights @ now_values + numerator) / (weights.sum(-1, keepdim=True) + total)
        else:
            beside, turn = _tokens(1, 5)[1:], (_numbers(1, 1, 8, 0.3)[0, 0], _numbers(1, 1, 8, 0.8)[0, 0])
            first, second = query[..., :4], query[..., 4:8]
            turned = query[..., :8] * turn[0] + torch.cat([-second, first], -1) * turn[1]
            met = torch.cat([turned, query[..., 8:]], -1)
            scores = torch.cat([scores, met @ beside[0].mT * 0.3], -1)
            mix = torch.full((HEADS,), 0.4, device="cpu")
            inside = scores.softmax(-1) @ torch.cat([now_values, beside[1]], 2)
            want = mix.sigmoid()[0] * inside + (1 - mix.sigmoid()[0]) * numerator / total
            sinks = window_decode.Sinks(query, *beside, turn)
        tail = window_decode.LinearTail(
            query, None, S, z, kind="elu1", mix=mix, mix_logit=mix is not None, learned=learned
        )
        got = window_decode.decode(query, key, value, None, ring, 0.3, tail, sinks)
        yield "a token behind a window", got, want
        yield "a token behind a window, its state", S, after.S


def _heavy() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Many tokens, more of them behind a cache, and one."""
    query, key, value = _tokens()
    near, columns = 0.5 * query, HeavyColumns(16, 6, 2, 2, half_life=20.0, reach=24)

    def call(
        start: int,
        stop: int,
        kept: HeavyState | None,
        columns: HeavyColumns,
        dtype: torch.dtype,
        chosen: Tensor | None = None,
    ) -> tuple[Tensor, HeavyState]:
        seen, new = (torch.tensor([x], dtype=torch.int32, device="cpu") for x in (start, stop - start))
        now, met, keys, values = (x[:, :, start:stop].to(dtype) for x in (query, near, key, value))
        places = HeavyPlaces(seen, new)
        return heavy.forward(now, met, keys, values, places, kept, columns, 0.3, chosen=chosen)

    chosen = torch.full((1, 1, columns.left(39), columns.heavy), -1, dtype=torch.int32, device="cpu")
    want, weight = _walk(query, near, key, value, columns)
    first, kept = call(0, 40, None, columns, torch.float32, chosen)
    stayed = kept.rank[:, :, columns.sinks : columns.sinks + columns.heavy]
    last, stayed = (x.sort()[0].float() for x in (chosen[:, :, -1], stayed))
    yield "a window with heavy hitters, what it chose", last, stayed
    second, kept = call(40, TOKENS - 1, kept, columns, torch.float32)
    third, kept = call(TOKENS - 1, TOKENS, kept, columns, torch.float32)
    yield "a window with heavy hitters", torch.cat([first, second, third], 2), want
    yield "a window with heavy hitters, what they got", kept.weight.sort()[0], weight.sort()[0]
    all_stay = columns._replace(heavy=TOKENS)  # no choice is close
    both = [[call(0, TOKENS, None, all_stay, dtype)[0]] for dtype in (torch.bfloat16, torch.float32)]
    yield from _coarse("a window with heavy hitters in bfloat16", *both)


def _walk(
    query: Tensor, near: Tensor, key: Tensor, value: Tensor, columns: HeavyColumns
) -> tuple[Tensor, Tensor]:
    """Compute token after token; return outputs, and what each column that is kept has got."""
    size, heavy, sinks, block, _, reach = columns
    assert reach is not None
    held: list[int] = []  # heavy hitters
    got, outputs, oldest = torch.zeros(TOKENS, device="cpu"), [], sinks
    for token in range(TOKENS):
        if token - oldest + 1 == size + block:
            held += range(oldest, oldest + block)
            held = sorted(held, key=lambda x: -float(got[x]) if x >= token - reach else 1)[:heavy]
            oldest += block
        first = list(range(min(sinks, token + 1)))
        seen = [*held, *range(oldest, token + 1)]
        own = slice(token, token + 1)
        scores = torch.cat([near[:, :, own] @ key[:, :, first].mT, query[:, :, own] @ key[:, :, seen].mT], -1)
        weights = (0.3 * scores).softmax(-1)
        outputs.append(weights @ value[:, :, [*first, *seen]])
        got *= columns.fade
        got[[*first, *seen]] += weights.sum((0, 1, 2))
    kept = got[[*range(sinks), *held, *range(oldest, TOKENS)]]
    return torch.cat(outputs, 2), F.pad(kept, (columns.total - len(kept), 0))[None, None]


def _features(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return F.elu(x) + 1
    y = torch.einsum("bhnd,hfd->bhnf", x, weight)
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], -1)
