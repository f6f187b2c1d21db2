"""What a matrix of attention weights, and the activations around it, look like in numbers. Pure arithmetic.

For one head of one text: weights w_ij `[N, S]` in float64, boolean visible `[N, S]`, and

    p_ij = |w_ij| / sum_j |w_ij|    the weights as shares of their row
    H_i  = - sum_j p_ij log p_ij    entropy, nats
    n_i                             number of keys that query i sees

Linear attention over N tokens has W = (phi_q phi_k^T) / row sums of rank F at most, F its number of features,
but only before the causal mask: a triangular matrix with a positive diagonal is always of full rank. So the
rank is taken of the lower left block too, queries of the second half over keys of the first, which no causal
mask touches.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MASS = 0.9
"""Share of a row's mass whose keys are counted."""


def shares(weights: Tensor) -> Tensor:
    """Turn weights into shares p `[N, S]`; rows without mass stay 0."""
    size = weights.abs()
    return size / size.sum(-1, keepdim=True).clamp_min(torch.finfo(size.dtype).tiny)


def entropy(p: Tensor) -> Tensor:
    """Compute the entropy H `[N]` of shares, in nats."""
    summands: Tensor = torch.special.entr(p)
    return summands.sum(-1)


def keys_for_mass(p: Tensor, mass: float = MASS) -> Tensor:
    """Count the fewest keys `[N]` whose shares sum to `mass`; 0 for rows without mass."""
    total = p.sort(-1, descending=True).values.cumsum(-1)
    # ten equal shares of 0.1 must count as 9 keys although their sum rounds to less
    reached = total < mass - 1e-9
    return torch.where(total[:, -1] > 0, reached.sum(-1) + 1, 0)


def ranks(matrix: Tensor) -> tuple[int, float]:
    """Compute numerical and effective rank of `[N, S]`, from singular values s in float64.

    The first is the number of s_i > max(N, S) eps max(s), as numpy has it, with eps of float32: softmax and
    the sums of linear attention are computed in it. The second is exp of the entropy of s_i / sum s (Roy and
    Vetterli 2007, "The effective rank").
    """
    values = torch.linalg.svdvals(matrix.double())
    top = float(values[0])
    if top == 0:
        return 0, 0.0
    tolerance = max(matrix.shape) * torch.finfo(torch.float32).eps * top
    return int((values > tolerance).sum()), math.exp(float(entropy(values / values.sum())))


def entropy_by_keys(weights: Tensor, visible: Tensor) -> Tensor:
    """Sum number, n, H and H / log n of the queries with 2^(k-1) < n_i <= 2^k into row k of `[bins, 4]`."""
    n = visible.sum(-1)
    seen = n > 0
    n, h = n[seen].double(), entropy(shares(weights[seen]))
    relative = torch.where(n > 1, h / n.log().clamp_min(0.5), 0)  # log 2 = 0.69; n = 1 has no ratio
    # k = ceil(log2 n); - 0.5 keeps a power of two from rounding up
    bins = (n - 0.5).log2().ceil().clamp_min(0).long()
    rows = torch.stack([torch.ones_like(h), n, h, relative], 1)
    sums = torch.zeros(int(bins.max()) + 1 if len(bins) else 0, 4, dtype=h.dtype, device=h.device)
    return sums.index_add_(0, bins, rows)


def head_statistics(weights: Tensor, visible: Tensor) -> dict[str, float | None]:
    """Measure a head's weights `[N, S]`, float64, over the keys that are visible, boolean `[N, S]`.

    See `results.Head` for the numbers. None where there is nothing to measure.
    """
    rows, columns = weights.shape
    late, early = slice(rows // 2, None), slice(0, columns // 2)
    w, seen = weights[late], visible[late]
    n = seen.sum(-1).double()
    w, n = w[n > 0], n[n > 0]
    p = shares(w)
    h = entropy(p)
    rank, effective = ranks(weights)
    # a window hides part of the block, and a masked block says nothing about rank
    whole = rows > 1 and bool(visible[late, early].all())
    block_rank, block_effective = ranks(weights[late, early]) if whole else (None, None)
    return {
        "entropy": _mean(h),
        "relative_entropy": _mean((h / n.log())[n > 1]),
        "effective_share": _mean(h.exp() / n),
        "keys90": _mean(keys_for_mass(p).double()),
        "mass": _mean(w.sum(-1)),
        "negative_mass": _mean(torch.where(w < 0, p, 0).sum(-1)),
        "sink": _mean(p[:, 0]),
        "rank": rank,
        "effective_rank": effective,
        "block_rank": block_rank,
        "block_effective_rank": block_effective,
    }


def score_statistics(query: Tensor, key: Tensor, visible: Tensor, scaling: float) -> dict[str, float | None]:
    """Measure the spread of queries `[N, D]`, keys `[S, D]` and of the scores q_i . k_j of visible pairs.

    Args:
        query: `[N, D]` float64.
        key: `[S, D]` float64.
        visible: boolean `[N, S]`.
        scaling: factor of the scores.
    """
    scores = (query @ key.mT)[visible]
    variance = float(scores.var(correction=0))
    return {
        "score_variance": variance,
        "scaled_score_variance": variance * scaling**2,
        "query_std": float(query.std(correction=0)),
        "key_std": float(key.std(correction=0)),
    }


def received(weights: Tensor, visible: Tensor) -> Tensor:
    """Compute the share `[S]` of all mass that each key gets from the queries of the second half."""
    late = slice(weights.shape[0] // 2, None)
    p = shares(weights[late])
    return p.sum(0) / visible[late].any(-1).sum().clamp_min(1)


def activation_statistics(x: Tensor) -> dict[str, float | None]:
    """Measure outliers of activations `[N, C]`, over all tokens and channels of one text.

    Kurtosis E (x - m)^4 / s^4 (3 for a normal distribution) and the infinity norm max |x| are the measures
    of Bondarenko et al. 2023 (arXiv:2306.12929), outliers their |x - m| > 6 s.
    """
    x = x.double()
    centred = x - x.mean()
    std = centred.square().mean().sqrt().clamp_min(torch.finfo(x.dtype).tiny)
    z = centred / std
    return {
        "kurtosis": float(z.pow(4).mean()),
        "inf_norm": float(x.abs().amax()),
        "outliers": float((z.abs() > 6).double().mean()),
    }


def pooled(weights: Tensor, cells: int) -> Tensor:
    """Shrink `[N, S]` to at most `[cells, cells]`: means over equal blocks, the last over what is left."""
    step = max(1, math.ceil(max(weights.shape) / cells))
    return F.avg_pool2d(weights[None], step, ceil_mode=True, count_include_pad=False)[0]


def _mean(x: Tensor) -> float | None:
    return float(x.mean()) if x.numel() else None
