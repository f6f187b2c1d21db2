"""Falcon: rotary or ALiBi, one key head for all (multi-query) or as many as the new architecture repeats."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.patching.adapters.base import (
    Masks,
    adapts,
    attention_interface,
    dropout_of,
    family,
    relative_bias,
    visible_of,
)


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    repeated = config.new_decoder_architecture
    return {
        "is_causal": module.is_causal,
        "alibi": config.alibi or None,
        "num_key_value_heads": module.num_heads if repeated else module.num_kv_heads,
    }


def _masks(config: Any) -> Masks:
    return "boolean" if config.alibi else "compact"  # the model writes ALiBi into the mask


@adapts("falcon.FalconAttention", attributes=_attributes, masks=_masks)
def forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `FalconAttention.forward` does under sdpa (its eager form adds ALiBi twice)."""
    query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
    if self.alibi is None:
        assert position_embeddings is not None
        query, key = family(self, "apply_rotary_pos_emb")(query, key, *position_embeddings)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    bias = None
    if self.alibi is not None:
        assert alibi is not None
        alibi = alibi.view(query.shape[0], self.num_heads, 1, -1) * self.inv_norm_factor
        bias = relative_bias(alibi, visible_of(attention_mask), query.shape[2])
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        visible_of(attention_mask),
        scaling=self.inv_norm_factor,
        dropout=0.0 if alibi is None else dropout_of(self, self.attention_dropout),
        position_bias=bias,
        output_attentions=output_attentions,
        **kwargs,
    )
    return self.dense(output.flatten(2)), weights
