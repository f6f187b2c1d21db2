"""Decoders and encoder-decoders on BART's plan: XGLM, MVP and TrOCR."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, heads_of


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    return {"is_causal": module.is_decoder and not name.endswith("encoder_attn")}


@adapts("xglm.XGLMAttention", "mvp.MvpAttention", "trocr.TrOCRAttention", attributes=_attributes)
def forward(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    attn_prompt: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `XGLMAttention.forward` and its likes do: to the text itself, or to another one's states."""
    if attn_prompt is not None:
        raise UnsupportedCallError(
            f"{type(self).__name__}: a prompt of learned keys (use_prompt=True), which no patch expresses"
        )
    cross = key_value_states is not None
    states = hidden_states if key_value_states is None else key_value_states
    query = heads_of(self.q_proj(hidden_states), self.head_dim)
    past = cache
    if isinstance(cache, EncoderDecoderCache):
        past = cache.cross_attention_cache if cross else cache.self_attention_cache
    if cross and isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(self.layer_idx):
        key, value = past.layers[self.layer_idx].keys, past.layers[self.layer_idx].values
    else:
        key, value = (heads_of(project(states), self.head_dim) for project in (self.k_proj, self.v_proj))
        if past is not None:
            key, value = past.update(key, value, self.layer_idx, kwargs=kwargs)
            if cross and isinstance(cache, EncoderDecoderCache):
                cache.is_updated[self.layer_idx] = True
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.scaling,
        dropout=dropout_of(self, self.dropout),
        output_attentions=output_attentions,
        **kwargs,
    )
    return self.out_proj(output.flatten(2)), weights
