"""flow: linear attention in which tokens compete for what flows."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, StatefulAttention, Tokens, upcast
from hf_linattn.ops.eager import linear
from hf_linattn.ops.types import State
from hf_linattn.registry import register

EPSILON = 1e-6
"""Added to every feature and every sum of features, as in the authors' code."""


class Flows(NamedTuple):
    """Sums over the tokens so far; `[B, H, D]` where not said otherwise.

    Attributes:
        S: phi(k_j) v_j^T times what the source won, `[B, H, D, Dv]`.
        keys, queries: phi(k_j), phi(q_j).
        sources, sinks: phi(k_j) over the outgoing flow of j, phi(q_j) over its incoming flow.
        contest: exp of what the sources compete with, `[B, H]`.
    """

    S: Tensor
    keys: Tensor
    queries: Tensor
    sources: Tensor
    sinks: Tensor
    contest: Tensor


@register("flow")
class Flow(StatefulAttention):
    """Flow-attention: keys compete for a conserved flow of information, queries are allotted it.

    o_i = sigmoid(a_i) phi(q_i)/I_i . sum_j phi(k_j) (n softmax_j(c_j) v_j)^T,  phi = sigmoid
    I_i = phi(q_i) . sum_j phi(k_j),  O_j = phi(k_j) . sum_i phi(q_i)     incoming and outgoing flow
    a_i = phi(q_i) . sum_j phi(k_j)/O_j,  c_j = phi(k_j) . sum_i phi(q_i)/I_i, held in [-1, 1]

    Causal, as in the authors' code: every sum runs over the tokens so far and all four flows are divided by
    their number; O_j and c_j are measured when j comes, against the queries up to j. Keys compete for each
    query head apart, so the state holds one S per query head also where heads share keys.

    Use: in place of elu1 where rows should be sharper at the same cost; fine-tune it, the sigmoid was not
        what the model was trained with. Cross-attention is refused: flows sum over queries, and a decoder's
        later queries would reach earlier ones.

    Source: "Flowformer", Wu et al. 2022, arXiv:2202.06258, sections 3.2 and 3.3; causal form: the code at
        github.com/thuml/Flowformer.
    """

    group = "feature map"
    cross = False
    needs_visible_count = True

    def causal(self, tokens: Tokens, state: Flows | None) -> tuple[Tensor, Flows]:
        """Compute running sums, and S in chunks."""
        phi_q, phi_k, value, count = self._mapped(tokens)
        if state is None:
            empty = phi_k.new_zeros(*phi_k.shape[:2], phi_k.shape[3])
            state = Flows(
                empty.unsqueeze(-1) * value[:, :, :1],
                empty,
                empty,
                empty,
                empty,
                empty.new_zeros(empty.shape[:2]),
            )
        keys, queries = _running(phi_k, state.keys), _running(phi_q, state.queries)
        incoming, outgoing = _flow(phi_q, keys) / count, _flow(phi_k, queries) / count
        sources = _running(phi_k / outgoing.unsqueeze(-1), state.sources)
        sinks = _running(phi_q / incoming.unsqueeze(-1), state.sinks)
        contest = tokens.hide((_flow(phi_k, sinks) / count).clamp(-1, 1).exp())
        total = _running(contest, state.contest)
        value = value * _shares(contest, total, count).unsqueeze(-1)
        before = State(state.S, state.keys)
        phi = phi_q / (incoming * count).unsqueeze(-1)
        moved, _, after = linear.causal(phi, phi_k, value, before)
        allotted = (_flow(phi_q, sources) / count).sigmoid()
        sums = (x[:, :, -1] for x in (queries, sources, sinks, total))
        return moved * allotted.unsqueeze(-1), Flows(after.S, after.z, *sums)

    def bidirectional(self, tokens: Tokens) -> Tensor:
        """Compute sums over all tokens."""
        phi_q, phi_k, value, count = self._mapped(tokens)
        incoming = _flow(phi_q, phi_k.sum(2, keepdim=True)).unsqueeze(-1)
        outgoing = _flow(phi_k, phi_q.sum(2, keepdim=True)).unsqueeze(-1)
        sources, sinks = (phi_k / outgoing).sum(2, keepdim=True), (phi_q / incoming).sum(2, keepdim=True)
        contest = tokens.hide(_flow(phi_k, sinks).clamp(-1, 1).exp())
        share = _shares(contest, contest.sum(-1, keepdim=True), count)
        moved, _ = linear.read(phi_q / incoming, linear.state_of(phi_k, value * share.unsqueeze(-1)))
        return moved * _flow(phi_q, sources).sigmoid().unsqueeze(-1)

    def _mapped(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return features `[B, H, N, D]` and values, 0 at padding; the number of tokens `[B or 1, 1, N]`."""
        assert tokens.query is not None
        assert tokens.count is not None
        shared = tokens.query.shape[1] // tokens.key.shape[1]
        phi_q = tokens.hide(upcast(tokens.query).sigmoid())
        phi_k = tokens.hide(upcast(tokens.key).sigmoid()).repeat_interleave(shared, 1)
        value = tokens.hide(upcast(tokens.value)).repeat_interleave(shared, 1)
        return phi_q, phi_k, value, tokens.count[:, None].clamp_min(1).to(phi_q.dtype)

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count the sums in float32 (float64 in float64 models)."""
        if site.heads is None or site.head_dim is None or site.value_dim is None:
            return None
        return max(size, 4) * site.heads * (site.head_dim * (site.value_dim + 4) + 1)


def _flow(phi: Tensor, total: Tensor) -> Tensor:
    """Multiply phi . total, `[B, H, N]`, never 0."""
    return ((phi + EPSILON) * (total + EPSILON)).sum(-1)


def _running(x: Tensor, before: Tensor) -> Tensor:
    """Sum along the tokens, `[B, H, N, ...]`, from the sums `[B, H, ...]` of earlier ones."""
    return x.cumsum(2) + before.unsqueeze(2)


def _shares(contest: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """Return what each source wins of n, `[B, H, N]`."""
    return contest / total.clamp_min(torch.finfo(total.dtype).tiny) * count
