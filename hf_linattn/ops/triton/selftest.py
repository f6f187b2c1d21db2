"""A small problem by which the Triton kernels are held to float64: what they must give, and how nearly.

The definition is written out, quadratic and in float64, on the CPU: a device that computes wrongly cannot
compute the answer wrongly too.

The bound. Every result is a sum of products, and on its way to that sum each number is rounded a few times:
inputs exact, then features, scores or states as operands, the quotient, the result itself. Each rounding
changes a number by at most u of itself, u = 2^-p for p bits of the operand's significand; sums are float32,
where n terms add at most n 2^-24. So, to first order,

    |got - want| <= (roundings u + n 2^-24) x (the same sum with all terms positive)

which holds for every element whatever cancels. Values keep one sign for some tokens, so that the sum of
positive terms is not far from the sum itself, and a segment left out or a mask one token off shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LENGTH = 613
"""Ten segments of 64 tokens, the last one ragged: more than the scan over segments takes in one step."""
SEGMENT = 64
"""Tokens of a segment; twice as many where heads share keys, so that it may be summed up in parts."""
WHOLE = 128
"""Texts of so many tokens, or a multiple, cut off no chunk: kernels are compiled for them by themselves."""
FORWARD, BACKWARD = 8, 20
"""Roundings on the longest way: features 2, score or state 1, value 1, the total's features 2, result 1, one
more where a store cuts bits off. Backward: g 4, t by an output 8, score or state 1, features 2, value 1,
result 2, and again one for each of the two products that g and t pass."""
SIGNIFICAND = {"bf16": 8, "bf16 by bits": 8, "fp16": 11, "tf32": 11, "tf32x3": 21, "ieee": 24}
"""Bits that an operand keeps, the hidden one too."""
EXPONENTIALS = 64
"""Units of 2^-24 for exp of a few units, in hardware."""
EPS = 1e-3
RESULTS = ("output", "total", "S", "z")
GRADIENTS = ("d_query", "d_key", "d_value", "d_S", "d_z", "d_decay")


class Form(NamedTuple):
    """What is computed, apart from numbers.

    Attributes:
        kind: feature map, "none" for features.
        causal: else over all keys.
        normalise: outputs, else numerators.
        decays: each token scales what came before.
        packed: of several documents.
    """

    kind: str
    causal: bool = True
    normalise: bool = True
    decays: bool = False
    packed: bool = False

    @property
    def words(self) -> list[str]:
        """Name it."""
        words = [self.kind, "causal" if self.causal else "over all keys"]
        words += [] if self.normalise else ["numerators"]
        words += ["decay"] if self.decays else []
        return words + (["documents"] if self.packed else [])


class Key(NamedTuple):
    """What is checked once: all that a kernel is compiled for, apart from numbers.

    Attributes:
        device: with its number.
        dtype: of queries and keys, of features what these become.
        value_dtype: of values.
        D: width of queries and keys, or number of features.
        Dv: width of values.
        group: query heads per key head, 2 for any number above 1.
        operand: what products are computed in, as in `kernels`.
        form: what is computed, a `Form`, or one of `window_selftest`.
    """

    device: torch.device
    dtype: torch.dtype
    value_dtype: torch.dtype
    D: int
    Dv: int
    group: int
    operand: str
    form: Any

    @property
    def name(self) -> str:
        """Text without the device."""
        dtypes = dict.fromkeys(str(x).removeprefix("torch.") for x in (self.dtype, self.value_dtype))
        words = ["/".join(dtypes), f"{self.D}x{self.Dv}", *self.form.words]
        words += ["grouped"] if self.group > 1 else []
        return ", ".join([*words, f"products in {self.operand}"])


class Numbers(NamedTuple):
    """Inputs of a trial, and gradients of its results; None where there are none."""

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None
    S: Tensor | None
    z: Tensor | None
    d_output: Tensor
    d_total: Tensor | None
    d_S: Tensor | None
    d_z: Tensor | None
    log_decay: Tensor | None
    documents: Tensor | None


def disagreement(trial: Key, kernels: Any, length: int = LENGTH) -> str | None:
    """Run the kernels and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where.
        kernels: has the functions of `launch`.
        length: tokens.
    """
    whole = max(length // WHOLE * WHOLE, SEGMENT)
    for plain, tokens in ((True, length), (True, whole), (False, length)):
        numbers = _numbers(trial, tokens, plain)
        exact, here = _exact(trial, numbers), _on(numbers, trial.device)
        after, segments = _forward(trial, here, kernels)
        wrong = compare(trial, dict(zip(RESULTS, after, strict=True)), exact, tokens)
        if wrong is None:
            found = _backward(trial, here, after, segments, kernels)
            wrong = compare(trial, dict(zip(GRADIENTS, found, strict=False)), exact, tokens)
        if wrong is None and trial.form.causal and not plain:
            numbers = _numbers(trial, 1, plain)
            step = _decode(trial, _on(numbers, trial.device), kernels)
            wrong = compare(trial, step, _exact(trial, numbers), 1)
            wrong = wrong and f"one decoded token: {wrong}"
        if wrong is not None:
            return wrong
    return None


def _numbers(trial: Key, length: int, plain: bool) -> Numbers:
    """Draw numbers on the CPU; nothing but a generator of our own is advanced."""
    generator = torch.Generator("cpu").manual_seed(length)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(dtype)

    def tokens(heads: int, width: int, dtype: torch.dtype) -> Tensor:
        return normal(1, length, heads, width, dtype=dtype).transpose(1, 2)  # as models lay them out

    heads, kv_heads = 2 * trial.group, 2
    query, key = tokens(heads, trial.D, trial.dtype), tokens(kv_heads, trial.D, trial.dtype)
    if trial.form.kind == "none":
        query, key = query.abs(), key.abs()
    size = 0.5 + torch.rand(
        1, length, kv_heads, trial.Dv, generator=generator, dtype=torch.float32, device="cpu"
    )
    signs = normal(1, -(-length // 32), kv_heads, trial.Dv).sign().repeat_interleave(32, 1)[:, :length]
    value = (size * signs).to(trial.value_dtype).transpose(1, 2)
    d_output = tokens(heads, trial.Dv, trial.value_dtype)
    # a head forgets within a few tokens, the other within some segments
    rates = torch.tensor([0.5, 0.01], device="cpu")[None, :, None]
    log_decay = -rates * normal(1, kv_heads, length).abs() if trial.form.decays else None
    # one begins with a segment, one inside a chunk, one has a single token
    begin = torch.tensor([SEGMENT, SEGMENT + 1, SEGMENT + 37], device="cpu")
    documents = (
        (torch.arange(length, device="cpu")[:, None] >= begin).sum(-1)[None] if trial.form.packed else None
    )
    links = log_decay, documents
    if plain:
        return Numbers(query, key, value, None, None, None, d_output, None, None, None, *links)
    valid = torch.rand(1, length, generator=generator, dtype=torch.float32, device="cpu") > 0.2
    S, z = normal(1, kv_heads, trial.D, trial.Dv), normal(1, kv_heads, trial.D).abs() + 1
    d_total, d_S, d_z = normal(1, heads, length), normal(*S.shape), normal(*z.shape)
    return Numbers(query, key, value, valid, S, z, d_output, d_total, d_S, d_z, *links)


def _on(numbers: Numbers, device: torch.device) -> Numbers:
    return Numbers(*(None if x is None else x.to(device) for x in numbers))  # type: ignore[arg-type]


def _options(trial: Key, here: Numbers) -> dict[str, Any]:
    options: dict[str, Any] = {"eps": EPS if trial.form.kind == "relu" else 0.0}
    if trial.form.causal:
        options |= {"log_decay": here.log_decay, "documents": here.documents}
    return options


def _forward(trial: Key, here: Numbers, kernels: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Compute the results, and what a causal form knows of its segments."""
    given = (*here[:4], here.S, here.z, trial.form.kind, trial.form.normalise)
    options = {"segment": SEGMENT * trial.group, **_options(trial, here)}
    if not trial.form.causal:
        return kernels.global_forward(*given, **options), None
    results: tuple[tuple[Tensor, ...], Any] = kernels.forward_and_segments(*given, **options)
    return results


def _backward(
    trial: Key, here: Numbers, after: tuple[Tensor, ...], segments: Any, kernels: Any
) -> tuple[Tensor | None, ...]:
    how = trial.form.kind, trial.form.normalise
    options = {"segment": SEGMENT * trial.group, **_options(trial, here)}
    grads = here[6:10]
    found: tuple[Tensor | None, ...]
    if trial.form.causal:
        given = (*here[:4], here.S, here.z, *after[:2])
        if here.log_decay is not None and here.d_S is not None and here.d_z is not None:
            options["last"] = (here.d_S * after[2]).sum((2, 3)) + (here.d_z * after[3]).sum(2)
        found = kernels.backward(*grads, *given, *how, segments=segments, **options)
    else:
        found = kernels.global_backward(*grads, *here[:4], *after, *how, **options)
    return found


def _decode(trial: Key, here: Numbers, kernels: Any) -> dict[str, Tensor | None]:
    options = _options(trial, here)
    options.pop("documents")
    over = None if here.S is None or here.z is None else (here.S.clone(), here.z.clone())
    given = *here[:4], *(over or (None, None)), trial.form.kind, trial.form.normalise
    step = kernels.decode(*given, in_place=over is not None, **options)
    return dict(zip(("output", "S", "z"), step, strict=True))


def features(kind: str, x: Tensor, query: bool) -> tuple[Tensor, Tensor]:
    """Compute phi and its derivative, in float64."""
    x = x.double()
    if kind == "elu1":
        shift = x.amax(-1, keepdim=True).clamp(max=0) if query else 0.0
        low = (x.clamp(max=0) - shift).exp()
        return torch.where(x > 0, x + 1, low), torch.where(x > 0, 1.0, low)
    if kind == "relu":
        return x.relu() + EPS, (x > 0).double()
    return x, torch.ones_like(x)


def _exact(trial: Key, numbers: Numbers) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute every result, and the same sums with all terms positive."""

    def by_group(x: Tensor) -> Tensor:
        return x.double().reshape(1, 2, trial.group, *x.shape[2:])

    (phi_q, slope_q), (phi_k, slope_k) = (
        features(trial.form.kind, numbers.query, True),
        features(trial.form.kind, numbers.key, False),
    )
    value, length = numbers.value.double(), numbers.query.shape[2]
    if numbers.valid is not None:
        seen = numbers.valid[:, None, :, None].double()
        phi_k, value, slope_k = phi_k * seen, value * seen, slope_k * seen
    phi_q, slope_q = by_group(phi_q), by_group(slope_q)
    weight = torch.ones(length, length, dtype=torch.float64, device="cpu")
    weight = weight.tril() if trial.form.causal else weight
    # of a query's keys, of the state before for it, of a key and of the state before for that after
    factors = weight.expand(1, 2, -1, -1), torch.ones(1, 2, length, dtype=torch.float64, device="cpu")
    pairs_of, of_state = factors
    of_key = of_state
    if numbers.log_decay is not None:
        running = numbers.log_decay.double().cumsum(-1)
        pairs_of = pairs_of * (running[..., None] - running[..., None, :]).clamp(max=0).exp()
        of_state, of_key = running.exp(), (running[..., -1:] - running).exp()
    if numbers.documents is not None:
        label = numbers.documents[:, None]
        pairs_of = pairs_of * (label[..., None] == label[..., None, :])
        of_state, of_key = of_state * (label == label[..., :1]), of_key * (label == label[..., -1:])
    left = of_state[..., -1] if trial.form.causal else torch.ones_like(of_state[..., -1])
    weight, read_q, kept_k = (
        pairs_of[:, :, None],
        phi_q * of_state[:, :, None, :, None],
        phi_k * of_key[..., None],
    )
    left, left_S = left[..., None], left[..., None, None]
    scores = torch.einsum("bhgid,bhjd->bhgij", phi_q, phi_k) * weight
    nothing = phi_k.new_zeros(1, 2, trial.D, trial.Dv)
    S0 = nothing if numbers.S is None else numbers.S.double()
    z0 = nothing[..., 0] if numbers.z is None else numbers.z.double()

    def summed(v: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
        """Numerators and the state after."""
        read = torch.einsum("bhgid,bhde->bhgie", read_q, S)
        return scores @ v[:, :, None] + read, S * left_S + kept_k.mT @ v

    def gradients(
        sign: int, g: Tensor, t: Tensor, v: Tensor, S: Tensor, d_S: Tensor, d_z: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of queries, keys, values, S and z before, and the decay."""
        pairs = (g @ v[:, :, None].mT + t[..., None]) * weight
        R, r = (torch.einsum("bhgid,bhgie->bhde", read_q, g), torch.einsum("bhgid,bhgi->bhd", read_q, t))
        d_q = torch.einsum("bhgij,bhjd->bhgid", pairs, phi_k)
        through = torch.einsum("bhgie,bhde->bhgid", g, S) + t[..., None] * z0[:, :, None, None]
        d_q = d_q + through * of_state[:, :, None, :, None]
        d_k = torch.einsum("bhgij,bhgid->bhjd", pairs, phi_q)
        d_k = d_k + (v @ d_S.mT + d_z[:, :, None]) * of_key[..., None]
        d_v = torch.einsum("bhgij,bhgie->bhje", scores, g) + kept_k @ d_S
        along = sign * (d_k * phi_k).sum(-1) + (d_q * phi_q).sum((2, 4))
        along[..., -1] += (d_S * summed(v, S)[1]).sum((2, 3)) + (d_z * (z0 * left + kept_k.sum(2))).sum(2)
        d_decay = along.flip(-1).cumsum(-1).flip(-1)
        return (d_q * slope_q).flatten(1, 2), d_k * slope_k, d_v, R + d_S * left_S, r + d_z * left, d_decay

    total = scores.sum(-1) + torch.einsum("bhgid,bhd->bhgi", read_q, z0)
    (numerator, S), (size, S_size) = summed(value, S0), summed(value.abs(), S0.abs())
    divisor = total if trial.form.normalise else torch.ones_like(total)
    output, size = numerator / divisor[..., None], size / divisor[..., None]
    g = by_group(numbers.d_output) / divisor[..., None]
    t = torch.zeros_like(total) if numbers.d_total is None else by_group(numbers.d_total)
    t_size = t.abs()
    if trial.form.normalise:
        t, t_size = t - (g * output).sum(-1), t_size + (g.abs() * size).sum(-1)
    d_S = nothing if numbers.d_S is None else numbers.d_S.double()
    d_z = nothing[..., 0] if numbers.d_z is None else numbers.d_z.double()
    z = z0 * left + kept_k.sum(2)
    names = RESULTS + GRADIENTS
    want = (output.flatten(1, 2), total.flatten(1, 2), S, z, *gradients(-1, g, t, value, S0, d_S, d_z))
    positive = gradients(1, g.abs(), t_size, value.abs(), S0.abs(), d_S.abs(), d_z.abs())
    scale = (size.flatten(1, 2), total.flatten(1, 2), S_size, z, *positive)
    return dict(zip(names, want, strict=True)), dict(zip(names, scale, strict=True))


def compare(
    trial: Key,
    got: dict[str, Tensor | None],
    exact: tuple[dict[str, Tensor], dict[str, Tensor]],
    length: int,
    more: float = 0.0,
) -> str | None:
    """Say which result is further from the definition than rounding explains.

    Args:
        trial: what was computed.
        got: results; None for none.
        exact: what they should be, and the same sums with all terms positive.
        length: terms of a sum.
        more: relative error of terms that has other causes.
    """
    want, scale = exact
    for name, x in got.items():
        if x is None:  # there was no state before
            continue
        places = BACKWARD if name.startswith("d_") else FORWARD
        bits = min(SIGNIFICAND[trial.operand], _bits(x.dtype))
        allowed = places * 2.0**-bits + (2 * length + trial.D + EXPONENTIALS) * 2.0**-24 + more
        limits = torch.finfo(x.dtype)
        least = limits.tiny * limits.eps * 2  # below it there is no relative precision
        if tuple(x.shape) != tuple(want[name].shape):
            return f"{name} has the shape {tuple(x.shape)}, not {tuple(want[name].shape)}"
        error = (x.detach().cpu().double() - want[name]).abs() / (scale[name] * allowed + least)
        if not bool((error <= 1).all()):  # NaN is not
            worst = float(error.nan_to_num(float("inf")).max())
            return f"{name} is {worst:.3g} times as far from float64 as rounding explains"
    return None


def _bits(dtype: torch.dtype) -> int:
    return {torch.bfloat16: 8, torch.float16: 11}.get(dtype, 24)
