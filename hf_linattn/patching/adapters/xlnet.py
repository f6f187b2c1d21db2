"""XLNet: relative positions and segments as a bias, and a second stream of queries for targets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, index_of


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    return {"is_causal": config.attn_type == "uni", "head_dim": module.d_head, "layer_idx": index_of(name)}


def _projected(x: Tensor, weight: Tensor) -> Tensor:
    """`[N, B, M]` by `[M, H, D]` -> `[N, B, H, D]`."""
    return torch.einsum("ibh,hnd->ibnd", x, weight)


def _bias(self: Any, query: Tensor, place: Tensor, segments: Tensor | None, keys: int) -> Tensor:
    """What a key's place, from the query on, and its segment add to the scores, `[B, H, N, S]`."""
    bias = torch.einsum("ibnd,jbnd->bnij", query + self.r_r_bias, place)
    bias = self.rel_shift_bnij(bias, klen=keys)
    if segments is not None:
        own = torch.einsum("ibnd,snd->ibns", query + self.r_s_bias, self.seg_embed)
        bias = bias + torch.einsum("ijbs,ibns->bnij", segments, own)
    scaled: Tensor = bias * self.scale
    return scaled


@adapts("xlnet.XLNetRelativeAttention", attributes=_attributes)
def forward(
    self: Any,
    h: Tensor,
    g: Tensor | None,
    attn_mask_h: Tensor | None,
    attn_mask_g: Tensor | None,
    r: Tensor,
    seg_mat: Tensor | None,
    mems: Tensor | None = None,
    target_mapping: Tensor | None = None,
    output_attentions: bool = False,
) -> tuple[Any, ...]:
    """Attend as `XLNetRelativeAttention.forward` does, one stream after the other.

    A target that sees no token at all gets 0, where the module's own code gives it the mean of all values.
    """
    states = h if mems is None or mems.dim() <= 1 else torch.cat([mems, h], dim=0)
    key, value = _projected(states, self.k), _projected(states, self.v)
    place = _projected(r.to(self.r.dtype), self.r)
    outputs: list[Any] = [None, None]
    seen: list[Any] = []
    for stream, (tokens, mask) in enumerate(((h, attn_mask_h), (g, attn_mask_g))):
        if tokens is None:
            continue
        query = _projected(tokens, self.q)
        if stream and target_mapping is not None:
            query = torch.einsum("mbnd,mlb->lbnd", query, target_mapping)
        output, weights = attention_interface(
            self,
            (query + self.r_w_bias).permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            None if mask is None else (mask <= 0).permute(2, 3, 0, 1),
            scaling=self.scale,
            dropout=dropout_of(self, self.dropout),
            position_bias=_bias(self, query, place, seg_mat, key.shape[0]),
            output_attentions=output_attentions,
        )
        output = output.transpose(0, 1)
        if stream and target_mapping is not None:
            output = torch.einsum("lbnd,mlb->mbnd", output, target_mapping)
        outputs[stream] = self.post_attention(tokens, output)
        seen.append(None if weights is None else weights.permute(2, 3, 0, 1))
    if output_attentions:
        outputs.append(tuple(seen) if g is not None else seen[0])
    return tuple(outputs)
