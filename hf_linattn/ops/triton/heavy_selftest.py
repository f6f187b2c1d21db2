"""A small problem that the kernel of a window with heavy hitters must solve as float64 does.

Which tokens stay is a choice, and a rounded number could turn it. So the numbers are those of the first draw
in which the last that stays and the first that does not lie further apart, whenever a block leaves, than
scores of exact products are wrong: then the choice is float64's, in any dtype. Those that stay may lie in
another order; their keys and values must be the same bits. Outputs and weights keep within the bound of
`window_selftest`; weights are sums in float32 whatever products are made in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import heavy_backward, selftest, token_selftest
from hf_linattn.ops.triton.selftest import Key
from hf_linattn.ops.types import HeavyChoices, HeavyColumns, HeavyPlaces, HeavyState

LENGTH = 140
"""Tokens: what is kept and what is ranked are more than a tile of 64 columns, the one before and the other
after heavy hitters fill their columns."""
HALF_LIFE = 30.0
APART = 5e-4
"""Relative distance of weights; the rounding to 16 bits moves each by 2^-17."""
DRAWS = 200
GRADIENTS = ("d_query", "d_near", "d_key", "d_value")


class HeavyForm(NamedTuple):
    """What is computed of a window with heavy hitters, apart from numbers.

    Attributes:
        turned: sinks meet queries of their own.
        learns: with gradients.
    """

    turned: bool = False
    learns: bool = False

    @property
    def words(self) -> list[str]:
        """Name it."""
        more = {"turned sinks": self.turned, "gradients": self.learns}
        return ["window and heavy hitters", *(word for word, there in more.items() if there)]


class Numbers(NamedTuple):
    """A whole text, `[B, H or Hkv, N, D]`, and which of its tokens are visible, `[B, N]`."""

    query: Tensor
    near: Tensor | None
    key: Tensor
    value: Tensor
    valid: Tensor
    scaling: float


class Exact(NamedTuple):
    """What float64 says.

    Attributes:
        output: `[B, H, N, Dv]`, 0 for padding.
        size: the same of values without signs.
        kept: the cache after the last token.
        chosen: ranks of what stayed after each choice, ascending, -1 for none, int32
            `[B, Hkv, choices, heavy]`; of texts without padding.
        apart: the least relative distance between one that stayed and one that did not.
        largest: largest sum of the sizes of products in a score.
    """

    output: Tensor
    size: Tensor
    kept: HeavyState
    chosen: Tensor
    apart: float
    largest: float


def disagreement(trial: Key, kernels: Any, length: int = LENGTH) -> str | None:
    """Run the kernel and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where.
        kernels: has the function of `heavy`.
        length: tokens.
    """
    for plain in (True,) if trial.form.learns else (True, False):
        own = columns_for(length, None if plain else HALF_LIFE)
        # a call that continues a text comes when some of it has left
        first = 0 if plain else 2 * own.size
        numbers, before, want = _clear(trial, own, first, length)
        choices = HeavyChoices(torch.full_like(want.chosen, -1, device=trial.device)) if plain else None
        # the last token comes alone where something was before: it takes a smaller tile
        last = length if plain else length - 1
        got, after = _run(trial, kernels, numbers, before, own, (first, last), choices)
        if last < length:
            one, after = _run(trial, kernels, numbers, after, own, (last, length))
            got = torch.cat([got, one], 2)
        after = _in_order(after, want.kept, own)
        more = want.largest * (trial.D + 16) * 2.0**-24 + 2.0**-20
        exact = {"output": want.output[:, :, first:]}, {"output": want.size[:, :, first:]}
        wrong = selftest.compare(trial, {"output": got}, exact, own.total, more)
        weight = {"weight": want.kept.weight}
        summed = trial._replace(operand="tf32x3")
        found: dict[str, Tensor | None] = {"weight": after.weight}
        wrong = wrong or selftest.compare(summed, found, (weight, weight), 2 * length, more)
        if wrong is not None:
            return wrong
        for name, x, y in zip(HeavyState._fields, after, want.kept, strict=True):
            if name == "weight":
                continue
            if not token_selftest.same(x, y):
                return f"{name}s are not what should be kept"
        if choices is None:
            continue
        if not token_selftest.same(choices.chosen.sort(-1).values, want.chosen):
            return "choices are not told as they were made"
        if trial.form.learns:
            grad = _tokens(trial, torch.Generator("cpu").manual_seed(length), 1, length, 2 * trial.group)
            found = _backward(trial, numbers, own, grad, got, choices)
            wrong = selftest.compare(trial, found, exact_gradients(numbers, own, grad), length, 2 * more)
            if wrong is not None:
                return wrong
    return None


def columns_for(length: int, half_life: float | None) -> HeavyColumns:
    """Choose what a text of so many tokens fills, with an odd number of tokens in a block."""
    size = 2 * length // 7
    reach = None if half_life is None else length // 2
    return HeavyColumns(size, 3 * size // 2 + 2, 2, max(1, size // 8), half_life, reach)


def _clear(
    trial: Key, columns: HeavyColumns, first: int, length: int
) -> tuple[Numbers, HeavyState | None, Exact]:
    """Draw numbers until no choice is close; return them, the cache before the call, and what is right."""
    for seed in range(DRAWS):
        numbers = draw(trial, length, not first, seed)
        found = exact(numbers, columns)
        if found.apart > APART:
            break
    if not first:
        return numbers, None, found
    query, near, key, value = (None if x is None else x[:, :, :first] for x in numbers[:4])
    assert query is not None
    assert key is not None
    assert value is not None
    begun = Numbers(query, near, key, value, numbers.valid[:, :first], numbers.scaling)
    return numbers, exact(begun, columns).kept, found


def draw(trial: Key, length: int, plain: bool, seed: int) -> Numbers:
    """Draw numbers on the CPU: all seen, or with padding of NaN, which is inside a row or before it."""
    generator = torch.Generator("cpu").manual_seed(seed)
    rows = 1 if plain else 2

    heads = 2 * trial.group
    query, near, key, value = (
        _tokens(trial, generator, rows, length, count, width)
        for count, width in ((heads, trial.D), (heads, trial.D), (2, trial.D), (2, trial.Dv))
    )
    valid = torch.ones(rows, length, dtype=torch.bool, device="cpu")
    if not plain:
        valid[0] = torch.rand(length, generator=generator, dtype=torch.float32, device="cpu") > 0.1
        valid[1, :7] = False
    for x in (query, near, key, value):
        x.masked_fill_(~valid[:, None, :, None], float("nan"))
    return Numbers(query, near if trial.form.turned else None, key, value, valid, 1.5 * trial.D**-0.5)


def _tokens(
    trial: Key, generator: torch.Generator, rows: int, length: int, heads: int, width: int | None = None
) -> Tensor:
    """Draw `[B, H, N, width]`, that of values where None, laid out as models do."""
    shape = rows, length, heads, trial.Dv if width is None else width
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return x.to(trial.dtype).transpose(1, 2)


def exact(numbers: Numbers, columns: HeavyColumns) -> Exact:
    """Compute all of a text in float64, each row and key head from choice to choice."""
    query, near, key, value, valid, _ = numbers
    rows, kv_heads, total = key.shape[0], key.shape[1], columns.total
    output = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    size = torch.zeros_like(output)
    kept = HeavyState(
        key.new_zeros(rows, kv_heads, total, key.shape[3]),
        value.new_zeros(rows, kv_heads, total, value.shape[3]),
        output.new_zeros(rows, kv_heads, total),
        torch.zeros(rows, kv_heads, total, dtype=torch.int32, device="cpu"),
    )
    choices = max(columns.left(key.shape[2] - 1), 0)
    chosen = torch.full((rows, kv_heads, choices, columns.heavy), -1, dtype=torch.int32, device="cpu")
    apart, largest, group = float("inf"), 0.0, query.shape[1] // kv_heads
    for row in range(rows):
        there = valid[row].nonzero()[:, 0]
        for head in range(kv_heads):
            own = slice(head * group, head * group + group)
            q, k = query[row, own][:, there].double(), key[row, head][there].double()
            met = q if near is None else near[row, own][:, there].double()
            scores = _scores(q, met, k, columns.sinks)
            products = _scores(q.abs(), met.abs(), k.abs(), columns.sinks)
            largest = max(largest, float(products.max()))
            weights, found, got, distance = _walk(scores * numbers.scaling, columns, chosen[row, head])
            v = value[row, head][there].double()
            output[row, own, there], size[row, own, there] = weights @ v, weights @ v.abs()
            apart = min(apart, distance)
            for column, token in found.items():
                kept.key[row, head, column] = key[row, head, there[token]]
                kept.value[row, head, column] = value[row, head, there[token]]
                kept.weight[row, head, column] = got[token]
                kept.rank[row, head, column] = token
    return Exact(output, size, kept, chosen.sort(-1).values, apart, largest * numbers.scaling)


def _scores(q: Tensor, met: Tensor, k: Tensor, sinks: int) -> Tensor:
    """Multiply queries by keys, `[G, N, N]`, those of sinks by what queries are to them."""
    return torch.cat([met @ k[:sinks].mT, q @ k[sinks:].mT], -1)


def exact_gradients(
    numbers: Numbers, columns: HeavyColumns, grad: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute the gradients of a text without padding, and the same sums with all terms positive."""
    query, near, key, value = (None if x is None else x[0].double() for x in numbers[:4])
    assert query is not None
    assert key is not None
    assert value is not None
    group, sinks = query.shape[0] // key.shape[0], columns.sinks
    choices = torch.empty(columns.left(key.shape[1] - 1), columns.heavy, dtype=torch.int32, device="cpu")
    want: dict[str, list[Tensor]] = {name: [] for name in GRADIENTS}
    scale: dict[str, list[Tensor]] = {name: [] for name in GRADIENTS}
    for head in range(key.shape[0]):
        own = slice(head * group, head * group + group)
        q, k, v, g = query[own], key[head], value[head], grad[0, own].double()
        met = q if near is None else near[own]
        weights = _walk(_scores(q, met, k, sinks) * numbers.scaling, columns, choices)[0]
        for sign, found, (x, y, z, w, u) in (
            (-1, want, (q, met, k, v, g)),
            (1, scale, tuple(map(torch.abs, (q, met, k, v, g)))),
        ):
            through = u @ w.mT + sign * (u * (weights @ w)).sum(-1, keepdim=True)
            d_scores = weights * through * numbers.scaling
            of_sinks, others = d_scores[..., :sinks], d_scores[..., sinks:]
            d_met = of_sinks @ z[:sinks]
            d_key = [of_sinks.mT @ y, others.mT @ x]
            found["d_query"].append(others @ z[sinks:] + (d_met if near is None else 0.0))
            found["d_near"].append(d_met)
            found["d_key"].append(torch.cat(d_key, 1).sum(0, keepdim=True))
            found["d_value"].append((weights.mT @ u).sum(0, keepdim=True))

    def whole(parts: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat(some)[None] for name, some in parts.items()}

    return whole(want), whole(scale)


def _walk(
    scores: Tensor, columns: HeavyColumns, chosen: Tensor
) -> tuple[Tensor, dict[int, int], Tensor, float]:
    """Walk a text `[G, N, N]` of one key head from choice to choice; write what stays into `chosen`.

    Returns:
        Weights `[G, N, N]`, the token of each column after the last one, what tokens got, and the least
        distance between one that stayed and one that did not.
    """
    size, most, sinks, block, _, reach = columns
    length, fade = scores.shape[-1], columns.fade
    weights, got = torch.zeros_like(scores), scores.new_zeros(length)
    heavy: list[int] = []
    start, oldest, apart = 0, sinks, float("inf")
    while start < length:
        if start == oldest + size + block - 1:  # with this token there is one block too many
            candidates = [*heavy, *range(oldest, oldest + block)]
            far = set() if reach is None else {token for token in heavy if token < start - reach}
            ranked = sorted(candidates, key=lambda token: 1 if token in far else -float(got[token]))
            if len(ranked) > most and ranked[most] not in far:
                apart = min(apart, 1 - float(got[ranked[most]] / got[ranked[most - 1]]))
            heavy, oldest = ranked[:most], oldest + block
            chosen[columns.left(start) - 1, : len(heavy)] = torch.tensor(heavy, device="cpu")
        stop = min(length, oldest + size + block - 1)
        seen = sorted([*range(min(sinks, stop)), *heavy, *range(oldest, stop)])
        index = torch.tensor(seen, device="cpu")
        queries = torch.arange(start, stop, device="cpu")
        shown = scores[:, start:stop][..., index]
        shown = shown.masked_fill(index > queries[:, None], float("-inf")).softmax(-1)
        weights[:, start:stop, index] = shown
        share = fade ** (stop - 1 - queries).double()
        got = got * fade ** (stop - start)
        got[index] += (shown * share[:, None]).sum((0, 1))
        start = stop
    found = {token: token for token in range(min(sinks, length))}
    found |= {sinks + place: token for place, token in enumerate(heavy)}
    found |= {sinks + most + token - oldest: token for token in range(oldest, length)}
    return weights, found, got, apart


def _in_order(found: HeavyState, want: HeavyState, columns: HeavyColumns) -> HeavyState:
    """Bring heavy hitters to the order in which others have them; those that others lack stay out."""
    if found.key.is_meta:  # nothing to compare: it is compiled
        return found
    key, value, weight, rank = (x.cpu().clone() for x in found)
    there = slice(columns.sinks, columns.sinks + columns.heavy)
    same = (want.key[:, :, there, None] == key[:, :, None, there]).all(-1)
    place = same.int().argmax(-1) + columns.sinks
    for x in (key, value):
        index = place[..., None].expand(-1, -1, -1, x.shape[3])
        x[:, :, there] = x.gather(2, index)
    for x in (weight, rank):
        x[:, :, there] = x.gather(2, place)
    return HeavyState(key, value, weight, rank)


def _run(
    trial: Key,
    kernels: Any,
    numbers: Numbers,
    before: HeavyState | None,
    columns: HeavyColumns,
    span: tuple[int, int],
    choices: HeavyChoices | None = None,
) -> tuple[Tensor, HeavyState]:
    """Launch the kernel for some tokens of the text, from the first of `span` on."""

    def on(x: Tensor) -> Tensor:
        return x.to(trial.device)

    some = slice(*span)
    query, near, key, value = (None if x is None else on(x[:, :, some]) for x in numbers[:4])
    valid = numbers.valid[:, some]
    seen, count = numbers.valid[:, : span[0]].sum(1).int(), valid.sum(1).int()
    order = valid.logical_not().int().argsort(dim=1, stable=True).int()
    places = HeavyPlaces(on(seen), on(count), None if bool(valid.all()) else on(order))
    if before is not None:
        before = HeavyState(*map(on, before._replace(weight=before.weight.float())))
    given = query, near, key, value, places, before, columns, numbers.scaling
    output, after = kernels.forward(*given, choices=choices)
    return output, HeavyState(*after)


def _backward(
    trial: Key, numbers: Numbers, columns: HeavyColumns, grad: Tensor, output: Tensor, choices: HeavyChoices
) -> dict[str, Tensor | None]:
    """Launch the kernels of gradients, for the whole text."""

    def on(x: Tensor) -> Tensor:
        return x.to(trial.device)

    near = None if numbers.near is None else on(numbers.near)
    found = heavy_backward.backward(
        on(grad), on(numbers.query), near, on(numbers.key), on(numbers.value), output, choices, columns,
        numbers.scaling,
    )  # fmt: skip
    return dict(zip(GRADIENTS, found, strict=True))
