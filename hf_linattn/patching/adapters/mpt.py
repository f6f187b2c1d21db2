"""MPT: ALiBi as a bias of the scores, for as many tokens as asked for, and clipped projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.patching.adapters.base import (
    adapts,
    attention_interface,
    dropout_of,
    heads_of,
    relative_bias,
)


def _alibi(table: Tensor, keys: int) -> Tensor:
    """Slope x index of the key, `[1, H, 1, keys]`; the table `[H, 1, tokens]` ends with -slope and 0."""
    slopes = table[:, 0, -1] - table[:, 0, -2]
    return (slopes[:, None] * torch.arange(keys, device=table.device))[None, :, None]


@adapts("mpt.MptAttention", masks=lambda config: "additive")
def forward(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `MptAttention.forward` does; its mask is True where a key is hidden."""
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (heads_of(x, self.head_dim) for x in projected.chunk(3, dim=2))
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    visible = None if attention_mask is None else ~attention_mask
    keys = key.shape[2] if visible is None else visible.shape[-1]
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        visible,
        scaling=self.softmax_scale,
        dropout=dropout_of(self, self.attn_dropout_p),
        position_bias=relative_bias(_alibi(position_bias, keys), visible, query.shape[2]),
        **kwargs,
    )
    return self.out_proj(output.flatten(2)), weights
