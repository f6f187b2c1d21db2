"""The gated delta rule in chunks: a state that corrects what it holds under a key, before it adds to it.

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = b_t (v_t - (a_t S_{t-1})^T k_t),   o_t = S_t^T q_t

("Parallelizing Linear Transformers with the Delta Rule", arXiv:2406.06484, section 3; gates as in "Gated
Delta Networks", arXiv:2412.06464, equation 10; by channel as in "Kimi Linear", arXiv:2510.26692, section 3.)
Inside a chunk, with G_t the sum of log a, the corrections u solve a triangular system, the WY form:

    (I + T) u = b (v - exp(G) k S_0),   T_tj = b_t sum_d k_td exp(G_td - G_jd) k_jd for j < t

Every exponential is of a number of at most 0, so none overflows. The system is solved by substitution, never
by an explicit inverse: keys that repeat make that large.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.tracing import exporting

CHUNK = 64
CHUNK_BY_CHANNEL = 16
"""Tokens per chunk where each channel decays by itself, which takes a tensor `[chunk, chunk, D]`."""
LOWEST = -50.0
"""Of log a: exp(-50) forgets all there is in float32, and sums of it over a chunk keep three digits."""


def causal(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Compute the sums above.

    Args:
        query: `[B, H, N, D]`, H a multiple of Hkv; None where the state alone is wanted.
        key: `[B, Hkv, N, D]`, of length 1, or 0 for a token that does not count.
        value: `[B, Hkv, N, Dv]`.
        beta: b, from 0 to 2, `[B, Hkv, N]`; 0 for a token that does not count.
        log_decay: log a, at most 0, `[B, Hkv, N, 1]`, or `[B, Hkv, N, D]` by channel; None for a = 1.
        state: S `[B, Hkv, D, Dv]` of the tokens before; None for nothing.
        documents: `[B, N]` ascending; a new number starts from nothing. None where nothing is packed.

    Returns:
        Output `[B, H, N, Dv]` or None, and S after the last token.
    """
    length = key.shape[2]
    if state is None:
        state = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    if log_decay is None:
        log_decay = key.new_zeros(1, 1, 1, 1).expand(*key.shape[:3], 1)
    if length == 1:
        return _step(query, key, value, beta, log_decay, state)
    size = length  # an exported program has no loop over chunks, whose number it does not know
    if not exporting():
        size = min(length, CHUNK if log_decay.shape[-1] == 1 else CHUNK_BY_CHANNEL)
    grouped = None if query is None else _chunks(query.unflatten(1, (key.shape[1], -1)), size)
    key, value, beta, log_decay = (_chunks(x, size) for x in (key, value, beta[..., None], log_decay))
    inner = log_decay.clamp_min(LOWEST).cumsum(-2)  # [B, Hkv, chunks, C, 1 or D]
    seen, carried, kept = _links(documents, size, key)
    from_start, to_end = carried * inner.exp(), kept * (inner[..., -1:, :] - inner).exp()
    products = _products(grouped, key, inner, seen)
    right = torch.cat([beta * value, beta * from_start * key], -1)
    solved = torch.linalg.solve_triangular(beta * products[0], right, upper=False, unitriangular=True)
    corrections, reads = solved.split([value.shape[-1], key.shape[-1]], -1)
    left, added = from_start[..., -1, :].unsqueeze(-1), (to_end * key).mT
    query_in = None if grouped is None else grouped * from_start.unsqueeze(2)
    outputs = []
    for index in range(key.shape[2]):
        correction = corrections[:, :, index] - reads[:, :, index] @ state
        if query_in is not None:
            read = query_in[:, :, :, index] @ state.unsqueeze(2)
            outputs.append(read + products[1][:, :, :, index] @ correction.unsqueeze(2))
        state = left[:, :, index] * state + added[:, :, index] @ correction
    if not outputs:
        return None, state
    return torch.cat(outputs, -2)[..., :length, :].flatten(1, 2), state


def _step(
    query: Tensor | None, key: Tensor, value: Tensor, beta: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Compute one token."""
    state = state * log_decay.clamp_min(LOWEST).exp().mT
    state = state + key.mT @ (beta[..., None] * (value - key @ state))
    if query is None:
        return None, state
    grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [B, Hkv, G, D]
    return (grouped @ state).flatten(1, 2).unsqueeze(2), state


def _products(query: Tensor | None, key: Tensor, inner: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply keys, and queries, by decayed keys inside each chunk.

    Returns:
        `[B, Hkv, chunks, C, C]` and `[B, Hkv, G, chunks, C, C]`.
    """
    gap = inner.unsqueeze(-2) - inner.unsqueeze(-3)
    gap = gap.masked_fill(~seen.unsqueeze(-1), float("-inf")).exp()  # [..., i, j, 1 or D]
    if gap.shape[-1] == 1:
        gap = gap.squeeze(-1)
        of_keys = key @ key.mT * gap
        return of_keys, of_keys if query is None else query @ key.mT.unsqueeze(2) * gap.unsqueeze(2)
    decayed = gap * key.unsqueeze(-3)
    of_keys = torch.einsum("bhnid,bhnijd->bhnij", key, decayed)
    if query is None:
        return of_keys, of_keys
    return of_keys, torch.einsum("bhgnid,bhnijd->bhgnij", query, decayed)


def _links(documents: Tensor | None, size: int, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tell which tokens of a chunk see which, which see the state before it, and which are left after it.

    Returns:
        Boolean `[B or 1, 1, chunks or 1, C, C]`; 0 or 1, `[B or 1, 1, chunks or 1, C, 1]`, twice.
    """
    seen = torch.ones(1, 1, 1, size, size, dtype=torch.bool, device=key.device).tril()
    if documents is None:
        one = key.new_ones(1, 1, 1, 1, 1)
        return seen, one, one
    missing = -documents.shape[1] % size
    labels = F.pad(documents[:, None], (0, missing), mode="replicate") if missing else documents[:, None]
    labels = labels.unflatten(-1, (-1, size))
    before = torch.cat([labels[:, :, :1, 0], labels[:, :, :-1, -1]], 2)
    seen = seen & (labels[..., :, None] == labels[..., None, :])
    carried, kept = labels == before[..., None], labels == labels[..., -1:]
    return seen, carried.to(key.dtype).unsqueeze(-1), kept.to(key.dtype).unsqueeze(-1)


def _chunks(x: Tensor, size: int) -> Tensor:
    """Cut `[..., N, D]` to `[..., chunks, C, D]`, with zeros behind the end."""
    missing = -x.shape[-2] % size
    padded: Tensor = F.pad(x, (0, 0, 0, missing)) if missing else x
    chunks: Tensor = padded.unflatten(-2, (-1, size))
    return chunks
