"""GPT-NeoX Japanese: rotary embedding of a part of each head, a bias that the last layer hands out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, family, heads_of


@adapts("gpt_neox_japanese.GPTNeoXJapaneseAttention")
def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor,
    cache: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend as `GPTNeoXJapaneseAttention.forward` does."""
    heads = heads_of(self.query_key_value(hidden_states), 3 * self.head_size)
    query, key, value = heads.chunk(3, dim=-1)
    assert position_embeddings is not None
    size = self.rotary_ndims
    rotated = family(self, "apply_rotary_pos_emb")(query[..., :size], key[..., :size], *position_embeddings)
    query = torch.cat([rotated[0], query[..., size:]], dim=-1)
    key = torch.cat([rotated[1], key[..., size:]], dim=-1)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=1 / self.norm_factor,
        dropout=dropout_of(self, self.attention_dropout),
        output_attentions=output_attentions,
        **kwargs,
    )
    return self.dense(output.flatten(2)), weights, self.dense_bias
