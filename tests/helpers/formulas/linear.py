"""Formulas of the linear attentions by feature map: quadratic, float64, one function each."""

import torch
from torch import Tensor

from helpers.oracle import Case, Inputs, elu_plus_one, formula, fronted, hedgehog_weights, over_its_sum

CASES: dict[str, Case] = {
    "relu": Case("relu"),
    "relu, eps": Case("relu", {"eps": 0.2}),
    "softmax_features": Case("softmax_features"),
    "taylor": Case("taylor"),
    "taylor2": Case("taylor2"),
    "taylor2, projected": Case("taylor2", {"features": 4}),
    "cosine": Case("cosine"),
    "cosine, power": Case("cosine", {"power": 0.5}),
    "performer": Case("performer"),
    "performer, features": Case("performer", {"features": 37, "seed": 5, "redraw": 100}),
    "t2r": Case("t2r"),
    "t2r, features": Case("t2r", {"features": 13}),
    "t2r, frozen": Case("t2r", {"frozen": True}),
    "zero": Case("zero"),
    "hedgehog": Case("hedgehog"),
    "nope+hedgehog": Case("nope+hedgehog"),
    "linear": Case("linear", {"feature_map": "softplus"}),
    "linear, two maps": Case("linear", {"query_map": "elu1", "key_map": "t2r"}),
    "linear, front": Case("linear", {"feature_map": "elu1", "front": True}),
    "linear, n, elu1": Case("linear", {"feature_map": "elu1", "normalise": "n"}),
    "linear, n": Case("linear", {"feature_map": "identity", "normalise": "n"}),
}


def over_n(weights: Tensor, x: Inputs, power: float = 1.0) -> Tensor:
    """Weights of any sign over n_i^power; 0 where nothing is visible."""
    n = x.visible.sum(-1, keepdim=True).double().clamp(min=1)
    return torch.where(x.visible, weights / n**power, 0.0)


def cos(x: Inputs) -> Tensor:
    """cos(q_i, k_j)."""
    norms = x.query.pow(2).sum(-1).sqrt()[..., :, None] * x.key.pow(2).sum(-1).sqrt()[..., None, :]
    return (x.query @ x.key.mT) / norms


@formula("relu", scores=False)
def relu(x: Inputs) -> Tensor:
    eps = x.options.get("eps", 0.001)
    weights = (x.query.clamp(min=0) + eps) @ (x.key.clamp(min=0) + eps).mT
    return over_its_sum(weights, x.visible) @ x.value


def softmax_over_features(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).clamp(min=1e-12)


@formula("softmax_features", scores=False)
def softmax_features(x: Inputs) -> Tensor:
    weights = softmax_over_features(x.query) @ softmax_over_features(x.key).mT
    return over_its_sum(weights, x.visible) @ x.value


@formula("taylor", scores=False)
def taylor(x: Inputs) -> Tensor:
    return over_its_sum(1 + cos(x), x.visible) @ x.value


@formula("cosine", scores=False)
def cosine(x: Inputs) -> Tensor:
    return over_n(cos(x), x, x.options.get("power", 1.0)) @ x.value


@formula("taylor2", scores=False)
def taylor2(x: Inputs) -> Tensor:
    query, key = x.query, x.key
    if x.options.get("features", 16) < query.shape[-1]:
        project_q, project_k = x.parameter("taylor2.query_weight"), x.parameter("taylor2.key_weight")
        query = query @ project_q.mT
        key = key @ x.per_head(project_k).mT
    s = query @ key.mT / query.shape[-1] ** 0.5
    return over_its_sum(1 + s + s**2 / 2, x.visible) @ x.value


@formula("performer", scores=False)
def performer(x: Inputs) -> Tensor:
    directions, scale = x.parameter("performer.projection"), x.query.shape[-1] ** -0.25

    def phi(x: Tensor) -> Tensor:
        x = x * scale
        return (x @ directions.mT - (x**2).sum(-1, keepdim=True) / 2).exp() / directions.shape[0] ** 0.5

    return over_its_sum(phi(x.query) @ phi(x.key).mT, x.visible) @ x.value


def t2r_map(x: Inputs, of: Tensor, prefix: str) -> Tensor:
    weight, bias = x.per_head(x.parameter(prefix + "weight")), x.per_head(x.parameter(prefix + "bias"))
    return (of @ weight.mT + bias[:, None]).clamp(min=1e-12)


@formula("zero", scores=False)
def zero(x: Inputs) -> Tensor:
    return torch.zeros_like(x.query[..., :1]) * x.value[..., :1, :]


@formula("t2r", scores=False)
def t2r(x: Inputs) -> Tensor:
    weights = t2r_map(x, x.query, "t2r.") @ t2r_map(x, x.key, "t2r.").mT
    return over_its_sum(weights, x.visible) @ x.value


@formula("hedgehog", scores=False)
def hedgehog(x: Inputs) -> Tensor:
    return over_its_sum(hedgehog_weights(x, "hedgehog."), x.visible) @ x.value


@formula("linear", scores=False)
def linear_map(x: Inputs) -> Tensor:
    if x.options.get("normalise") == "n" and x.options["feature_map"] == "elu1":
        return over_n(elu_plus_one(x.query) @ elu_plus_one(x.key).mT, x) @ x.value
    if x.options.get("normalise") == "n":
        return over_n(x.query @ x.key.mT, x) @ x.value
    if x.options.get("front"):
        query, key = fronted(x, "linear")
        weights = elu_plus_one(query) @ elu_plus_one(key).mT
    elif "key_map" in x.options:
        weights = elu_plus_one(x.query) @ t2r_map(x, x.key, "linear.maps.key_map.").mT
    else:
        weights = (1 + x.query.exp()).log() @ (1 + x.key.exp()).log().mT
    return over_its_sum(weights, x.visible) @ x.value
