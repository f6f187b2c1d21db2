"""Encoders and decoders on BERT's plan: RemBERT, Megatron-BERT, RoFormer, GIT, full attention of BigBird."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, heads_of


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    decoder = getattr(module, "is_decoder", True)  # GIT is nothing else
    return {"is_causal": bool(decoder) and "crossattention" not in name}


@adapts(
    "rembert.RemBertSelfAttention",
    "megatron_bert.MegatronBertSelfAttention",
    "roformer.RoFormerSelfAttention",
    "git.GitSelfAttention",
    "big_bird.BigBirdSelfAttention",
    attributes=_attributes,
)
def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    encoder_hidden_states: Tensor | None = None,
    sinusoidal_pos: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `RemBertSelfAttention.forward` and its likes do."""
    cross = encoder_hidden_states is not None
    states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    size = self.attention_head_size
    query = heads_of(self.query(hidden_states), size)
    past = cache
    if isinstance(cache, EncoderDecoderCache):
        past = cache.cross_attention_cache if cross else cache.self_attention_cache
    if cross and isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(self.layer_idx):
        key, value = past.layers[self.layer_idx].keys, past.layers[self.layer_idx].values
    else:
        key, value = heads_of(self.key(states), size), heads_of(self.value(states), size)
        if sinusoidal_pos is not None and not cross:
            turned = (query, key, value) if self.rotary_value else (query, key)
            rotated = self.apply_rotary_position_embeddings(sinusoidal_pos, *turned)
            query, key, value = rotated if self.rotary_value else (*rotated, value)
        if past is not None:
            key, value = past.update(key, value, self.layer_idx, kwargs=kwargs)
            if cross and isinstance(cache, EncoderDecoderCache):
                cache.is_updated[self.layer_idx] = True
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask if encoder_attention_mask is None else encoder_attention_mask,
        scaling=size**-0.5,
        dropout=dropout_of(self, self.dropout),
        output_attentions=output_attentions,
        **kwargs,
    )
    return output.flatten(2), weights
