"""Which tokens a window with heavy hitters sees: a token at a time, from lists."""

import torch
from torch import Tensor

from helpers.oracle import Case, Inputs, formula, softmax_weights

HALF = 0.5
"""Rounding changes the order of tokens that got nearly the same, and then others are kept."""
CASES: dict[str, Case] = {
    "h2o": Case(
        "h2o", {"size": 17, "heavy": 6, "sinks": 2, "positions": "text", "half_life": 20.0}, half=HALF
    ),
    "h2o, an end to what is kept": Case(
        "h2o",
        {"size": 9, "heavy": 5, "sinks": 2, "positions": "text", "half_life": None, "reach": 14},
        half=HALF,
    ),
    "h2o, published": Case("h2o", {"size": 9, "heavy": 20, "sinks": 0, "half_life": None}, half=HALF),
}


@formula("h2o", windowed=True)
def h2o(x: Inputs) -> Tensor:
    """Softmax over the sinks, the window with the block that is leaving it, and the tokens kept."""
    with torch.no_grad():
        seen = exact(x) & x.visible
    return softmax_weights(x.scores(), seen, x.sink) @ x.value


def exact(x: Inputs) -> Tensor:
    """Boolean `[B, H, N, S]`: what each query sees."""
    scores, (_, rank) = x.scores(), x.ranks()
    seen = torch.zeros(scores.shape, dtype=torch.bool)
    for row in range(scores.shape[0]):
        visible = x.visible[row, 0].diagonal()
        for heads in torch.arange(scores.shape[1]).view(x.kv_heads, -1).tolist():
            own = None if x.sink is None else x.sink.double()[heads]
            seen[row, heads] = exact_of_heads(x, scores[row, heads], rank[row], visible, own)
    return seen


def exact_of_heads(x: Inputs, scores: Tensor, rank: Tensor, visible: Tensor, own: Tensor | None) -> Tensor:
    """What each query of the heads of one key head sees, `[N, S]`; `own` are logits of sinks of the model."""
    size, first, most = x.options["size"], x.options["sinks"], x.options["heavy"]
    half_life, reach = x.options["half_life"], x.options.get("reach")
    if reach in (None, "auto"):  # texts are shorter than the context
        reach = len(visible)
    fade, block = 1.0 if half_life is None else 2 ** (-1 / half_life), max(1, size // 8)
    seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
    got = torch.zeros(scores.shape[-1], dtype=torch.float64)
    sinks: list[int] = []
    recent: list[int] = []
    kept: list[int] = []
    for token in range(len(visible)):
        if not visible[token]:
            continue
        if rank[token] == 0:  # a document begins
            sinks, recent, kept = [], [], []
        (sinks if rank[token] < first else recent).append(token)
        if len(recent) == size + block:
            far = {j for j in kept if rank[token] - rank[j] > reach}
            ranked = sorted(kept + recent[:block], key=lambda j: 1 if j in far else -float(got[j]))
            kept, recent = ranked[:most], recent[block:]
        columns = sinks + recent + kept
        seen[token, columns] = True
        weights = scores[:, token, columns].exp()
        total = weights.sum(-1) if own is None else weights.sum(-1) + own.exp()
        got *= fade
        got[columns] += (weights / total[:, None]).sum(0)
    return seen
