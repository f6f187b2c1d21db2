"""BLOOM: ALiBi as a bias of the scores, the residual added inside the attention module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_linattn.patching.adapters.base import (
    adapts,
    attention_interface,
    dropout_of,
    family,
    relative_bias,
)


@adapts("bloom.BloomAttention")
def forward(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    cache: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as `BloomAttention.forward` does."""
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    alibi = alibi.view(query.shape[0], self.num_heads, 1, -1)
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.inv_norm_factor,
        dropout=dropout_of(self, self.attention_dropout),
        position_bias=relative_bias(alibi, attention_mask, query.shape[2]),
        output_attentions=output_attentions,
        **kwargs,
    )
    output = output.flatten(2)
    if self.pretraining_tp > 1 and self.slow_but_exact:  # sums slices, and leaves the bias out
        output = nn.functional.linear(output, self.dense.weight)
    else:
        output = self.dense(output)
    return family(self, "dropout_add")(output, residual, self.hidden_dropout, self.training), weights
