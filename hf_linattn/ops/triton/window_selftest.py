"""Small problems that the kernels of windows must solve as float64 does, as well as rounding allows.

The bound is that of `selftest`, |got - want| <= (roundings u + n 2^-24) x (the same sum with all terms
positive), and for what a weight exp(s) is changed by an error of its score, which sums D products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import selftest
from hf_linattn.ops.triton.selftest import Key
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.types import Elu1Sums, OtherSums, ScaledSums, Window

LENGTH = 150
SPAN = 29
SINKS = 3
ALONE = 17
"""Queries behind whose window nothing lies, where the others come alone."""
MISSING = 12
"""Columns before the first key that are missing, where it is not all of them."""
GRADIENTS = ("d_query", "d_key", "d_value", "d_sink_query", "d_sink_key", "d_sink_value")
OTHERS = ("d_values", "d_total", "d_log_scale")


class WindowForm(NamedTuple):
    """What is computed over a window, forward and backward, apart from numbers.

    Attributes:
        sinks: there are some.
        others: sums over other tokens share the normaliser.
        shifted: the kernel finds their scale, what elu1's map divides queries by.
    """

    sinks: bool = False
    others: bool = False
    shifted: bool = False

    @property
    def words(self) -> list[str]:
        """Name it."""
        return [
            "window",
            *(["sinks"] if self.sinks else []),
            *(["other sums"] if self.others else []),
            *(["shifted"] if self.shifted else []),
        ]


class Numbers(NamedTuple):
    """Inputs of a trial and the gradient of its output."""

    window: Window
    sinks: Sinks | None
    others: OtherSums | None
    grad: Tensor


def disagreement(trial: Key, kernels: Any, length: int = LENGTH) -> str | None:
    """Run the kernels and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where.
        kernels: has the functions of `window`.
        length: queries.
    """
    for plain in (True, False):
        numbers = draw(trial, length, plain)
        want, scale, more = exact(numbers)
        window, sinks, others, grad = on_device(numbers, trial.device)
        output, lse = kernels.forward(window, sinks, others)
        wrong = selftest.compare(trial, {"output": output}, (want, scale), length, more)
        if wrong is None:
            found = kernels.backward(grad, window, sinks, others, output, lse)
            got = dict(zip(GRADIENTS, found[:6], strict=True))
            got |= dict(zip(OTHERS, found.others or (), strict=False))
            wrong = selftest.compare(trial, got, (want, scale), length, 2 * more)
        if wrong is not None:
            return wrong
    return None


def draw(trial: Key, length: int, plain: bool) -> Numbers:
    """Draw numbers on the CPU: from the start and all seen, or behind others and with padding."""
    generator = torch.Generator("cpu").manual_seed(length)
    form, (heads, kv_heads) = trial.form, (2 * trial.group, 2)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    def tokens(count: int, heads: int, width: int) -> Tensor:
        return normal(1, count, heads, width, dtype=trial.dtype).transpose(1, 2)  # as models lay them out

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")

    keys = length if plain else length + SPAN - MISSING
    query, key, value = (
        tokens(length, heads, trial.D),
        tokens(keys, kv_heads, trial.D),
        tokens(keys, kv_heads, trial.Dv),
    )
    valid = torch.ones(1, keys, dtype=torch.bool, device="cpu") if plain else chance(1, keys) > 0.2
    valid[:, : keys // 3] &= plain  # some queries see nothing
    window = Window(query, key, value, valid, SPAN, trial.D**-0.5)
    sinks: Sinks | None = None
    others: OtherSums | None = None
    if form.sinks:
        turned = None if plain else tokens(length, heads, trial.D)
        there = torch.ones(1, SINKS, dtype=torch.bool, device="cpu")
        there[:, -1] = plain
        ranks = None if plain else torch.arange(length, device="cpu")[None] // 2 - 1
        sinks = Sinks(
            turned, normal(1, kv_heads, SINKS, trial.D, dtype=trial.dtype),
            normal(1, kv_heads, SINKS, trial.Dv, dtype=trial.dtype), there, ranks,
        )  # fmt: skip
    if form.others:
        total = 20 * chance(1, heads, length) * (plain | (chance(1, heads, length) > 0.3))
        values = normal(1, heads, length, trial.Dv) * total[..., None]
        sums = ScaledSums(values, total, normal(1, heads, length))
        sums = ScaledSums(*(x[:, :, ALONE:] for x in sums)) if plain else sums
        others = Elu1Sums(*sums[:2]) if form.shifted else sums
    return Numbers(window, sinks, others, tokens(length, heads, trial.Dv))


def on_device(numbers: Numbers, device: torch.device) -> Numbers:
    """Bring the inputs of a trial to a device."""

    def moved(x: Any) -> Any:
        return x.to(device) if isinstance(x, Tensor) else x

    def every(x: Any) -> Any:
        return None if x is None else type(x)(*map(moved, x))

    window, sinks, others = map(every, numbers[:3])
    return Numbers(window, sinks, others, moved(numbers.grad))


def exact(numbers: Numbers) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Compute every result, the same sums with all terms positive, and the error of scores on weights."""
    window, sinks, others, grad = numbers
    query, key, value = (x.double() for x in window[:3])
    (_, heads, length, width), kv_heads, group = query.shape, key.shape[1], query.shape[1] // key.shape[1]

    def spread(x: Tensor) -> Tensor:
        return x.double().repeat_interleave(group, 1)

    def by_key_head(x: Tensor) -> Tensor:
        parts: Tensor = x.unflatten(1, (kv_heads, group))
        return parts.sum(2)

    places = torch.arange(key.shape[2], device="cpu") + window.n_missing
    ahead = places - torch.arange(length, device="cpu")[:, None]
    seen = ((ahead > 0) & (ahead <= window.span) & window.valid[:, None, None]).expand(1, heads, -1, -1)
    keys, values = spread(key), spread(value)
    scores, size = query @ keys.mT, query.abs() @ keys.abs().mT
    met = query
    if sinks is not None:
        met = query if sinks.query is None else sinks.query.double()
        own, there = spread(sinks.key), sinks.valid[:, None, None]
        if sinks.ranks is not None:
            there = there & (torch.arange(SINKS, device="cpu") <= sinks.ranks[:, None, :, None])
        scores = torch.cat([scores, met @ own.mT], -1)
        size = torch.cat([size, met.abs() @ own.abs().mT], -1)
        seen = torch.cat([seen, there.expand(1, heads, length, -1)], -1)
        values = torch.cat([values, spread(sinks.value)], 2)
        keys = torch.cat([keys, own], 2)
    scores, size = scores * window.scaling, size * window.scaling
    exact = window.query.dtype != torch.float32  # products of 16 bits are
    more = float(size.masked_fill(~seen, 0.0).max()) * (width + (2 if exact else 16)) * 2.0**-24 + 2.0**-20
    scores = scores.masked_fill(~seen, float("-inf"))
    total, log_scale, beside = (scores.new_zeros(()),) * 3
    if others is not None:
        alone = length - others.total.shape[2]
        beside = torch.nn.functional.pad(others.values.double(), (0, 0, alone, 0))
        of_map = query.amax(-1).clamp(max=0)[:, :, alone:]
        scales = others.total, others.log_scale if isinstance(others, ScaledSums) else of_map
        total, log_scale = (torch.nn.functional.pad(x.double(), (alone, 0)) for x in scales)
    outside = log_scale.exp() * total
    divisor = scores.exp().sum(-1) + outside
    divisor = torch.where(divisor > 0, divisor, 1.0)
    weights = scores.exp() / divisor[..., None]
    share = (torch.where(total > 0, log_scale.exp(), 0.0) / divisor)[..., None]
    g = grad.double()
    want: dict[str, Tensor] = {}
    scale: dict[str, Tensor] = {}
    for found, sign, v, x, f in (
        (want, -1, values, g, beside),
        (scale, 1, values.abs(), g.abs(), beside.abs()),
    ):
        found["output"] = output = weights @ v + share * f
        t = (x * output).sum(-1, keepdim=True)
        d_scores = weights * (x @ v.mT + sign * t) * window.scaling
        last = window.key.shape[2]
        q, k, m = (query, keys, met) if sign < 0 else (query.abs(), keys.abs(), met.abs())
        d_met = d_scores[..., last:] @ k[:, :, last:]
        turned = sinks is not None and sinks.query is not None
        found["d_query"] = d_scores[..., :last] @ k[:, :, :last] + (0.0 if turned else d_met)
        found["d_key"] = by_key_head(d_scores[..., :last].mT @ q)
        d_value = by_key_head(weights.mT @ x)
        found["d_value"], found["d_sink_value"] = d_value[:, :, :last], d_value[:, :, last:]
        found["d_sink_query"] = d_met
        found["d_sink_key"] = by_key_head(d_scores[..., last:].mT @ m)
        found["d_values"] = x * share
        found["d_total"] = (sign * t * share)[..., 0]
        along = (x * f).sum(-1, keepdim=True) if others is not None else t
        found["d_log_scale"] = (share * (along + sign * t * total[..., None]))[..., 0]
        if others is not None:
            for name in OTHERS:
                found[name] = found[name][:, :, alone:]
    return want, scale, more
