"""A small problem that the kernels of a decoded token behind a window must solve as float64 does.

Rows of the batch are what may come: a full window whose oldest token leaves, one that fills, padding, a token
that is a sink. The bound is that of `window_selftest`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import selftest
from hf_linattn.ops.triton.selftest import Key
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.triton.window_token import Ring, Tail
from hf_linattn.ops.types import Gate

SIZE, SINKS = 75, 3
TEMPERATURE = 2.0


class TokenForm(NamedTuple):
    """What is computed for a decoded token behind a window, apart from numbers.

    Attributes:
        features: of the state behind the window; 0 for a window alone.
        kind: its map, "none" for features that are handed over.
        sinks: there are some.
        decay: "", "given", or "gate" where the kernel makes it of the value.
        mix: "", "share", or "logit" where the share is a sigmoid.
    """

    features: int = 0
    kind: str = "none"
    sinks: bool = False
    decay: str = ""
    mix: str = ""

    @property
    def words(self) -> list[str]:
        """Name it."""
        tail = [f"{self.features} features, {self.kind}"] if self.features else []
        words = [f"{name} {x}" for name, x in (("decay", self.decay), ("mix", self.mix)) if x]
        return ["token behind a window", *tail, *(["sinks"] if self.sinks else []), *words]


class Numbers(NamedTuple):
    """Inputs of a trial."""

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor
    ring: Ring
    tail: Tail | None
    sinks: Sinks | None


def disagreement(trial: Key, kernels: Any) -> str | None:
    """Run the kernels and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where.
        kernels: has the function of `window_token`.
    """
    numbers = _numbers(trial)
    want, scale, more = _exact(trial, numbers)
    after, exactly = _after(trial, numbers)
    here = _moved(numbers, trial.device)
    query, key, value, valid, ring, tail, sinks = here
    output = kernels.decode(query, key, value, valid, ring, trial.D**-0.5, tail, sinks)
    got = {"output": output} | ({} if tail is None else {"S": tail.S, "z": tail.z})
    wrong = selftest.compare(trial, got, (want, scale), SIZE, more)
    if wrong is not None:
        return f"one decoded token: {wrong}"
    kept = [*ring, *(() if sinks is None else (sinks.key, sinks.value, sinks.valid))]
    for name, x, y in zip(after, kept, exactly, strict=True):
        if not same(x, y):
            return f"one decoded token: {name} is not what the window should hold"
    return None


def same(got: Tensor, want: Tensor) -> bool:
    """Tell whether two tensors hold the same bits."""
    return torch.equal(got.cpu(), want)


def _numbers(trial: Key) -> Numbers:
    generator = torch.Generator("cpu").manual_seed(SIZE)
    form, heads, kv_heads, rows = trial.form, 2 * trial.group, 2, 4

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    def new(heads: int, count: int, width: int) -> Tensor:
        return normal(rows, heads, count, width, dtype=trial.dtype)

    query, key, value = (
        new(1, heads, width).transpose(1, 2)
        for heads, width in ((heads, trial.D), (kv_heads, trial.D), (kv_heads, trial.Dv))
    )
    filled = torch.ones(rows, SIZE, dtype=torch.bool, device="cpu")
    filled[1, 5:] = filled[3] = False
    oldest = torch.tensor([SIZE - 1, 5, 40, 1], device="cpu")
    ring = Ring(new(kv_heads, SIZE, trial.D), new(kv_heads, SIZE, trial.Dv), filled, oldest)
    valid = torch.tensor([[True], [True], [False], [True]], device="cpu")
    sinks = tail = None
    if form.sinks:
        ranks = torch.tensor([[SIZE + 9], [8], [-1], [1]], device="cpu")
        there = torch.arange(SINKS, device="cpu") < ranks
        there[2] = True
        sinks = Sinks(
            new(heads, 1, trial.D),
            new(kv_heads, SINKS, trial.D),
            new(kv_heads, SINKS, trial.Dv),
            there,
            ranks,
        )
    if form.features:
        width = form.features
        S, z = normal(rows, kv_heads, width, trial.Dv), normal(rows, kv_heads, width).abs() + 1
        S[1], z[1] = 0, 0  # nothing has left
        free = form.kind == "none"
        evicted = normal(rows, kv_heads, 1, width).abs() if free or width != trial.D else None
        gate = (normal(kv_heads, trial.Dv), normal(kv_heads))
        tail = Tail(
            S, z, normal(rows, heads, 1, width).abs() if free or width != trial.D else None, evicted,
            -normal(rows, kv_heads, 1).abs() if form.decay == "given" else None,
            Gate(*gate, TEMPERATURE) if form.decay == "gate" else None, form.kind, selftest.EPS,
            normal(rows, heads, 1) if free else None,
            normal(heads).sigmoid() if form.mix else None, form.mix == "logit",
        )  # fmt: skip
    return Numbers(query, key, value, valid, ring, tail, sinks)


def _moved(x: Any, device: torch.device) -> Any:
    """Copy what is in tuples of tensors to a device."""
    if isinstance(x, Tensor):
        return x.to(device, copy=True)
    if isinstance(x, tuple):
        return type(x)(*(_moved(part, device) for part in x))
    return x


def _after(trial: Key, numbers: Numbers) -> tuple[list[str], list[Tensor]]:
    """Put the tokens where they go, one row after the other."""
    _, key, value, valid, ring, _, sinks = _moved(numbers, torch.device("cpu"))
    for row, counts in enumerate(valid[:, 0].tolist()):
        if not counts:
            continue
        column, rank = int(ring.oldest[row]), SINKS if sinks is None else int(sinks.ranks[row, 0])
        ring.key[row, :, column], ring.value[row, :, column] = key[row, :, 0], value[row, :, 0]
        ring.valid[row, column] = rank >= SINKS
        ring.oldest[row] = (column + 1) % SIZE
        if rank < SINKS:
            sinks.key[row, :, rank], sinks.value[row, :, rank] = key[row, :, 0], value[row, :, 0]
            sinks.valid[row, rank] = True
    names = ["keys", "values", "the mask", "the oldest column"]
    if sinks is None:
        return names, [*ring]
    return [*names, "sinks' keys", "sinks' values", "sinks' mask"], [
        *ring,
        sinks.key,
        sinks.value,
        sinks.valid,
    ]


def _exact(trial: Key, numbers: Numbers) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Compute every result, the same sums with all terms positive, and the error of scores."""
    query, _, _, valid, before, tail, sinks = numbers
    _, (key, value, filled, _, *first) = _after(trial, numbers)
    group = trial.group

    def spread(x: Tensor) -> Tensor:
        return x.double().repeat_interleave(group, 1)

    q = query.double()
    scores, size = q @ spread(key).mT, q.abs() @ spread(key).abs().mT
    seen, values = filled[:, None, None].expand(-1, q.shape[1], -1, -1), spread(value)
    if sinks is not None and sinks.query is not None and sinks.ranks is not None:
        shown = first[2] & (torch.arange(SINKS, device="cpu") <= sinks.ranks)
        # a sink meets itself as it is
        own = torch.eq(torch.arange(SINKS, device="cpu"), sinks.ranks).double()[:, None, None]
        plain, turned = q @ spread(first[0]).mT, sinks.query.double() @ spread(first[0]).mT
        scores = torch.cat([scores, own * plain + (1 - own) * turned], -1)
        both = torch.maximum(q.abs(), sinks.query.double().abs()) @ spread(first[0]).abs().mT
        size = torch.cat([size, both], -1)
        seen = torch.cat([seen, shown[:, None, None].expand(-1, q.shape[1], -1, -1)], -1)
        values = torch.cat([values, spread(first[1])], 2)
    scaling, exact = trial.D**-0.5, trial.dtype != torch.float32
    more = float(size.max()) * scaling * (trial.D + (2 if exact else 16)) * 2.0**-24 + 2.0**-20
    weights = (scores * scaling).masked_fill(~seen, float("-inf")).exp()
    want: dict[str, Tensor] = {}
    scale: dict[str, Tensor] = {}
    total = weights.sum(-1, keepdim=True)
    if tail is None:
        divisor = torch.where(total > 0, total, 1.0)
        return {"output": weights @ values / divisor}, {"output": weights @ values.abs() / divisor}, more
    rows, column = torch.arange(len(q), device="cpu"), before.oldest
    leaves = (valid[:, 0] & before.valid[rows, column])[:, None]
    old = before.key[rows, :, column] if tail.evicted is None else tail.evicted[:, :, 0]
    left = before.value[rows, :, column].double()
    phi_k = selftest.features(trial.form.kind, old, False)[0] * leaves[..., None]
    decay = torch.zeros(leaves.shape, dtype=torch.float64, device="cpu").expand(-1, 2)
    if tail.log_decay is not None:
        decay = tail.log_decay[..., 0].double()
    elif tail.gate is not None:
        logit = (left * tail.gate.weight.double()).sum(-1) + tail.gate.bias.double()
        decay = torch.nn.functional.logsigmoid(logit) / tail.gate.temperature
    kept = torch.where(leaves, decay, 0.0).exp()
    of_query = (query if tail.query is None else tail.query)[:, :, 0]
    phi_q = selftest.features(trial.form.kind, of_query, True)[0]
    log = torch.zeros(phi_q.shape[:2], dtype=torch.float64, device="cpu")
    if trial.form.kind == "elu1":
        log = of_query.double().amax(-1).clamp(max=0)
    if tail.query_log_scale is not None:
        log = tail.query_log_scale[..., 0].double()
    want["z"] = scale["z"] = tail.z.double() * kept[..., None] + phi_k
    beside = (phi_q * spread(want["z"])).sum(-1)[..., None, None]
    for found, S, x, v in (
        (want, tail.S.double(), left, values),
        (scale, tail.S.double().abs(), left.abs(), values.abs()),
    ):
        found["S"] = S * kept[..., None, None] + phi_k[..., None] * x[:, :, None]
        rest, inside = phi_q[:, :, None] @ spread(found["S"]), weights @ v
        if tail.mix is None:
            factor = log.exp()[..., None, None]
            divisor = total + factor * beside
            found["output"] = (inside + factor * rest) / torch.where(divisor > 0, divisor, 1.0)
            continue
        share = (tail.mix.sigmoid() if tail.mix_logit else tail.mix).double()[:, None, None]
        share = torch.where(beside > 0, share, 1.0)
        alone = inside / torch.where(total > 0, total, 1.0)
        found["output"] = share * alone + (1 - share) * rest / torch.where(beside > 0, beside, 1.0)
    return want, scale, more
