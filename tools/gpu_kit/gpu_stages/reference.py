"""Linear attention in float64, span by span, with torch's own gradients: what kernels are held against.

It shares no line with the kernels or with the package's other forms.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPAN = 512


def features(x: Tensor, kind: str, eps: float, query: bool) -> Tensor:
    """Apply a map to `[B, H, N, D]`; queries of elu1 are scaled per row, as the kernels scale them."""
    if kind == "elu1":
        shift = x.detach().amax(-1, keepdim=True).clamp(max=0) if query else torch.zeros_like(x[..., :1])
        return torch.where(x > 0, x + 1, (x.clamp(max=0) - shift).exp())
    return x.relu() + eps if kind == "relu" else x


def linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    kind: str,
    eps: float = 0.0,
    normalise: bool = True,
    causal: bool = True,
    valid: Tensor | None = None,
    state: tuple[Tensor, Tensor] | None = None,
    log_decay: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute output `[B, H, N, Dv]`, total `[B, H, N]`, S `[B, Hkv, D, Dv]` and z `[B, Hkv, D]`.

    Args:
        query: `[B, H, N, D]`, float64 like all that follow.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        kind: "elu1", "relu" or "none".
        eps: added to the features of "relu".
        normalise: divide by the total.
        causal: else over all keys, without decay and documents.
        valid: boolean `[B, N]`; None for all.
        state: S and z before the first token.
        log_decay: `[B, Hkv, N]`; each token scales all before it by its exponential.
        documents: `[B, N]`, ascending; the state before belongs to the first, that after to the last.
    """
    phi_q, phi_k = features(query, kind, eps, True), features(key, kind, eps, False)
    if valid is not None:
        phi_k = phi_k * valid[:, None, :, None]
        value = torch.where(valid[:, None, :, None], value, 0.0)
    batch, kv_heads, length, width = key.shape
    if state is None:
        S = query.new_zeros(batch, kv_heads, width, value.shape[3])
        z = query.new_zeros(batch, kv_heads, width)
    else:
        S, z = state
    phi_q = phi_q.unflatten(1, (kv_heads, -1))
    if not causal:
        S, z = S + phi_k.mT @ value, z + phi_k.sum(2)
        numerator, total = phi_q @ S[:, :, None], (phi_q @ z[:, :, None, :, None])[..., 0]
        return *_divided(numerator, total, normalise), S, z
    numerators, totals = [], []
    label = None if documents is None else documents[:, :1]
    for start in range(0, length, SPAN):
        part = slice(start, min(start + SPAN, length))
        Q, K, V = phi_q[:, :, :, part], phi_k[:, :, part], value[:, :, part]
        size = K.shape[2]
        pairs = torch.ones(size, size, dtype=Q.dtype, device=Q.device).tril()
        of_state = of_key = torch.ones(1, 1, size, dtype=Q.dtype, device=Q.device)
        if log_decay is not None:
            running = log_decay[:, :, part].cumsum(-1)
            pairs = pairs * (running[..., None] - running[..., None, :]).clamp(max=0).exp()
            of_state, of_key = running.exp(), (running[..., -1:] - running).exp()
        kept = of_state[..., -1]
        if documents is not None and label is not None:
            labels = documents[:, part]
            pairs = pairs * (labels[:, None, :, None] == labels[:, None, None, :])
            of_state = of_state * (labels == label)[:, None]
            of_key = of_key * (labels == labels[:, -1:])[:, None]
            kept = kept * (labels[:, -1:] == label)
            label = labels[:, -1:]
        scores = (Q @ K[:, :, None].mT) * (pairs[:, :, None] if pairs.dim() == 4 else pairs)
        Q = Q * of_state[:, :, None, :, None]
        totals.append(scores.sum(-1) + (Q @ z[:, :, None, :, None])[..., 0])
        numerators.append(scores @ V[:, :, None] + Q @ S[:, :, None])
        K = K * of_key[..., None]
        S, z = S * kept[..., None, None] + K.mT @ V, z * kept[..., None] + K.sum(2)
    return *_divided(torch.cat(numerators, 3), torch.cat(totals, 3), normalise), S, z


def _divided(numerator: Tensor, total: Tensor, normalise: bool) -> tuple[Tensor, Tensor]:
    if normalise:
        numerator = torch.where(total[..., None] == 0, 0.0, numerator / total[..., None])
    return numerator.flatten(1, 2), total.flatten(1, 2)
