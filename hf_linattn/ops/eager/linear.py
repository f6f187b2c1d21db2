"""Linear attention from features: causal in chunks, bidirectional, from a carried state, with decay.

    numerator_i = sum_{j in V(i)} a_ij (phi_q(q_i) . phi_k(k_j)) v_j
    total_i     = sum_{j in V(i)} a_ij (phi_q(q_i) . phi_k(k_j))        a_ij = prod_{j < t <= i} decay_t

("Transformers are RNNs", arXiv:2006.16236, equations 5 and 9; decay as in "Retentive Network",
arXiv:2307.08621, equation 7.) Features and values come in float32 (float64 in float64 models), so state,
normaliser and denominators are never kept in half precision.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_linattn.ops.types import Inputs, OpConfig, Outputs, State, accumulator_dtype

CHUNK = 64
SPAN = 64 * CHUNK
"""Tokens, at most, that are computed at once: their chunks look at each other pair by pair."""
STATES = 1 << 26
"""Numbers, about, of the states before the chunks of a span, of which there is one each: 256 MiB."""
Sums = tuple[Tensor, Tensor, State]
"""Numerator, total, and the state after."""


def state_of(phi_k: Tensor, value: Tensor) -> State:
    """Sum up keys `[B, Hkv, N, D]` with values `[B, Hkv, N, Dv]` to a state."""
    return State(torch.einsum("bhnd,bhne->bhde", phi_k, value), phi_k.sum(2))


def after(phi_k: Tensor, value: Tensor, log_decay: Tensor | None, state: State | None) -> State:
    """Compute the state after more keys.

    Args:
        phi_k: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        log_decay: `[B, Hkv, N]`, at most 0; None for no decay.
        state: of what came before; None for nothing.
    """
    if log_decay is not None:
        total = log_decay.sum(-1)
        phi_k = phi_k * (total.unsqueeze(-1) - log_decay.cumsum(-1)).exp().unsqueeze(-1)
        state = None if state is None else _scaled(state, total.exp())
    new = state_of(phi_k, value)
    return new if state is None else State(state.S + new.S, state.z + new.z)


def _scaled(state: State, factor: Tensor) -> State:
    factor = factor.unsqueeze(-1)
    return State(state.S * factor.unsqueeze(-1), state.z * factor)


def grouped(phi_q: Tensor, kv_heads: int) -> Tensor:
    """Group query heads by the key head they share: `[B, H, N, D]` -> `[B, Hkv, H / Hkv, N, D]`."""
    shared: Tensor = phi_q.unflatten(1, (kv_heads, -1))
    return shared


def normalised(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide `[B, H, N, Dv]` by `[B, H, N]`.

    Rows that see nothing, 0 / 0, give 0 with finite gradients; an added epsilon would bias all rows. A
    numerator of 16 bits, as `causal` returns it, is written over where nobody wants gradients.
    """
    safe = torch.where(denominator > 0, denominator, 1.0).unsqueeze(-1)
    if numerator.dtype == denominator.dtype or torch.is_grad_enabled():
        return numerator / safe
    return numerator.div_(safe)  # computed in float32, and rounded as the model will have it


def read(phi_q: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """Let every query read the same state: bidirectional attention, and one decoded token.

    Returns:
        Numerator `[B, H, N, Dv]` and total `[B, H, N]`.
    """
    query = grouped(phi_q, state.S.shape[1])
    numerator = torch.einsum("bhgnd,bhde->bhgne", query, state.S).flatten(1, 2)
    return numerator, torch.einsum("bhgnd,bhd->bhgn", query, state.z).flatten(1, 2)


def plain(inputs: Inputs, config: OpConfig) -> Outputs:
    """Compute what kernels do, maps and all, by operations whose gradients have gradients."""
    query, key, value, valid, S, z, log_decay, documents = inputs
    dtype = accumulator_dtype(query, key, value)
    query, key, values = (x.to(dtype) for x in (query, key, value))
    hidden = None if valid is None else ~valid[:, None, :, None]
    if hidden is not None:  # by no product: they may hold NaN
        key, values = (x.masked_fill(hidden, 0) for x in (key, values))
    scale = None
    if config.kind == "elu1":  # of queries: over a factor that divides away, and counts as a constant
        scale = query.detach().amax(-1, keepdim=True).clamp(max=0)
    phi_q, phi_k = _features(query, config, scale), _features(key, config, None)
    phi_k = phi_k if hidden is None else phi_k.masked_fill(hidden, 0)
    if config.causal:
        state = None if S is None or z is None else State(S, z)
        numerator, total, after = causal(phi_q, phi_k, values, state, documents, log_decay)
    else:
        after = state_of(phi_k, values)
        numerator, total = read(phi_q, after)
    output = normalised(numerator, total).to(value.dtype) if config.normalise else numerator
    return Outputs(output, total, *after)


def _features(x: Tensor, config: OpConfig, log_scale: Tensor | None) -> Tensor:
    if config.kind == "elu1":
        low = x.clamp(max=0)
        return torch.where(x > 0, x, 0) + (low if log_scale is None else low - log_scale).exp()
    return x.relu() + config.eps if config.kind == "relu" else x


def step(
    phi_q: Tensor,
    phi_k: Tensor,
    value: Tensor,
    state: State | None,
    log_decay: Tensor | None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor, State]:
    """Decode one token, in few operations: update the state, then read it.

    Args:
        phi_q: `[B, H, 1, D]`.
        phi_k: `[B, Hkv, 1, D]`.
        value: `[B, Hkv, 1, Dv]`.
        state: before the token; None for nothing.
        log_decay: `[B, Hkv, 1]`, at most 0; None for no decay.
        in_place: the state may be written over.

    Returns:
        Numerator `[B, H, 1, Dv]`, total `[B, H, 1]`, and the state after the token.
    """
    if state is None:
        state = State(phi_k.mT * value, phi_k[:, :, 0])
    elif in_place and state.S.dtype == value.dtype:
        if log_decay is not None:
            factor = log_decay[:, :, 0].exp().unsqueeze(-1)
            state.S.mul_(factor.unsqueeze(-1))
            state.z.mul_(factor)
        state.S.addcmul_(phi_k.mT, value)
        state.z.add_(phi_k[:, :, 0])
    else:
        state = state if log_decay is None else _scaled(state, log_decay[:, :, 0].exp())
        state = State(torch.addcmul(state.S, phi_k.mT, value), state.z + phi_k[:, :, 0])
    (batch, heads, _, size), kv_heads = phi_q.shape, phi_k.shape[1]
    query = phi_q.reshape(batch * kv_heads, heads // kv_heads, size)  # bmm: a matmul of views takes longer
    numerator = torch.bmm(query, state.S.flatten(0, 1))
    total = torch.bmm(query, state.z.flatten(0, 1).unsqueeze(-1))
    return numerator.view(batch, heads, 1, value.shape[3]), total.view(batch, heads, 1), state


def causal(
    phi_q: Tensor,
    phi_k: Tensor,
    value: Tensor,
    state: State | None = None,
    documents: Tensor | None = None,
    log_decay: Tensor | None = None,
    in_place: bool = False,
    products: torch.dtype | None = None,
) -> Sums:
    """Compute causal attention, quadratic inside chunks of 64 tokens and through the state between them.

    Args:
        phi_q: `[B, H, N, D]`; H a multiple of Hkv.
        phi_k: `[B, Hkv, N, D]`, zero at padded keys.
        value: `[B, Hkv, N, Dv]`, zero at padded keys.
        state: what came before; None for nothing.
        documents: `[B, N]` ascending; a new number starts from an empty state. `state` belongs to the first
            one.
        log_decay: `[B, Hkv, N]`, at most 0: each token scales what came before it by its exponential.
        in_place: a single token may write its state over the one before.
        products: dtype to which operands are rounded, and in which they may come; totals and states are
            float32 then. None for that of the features.

    Returns:
        Numerator `[B, H, N, Dv]`, of several tokens in the dtype of products, total `[B, H, N]`, and the
        state of the last document after the last token.
    """
    length = phi_k.shape[2]
    if length == 1:
        if products is not None:
            phi_q, phi_k, value = (x.float() for x in (phi_q, phi_k, value))
        return step(phi_q, phi_k, value, state, log_decay, in_place)

    def run(part: slice, before: State | None) -> Sums:
        labels = None if documents is None else documents[:, part]
        decay = None if log_decay is None else log_decay[:, :, part]
        cut = phi_q[:, :, part], phi_k[:, :, part], value[:, :, part]
        return _block(*cut, before, labels, decay, products)

    if not torch.compiler.is_compiling():  # a graph would be bound to these sizes
        most = span(phi_k.shape[0] * phi_k.shape[1], phi_k.shape[3], value.shape[3])
        if length > most:
            return in_spans(run, length, most, state, documents)
    return _block(phi_q, phi_k, value, state, documents, log_decay, products)


def span(batch_heads: int, features: int, value_dim: int) -> int:
    """Choose the tokens that are computed at once, by the size of their states."""
    chunks = STATES // max(1, batch_heads * features * value_dim)
    return min(SPAN, max(1, chunks) * CHUNK)


def in_spans(
    run: Callable[[slice, State | None], Sums],
    length: int,
    most: int,
    state: State | None,
    documents: Tensor | None,
) -> Sums:
    """Compute spans of tokens one after the other, each from the state of those before.

    Where there are gradients, spans are computed again in the backward: only states between them are kept.

    Args:
        run: computes a slice of tokens after a state.
        length: tokens in all.
        most: tokens of a span.
        state: before all.
        documents: `[B, N]`, or None.
    """
    numerators, totals = [], []
    for start in range(0, length, most):
        part = slice(start, start + most)
        if state is not None and documents is not None and start:
            continues = documents[:, start - 1 : start] == documents[:, start : start + 1]
            state = _scaled(state, continues.to(state.S.dtype))
        if torch.is_grad_enabled():
            sums = checkpoint(run, part, state, use_reentrant=False, preserve_rng_state=False)
        else:
            sums = run(part, state)
        numerators.append(sums[0])
        totals.append(sums[1])
        state = sums[2]
    assert state is not None
    return torch.cat(numerators, 2), torch.cat(totals, 2), state


def _block(
    phi_q: Tensor,
    phi_k: Tensor,
    value: Tensor,
    state: State | None,
    documents: Tensor | None,
    log_decay: Tensor | None,
    products: torch.dtype | None = None,
) -> Sums:
    sums, rounded = (phi_k.dtype, phi_k.dtype) if products is None else (torch.float32, products)
    length, shared = phi_k.shape[2], phi_q.shape[1] // phi_k.shape[1]
    query, key, values = (_chunks(x) for x in (grouped(phi_q, phi_k.shape[1]), phi_k, value))
    # once for all, and laid out as products read them: queries [B, Hkv, chunks, H / Hkv, CHUNK, D]
    query, key, values = (
        x.to(rounded, memory_format=torch.contiguous_format).contiguous()
        for x in (query.transpose(2, 3), key, values)
    )
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=phi_k.device).tril()
    intra: Tensor = lower.to(rounded)
    key_out, query_in, between, from_state = key, query, None, None
    if log_decay is not None:
        running = _chunks(log_decay.unsqueeze(-1))[..., 0].cumsum(-1)  # [B, Hkv, chunks, CHUNK]
        pairwise = running.unsqueeze(-1) - running.unsqueeze(-2)
        intra = pairwise.masked_fill(~lower, float("-inf")).exp()[:, :, :, None].to(rounded)
        key_out = key * (running[..., -1:] - running).exp().unsqueeze(-1).to(rounded)
        query_in = query * running.exp()[:, :, :, None, :, None].to(rounded)
        total = F.pad(running[..., -1].cumsum(-1), (1, 0))  # before each chunk, and behind the last
        chunks = torch.arange(total.shape[-1], device=key.device)
        log_between = total.unsqueeze(-1) - total[..., None, 1:]
        between = log_between.masked_fill(chunks[:, None] <= chunks[:-1], float("-inf")).exp()
        from_state = total.exp()
    if documents is not None:
        index = _chunk_index(length, key.shape[2], phi_k.device)
        label = documents[:, index.clamp(max=length - 1)]  # [B, chunks, CHUNK]
        intra = intra * (label.unsqueeze(-1) == label.unsqueeze(-2))[:, None, :, None]
        first, last = label[..., :1], label[..., -1:]
        key_out = key_out * (label == last)[:, None, :, :, None]  # the last document of a chunk goes on
        query_in = query_in * (label == first)[:, None, :, None, :, None]  # the first one looks back
        reader = torch.cat([first, last[:, -1:]], 1)
        follows = (reader == last.transpose(1, 2)).tril(-1)[:, None].to(sums)
        between = follows if between is None else between * follows
        same_document = (reader[..., 0] == label[:, :1, 0])[:, None].to(sums)
        from_state = same_document if from_state is None else from_state * same_document
    key_sums = key_out.sum(3, dtype=sums)
    added = key_out.mT @ values
    states, final = _states_before(added, key_sums, state, between, from_state)
    query_in = query_in.flatten(3, 4)
    scores = (query.flatten(3, 4) @ key.mT).unflatten(3, (shared, CHUNK)) * intra
    near, far = scores.sum(-1, dtype=sums).flatten(3, 4), query_in @ states.z.to(rounded).unsqueeze(-1)
    numerator = _plus_product(scores.flatten(3, 4) @ values, query_in, states.S.to(rounded))
    total = near + far.squeeze(-1)
    numerator, total = (x.unflatten(3, (shared, CHUNK)).transpose(2, 3) for x in (numerator, total))
    numerator, total = (leading(x.flatten(3, 4), 3, length).flatten(1, 2) for x in (numerator, total))
    return numerator, total, final


def _plus_product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute x + a b of three matrices for each chunk, in one operation."""
    return torch.baddbmm(x.flatten(0, 2), a.flatten(0, 2), b.flatten(0, 2)).view_as(x)


def _states_before(
    S: Tensor, z: Tensor, state: State | None, between: Tensor | None, from_state: Tensor | None
) -> tuple[State, State]:
    """Compute the state before each chunk, `[B, Hkv, chunks, D, Dv]`, and the one after the last.

    Args:
        S: what each chunk adds, `[B, Hkv, chunks, D, Dv]`, which may be of 16 bits.
        z: likewise, `[B, Hkv, chunks, D]`, in the dtype of sums, which the last state has, too.
        state: before the first chunk.
        between: `[B, 1 or Hkv, chunks + 1, chunks]`, what each later place takes of each chunk; None for all.
        from_state: `[B, 1 or Hkv, chunks + 1]`, what each place takes of `state`; None for all.
    """
    carried = None
    if state is not None:
        carried = State(state.S.unsqueeze(2), state.z.unsqueeze(2))
        carried = carried if from_state is None else _scaled(carried, from_state)
    if S.dtype != z.dtype and not torch.compiler.is_compiling():  # the chunks of a graph are not bounded
        return _rounded_states_before(S, z, carried, between)
    S = S.to(z.dtype)
    if between is None:
        # shifted, not total minus own: a large chunk would cancel small keys before it
        S, z = F.pad(S, (0, 0, 0, 0, 1, 0)).cumsum(2), F.pad(z, (0, 0, 1, 0)).cumsum(2)
    else:
        S, z = (between @ S.flatten(3)).unflatten(-1, S.shape[3:]), between @ z
    if carried is not None:
        S, z = S + carried.S, z + carried.z
    return State(S[:, :, :-1], z[:, :, :-1]), State(S[:, :, -1], z[:, :, -1])


def _rounded_states_before(
    S: Tensor, z: Tensor, carried: State | None, between: Tensor | None
) -> tuple[State, State]:
    """Compute `_states_before` by a product, which sums in float32 and rounds once, as its reader would."""
    sizes, parts = S.shape[3:], S.flatten(3)
    if between is None:
        between, weighted = z.new_ones(S.shape[2] + 1, S.shape[2]).tril(-1), parts
    else:
        weighted = parts * between[..., -1, :, None]
    last = weighted.sum(2, dtype=z.dtype).unflatten(-1, sizes)
    S, z = (between[..., :-1, :].to(S.dtype) @ parts).unflatten(-1, sizes), between @ z
    if carried is not None:
        own = carried.S[:, :, : S.shape[2]]
        S, z, last = S + own.to(S.dtype), z + carried.z, last + carried.S[:, :, -1]
    return State(S, z[:, :, :-1]), State(last, z[:, :, -1])


def leading(x: Tensor, axis: int, length: int) -> Tensor:
    """Return the first elements of an axis, in a graph by their indices: a slice would guard the length."""
    if torch.compiler.is_compiling():
        return x.index_select(axis, torch.arange(length, device=x.device))
    return x.narrow(axis, 0, length)


def _chunk_index(length: int, chunks: int, device: torch.device) -> Tensor:
    return torch.arange(chunks, device=device)[:, None] * CHUNK + torch.arange(CHUNK, device=device)


def _chunks(x: Tensor) -> Tensor:
    """Cut `[..., N, D]` to `[..., chunks, CHUNK, D]`, with zeros behind the end."""
    return blocks(x, CHUNK)


def blocks(x: Tensor, size: int, span: int = 0) -> Tensor:
    """Cut `[..., N + span, D]` into overlapping `[..., blocks, size + span, D]`, 0 behind the end."""
    length = x.shape[-2] - span
    if torch.compiler.is_compiling():
        # a constant pad and a gather: slices would put a guard on the length that export cannot prove, and a
        # single block would specialise the graph, so there is one more; written as one quotient, which export
        # can reason about
        count = (length + 2 * size - 1) // size
        index = torch.arange(count, device=x.device)[:, None] * size
        index = index + torch.arange(size + span, device=x.device)
        return F.pad(x, (0, 0, 0, 2 * size - 1))[..., index, :]
    count = (length + size - 1) // size
    if missing := count * size - length:  # a copy
        x = F.pad(x, (0, 0, 0, missing))
    cut: Tensor = x.unfold(-2, size + span, size).mT if span else x.unflatten(-2, (count, size))
    return cut
