"""Base classes of patches: what one file in `patches/` fills in, and what it gets for that.

    LinearAttention   feature maps of query and key  -> causal, bidirectional, cached, padded, packed:
    everything ScoreAttention    weights of the scores, or a sink logit
    Modifier          changes the query before any attention

A patch is an `nn.Module`, made once per attention module. The keyword-only parameters of its constructor are
its options; its parameters, if any, are learned. Parameters are read inside `forward` only, where offloading
loads them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_linattn.ops.softmax import softmax_weights
from hf_linattn.sites import Site


class Patch(nn.Module):
    """What is registered under a name. Docstring: first line is the summary users see.

    Class attributes:
        name: set by `@register`.
        linear: the state is of constant size, the time linear in the tokens.
        modifier: changes another attention instead of being one.
        identity: leaves the module's own attention in force.
    """

    name: ClassVar[str] = ""
    linear: ClassVar[bool] = False
    modifier: ClassVar[bool] = False
    identity: ClassVar[bool] = False

    def __init__(self, site: Site) -> None:
        super().__init__()

    def extra_repr(self) -> str:
        """Name in `print(model)`."""
        return self.name


class LinearAttention(Patch):
    """o_i = sum_j (phi_q(q_i) . phi_k(k_j)) v_j / sum_j phi_q(q_i) . phi_k(k_j).

    Give `feature_map`, or `query_map` and `key_map` apart. Features must not be negative, and the query's
    may be scaled by any positive factor per row, since the sum divides it away.
    """

    linear = True

    def feature_map(self, x: Tensor) -> Tensor:
        """phi: `[B, H, N, D]` -> `[B, H, N, F]`; float32 in and out (float64 in float64 models)."""
        raise NotImplementedError(f"{type(self).__name__} has neither feature_map nor query_map and key_map")

    def query_map(self, query: Tensor) -> Tensor:
        """phi_q; after rotary embedding, without 1/sqrt(D)."""
        return self.feature_map(query)

    def key_map(self, key: Tensor) -> Tensor:
        """phi_k."""
        return self.feature_map(key)

    def forward(self, query: Tensor | None, key: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Features of queries `[B, H, N, D]` and keys `[B, Hkv, N, D]`; None passes through."""

        def upcast(x: Tensor) -> Tensor:
            return x if x.dtype == torch.float64 else x.float()

        return (
            None if query is None else self.query_map(upcast(query)),
            None if key is None else self.key_map(upcast(key)),
        )


class ScoreAttention(Patch):
    """o_i = sum_j w_ij v_j with weights from the scores s_ij = scaling q_i . k_j of the visible keys.

    Softmax as it stands. Override `sink_logit` to add a key of value 0 (fused kernels stay in use), or
    `weights` for any other function of the scores (quadratic).
    """

    def sink_logit(self, query: Tensor) -> Tensor | None:
        """Logit b of an extra key with value 0: scalar or `[H]`; None for no such key."""
        return None

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """`[B, H, N, S]` -> weights of the same shape.

        Args:
            scores: scaled, capped and biased, float32 (float64 in float64 models).
            mask: True where visible, broadcast to the scores; None where all is.
            sink: from `sink_logit`, joined with the model's own sinks.
        """
        return softmax_weights(scores, mask, sink)

    def forward(self, query: Tensor) -> Tensor | None:
        """The sink's logit; parameters are read here."""
        return self.sink_logit(query)


class Modifier(Patch):
    """Scales queries before the attention it is composed with; scores are scaled by the same factor."""

    modifier = True

    def query_scale(self, visible: Tensor) -> Tensor:
        """Factor of each query.

        Args:
            visible: number n_i of keys that query i sees, `[B or 1, 1 or H, N]`, float32 (float64 in float64
                models).

        Returns:
            Broadcast to `[B, H, N]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no query_scale")

    def forward(self, query: Tensor, visible: Tensor) -> Tensor:
        """`[B, H, N, D]` -> the same, scaled in float32."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        return (query.to(dtype) * self.query_scale(visible.to(dtype)).unsqueeze(-1)).to(query.dtype)


def options_of(patch: Patch, names: Any) -> dict[str, Any]:
    """Current values of a patch's options."""
    return {name: getattr(patch, name) for name in names}
