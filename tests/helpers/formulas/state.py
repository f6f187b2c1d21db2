"""Formulas of the patches with a state of another kind: quadratic, float64, one function each."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from helpers.formulas.salient import elu_keys, exact, hedgehog_keys
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
    "decay, not normalised": Case("decay", {"half_life": 20.0, "normalise": "none"}),
    "decay, hedgehog": Case("decay", {"feature_map": "hedgehog"}),
    "decay, front": Case("decay", {"front": True}),
    "window": Case("window", {"size": 24}),
    "window, sinks": Case("window", {"size": 13, "sinks": 3, "positions": "text"}),
    "window+elu1": Case("window+elu1", {"size": 24}),
    "window+elu1, learned": Case(
        "window+elu1", {"size": 9, "sinks": 2, "mix": "learned", "positions": "text"}
    ),
    "window+delta": Case("window+delta", {"size": 24}),
    "window+delta, sinks": Case(
        "window+delta",
        {
            "window": {"size": 9, "sinks": 2, "positions": "text", "mix": "learned"},
            "delta": {"half_life": 20.0, "source": "value", "decay": "channel"},
        },
    ),
    "window+gated, hidden": Case(
        "window+gated", {"window": {"size": 13}, "gated": {"source": "hidden", "half_life": 50.0}}
    ),
    "window+elu1, interpolated": Case("window+elu1", {"size": 9, "mix": "interpolated"}),
    "window, hedgehog": Case("window+hedgehog", {"size": 16, "sinks": 2, "positions": "text"}),
    "nope+window+elu1, small": Case("nope+window+elu1", {"size": 16}),
    "efficient": Case("efficient"),
    "gated": Case("gated", {"half_life": 50.0}),
    "gated, hidden": Case("gated", {"source": "hidden", "half_life": 50.0}),
    "delta": Case("delta"),
    "delta, near": Case("delta", {"half_life": 5.0, "source": "value", "front": True}),
    "delta, channel": Case("delta", {"decay": "channel", "beta": 2.0, "half_life": 20.0}),
    "delta, conv": Case("delta", {"conv": 4, "front": True}),
    "delta, no decay": Case("delta", {"decay": "none", "feature_map": "elu1"}),
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
    if x.options.get("feature_map") == "cosine":
        query, key = (y / y.pow(2).sum(-1, keepdim=True).sqrt() for y in (x.query, x.key))
        return query @ key.mT
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
    if x.options.get("normalise") == "none":
        return torch.where(x.visible, weights, 0.0) @ x.value
    return over_its_sum(weights, x.visible) @ x.value


def gates_of(x: Inputs, patch: str, weight: str, bias: str, source: str, which: int = 0) -> Tensor:
    """w_h . x_t + b_h `[B, H, N]`, of the hidden state or the value."""
    read = x.value if source == "value" else x.hidden[:, None]
    w, b = x.per_head(x.parameter(f"{patch}.{weight}")), x.per_head(x.parameter(f"{patch}.{bias}"))
    w, b = (w[:, which], b[:, which]) if w.ndim == 3 else (w, b)
    return (read * w[None, :, None]).sum(-1) + b[None, :, None]


@formula("gated", scores=False)
def gated(x: Inputs) -> Tensor:
    gate = gates_of(x, "gated", "weight", "bias", x.options.get("source", "value")).sigmoid() ** (1 / 16)
    weights = mapped(x, "gated")
    valid = x.visible[:, 0].any(1)  # padding does not close the gate
    closed = torch.where(valid[:, None], gate.log(), 0.0).cumsum(-1)
    product = (closed[..., :, None] - closed[..., None, :]).tril().exp()
    return over_its_sum(weights * product, x.visible) @ x.value


def convolved(x: Inputs, tokens: Tensor, weight: Tensor) -> Tensor:
    """Sum a token and those before it that it sees, the nearest by the last weight `[Hkv, D, taps]`."""
    weight, (rank, _) = x.per_head(weight), x.ranks()
    before = rank[:, None, :, None] - rank[:, None, None, :]  # how many tokens ago
    mixed = sum(
        (x.visible & (before == ago)).double() @ tokens * weight[None, :, None, :, -1 - ago]
        for ago in range(weight.shape[-1])
    )
    return torch.where(x.visible.any(-1, keepdim=True), mixed, tokens)


def delta_reads(x: Inputs, prefix: str, counted: Tensor, seen: Tensor) -> Tensor:
    """c (Q K^T * A)(I + T)^-1 b v; T = b (K K^T * A) for j < i; A: the product of a over what came since.

    Args:
        x: the inputs, with the weights named `prefix`.
        counted: which tokens are written, `[B, S]`.
        seen: which of them before each query reads, `[B, 1, N, S]`.
    """
    options, source = x.options, x.options.get("source", "hidden")
    beta = options.get("beta", 1.0) * gates_of(x, prefix, "gate_weight", "gate_bias", source).sigmoid()
    text = x
    if "conv" in options:
        of_key, of_value = x.parameter(f"{prefix}.conv").split([x.key.shape[-1], x.value.shape[-1]], 1)
        x = replace(x, key=convolved(x, x.key, of_key), value=convolved(x, x.value, of_value))
    query, key = fronted(x, prefix) if options.get("front") else (x.query, x.key)
    if options.get("feature_map") == "elu1":
        query, key = elu_plus_one(query), elu_plus_one(key)
    query, key = (part / part.pow(2).sum(-1, keepdim=True).sqrt() for part in (query, key))
    kind = options.get("decay", "head")
    if kind == "none":
        log_a = torch.zeros_like(beta)[..., None]
    elif kind == "head":
        log_a = gates_of(text, prefix, "gate_weight", "gate_bias", source, 1)[..., None].sigmoid().log() / 16
    else:
        read = text.value if source == "value" else text.hidden[:, None]
        reduced = read @ x.per_head(x.parameter(f"{prefix}.channel_down")).mT
        logit = reduced @ x.per_head(x.parameter(f"{prefix}.channel_weight")).mT
        log_a = (logit + x.per_head(x.parameter(f"{prefix}.channel_bias"))[:, None]).sigmoid().log() / 16
    log_a = torch.where(counted[:, None, :, None], log_a, 0.0)
    at_query = torch.einsum("bhij,bhjd->bhid", seen.double().expand(-1, log_a.shape[1], -1, -1), log_a)
    before = x.visible.tril(-1)  # in packed rows those of the same document
    alone = torch.einsum("bhij,bhjd->bhid", x.visible.tril().double().expand_as(key @ key.mT), log_a)

    def products(left: Tensor, until: Tensor) -> Tensor:
        between = (until[..., :, None, :] - alone[..., None, :, :]).clamp(max=0).exp()
        between = between.expand(*between.shape[:-1], key.shape[-1])
        return torch.einsum("bhid,bhjd,bhijd->bhij", left, key, between)

    beta = torch.where(counted[:, None], beta, 0.0)[..., None]
    system = beta * torch.where(before, products(key, alone), 0.0)
    system = system + torch.eye(key.shape[2], dtype=torch.float64)
    reads = torch.where(seen, products(query, at_query), 0.0)
    output = reads @ torch.linalg.inv(system) @ (beta * x.value)
    return output * x.parameter(f"{prefix}.scale")[None, :, None, None]


@formula("delta", scores=False)
def delta(x: Inputs) -> Tensor:
    return delta_reads(x, "delta", x.visible[:, 0].any(1), x.visible.tril())


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


@formula("window", scores=False, windowed=True)
def window(x: Inputs) -> Tensor:
    return softmax_weights(x.scores(), in_window(x), x.sink) @ x.value


def hybrid(x: Inputs, similarity: Tensor, keys: Callable[[Inputs], Tensor] | None = None) -> Tensor:
    """Softmax inside, a similarity that is not negative outside; `keys` is that of keys with keys."""
    if x.options.get("salient"):
        assert keys is not None
        inside = x.visible & exact(x, keys(x))
    else:
        inside = in_window(x)
    if x.options.get("mix") in ("learned", "interpolated"):
        rest = over_its_sum(similarity, x.visible & ~inside)
        gate = x.parameter("window.gate")[None, :, None, None]
        gate = gate.sigmoid() if x.options["mix"] == "learned" else gate
        gate = torch.where(rest.sum(-1, keepdim=True) > 0, gate, 1.0)
        return (gate * softmax_weights(x.scores(), inside, x.sink) + (1 - gate) * rest) @ x.value
    return over_its_sum(torch.where(inside, x.scores().exp(), similarity), x.visible, x.sink) @ x.value


@formula("window+hedgehog", scores=False, windowed=True)
def window_hedgehog(x: Inputs) -> Tensor:
    return hybrid(x, hedgehog_weights(x, "window.rest."), hedgehog_keys)


@formula("window+elu1", scores=False, windowed=True)
def window_elu1(x: Inputs) -> Tensor:
    return hybrid(x, elu_plus_one(x.query) @ elu_plus_one(x.key).mT, elu_keys)


def has_left(x: Inputs) -> tuple[Tensor, Tensor]:
    """Which tokens are no sinks, `[B, S]`, and which of these have left at each query, `[B, 1, N, S]`."""
    _, key = x.ranks()
    counted = x.visible[:, 0].any(1) & (key >= x.options.get("sinks", 0))
    return counted, x.visible & ~in_window(x) & counted[:, None, None]


@formula("window+delta", scores=False, windowed=True)
def window_delta(x: Inputs) -> Tensor:
    counted, left = has_left(x)
    gate = x.parameter("window.gate")[None, :, None, None]
    gate = gate.sigmoid() if x.options.get("mix") == "learned" else gate
    gate = torch.where(left.any(-1, keepdim=True), gate, 1.0)
    rest = delta_reads(x, "window.rest", counted, left)
    return gate * (softmax_weights(x.scores(), in_window(x), x.sink) @ x.value) + (1 - gate) * rest


@formula("window+gated", scores=False, windowed=True)
def window_gated(x: Inputs) -> Tensor:
    counted, left = has_left(x)
    logit = gates_of(x, "window.rest", "weight", "bias", x.options.get("source", "value"))
    log_g = torch.where(counted[:, None], logit.sigmoid().log() / 16, 0.0)
    at_query = torch.einsum("bhij,bhj->bhi", left.double().expand(-1, log_g.shape[1], -1, -1), log_g)
    fade = (at_query[..., None] - log_g.cumsum(-1)[..., None, :]).clamp(max=0).exp()
    return hybrid(x, elu_plus_one(x.query) @ elu_plus_one(x.key).mT * fade)
