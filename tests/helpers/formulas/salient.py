"""Which tokens of a window with salient tokens are exact: a token at a time, from lists."""

import torch
from torch import Tensor

from helpers.oracle import Case, Inputs, elu_plus_one

BLOCK = 16
CASES: dict[str, Case] = {
    "window+elu1, salient": Case(
        "window+elu1", {"size": 9, "sinks": 2, "salient": 6, "positions": "text"}, half=0.1
    ),
    "window+hedgehog, salient": Case(
        "window+hedgehog", {"size": 13, "salient": 20, "mix": "learned"}, half=0.1
    ),
}


def elu_keys(x: Inputs) -> Tensor:
    """phi(k_i) . phi(k_j)."""
    return elu_plus_one(x.key) @ elu_plus_one(x.key).mT


def hedgehog_keys(x: Inputs) -> Tensor:
    """phi(k_i) . phi(k_j), with the keys' own weights on both sides."""
    key = x.key @ x.per_head(x.parameter("window.rest.key_weight")).mT
    phi = torch.cat([key.softmax(-1), (-key).softmax(-1)], -1)
    return phi @ phi.mT


def exact(x: Inputs, own: Tensor) -> Tensor:
    """Boolean `[B, H, N, S]`: sinks, the window with the block that is leaving it, and salient tokens."""
    seen = torch.zeros(own.shape, dtype=torch.bool)
    _, rank = x.ranks()
    own, value = own.detach(), x.value.detach()
    for row in range(own.shape[0]):
        for head in range(own.shape[1]):
            visible = x.visible[row, 0].diagonal()
            exact_of_head(x, own[row, head], rank[row], visible, seen[row, head], value[row, head])
    return seen


def exact_of_head(x: Inputs, own: Tensor, rank: Tensor, visible: Tensor, seen: Tensor, value: Tensor) -> None:
    """Mark what each query of one head sees."""
    size, first, most = x.options["size"], x.options.get("sinks", 0), x.options["salient"]
    sinks: list[int] = []
    recent: list[int] = []
    kept: list[int] = []
    gone: list[int] = []

    def error(token: int) -> float:
        if not gone:
            return float(value[token].norm())
        weights = own[token, gone] / own[token, gone].sum()
        return float((value[token] - weights @ value[gone]).norm())

    for token in range(len(visible)):
        if visible[token]:
            (sinks if rank[token] < first else recent).append(token)
        if len(recent) == size + BLOCK:
            candidates = sorted(kept + recent[:BLOCK], key=error, reverse=True)
            kept, recent = candidates[:most], recent[BLOCK:]
            gone = gone + candidates[most:]
        seen[token, sinks + recent + kept] = True
