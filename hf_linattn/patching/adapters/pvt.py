"""Pyramid Vision Transformer: keys and values from an image that a convolution made smaller."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, heads_of


@adapts("pvt.PvtEfficientSelfAttention", attributes=lambda module, config, name: {"is_causal": False})
def forward(
    self: Any, hidden_states: Tensor, height: int, width: int, output_attentions: bool = False
) -> tuple[Tensor, ...]:
    """Attend as `PvtEfficientSelfAttention.forward` does."""
    size = self.attention_head_size
    query = heads_of(self.query(hidden_states), size)
    if self.sequences_reduction_ratio > 1:
        image = hidden_states.mT.unflatten(2, (height, width))
        hidden_states = self.layer_norm(self.sequence_reduction(image).flatten(2).mT)
    key, value = heads_of(self.key(hidden_states), size), heads_of(self.value(hidden_states), size)
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        None,
        scaling=size**-0.5,
        dropout=dropout_of(self, self.dropout),
        is_causal=False,
        output_attentions=output_attentions,
    )
    return (output.flatten(2), weights) if output_attentions and weights is not None else (output.flatten(2),)
