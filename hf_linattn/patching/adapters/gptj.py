"""GPT-J and CodeGen: rotary embedding of a part of each head, by a table of sines and cosines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, family

PARTS = 4
"""Of CodeGen's projection, which lies as on the devices that it was trained on."""


def _projected(self: Any, hidden_states: Tensor) -> list[Tensor]:
    """Query, key and value `[B, N, H, D]`."""
    shape = (*hidden_states.shape[:-1], self.num_attention_heads, self.head_dim)
    if hasattr(self, "qkv_proj"):
        parts = self.qkv_proj(hidden_states).unflatten(-1, (PARTS, -1)).chunk(3, dim=-1)
        query, value, key = (part.reshape(shape) for part in parts)
        return [query, key, value]
    return [project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj)]


def _rotated(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Turn `[B, N, H, D]`."""
    sin, cos = self.embed_positions.to(x.device)[position_ids].to(x.dtype).chunk(2, dim=-1)
    size = self.rotary_dim or self.head_dim
    turned = family(self, "apply_rotary_pos_emb")(x[..., :size], sin, cos)
    return torch.cat([turned, x[..., size:]], dim=-1)


@adapts("gptj.GPTJAttention", "codegen.CodeGenAttention")
def forward(
    self: Any,
    hidden_states: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `GPTJAttention.forward` and `CodeGenAttention.forward` do."""
    query, key, value = _projected(self, hidden_states)
    assert position_ids is not None
    query, key = (_rotated(self, x, position_ids).transpose(1, 2) for x in (query, key))
    value = value.transpose(1, 2)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=1 / self.scale_attn,
        dropout=dropout_of(self, self.attn_dropout),
        output_attentions=output_attentions,
        **kwargs,
    )
    return self.resid_dropout(self.out_proj(output.flatten(2))), weights
