"""A small problem by which fla's kernels of the delta rule are held to float64, on the device that runs them.

The definition is the recurrence, token by token, in float64 on the CPU; its gradients are autograd's.

The bound. Let u be 2^-p for the p bits that products keep, and r the root of the mean square of a result. In
float16, against the kernels interpreted in numpy, no result was further off than 4.2 u r in the mean over 64
tokens of a head, and 20 u r in a single number, at 100 to 613 tokens and widths from 32 to 128, b up to 2,
with and without decays, documents and a state. Three times as much is allowed. A chunk left out or a mask one
token off is some r.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.fla.rule import Kind

LENGTH = 213
"""Three chunks of 64 tokens and a ragged one."""
BLOCK = 64
IN_THE_MEAN, IN_ONE = 12, 60
"""Times u r."""
SIGNIFICAND = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}
ROUGH = 5
"""Bits less for float32 in the recurrent kernels: their sums are long, and exp is the hardware's."""
RESULTS = ("output", "state")
GRADIENTS = ("d_query", "d_key", "d_value", "d_beta", "d_log_decay", "d_state")


class Key(NamedTuple):
    """What is checked once: all that kernels are compiled for, apart from numbers.

    Attributes:
        device: with its number.
        dtype: of the values, and of products in chunks.
        D: width of queries and keys.
        Dv: width of values.
        kind: which kernels.
        recurrent: token by token, else in chunks, with a backward.
    """

    device: torch.device
    dtype: torch.dtype
    D: int
    Dv: int
    kind: Kind
    recurrent: bool

    @property
    def name(self) -> str:
        """Text without the device."""
        how = "fused_recurrent" if self.recurrent else "chunk"
        return f"{str(self.dtype).removeprefix('torch.')}, {self.D}x{self.Dv}, {how}_{self.kind}"


class Numbers(NamedTuple):
    """Arguments of `rule.causal`, None where there are none, and gradients of its results."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    log_decay: Tensor | None
    state: Tensor | None
    documents: Tensor | None
    d_output: Tensor
    d_state: Tensor


def disagreement(trial: Key, kernels: Any, length: int = LENGTH) -> str | None:
    """Run the kernels and compare; return what differs, None where all agrees.

    Args:
        trial: what to compute, and where.
        kernels: has `causal`, as `rule` does.
        length: tokens.
    """
    # with one query head per key head from the start, then with two behind a state
    problems = ((9, False), (1, True)) if trial.recurrent else ((length, False), (length, True))
    for tokens, rich in problems:
        numbers = _numbers(trial, tokens, rich)
        want = _results(numbers, _definition, trial.recurrent, torch.float64)
        got = _results(_on(numbers, trial.device), kernels.causal, trial.recurrent)
        wrong = _compare(trial, got, want, tokens)
        if wrong is not None:
            return f"one token: {wrong}" if tokens == 1 else wrong
    return None


def _numbers(trial: Key, length: int, rich: bool) -> Numbers:
    """Draw numbers on the CPU; nothing but a generator of our own is advanced."""
    generator, heads, group = torch.Generator("cpu").manual_seed(length + rich), 2, 1 + rich

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    query, key = normal(2, heads * group, length, trial.D), normal(2, heads, length, trial.D)
    value = normal(2, heads, length, trial.Dv).to(trial.dtype)
    beta = normal(2, heads, length).sigmoid() * 2
    key, log_decay, documents = F.normalize(key, dim=-1), None, None
    if trial.kind != "delta_rule":
        # one head forgets within some tokens, the other within some hundred
        rates = torch.tensor([0.2, 0.01], device="cpu").view(1, 2, 1, 1)
        log_decay = -rates * normal(2, heads, length, trial.D if trial.kind == "kda" else 1).abs()
    if rich and trial.kind != "delta_rule":  # one begins inside a chunk, one with a chunk, one is one token
        begin = torch.tensor([37, BLOCK, BLOCK + 1], device="cpu")
        row = (torch.arange(length, device="cpu")[:, None] >= begin).sum(-1)
        documents = torch.stack([row, 0 * row])
    if rich and length > 1:  # padding, as `rule` is given it
        hidden = torch.rand(2, 1, length, generator=generator, device="cpu") < 0.2
        beta = beta.masked_fill(hidden, 0)
        key, value = (x.masked_fill(hidden[..., None], 0) for x in (key, value))
        log_decay = None if log_decay is None else log_decay.masked_fill(hidden[..., None], 0)
    state = normal(2, heads, trial.D, trial.Dv) if rich else None
    d_output = normal(2, heads * group, length, trial.Dv).to(trial.dtype)
    d_state = normal(2, heads, trial.D, trial.Dv)
    query = F.normalize(query, dim=-1)
    return Numbers(query, key, value, beta, log_decay, state, documents, d_output, d_state)


def _on(numbers: Numbers, device: torch.device) -> Numbers:
    return Numbers(*(None if x is None else x.to(device) for x in numbers))  # type: ignore[arg-type]


def _results(
    numbers: Numbers, compute: Any, forward_only: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Compute everything, and gradients of all that can have them, in a dtype of ours or as they come."""

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(dtype or x.dtype).requires_grad_(not forward_only)

    with torch.enable_grad():
        leaves = [own(x) for x in numbers[:6]]
        output, state = compute(*leaves, numbers.documents)
        found = dict(zip(RESULTS, (output.detach(), state.detach()), strict=True))
        if forward_only:
            return found
        loss = (output * numbers.d_output.to(output)).sum() + (state * numbers.d_state.to(state)).sum()
        grads = torch.autograd.grad(loss, [x for x in leaves if x is not None])
    names = [name for name, x in zip(GRADIENTS, leaves, strict=True) if x is not None]
    return found | dict(zip(names, grads, strict=True))


def _definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    state: Tensor | None,
    documents: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute S_t = a_t S_{t-1} + k_t b_t (v_t - (a_t S_{t-1})^T k_t)^T and o_t = S_t^T q_t as they stand."""
    (batch, heads, length, size), outputs = key.shape, []
    S = key.new_zeros(batch, heads, size, value.shape[-1]) if state is None else state
    query = query.unflatten(1, (heads, -1))
    for t in range(length):
        if documents is not None and t:
            goes_on = documents[:, t] == documents[:, t - 1]
            S = S * goes_on[:, None, None, None]
        if log_decay is not None:
            S = S * log_decay[:, :, t, :, None].exp()
        k = key[:, :, t, :, None]
        S = S + k * (beta[:, :, t, None] * (value[:, :, t] - (S * k).sum(2))).unsqueeze(2)
        outputs.append(query[:, :, :, t] @ S)
    return torch.stack(outputs, 3).flatten(1, 2), S


def _compare(trial: Key, got: dict[str, Tensor], want: dict[str, Tensor], length: int) -> str | None:
    """Say which result is further from the definition than rounding explains."""
    for name, exact in want.items():
        x = got[name]
        if tuple(x.shape) != tuple(exact.shape):
            return f"{name} has the shape {tuple(x.shape)}, not {tuple(exact.shape)}"
        kept = SIGNIFICAND[trial.dtype if name == "output" or not trial.recurrent else torch.float32]
        kept -= ROUGH if kept == SIGNIFICAND[torch.float32] else 0
        error = (x.detach().cpu().double() - exact).abs()
        unit = float(exact.square().mean().sqrt()) * 2.0**-kept
        worst = float(error.max()) / (IN_ONE * unit)
        if exact.shape[2] == length:  # tokens: of a head, 64 at a time
            error = error.flatten(3) if exact.ndim > 3 else error[..., None]
            error = F.pad(error, (0, 0, 0, -length % BLOCK)).unflatten(2, (-1, BLOCK)).flatten(3)
        else:
            error = error.flatten(2)
        mean = float(error.square().mean(-1).sqrt().max()) / (IN_THE_MEAN * unit)
        if not (worst <= 1 and mean <= 1):  # NaN is not
            far = float(torch.tensor([worst, mean]).nan_to_num(float("inf")).max())
            return f"{name} is {far:.3g} times as far from float64 as rounding explains"
    return None
