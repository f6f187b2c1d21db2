"""Formulas of the patches that see few keys or summaries of them: quadratic, float64, one function each."""

import math

import torch
from torch import Tensor

from helpers.oracle import Case, Inputs, formula, softmax_weights

CASES: dict[str, Case] = {
    "local": Case("local", {"size": 24}),
    "local, before": Case("local", {"size": 16, "before": 2}),
    "strided": Case("strided", {"stride": 8}),
    "strided, window": Case("strided", {"stride": 12, "window": 5}),
    "topk": Case("topk", {"k": 8}, half=0.15),
    "lsh": Case("lsh", {"buckets": 8, "rounds": 2}, half=0.3),
    "lsh, shared": Case("lsh", {"buckets": 4, "rounds": 3, "shared": True, "seed": 5}, half=0.3),
    "linformer": Case("linformer", {"rank": 16, "max_length": 140}),
    "linformer, shared": Case("linformer", {"rank": 30, "shared": True}),
    "pooled": Case("pooled", {"size": 6}),
    "pooled, conv": Case("pooled", {"size": 4, "pool": "conv"}),
    "flow": Case("flow"),
    "power": Case("power", {"keep": 0.7}, half=1.0, smooth=False),  # rounding moves the choice
    "power, tokens": Case("power", {"tokens": 20}, half=1.0, smooth=False),
}


def places(x: Inputs) -> tuple[Tensor, Tensor]:
    """Place of query and key, `[B, 1, N, 1]` and `[B, 1, 1, S]`."""
    query, key = x.ranks()
    return query[:, None, :, None], key[:, None, None]


def softmax_over(x: Inputs, seen: Tensor) -> Tensor:
    return softmax_weights(x.scores(), x.visible & seen, x.sink) @ x.value


@formula("local")
def local(x: Inputs) -> Tensor:
    size, before = x.options["size"], x.options.get("before", 1)
    i, j = (place.div(size, rounding_mode="floor") for place in places(x))
    return softmax_over(x, (j >= i - before) & (j <= i + before))


@formula("strided")
def strided(x: Inputs) -> Tensor:
    i, j = places(x)
    stride = x.options["stride"]
    apart = (i - j).abs()
    return softmax_over(x, (apart < x.options.get("window", stride)) | (apart % stride == 0))


@formula("topk")
def topk(x: Inputs) -> Tensor:
    scores = x.scores()
    ordered = scores.masked_fill(~x.visible, -torch.inf).sort(-1, descending=True).values
    kth = ordered[..., min(x.options["k"], ordered.shape[-1]) - 1]
    return softmax_over(x, scores >= kth[..., None])


@formula("power")
def power(x: Inputs) -> Tensor:
    left = x.visible[:, 0].any(1)
    if not x.first:
        left = x.shared["left"]
    scores = x.scores().masked_fill(~(x.visible & left[:, None, None]), -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0) * left[:, None, :, None]
    kept = torch.zeros_like(left)
    for row, alive in enumerate(left):
        places = alive.nonzero()[:, 0]
        received = weights[row].sum((0, 1))[places[1:]]
        count = math.ceil(len(places) * x.options.get("keep", 0.9))
        count = min(x.options.get("tokens", count), len(places))
        kept[row, places[:1]] = True
        kept[row, places[1:][received.argsort(descending=True)[: count - 1]]] = True
    x.shared["left"] = kept
    return weights @ x.value


@formula("lsh")
def lsh(x: Inputs) -> Tensor:
    itself = torch.eye(x.query.shape[2], dtype=torch.bool)
    shared = x.options.get("shared", False)
    if shared:
        direction = x.key / (x.key**2).sum(-1, keepdim=True).sqrt()
        x.query = (x.query**2).sum(-1, keepdim=True).sqrt() * direction
        x.key = direction * x.key.shape[-1] ** 0.5
    same = torch.zeros(*x.query.shape[:3], x.key.shape[2], dtype=torch.bool)
    for rotation in x.parameter("lsh.rotations"):
        query, key = (torch.cat([y @ rotation, -(y @ rotation)], -1).argmax(-1) for y in (x.query, x.key))
        same |= query[..., None] == key[..., None, :]
    if not shared:
        return softmax_over(x, same | itself)
    lonely = ~(same & x.visible & ~itself).any(-1, keepdim=True)
    return softmax_over(x, (same & ~itself) | (itself & lonely))


@formula("linformer", scores=False)
def linformer(x: Inputs) -> Tensor:
    to_key = x.parameter("linformer.key_projection")
    to_value = to_key if x.options.get("shared") else x.parameter("linformer.value_projection")
    rows = []
    for row in range(x.query.shape[0]):
        tokens = x.visible[row, 0].any(0).nonzero()[:, 0]
        mixtures = (to_key[:, : len(tokens)] != 0).any(1)  # the others hold no token
        key = to_key[mixtures, : len(tokens)] @ x.key[row][:, tokens]
        value = to_value[mixtures, : len(tokens)] @ x.value[row][:, tokens]
        rows.append((x.query[row] @ key.mT * x.scaling).softmax(-1) @ value)
    return torch.stack(rows)


@formula("pooled", scores=False)
def pooled(x: Inputs) -> Tensor:
    size = x.options["size"]
    if x.options.get("pool") == "conv":
        a, c = (x.per_head(x.parameter(f"pooled.{name}_pool"))[..., None] for name in ("key", "value"))
    else:
        a = c = torch.full((1, size, 1), 1 / size, dtype=torch.float64)
    output = torch.zeros(*x.query.shape[:3], x.value.shape[3], dtype=torch.float64)
    for row in range(output.shape[0]):
        for i in range(output.shape[2]):
            tokens = x.visible[row, 0, i].nonzero()[:, 0]
            if not len(tokens):
                continue
            alone = (len(tokens) - 1) // size * size if x.causal else len(tokens)
            keys, values = [], []
            for block in tokens[:alone].split(size) if alone else ():
                n = len(block)
                keys.append((a[:, :n] * x.key[row][:, block]).sum(1, keepdim=True) * size / n)
                values.append((c[:, :n] * x.value[row][:, block]).sum(1, keepdim=True) * size / n)
            key = torch.cat([*keys, x.key[row][:, tokens[alone:]]], 1)
            value = torch.cat([*values, x.value[row][:, tokens[alone:]]], 1)
            weights = (x.query[row, :, i : i + 1] @ key.mT * x.scaling).softmax(-1)
            output[row, :, i] = (weights @ value)[:, 0]
    return output


@formula("flow", scores=False)
def flow(x: Inputs) -> Tensor:
    eps, query, key = 1e-6, x.query.sigmoid(), x.key.sigmoid()
    seen = x.visible.double()  # row j also says which queries the flow of key j is measured against
    n = seen.sum(-1).clamp(min=1)
    mean = n if x.causal else torch.ones_like(n)

    def through(phi: Tensor, others: Tensor) -> Tensor:
        return ((phi + eps) * (seen @ others + eps)).sum(-1) / mean

    incoming, outgoing = through(query, key), through(key, query)
    sink, source = through(query, key / outgoing[..., None]), through(key, query / incoming[..., None])
    won = source.clamp(-1, 1).exp()
    won = n * won / (seen @ won[..., None])[..., 0].clamp(min=1e-300)
    weights = query @ key.mT / (incoming * mean)[..., None] * won[..., None, :]
    return sink.sigmoid()[..., None] * (torch.where(x.visible, weights, 0.0) @ x.value)
