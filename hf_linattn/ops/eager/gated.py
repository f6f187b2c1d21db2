"""Causal linear attention whose state decays feature by feature, in chunks of 16.

    o_i = sum_{j<=i} sum_d q_id exp(G_id - G_jd) k_jd v_j,   G_i = sum_{t<=i} g_t,  g <= 0

("Gated Linear Attention", arXiv:2312.06635, equation 3.) Every exponential is of a number of at most 0,
whatever the gates: none overflows, and none that matters is lost. That takes a tensor `[16, 16, D]` per
chunk, the reason why the chunks are small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.eager import linear
from hf_linattn.ops.tracing import exporting

CHUNK = 16
SPAN = 64 * CHUNK
"""Tokens within which chunks look at each other pair by pair; longer inputs go span by span."""


def causal(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the sums above.

    Args:
        query: `[B, H, N, D]`; H a multiple of Hkv.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        gates: g, logarithms of the decay, `[B, Hkv, N, D]`, at most 0; -inf forgets all.
        state: S `[B, Hkv, D, Dv]` of what came before; None for nothing.

    Returns:
        Output `[B, H, N, Dv]` and S after the last token.
    """
    if state is None:
        state = value.new_zeros(*key.shape[:2], key.shape[3], value.shape[3])
    if exporting():  # for all lengths: how many spans there are is not known
        return _span(query, key, value, gates, state)
    outputs = []
    for start in range(0, key.shape[2], SPAN):
        span = slice(start, start + SPAN)
        parts = (query[:, :, span], key[:, :, span], value[:, :, span], gates[:, :, span])
        output, state = _span(*parts, state)
        outputs.append(output)
    return torch.cat(outputs, 2), state


def _span(query: Tensor, key: Tensor, value: Tensor, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    length = key.shape[2]
    # exp is 0 there as well; of numbers far below, differences would be inf - inf, or rounded coarsely
    gates = gates.clamp_min(-750 if gates.dtype == torch.float64 else -110)
    query, key, value, gates = (
        linear.blocks(x, CHUNK) for x in (query.unflatten(1, (key.shape[1], -1)), key, value, gates)
    )
    inner = gates.cumsum(-2)  # [B, Hkv, chunks, CHUNK, D]
    pairwise = inner.unsqueeze(-2) - inner.unsqueeze(-3)  # [..., i, j, D]
    keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=key.device).tril()
    decayed_key = pairwise.masked_fill(~keep[..., None], float("-inf")).exp() * key.unsqueeze(-3)
    scores = torch.einsum("bhgnid,bhnijd->bhgnij", query, decayed_key)
    output = torch.einsum("bhgnij,bhnje->bhgnie", scores, value)
    chunk_state = torch.einsum("bhnjd,bhnje->bhnde", key * (inner[..., -1:, :] - inner).exp(), value)
    total = F.pad(inner[..., -1, :].cumsum(2), (0, 0, 1, 0))  # before each chunk, and behind the last
    index = torch.arange(total.shape[2], device=key.device)
    log_between = total[:, :, :, None] - total[:, :, None, 1:]  # [B, Hkv, chunks + 1, chunks, D]
    between = log_between.masked_fill((index[:, None] <= index[:-1])[..., None], float("-inf")).exp()
    states = torch.einsum("bhnmd,bhmde->bhnde", between, chunk_state) + total.exp().unsqueeze(
        -1
    ) * state.unsqueeze(2)
    query_in = query * inner.exp().unsqueeze(2)
    output = output + torch.einsum("bhgnid,bhnde->bhgnie", query_in, states[:, :, :-1])
    return linear.leading(output.flatten(3, 4), 3, length).flatten(1, 2), states[:, :, -1]
