"""A small problem that the kernels of gates must solve as float64 does, as well as rounding allows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_linattn.ops.triton import selftest
from hf_linattn.ops.triton.selftest import Key
from hf_linattn.ops.types import Gate

TEMPERATURE = 16.0


class GateForm(NamedTuple):
    """Gates made of values, forward and backward."""

    @property
    def words(self) -> list[str]:
        """Name it."""
        return ["gates"]


def disagreement(trial: Key, kernels: Any, length: int) -> str | None:
    """Run the kernels and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where; gates are of values `[1, 2, length, Dv]`.
        kernels: has the functions of `gate`.
        length: tokens.
    """
    generator = torch.Generator("cpu").manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    value = normal(1, length, 2, trial.Dv).to(trial.value_dtype).transpose(1, 2)
    # one head forgets, one has gates that are all but open
    weight, bias = normal(2, trial.Dv) * trial.Dv**-0.5, torch.tensor([-2.0, 7.0], device="cpu")
    grad = normal(1, 2, length)
    for masked in (False, True):
        valid = (normal(1, length) > -1) if masked else None
        exact = definition(value, valid, Gate(weight, bias, TEMPERATURE), grad)
        here = [x if x is None else x.to(trial.device) for x in (value, valid, weight, bias, grad)]
        given = here[0], here[1], Gate(here[2], here[3], TEMPERATURE)  # type: ignore[arg-type]
        got = {"output": kernels.forward(*given)}
        names = ("d_value", "d_weight", "d_bias")
        onto = None
        if masked:  # added to other gradients
            others = normal(*value.shape).to(trial.value_dtype)
            onto = others.to(trial.device, copy=True)
            exact[0]["d_value"] += others.double()
            exact[1]["d_value"] += others.double().abs()
        got |= dict(zip(names, kernels.backward(here[4], *given, onto), strict=True))
        # numbers are float32 on the way, whatever the values are
        wrong = selftest.compare(trial._replace(operand="ieee"), got, exact, length)
        if wrong is not None:
            return wrong
    return None


def definition(
    value: Tensor, valid: Tensor | None, gate: Gate, grad: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute every result in float64, and the same sums with all terms positive."""
    v, w, b = value.double(), gate.weight.double()[:, None], gate.bias.double()[:, None]
    seen = torch.ones_like(grad) if valid is None else valid[:, None].expand_as(grad)
    v = v.masked_fill(seen[..., None] == 0, 0.0)
    logit, size = (v * w).sum(-1) + b, (v * w).abs().sum(-1) + b.abs()
    slope = (-logit).sigmoid() * seen / gate.temperature
    output = functional.logsigmoid(logit) / gate.temperature * seen
    d_logit = grad.double() * slope
    # an error of the logit changes a gate, and its slope by as much of it
    spread = d_logit.abs() * (1 + size)
    want = (output, d_logit[..., None] * w, (d_logit[..., None] * v).sum((0, 2)), d_logit.sum((0, 2)))
    scale = (
        output.abs() + slope * size,
        spread[..., None] * w.abs(),
        (spread[..., None] * v.abs()).sum((0, 2)),
        spread.sum((0, 2)),
    )
    names = ("output", "d_value", "d_weight", "d_bias")
    return dict(zip(names, want, strict=True)), dict(zip(names, scale, strict=True))
