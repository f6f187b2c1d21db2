"""Attention with all pairs at once, in float64: the oracle of tests/ops. It shares no line with the code."""

from __future__ import annotations

import torch


def feature_map(x, kind, is_query, eps=0.0):
    """phi of queries or keys; queries of "elu1" are divided by a factor per row, which divides away."""
    if kind == "elu1":
        shift = x.amax(-1, keepdim=True).clamp(max=0).detach() if is_query else 0.0
        return torch.where(x > 0, x + 1, (x.clamp(max=0) - shift).exp())
    return x.relu() + eps if kind == "relu" else x


def repeated(x, heads):
    """`[B, Hkv, ...]` -> `[B, H, ...]`: query head h has key head h // (H / Hkv)."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def linear(
    phi_q,
    phi_k,
    value,
    *,
    causal=True,
    normalise=True,
    hidden=None,
    S=None,
    z=None,
    log_decay=None,
    documents=None,
):
    """Linear attention: output `[B, H, N, Dv]`, total `[B, H, N]`, and the state after, S and z.

    Args:
        phi_q: features `[B, H, N, D]`.
        phi_k: features `[B, Hkv, M, D]`; M == N where causal.
        value: `[B, Hkv, M, Dv]`.
        causal: query i sees keys up to i.
        normalise: divide by the total; 0 where that is 0.
        hidden: `[B, M]`, True at keys that do not count.
        S, z: the state before; None for nothing.
        log_decay: `[B, Hkv, N]`; causal only.
        documents: `[B, N]`; causal only. The state before belongs to the first.
    """
    if hidden is not None:
        phi_k, value = (x.masked_fill(hidden[:, None, :, None], 0) for x in (phi_k, value))
    heads, (batch, kv_heads, length) = phi_q.shape[1], phi_k.shape[:3]
    weight = phi_q.new_ones(batch, kv_heads, phi_q.shape[2], length)
    weight = weight.tril() if causal else weight
    of_state, of_key = (
        phi_q.new_ones(batch, kv_heads, phi_q.shape[2]),
        phi_q.new_ones(batch, kv_heads, length),
    )
    if log_decay is not None:
        running = log_decay.cumsum(-1)
        weight = weight * (running[..., :, None] - running[..., None, :]).tril().exp()
        of_state, of_key = running.exp(), (running[..., -1:] - running).exp()
    if documents is not None:
        weight = weight * (documents[:, None, :, None] == documents[:, None, None, :])
        of_state = of_state * (documents == documents[:, :1])[:, None]
        of_key = of_key * (documents == documents[:, -1:])[:, None]
    scores = phi_q @ repeated(phi_k, heads).mT * repeated(weight, heads)
    numerator, total = scores @ repeated(value, heads), scores.sum(-1)
    kept = phi_k * of_key[..., None]
    S_after, z_after = kept.mT @ value, kept.sum(2)
    if S is not None:
        read = phi_q * repeated(of_state, heads)[..., None]
        numerator = numerator + read @ repeated(S, heads)
        total = total + (read * repeated(z, heads)[:, :, None]).sum(-1)
        left = of_state[:, :, -1] if causal else of_state.new_ones(batch, kv_heads)
        S_after, z_after = S_after + S * left[..., None, None], z_after + z * left[..., None]
    output = numerator / torch.where(total > 0, total, 1)[..., None] if normalise else numerator
    return output, total, S_after, z_after


def softmax(scores, value, others=None):
    """Softmax attention, joined with sums over other tokens: `[B, H, N, Dv]`; 0 where nothing is seen.

    Args:
        scores: `[B, H, N, S]`, -inf where a key is not visible.
        value: `[B, Hkv, S, Dv]`.
        others: sums `[B, H, N, Dv]`, totals `[B, H, N]`, both to be multiplied by the exponential of the
            third, `[B, H, N]`, where the total is above 0; None for none.
    """
    top = scores.detach().amax(-1)
    if others is not None:
        values, other_total, log_scale = others
        log_scale = torch.where(other_total > 0, log_scale, float("-inf"))
        top = torch.maximum(top, log_scale.detach())
    top = top.clamp_min(-1e30)  # nothing is seen
    weights = (scores - top[..., None]).exp()
    numerator, total = weights @ repeated(value, scores.shape[1]), weights.sum(-1)
    if others is not None:
        factor = (log_scale - top).exp()
        numerator, total = numerator + factor[..., None] * values, total + factor * other_total
    return numerator / torch.where(total > 0, total, 1)[..., None]
