"""Formulas of the patches with a state of another kind: quadratic, float64, one function each."""

import math

import torch
from torch import Tensor

from helpers.oracle import (
    Case,
    Inputs,
    elu_plus_one,
    formula,
    fronted,
    hedgehog_weights,
    over_its_sum,
    softmax_weights,
)

CASES: dict[str, Case] = {
    "decay": Case("decay"),
    "decay, lightning": Case("decay", {"rates": "lightning"}),
    "decay, half_life": Case("decay", {"half_life": 20.0}),
    "decay, hedgehog": Case("decay", {"feature_map": "hedgehog"}),
    "decay, front": Case("decay", {"front": True}),
    "window": Case("window", {"size": 24}),
    "window, sinks": Case("window", {"size": 13, "sinks": 3, "positions": "text"}),
    "window+elu1": Case("window+elu1", {"size": 24}),
    "window+elu1, learned": Case(
        "window+elu1", {"size": 9, "sinks": 2, "mix": "learned", "positions": "text"}
    ),
    "window, hedgehog": Case("window+hedgehog", {"size": 16, "sinks": 2, "positions": "text"}),
    "nope+window+elu1, small": Case("nope+window+elu1", {"size": 16}),
    "efficient": Case("efficient"),
    "gated": Case("gated", {"half_life": 50.0}),
    "gated, front": Case("gated", {"front": True, "half_life": 50.0}),
    "gated, hedgehog": Case("gated", {"feature_map": "hedgehog", "shortest": 4.0, "half_life": 50.0}),
}


def age(x: Inputs) -> Tensor:
    """Visible tokens after key j up to query i, `[B, N, S]`."""
    query, key = x.ranks()
    return (query[:, :, None] - key[:, None]).clamp(min=0)


def mapped(x: Inputs, patch: str) -> Tensor:
    """phi(q_i) . phi(k_j) of the map that the options name."""
    if x.options.get("feature_map") == "hedgehog":
        return hedgehog_weights(x, f"{patch}.map.")
    query, key = fronted(x, patch) if x.options.get("front") else (x.query, x.key)
    return elu_plus_one(query) @ elu_plus_one(key).mT


@formula("decay", scores=False)
def decay(x: Inputs) -> Tensor:
    heads = x.kv_heads
    if (half_life := x.options.get("half_life")) is not None:
        rates = [0.5 ** (1 / half_life)] * heads
    elif x.options.get("rates") == "lightning":
        rates = [math.exp(-(2 ** (-8 * (h + 1) / heads))) for h in range(heads)]
    else:
        rates = (
            (1 - 2 ** torch.linspace(-5, -12, heads, dtype=torch.float64)).tolist()
            if heads > 1
            else [1 - 2**-5]
        )
    rate = x.per_head(torch.tensor(rates, dtype=torch.float64))[None, :, None, None]
    weights = mapped(x, "decay") * rate ** age(x)[:, None]
    return over_its_sum(weights, x.visible) @ x.value


@formula("gated", scores=False)
def gated(x: Inputs) -> Tensor:
    weight, bias = x.per_head(x.parameter("gated.weight")), x.per_head(x.parameter("gated.bias"))
    gate = ((x.value * weight[None, :, None]).sum(-1) + bias[None, :, None]).sigmoid() ** (1 / 16)
    weights = mapped(x, "gated")
    valid = x.visible[:, 0].any(1)  # padding does not close the gate
    closed = torch.where(valid[:, None], gate.log(), 0.0).cumsum(-1)
    product = (closed[..., :, None] - closed[..., None, :]).tril().exp()
    return over_its_sum(weights * product, x.visible) @ x.value


@formula("efficient", scores=False)
def efficient(x: Inputs) -> Tensor:
    # of each query: the keys that it sees, by a softmax over them for every feature
    visible = x.visible[..., None]  # [B, 1, N, S, 1]
    keys = torch.where(visible, x.key[:, :, None], float("-inf")).softmax(-2).nan_to_num(0.0)
    return (keys * x.query.softmax(-1)[:, :, :, None]).sum(-1) @ x.value


def in_window(x: Inputs) -> Tensor:
    """Boolean `[B, 1, N, S]`: the window's tokens and the sinks, among the visible ones."""
    query, key = x.ranks()
    distance = query[:, :, None] - key[:, None]
    size, sinks = x.options.get("size", 256), x.options.get("sinks", 0)
    near = (distance < size) if x.causal else (distance.abs() < size)
    return x.visible & (near | (key < sinks)[:, None])[:, None]


@formula("window", scores=False)
def window(x: Inputs) -> Tensor:
    return softmax_weights(x.scores(), in_window(x)) @ x.value


def hybrid(x: Inputs, similarity: Tensor) -> Tensor:
    """Softmax inside, a similarity that is not negative outside."""
    inside = in_window(x)
    if x.options.get("mix") == "learned":
        rest = over_its_sum(similarity, x.visible & ~inside)
        gate = x.parameter("window.gate").sigmoid()[None, :, None, None]
        gate = torch.where(rest.sum(-1, keepdim=True) > 0, gate, 1.0)
        return (gate * softmax_weights(x.scores(), inside) + (1 - gate) * rest) @ x.value
    return over_its_sum(torch.where(inside, x.scores().exp(), similarity), x.visible) @ x.value


@formula("window+hedgehog", scores=False)
def window_hedgehog(x: Inputs) -> Tensor:
    return hybrid(x, hedgehog_weights(x, "window.rest."))


@formula("window+elu1", scores=False)
def window_elu1(x: Inputs) -> Tensor:
    return hybrid(x, elu_plus_one(x.query) @ elu_plus_one(x.key).mT)
