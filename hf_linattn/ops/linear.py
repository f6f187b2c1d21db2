"""Normalised linear attention from features: causal in chunks, bidirectional, and from a carried state.

    o_i = sum_{j in V(i)} (phi_q(q_i) . phi_k(k_j)) v_j / sum_{j in V(i)} phi_q(q_i) . phi_k(k_j)

("Transformers are RNNs", arXiv:2006.16236, equations 5 and 9.) Features and values come in float32 (float64
in float64 models), so state, normaliser and denominators are never kept in half precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class State(NamedTuple):
    """S = sum_j phi(k_j) v_j^T, `[B, Hkv, D, Dv]`, and z = sum_j phi(k_j), `[B, Hkv, D]`."""

    S: Tensor
    z: Tensor


def state_of(phi_k: Tensor, value: Tensor) -> State:
    """The state after the keys `[B, Hkv, N, D]` with values `[B, Hkv, N, Dv]`."""
    return State(torch.einsum("bhnd,bhne->bhde", phi_k, value), phi_k.sum(2))


def grouped(phi_q: Tensor, kv_heads: int) -> Tensor:
    """Query heads by the key head they share: `[B, H, N, D]` -> `[B, Hkv, H / Hkv, N, D]`."""
    shared: Tensor = phi_q.unflatten(1, (kv_heads, -1))
    return shared


def normalised(numerator: Tensor, denominator: Tensor) -> Tensor:
    """`[B, Hkv, G, N, Dv]`, `[B, Hkv, G, N]` -> `[B, H, N, Dv]`.

    The clamp changes rows that see nothing, 0 / 0, and gives 0 for them; an added epsilon would bias all
    rows.
    """
    tiny = torch.finfo(denominator.dtype).tiny
    return (numerator / denominator.clamp_min(tiny).unsqueeze(-1)).flatten(1, 2)


def read(phi_q: Tensor, state: State) -> Tensor:
    """Every query reads the same state: bidirectional attention, and one decoded token."""
    query = grouped(phi_q, state.S.shape[1])
    numerator = torch.einsum("bhgnd,bhde->bhgne", query, state.S)
    return normalised(numerator, torch.einsum("bhgnd,bhd->bhgn", query, state.z))


def causal(
    phi_q: Tensor, phi_k: Tensor, value: Tensor, state: State | None = None, documents: Tensor | None = None
) -> tuple[Tensor, State]:
    """Causal attention, quadratic inside chunks of 64 tokens and through the state between them.

    Args:
        phi_q: `[B, H, N, D]`; H a multiple of Hkv.
        phi_k: `[B, Hkv, N, D]`, zero at padded keys.
        value: `[B, Hkv, N, Dv]`, zero at padded keys.
        state: what came before; None for nothing.
        documents: `[B, N]` ascending; a new number starts from an empty state. `state` belongs to the first
            one.

    Returns:
        The output `[B, H, N, Dv]` and the state after the last token, all documents together.
    """
    if phi_k.shape[2] == 1:
        new = state_of(phi_k, value)
        new = new if state is None else State(state.S + new.S, state.z + new.z)
        return read(phi_q, new), new
    length = phi_k.shape[2]
    query, key, values = (_chunks(x) for x in (grouped(phi_q, phi_k.shape[1]), phi_k, value))
    keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=phi_k.device).tril()
    key_out, query_in, links, first_document = key, query, None, None
    if documents is not None:
        index = _chunk_index(length, key.shape[2], phi_k.device)
        label = documents[:, index.clamp(max=length - 1)]  # [B, chunks, CHUNK]
        keep = (keep & (label.unsqueeze(-1) == label.unsqueeze(-2)))[:, None, None]
        first, last = label[..., :1], label[..., -1:]
        key_out = key * (label == last)[:, None, :, :, None]  # the last document of a chunk goes on
        query_in = query * (label == first)[:, None, None, :, :, None]  # the first one looks back
        links = (first == last.transpose(1, 2)).tril(-1).to(key.dtype)  # [B, chunks, chunks]
        first_document = (first[..., 0] == label[:, :1, 0])[:, None].to(key.dtype)
    states, final = _states_before(key_out, values, state, links, first_document)
    scores = torch.einsum("bhgncd,bhnkd->bhgnck", query, key) * keep
    numerator = torch.einsum("bhgnck,bhnke->bhgnce", scores, values)
    numerator = numerator + torch.einsum("bhgncd,bhnde->bhgnce", query_in, states.S)
    denominator = scores.sum(-1) + torch.einsum("bhgncd,bhnd->bhgnc", query_in, states.z)
    numerator, denominator = numerator.flatten(3, 4), denominator.flatten(3, 4)
    if torch.compiler.is_compiling():
        back = torch.arange(length, device=phi_k.device)
        numerator, denominator = numerator.index_select(3, back), denominator.index_select(3, back)
    else:
        numerator, denominator = numerator[:, :, :, :length], denominator[..., :length]
    return normalised(numerator, denominator), final


def _states_before(
    key: Tensor, value: Tensor, state: State | None, links: Tensor | None, first_document: Tensor | None
) -> tuple[State, State]:
    """The state before each chunk `[B, Hkv, chunks, D, Dv]`, and the one after the last."""
    S = torch.einsum("bhncd,bhnce->bhnde", key, value)
    z = key.sum(3)
    if links is None:
        # shifted, not total minus own: a large chunk would cancel small keys before it
        S, z = F.pad(S, (0, 0, 0, 0, 1, 0)).cumsum(2), F.pad(z, (0, 0, 1, 0)).cumsum(2)
        before, final = State(S[:, :, :-1], z[:, :, :-1]), State(S[:, :, -1], z[:, :, -1])
    else:
        before = State(torch.einsum("bnm,bhmde->bhnde", links, S), torch.einsum("bnm,bhmd->bhnd", links, z))
        final = State(S.sum(2), z.sum(2))
    if state is None:
        return before, final
    carried = State(state.S.unsqueeze(2), state.z.unsqueeze(2))
    if first_document is not None:
        on = first_document.unsqueeze(-1)
        carried = State(carried.S * on.unsqueeze(-1), carried.z * on)
    after = State(final.S + state.S, final.z + state.z)
    return State(before.S + carried.S, before.z + carried.z), after


def _chunk_index(length: int, chunks: int, device: torch.device) -> Tensor:
    return torch.arange(chunks, device=device)[:, None] * CHUNK + torch.arange(CHUNK, device=device)


def _chunks(x: Tensor) -> Tensor:
    """`[..., N, D]` -> `[..., chunks, CHUNK, D]`, zeros behind the end."""
    length = x.shape[-2]
    chunks = (length + CHUNK - 1) // CHUNK
    if torch.compiler.is_compiling():
        # a constant pad and a gather: slices would put a guard on the length that export cannot prove, and a
        # single chunk would specialise the graph
        index = _chunk_index(length, chunks + 1, x.device)
        return F.pad(x, (0, 0, 0, 2 * CHUNK - 1))[..., index, :]
    padded: Tensor = F.pad(x, (0, 0, 0, chunks * CHUNK - length)).unflatten(-2, (chunks, CHUNK))
    return padded
