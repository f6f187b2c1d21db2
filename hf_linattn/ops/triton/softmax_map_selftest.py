"""A small problem that the kernels of learned maps must solve as float64 does, as well as rounding allows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.triton import selftest
from hf_linattn.ops.triton.selftest import Key

FLOOR = 1e-3
"""Least feature of a trial: it holds some."""


class MapForm(NamedTuple):
    """Learned maps [softmax(W x), softmax(-W x)], forward and backward.

    Attributes:
        weights: W is float32, whatever x is.
    """

    weights: bool = False

    @property
    def words(self) -> list[str]:
        """Name it."""
        return ["softmax map", *(["float32 weights"] if self.weights else [])]


def disagreement(trial: Key, kernels: Any, length: int) -> str | None:
    """Run the kernels and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where; `Dv` is the number of rows of W.
        kernels: has the functions of `softmax_map`.
        length: tokens.
    """
    generator = torch.Generator("cpu").manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    x = normal(1, length, 2, trial.D).to(trial.dtype).transpose(1, 2)
    weight = 2 * normal(2, trial.Dv, trial.D) * trial.D**-0.5
    weight = weight if trial.form.weights else weight.to(trial.dtype)
    dtype = trial.dtype if trial.dtype == torch.bfloat16 else torch.float32
    grad = normal(1, length, 2, 2 * trial.Dv).to(dtype).transpose(1, 2)
    logits = x.double() @ weight.double().mT
    features = torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)
    grad = grad.masked_fill((features / FLOOR - 1).abs() < 0.02, 0.0)  # either side of the floor is right
    exact = definition(x, weight, grad)
    x, weight, grad = (part.to(trial.device) for part in (x, weight, grad))
    got = {"output": kernels.forward(x, weight, FLOOR, dtype)}
    got["token"] = kernels.forward(x[:, :, :1], weight, FLOOR, torch.float32)
    got |= dict(zip(("d_x", "d_weight"), kernels.backward(grad, x, weight, FLOOR), strict=True))
    return selftest.compare(trial, got, exact, length)


def definition(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Compute every result in float64, and the same sums with all terms positive."""
    x, weight, grad = x.double(), weight.double(), grad.double()
    logits = x @ weight.mT
    # an error of a logit changes a softmax by as much of it
    spread = 1 + (x.abs() @ weight.mT.abs()).amax(-1, keepdim=True)
    features, d_logits, sizes = [], torch.zeros_like(logits), torch.zeros_like(logits)
    for sign, g in zip((1, -1), grad.chunk(2, -1), strict=True):
        part = (sign * logits).softmax(-1)
        g = torch.where(part > FLOOR, g, 0.0)
        d_logits += sign * part * (g - (part * g).sum(-1, keepdim=True))
        sizes += part * (g.abs() + (part * g.abs()).sum(-1, keepdim=True))
        features.append(part.clamp(min=FLOOR))
    sizes = sizes * spread
    output = torch.cat(features, -1)
    want = output, output[:, :, :1], d_logits @ weight, (d_logits.mT @ x).sum(0)
    scale = output * spread, (output * spread)[:, :, :1], sizes @ weight.abs(), (sizes.mT @ x.abs()).sum(0)
    names = ("output", "token", "d_x", "d_weight")
    return dict(zip(names, want, strict=True)), dict(zip(names, scale, strict=True))
