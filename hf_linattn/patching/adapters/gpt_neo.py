"""GPT-Neo: scores without scaling, and local layers that see a window."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    window = config.window_size if module.attention_type == "local" else None
    return {"is_causal": module.is_causal, "layer_idx": module.layer_id, "sliding_window": window}


@adapts("gpt_neo.GPTNeoSelfAttention", attributes=_attributes)
def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `GPTNeoSelfAttention.forward` does."""
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (
        self._split_heads(project(hidden_states), self.num_heads, self.head_dim) for project in projections
    )
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=1.0,
        dropout=dropout_of(self, self.attn_dropout),
        window=self.sliding_window,
        output_attentions=output_attentions,
        **kwargs,
    )
    return self.resid_dropout(self.out_proj(output.flatten(2))), weights
