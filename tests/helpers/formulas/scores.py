"""Formulas of the patches: quadratic, float64, one function each."""

import torch
from torch import Tensor

from helpers.oracle import Case, Inputs, formula, modifier

CASES: dict[str, Case] = {
    "relu2": Case("relu2"),
    "relu2, n2": Case("relu2", {"over": "n2"}),
    "relu2, number": Case("relu2", {"over": 20.0}),
    "relu_n": Case("relu_n"),
    "relu_n, power": Case("relu_n", {"power": 0.5}),
    "sigmoid_n": Case("sigmoid_n"),
    "sigmoid_n, bias": Case("sigmoid_n", {"bias": -3.0}),
    "sigmoid_n, over n": Case("sigmoid_n", {"bias": 0.5, "over_n": True}),
    "l2softmax": Case("l2softmax"),
    "additive": Case("additive"),
    "additive, hidden": Case("additive", {"hidden": 5}),
    "softmax1, sink": Case("softmax1", {"sink": -1.5}),
    "softmax1, learned": Case("softmax1", {"sink": "learned", "init": -1.0}),
    "softmax1, learned+logn": Case("softmax1+logn", {"sink": "learned"}),
    "logn, learned": Case("logn", {"kappa": "learned", "train_length": 64}),
    "logn, learned, clip": Case("logn", {"kappa": "learned", "train_length": 64, "clip": True}),
    "logn, sqrt": Case("logn", {"form": "sqrt", "train_length": 64}),
    "logn, llama4": Case("logn", {"form": "llama4", "train_length": 16, "slope": 0.7}),
    "logn, ministral3": Case("logn", {"form": "ministral3", "train_length": 16, "slope": 0.7}),
    "logn, inkling": Case("logn", {"form": "inkling", "train_length": 20}),
    "temperature": Case("temperature"),
    "temperature, init": Case("temperature", {"init": 2.0}),
    "unscaled": Case("unscaled"),
    "scaled": Case("scaled", {"exponent": 1.0}),
    "nope": Case("nope"),
    "nope+logn": Case("nope+logn", {"train_length": 64}),
    "alibi": Case("alibi"),
    "scale_invariant": Case("scale_invariant", {"tau": 3.0}),
    "entmax15": Case("entmax15", half=0.1),
    "entmax15, learned": Case("entmax15", {"scale": "learned"}, half=0.1),
    "kerple": Case("kerple"),
    "kerple, power": Case("kerple", {"kind": "power", "seed": 3}),
    "sandwich": Case("sandwich"),
    "sandwich, size": Case("sandwich", {"size": 6}),
    "fox": Case("fox", {"half_life": 32.0, "shortest": 2.0}),
    "fox, value": Case("fox", {"half_life": 4.0, "source": "value"}),
    "fox, softmax1+logn": Case("softmax1+fox+logn", {"half_life": 16.0, "train_length": 64}),
    "softmax1+alibi": Case("softmax1+alibi"),
    "alibi+logn": Case("alibi+logn", {"train_length": 64}),
    "temperature+relu2": Case("temperature+relu2"),
    "elu1+temperature": Case("elu1+temperature"),
    "sigmoid_n+kerple+unscaled": Case("sigmoid_n+kerple+unscaled"),
    "additive+scaled+sandwich": Case("additive+scaled+sandwich", {"exponent": 0.0}),
}


def seen(x: Inputs) -> Tensor:
    """n_i, at least 1."""
    return x.visible.sum(-1, keepdim=True).double().clamp(min=1)


def apart(x: Inputs) -> Tensor:
    """|i - j| in visible tokens, `[B, 1, N, S]`; right where j is visible, in windows too."""
    place = x.visible[:, 0].any(1).cumsum(-1).double()
    return (place[:, -x.query.shape[2] :, None] - place[:, None]).abs()[:, None]


def per_query_head(values: Tensor) -> Tensor:
    return values.double()[None, :, None, None]


def add(x: Inputs, bias: Tensor) -> None:
    x.bias = bias if x.bias is None else x.bias + bias


@formula("relu2")
def relu2(x: Inputs) -> Tensor:
    over = x.options.get("over", "n")
    divisor = {"n": seen(x), "n2": seen(x) ** 2}.get(over, over)
    return torch.where(x.visible, x.scores().clamp(min=0) ** 2 / divisor, 0.0) @ x.value


@formula("relu_n")
def relu_n(x: Inputs) -> Tensor:
    weights = x.scores().clamp(min=0) / seen(x) ** x.options.get("power", 1.0)
    return torch.where(x.visible, weights, 0.0) @ x.value


@formula("sigmoid_n")
def sigmoid_n(x: Inputs) -> Tensor:
    bias = x.options.get("bias", "-log n")
    odds = x.scores().exp() * (1 / seen(x) if bias == "-log n" else torch.tensor(bias).double().exp())
    weights = 1 - 1 / (1 + odds)
    weights = weights / seen(x) if x.options.get("over_n") else weights
    return torch.where(x.visible, weights, 0.0) @ x.value


@formula("l2softmax")
def l2softmax(x: Inputs) -> Tensor:
    squares = torch.where(x.visible, (2 * x.scores()).exp(), 0.0)
    total = squares.sum(-1, keepdim=True)
    weights = torch.where(x.visible, x.scores().exp(), 0.0) / total.where(total > 0, 1.0).sqrt()
    return weights @ x.value


@formula("additive")
def additive(x: Inputs) -> Tensor:
    first, second, last = (x.parameter(f"additive.{name}_weight") for name in ("query", "key", "score"))
    heads = []
    for h in range(x.query.shape[1]):
        query, key = x.query[:, h] @ first[h].T, x.key[:, h] @ second[h].T
        heads.append((query[:, :, None] + key[:, None]).tanh() @ last[h])
    scores = x.finish(x.scaling * torch.stack(heads, 1))
    exponentials = torch.where(x.visible, scores.exp(), 0.0)
    total = exponentials.sum(-1, keepdim=True)
    if x.sink is not None:
        total = total + x.sink.double().reshape(1, -1, 1, 1).exp()
    return exponentials / total.where(total > 0, 1.0) @ x.value


@modifier("scale_invariant")
def scale_invariant(x: Inputs) -> None:
    square = 1 + 2 * (1 + apart(x) / x.options.get("tau", 10.0)).log()
    x.factor = square.sqrt()
    add(x, 1 - square)


@formula("entmax15")
def entmax15(x: Inputs) -> Tensor:
    """The threshold by bisection: the sum falls as it rises."""
    scores = x.scores()
    if x.options.get("scale") == "learned":
        slope = per_query_head(x.parameter("entmax15.log_factor")) * seen(x).log()
        scores = scores * (per_query_head(x.parameter("entmax15.factor")) + slope)
    sink = torch.full_like(scores[..., :1], -torch.inf)
    if x.sink is not None:
        sink = x.sink.double().reshape(1, -1, 1, 1).expand_as(sink)
    scores = torch.cat([torch.where(x.visible, scores, -torch.inf), sink], -1) / 2
    low, high = (scores.amax(-1, keepdim=True).clamp(min=-1e6) - shift for shift in (1.0, 0.0))
    for _ in range(80):
        middle = (low + high) / 2
        above = (scores - middle).clamp(min=0).pow(2).sum(-1, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    # of the threshold's own gradient: the weights sum to 1
    root = (scores - (low + high).detach() / 2).clamp(min=0)
    slope = root / root.sum(-1, keepdim=True).clamp(min=1e-300)
    threshold = (low + high).detach() / 2
    finite = torch.where(scores.isfinite(), scores, 0.0)
    moved = (slope.detach() * (finite - finite.detach())).sum(-1, keepdim=True)
    return (scores - threshold - moved).clamp(min=0).pow(2)[..., :-1] @ x.value


@modifier("temperature")
def temperature(x: Inputs) -> None:
    x.query = x.query * per_query_head(x.parameter("temperature.log_factor").exp())


@modifier("unscaled")
def unscaled(x: Inputs) -> None:
    x.scaling = 1.0


@modifier("scaled")
def scaled(x: Inputs) -> None:
    x.scaling = x.query.shape[-1] ** -x.options.get("exponent", 0.5)


@modifier("nope", rope=False)
def nope(x: Inputs) -> None:
    """Query and key are not turned in the first place."""


def slopes(heads: int) -> list[float]:
    """The recursion of ALiBi's paper, in its own terms."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * h / heads) for h in range(1, heads + 1)]
    power = 1 << (heads.bit_length() - 1)
    return slopes(power) + slopes(2 * power)[::2][: heads - power]


@modifier("alibi")
def alibi(x: Inputs) -> None:
    add(x, -per_query_head(torch.tensor(slopes(x.query.shape[1]))) * apart(x))


@modifier("kerple")
def kerple(x: Inputs) -> None:
    first, second = (per_query_head(x.parameter(f"kerple.raw_r{i}")) for i in (1, 2))
    if x.options.get("kind") == "power":
        bias = -first.exp() * apart(x) ** (2 / (1 + (-second).exp()))
    else:
        bias = -first.exp() * (1 + second.exp() * apart(x)).log()
    add(x, bias)


@modifier("sandwich")
def sandwich(x: Inputs) -> None:
    size, heads = x.options.get("size", 128), x.query.shape[1]
    rates = 10000 ** (-2 * torch.arange(size // 2).double() / size)
    angles = torch.arange(int(apart(x).max()) + 1).double()[:, None] * rates
    vectors = torch.cat([angles.sin(), angles.cos()], -1)
    product = (vectors @ vectors[0])[apart(x).long()] - size / 2
    add(x, product / per_query_head(8 * torch.arange(1, heads + 1) / heads))


@modifier("fox")
def fox(x: Inputs) -> None:
    weight, bias = x.parameter("fox.weight"), x.parameter("fox.bias")
    read = x.value if x.options.get("source") == "value" else x.hidden[:, None]
    logits = (read * weight[None, :, None]).sum(-1) + bias[None, :, None]
    gates = torch.where(x.visible[:, 0].any(1)[:, None], -(1 + (-logits).exp()).log(), 0.0)
    place = torch.arange(gates.shape[-1])
    between = (place > place[:, None]) & (place <= place[:, None, None])  # [i, j, l]: j < l <= i
    add(x, torch.einsum("bhl,ijl->bhij", gates, between.double()))
