"""Gates of a state, computed from each token's hidden state or from its value."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, upcast
from hf_linattn.attention.call import Call
from hf_linattn.errors import CacheError, OptionError, UnsupportedCallError

TEMPERATURE = 16.0
"""Gates are sigmoid(...)^(1/16), so that a few units of the logit reach half-lives of thousands of tokens."""

Source = Literal["hidden", "value"]


def source_width(site: AttentionSite, source: Source) -> int:
    """Return the width C of what gates are computed from.

    Raises:
        OptionError: the module is not given a hidden state, or the width cannot be told.
    """
    if source == "value":
        [width] = site.require("value_dim", reason="so it can have no gates")
    else:
        [width] = site.require("hidden_size", reason="which gates read (source='value' does without)")
    return width


def source_of(call: Call, source: Source, width: int) -> Tensor:
    """Return what gates read, `[B, 1, N, C]` or `[B, Hkv, N, C]`, float32 (float64 in float64 models).

    Raises:
        UnsupportedCallError: the hidden state is not the one that was expected.
    """
    return upcast(call.value if source == "value" else read_hidden(call, width).unsqueeze(1))


def read_hidden(call: Call, width: int) -> Tensor:
    """Return the hidden state of the queries, `[B, N, C]`.

    Raises:
        UnsupportedCallError: it is not the one that was expected.
    """
    hidden, tokens = call.hidden, call.query.shape[2]
    if hidden is None or hidden.ndim != 3 or hidden.shape[1:] != (tokens, width):
        shape = None if hidden is None else tuple(hidden.shape)
        raise UnsupportedCallError(
            f"{call.where}: {call.spec!r} reads the hidden state, [rows, {tokens}, {width}], and the module "
            f"was given {shape}. Leave it out of the plan; gated, delta and fox have source='value'"
        )
    return hidden


def per_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Project x `[B, 1 or Hkv, N, C]` by `[Hkv, F, C]`, and add `[Hkv, F]`: `[B, Hkv, N, F]`."""
    weight, bias = weight.to(x), None if bias is None else bias.to(x)
    if x.shape[1] == 1:
        flat = None if bias is None else bias.flatten()
        projected: Tensor = nn.functional.linear(x[:, 0], weight.flatten(0, 1), flat)
        by_head: Tensor = projected.unflatten(-1, weight.shape[:2])
        return by_head.transpose(1, 2)
    projected = x @ weight.mT
    return projected if bias is None else projected + bias[:, None]


def missing_hidden(name: str) -> CacheError:
    """Make the error for past tokens whose hidden state is not known."""
    return CacheError(
        f"{name!r} computes its gates from the hidden state of past tokens too, and a cache of the unpatched "
        "model holds none: start from a new cache, or patch with options={'source': 'value'}"
    )


def half_lives(heads: int, shortest: float | None, longest: float) -> list[float]:
    """Spread half-lives, in tokens, from the shortest to the longest in equal ratios.

    Raises:
        OptionError: out of range.
    """
    if not 1 <= longest < math.inf:
        raise OptionError(f"half_life must be at least 1 token, got {longest}")
    if shortest is not None and not 1 <= shortest <= longest:
        raise OptionError(
            f"shortest must be from 1 token to half_life, which is {longest:g}, got {shortest:g}"
        )
    first = longest if shortest is None or heads == 1 else shortest
    return [first * (longest / first) ** (head / max(1, heads - 1)) for head in range(heads)]


def gate_bias(lives: list[float], temperature: float = TEMPERATURE) -> Tensor:
    """Return b, one for each half-life in tokens, with sigmoid(b)^(1 / temperature) = 2^(-1 / half-life)."""
    logs = [temperature * math.log(0.5) / life for life in lives]
    return torch.tensor([log - math.log(-math.expm1(log)) for log in logs])


def log_gate(logit: Tensor) -> Tensor:
    """Return log sigmoid(logit)^(1/16), at most 0."""
    return nn.functional.logsigmoid(logit) / TEMPERATURE
