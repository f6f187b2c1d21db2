"""A call of each kind that the Triton kernels compute, on tensors that hold nothing: to compile, to time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hf_linattn.ops.triton import (
    gate,
    heavy,
    heavy_backward,
    launch,
    problem,
    softmax_map,
    window,
    window_rest,
    window_token,
)
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import (
    Elu1Sums,
    Gate,
    HeavyChoices,
    HeavyColumns,
    HeavyPlaces,
    HeavyState,
    Inputs,
    OtherSums,
    ScaledSums,
    Window,
)

LINEAR = ("forward", "backward", "token")
WINDOWS = ("window", "window backward", "window token")
PREFILL = ("apart", "at once")
"""Window and linear attention of a prompt: their kernels one after the other, and the one that does both."""
HEAVY = ("heavy", "heavy backward", "heavy token")
"""Window and heavy hitters of a prompt, whose kernels choose them, their gradients, and one token."""
BESIDE = ("gates", "gates backward", "map", "map backward")
"""Gates made of values; their gradients, from those of the running sums that an attention reads. A learned
map of queries, whose weights have as many rows as a head is wide; its gradients."""
CALLS = LINEAR + WINDOWS + PREFILL + HEAVY + BESIDE
SPAN, SINKS = 256, 4
"""Of the window that is compiled: what `window+gated` has by default."""
COLUMNS = HeavyColumns(SPAN, SPAN // 2, SINKS, SPAN // 8, 512.0)
"""What `h2o` keeps by default."""


class Shape(NamedTuple):
    """What is computed; tensors `[batch, heads, length, D]` and `[batch, kv_heads, length, D or Dv]`."""

    dtype: str = "bfloat16"
    D: int = 128
    Dv: int = 128
    heads: int = 32
    kv_heads: int = 32
    length: int = 8192
    batch: int = 1
    feature_map: str = "elu1"
    linked: bool = False
    state: bool = False
    segment: int | None = None


def _segments(call: problem.Problem) -> problem.Segments:
    """Make what a forward hands to its backward, nothing in it."""
    tokens, count = call.cut(call.length, problem.OUTPUTS)
    parts = call.parts(tokens, count)
    slots = call.new_slots((count - 1) * parts)
    return problem.Segments(tokens, slots, slots.many, parts)


def calls(shape: Shape, device: str) -> dict[str, Callable[[], Any]]:
    """Make the calls of CALLS, on tensors that hold nothing.

    Args:
        shape: of these tensors.
        device: "meta", or where torch is as fast as with numbers.
    """
    dtype = getattr(torch, shape.dtype)
    sizes = (shape.heads, shape.D), (shape.kv_heads, shape.D), (shape.kv_heads, shape.Dv)
    batch, kv_heads, length = shape.batch, shape.kv_heads, shape.length

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    query, key, value = (
        new(batch, length, heads, width, dtype=dtype).transpose(1, 2) for heads, width in sizes
    )
    state = new(batch, kv_heads, shape.D, shape.Dv), new(batch, kv_heads, shape.D)
    before = state if shape.state else (None, None)
    decay = new(batch, kv_heads, length) if shape.linked else None
    documents = new(batch, length, dtype=torch.int32) if shape.linked else None
    links: dict[str, Any] = {"log_decay": decay, "documents": documents, "segment": shape.segment}
    output = new(batch, length, shape.heads, shape.Dv, dtype=dtype).transpose(1, 2)
    total, how = new(batch, shape.heads, length), (shape.feature_map, True)
    given: tuple[Any, ...] = query, key, value, None, *before, *how
    one: tuple[Any, ...] = *(x[:, :, :1] for x in (query, key, value)), None, *state, *how
    last = None if decay is None else decay[:, :, :1]
    after = (None, *state) if shape.state else (None, None, None)
    back: tuple[Any, ...] = output, *after, *given[:6], output, total, *how
    segments = _segments(problem.Problem(query, key, value, None, *how, **links))
    sinks = (
        new(batch, kv_heads, SINKS, shape.D, dtype=dtype),
        new(batch, kv_heads, SINKS, shape.Dv, dtype=dtype),
    )
    there, ranks = new(batch, SINKS, dtype=torch.bool), new(batch, length, dtype=torch.int64)
    first = Sinks(None, *sinks, there, ranks)
    inside = Window(query, key, value, new(batch, length, dtype=torch.bool), SPAN, 0.1)
    beside = _beside(shape, output.float(), total)
    free = shape.feature_map == "none"
    ring = window_token.Ring(
        new(batch, kv_heads, SPAN, shape.D, dtype=dtype), new(batch, kv_heads, SPAN, shape.Dv, dtype=dtype),
        new(batch, SPAN, dtype=torch.bool), new(batch, dtype=torch.int64),
    )  # fmt: skip
    tail = window_token.Tail(
        *state, query.float()[:, :, :1] if free else None, key.float()[:, :, :1] if free else None, None,
        weights := Gate(new(kv_heads, shape.Dv), new(kv_heads), 16.0), shape.feature_map,
    )  # fmt: skip
    of_token = sinks[0].new_empty(batch, shape.heads, 1, shape.D)
    at = Sinks(of_token, *sinks, there, ranks[:, :1])
    made: dict[str, Callable[[], Any]] = {
        "window token": lambda: window_token.decode(one[0], one[1], one[2], None, ring, 0.1, tail, at),
        "window": lambda: window.forward(inside, first, beside),
        "window backward": lambda: window.backward(output, inside, first, beside, output, total),
        "forward": lambda: launch.forward(*given, **links),
        "backward": lambda: launch.backward(*back, **links, segments=segments),
        "token": lambda: launch.decode(*one, log_decay=last, in_place=True),
    }
    gates, on = new(batch, kv_heads, length), problem.Launches(total)
    rows = new(shape.heads, shape.D, shape.D, dtype=dtype)
    of_features = dtype if dtype == torch.bfloat16 else torch.float32
    features = new(batch, length, shape.heads, 2 * shape.D, dtype=of_features).transpose(1, 2)
    made |= {
        "gates": lambda: gate.forward(value, None, weights),
        "gates backward": lambda: gate.backward(
            gate.decay_gradients(total[None], gates[None], None, on), value, None, weights
        ),
    }
    if shape.D <= softmax_map.WIDEST:
        made |= {
            "map": lambda: softmax_map.forward(query, rows, 1e-12, of_features),
            "map backward": lambda: softmax_map.backward(features, query, rows, 1e-12),
        }
    # last: kernels count by the first call that launches them
    made |= _prefill(shape, inside, first, decay)
    if max(shape.D, shape.Dv) > heavy.WIDEST:
        return made
    numbers, held = new(batch, dtype=torch.int32), (batch, kv_heads, COLUMNS.total)
    places = HeavyPlaces(numbers, numbers, documents)
    of_heads = new(*held, shape.D, dtype=dtype), new(*held, shape.Dv, dtype=dtype)
    kept = HeavyState(*of_heads, new(*held), new(*held, dtype=torch.int32)) if shape.state else None
    last_of = new(batch, 1, dtype=torch.int32)
    of_one = HeavyPlaces(numbers, numbers, None if documents is None else last_of)
    chosen = new(batch, kv_heads, COLUMNS.left(length - 1), COLUMNS.heavy, dtype=torch.int32)
    choices = HeavyChoices(chosen, numbers, total)
    text = output, query, query, key, value, output, choices, COLUMNS, 0.1

    def gradients() -> None:  # of all key heads at once: a kernel counts by its first launch
        with mock.patch.object(heavy_backward, "BYTES", 1 << 60):
            heavy_backward.backward(*text)

    return made | {
        "heavy": lambda: heavy.forward(query, query, key, value, places, kept, COLUMNS, 0.1),
        "heavy backward": gradients,
        "heavy token": lambda: heavy.forward(one[0], one[0], one[1], one[2], of_one, kept, COLUMNS, 0.1),
    }


def _beside(shape: Shape, values: Tensor, total: Tensor) -> OtherSums:
    """Make sums over other tokens, as a window gets them."""
    own = shape.feature_map == "elu1"
    return Elu1Sums(values, total) if own else ScaledSums(values, total, total)


def _prefill(
    shape: Shape, inside: Window, sinks: Sinks, decay: Tensor | None
) -> dict[str, Callable[[], Any]]:
    """Make the calls of PREFILL: what has left the window is all but its last tokens."""
    query, key, value = inside[:3]
    if max(shape.D, shape.Dv) > window_rest.WIDEST:
        return {}
    left = shape.length - SPAN
    behind = query[:, :, SPAN:], key[:, :, :left], value[:, :, :left]
    decay = None if decay is None else decay[:, :, :left]
    rest = window_rest.Rest(Inputs(*behind, log_decay=decay), shape.feature_map)

    def apart() -> None:
        how = shape.feature_map, False
        links: dict[str, Any] = {"log_decay": decay, "segment": shape.segment}
        numerator, total = launch.forward(*behind, None, None, None, *how, **links)[:2]
        window.forward(inside, sinks, _beside(shape, numerator, total))

    return {"at once": lambda: window_rest.forward(inside, sinks, rest, shape.segment), "apart": apart}
