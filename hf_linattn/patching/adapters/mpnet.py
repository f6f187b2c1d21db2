"""MPNet: a learned bias by distance, the output projection inside the module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, heads_of


@adapts("mpnet.MPNetSelfAttention", attributes=lambda module, config, name: {"is_causal": False})
def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Attend as `MPNetSelfAttention.forward` does."""
    size = self.attention_head_size
    query, key, value = (heads_of(project(hidden_states), size) for project in (self.q, self.k, self.v))
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=size**-0.5,
        dropout=dropout_of(self, self.dropout),
        position_bias=position_bias,
        output_attentions=output_attentions,
        **kwargs,
    )
    output = self.o(output.flatten(2))
    return (output, weights) if output_attentions and weights is not None else (output,)
