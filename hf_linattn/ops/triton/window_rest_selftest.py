"""Small problems that the kernel of a window and the rest must solve as float64 does.

The bound is that of `window_selftest`. The sums of the linear attention are computed in float64 and join as
those of any other tokens do; sums with all terms positive are those of the values without their signs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import selftest, window_selftest
from hf_linattn.ops.triton.selftest import SEGMENT, Key
from hf_linattn.ops.triton.window_rest import Rest
from hf_linattn.ops.triton.window_selftest import LENGTH, SPAN, Numbers
from hf_linattn.ops.types import Inputs, ScaledSums


class RestForm(NamedTuple):
    """What is computed of a window and a linear attention behind it, forward, apart from numbers.

    Attributes:
        features: of the linear attention.
        kind: its map, "none" for features that are handed over.
        sinks: there are some.
        decays: each token scales what came before.
    """

    features: int
    kind: str
    sinks: bool = False
    decays: bool = False

    @property
    def words(self) -> list[str]:
        """Name it."""
        words = ["window and rest", f"{self.features} features, {self.kind}"]
        return [*words, *(["sinks"] if self.sinks else []), *(["decay"] if self.decays else [])]


def disagreement(trial: Key, kernels: Any, length: int = LENGTH) -> str | None:
    """Run the kernel and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where.
        kernels: has the function of `window_rest`.
        length: queries.
    """
    for plain in (True, False):
        about = trial._replace(form=window_selftest.WindowForm(trial.form.sinks))
        numbers = window_selftest.draw(about, length, plain)
        rest = _rest(trial, numbers, plain)
        wanted = [_exact(numbers, rest, absolute) for absolute in (False, True)]
        on = window_selftest.on_device(numbers, trial.device)
        got = kernels.forward(on.window, on.sinks, _on(rest, trial.device), SEGMENT)
        results = dict(zip(("output", "S", "z"), got, strict=True))
        want, scale = ({name: found[name] for name in results} for found, _ in wanted)
        wrong = selftest.compare(trial, results, (want, scale), length, wanted[0][1])
        if wrong is not None:
            return wrong
    return None


def _rest(trial: Key, numbers: Numbers, plain: bool) -> Rest:
    """Let a linear attention sum up what leaves the window: from the start, or behind a state and padding."""
    form, (query, key, value, valid) = trial.form, numbers.window[:4]
    generator = torch.Generator("cpu").manual_seed(key.shape[2])
    behind = query.shape[2] - SPAN if plain else query.shape[2]
    (batch, heads), kv_heads = query.shape[:2], key.shape[1]

    def positive(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    phi_q, phi_k, scale = query[:, :, -behind:], key[:, :, :behind], None
    if form.kind == "none":
        phi_q = positive(batch, heads, behind, form.features, dtype=query.dtype)
        phi_k = positive(batch, kv_heads, behind, form.features, dtype=key.dtype)
        scale = positive(batch, heads, behind) - 0.5
    S = z = None
    if not plain:
        S, z = positive(batch, kv_heads, form.features, trial.Dv), positive(batch, kv_heads, form.features)
    # a head forgets within a few tokens, the other within some hundred
    rates = torch.tensor([0.5, 0.01], device="cpu")[None, :, None]
    decay = -rates * positive(batch, kv_heads, behind) if form.decays else None
    seen = None if plain else valid[:, :behind].contiguous()
    inputs = Inputs(phi_q, phi_k, value[:, :, :behind], seen, S, z, decay)
    return Rest(inputs, form.kind, selftest.EPS, scale)


def _on(rest: Rest, device: torch.device) -> Rest:
    inputs = Inputs(*(None if x is None else x.to(device) for x in rest.inputs))  # type: ignore[arg-type]
    scale = rest.log_scale
    return rest._replace(inputs=inputs, log_scale=None if scale is None else scale.to(device))


def _exact(numbers: Numbers, rest: Rest, absolute: bool) -> tuple[dict[str, Tensor], float]:
    """Compute the results, of values without signs where `absolute`; and the error of scores on weights."""
    query, key, value, valid, S, z, decay, _ = rest.inputs
    group = query.shape[1] // key.shape[1]
    value = value.double().abs() if absolute else value.double()
    (phi_q, _), (phi_k, _) = (selftest.features(rest.kind, x.double(), False) for x in (query, key))
    if valid is not None:
        phi_k = phi_k * valid[:, None, :, None]
    running = phi_k.new_zeros(key.shape[:3]) if decay is None else decay.double().cumsum(-1)
    pairs = (running[..., None] - running[..., None, :]).clamp(max=0).exp().tril()
    of_key, of_state = (running[..., -1:] - running).exp()[..., None], running.exp()

    def spread(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1)

    weights = phi_q @ spread(phi_k).mT * spread(pairs)
    total, values = weights.sum(-1), weights @ spread(value)
    after = [(phi_k * of_key).mT @ value, (phi_k * of_key).sum(2)]
    if S is not None and z is not None:
        S, z, end = S.double(), z.double(), of_state[..., -1:]
        total = total + (phi_q @ spread(z).unsqueeze(-1)).squeeze(-1) * spread(of_state)
        values = values + phi_q @ spread(S) * spread(of_state)[..., None]
        after = [after[0] + S * end[..., None], after[1] + z * end]
    scale = torch.zeros_like(total) if rest.log_scale is None else rest.log_scale.double()
    window, sinks = numbers.window, numbers.sinks
    if absolute:
        window = window._replace(value=window.value.abs())
        sinks = None if sinks is None else sinks._replace(value=sinks.value.abs())
    joined = Numbers(window, sinks, ScaledSums(values, total, scale), torch.zeros_like(numbers.grad))
    found, _, more = window_selftest.exact(joined)
    return {"output": found["output"], "S": after[0], "z": after[1]}, more
