"""CPM-Ant: a learned bias by distance and segment, and a mask of the model's own for its prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, heads_of


@adapts(
    "cpmant.CpmAntAttention",
    attributes=lambda module, config, name: {"head_dim": module.dim_head},
    masks=lambda config: "boolean",
)
def forward(
    self: Any,
    hidden_q: Tensor,
    hidden_kv: Tensor,
    attention_mask: Tensor,
    position_bias: Tensor,
    output_attentions: bool = False,
    cache: Any = None,
    use_cache: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `CpmAntAttention.forward` does."""
    size = self.dim_head
    query = heads_of(self.project_q(hidden_q), size)
    key, value = heads_of(self.project_k(hidden_kv), size), heads_of(self.project_v(hidden_kv), size)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask[:, None] != 0,
        scaling=size**-0.5,
        dropout=0.0 if self.dropout is None else dropout_of(self, self.dropout),
        position_bias=position_bias,
        output_attentions=output_attentions,
        **kwargs,
    )
    return self.attention_out(output.flatten(2)), weights
