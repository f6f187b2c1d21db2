"""XLM and FlauBERT: a mask of the keys, or of queries and keys where the model is causal."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import EncoderDecoderCache

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.patching.adapters.base import adapts, attention_interface, dropout_of, heads_of


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    return {"is_causal": bool(config.causal), "layer_idx": module.layer_id}


@adapts("xlm.MultiHeadAttention", "flaubert.MultiHeadAttention", attributes=_attributes)
def forward(
    self: Any,
    input: Tensor,
    mask: Tensor,
    kv: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, ...]:
    """Attend as the module's own forward does, to the text itself; the model makes a cache for each call."""
    past = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if kv is not None or (past is not None and past.get_seq_length(self.layer_idx)):
        raise UnsupportedCallError(
            f"{type(self).__module__}.{type(self).__name__}: a patched one takes no states of another text, "
            "and no cache that holds tokens"
        )
    query, key, value = (
        heads_of(project(input), self.head_dim) for project in (self.q_lin, self.k_lin, self.v_lin)
    )
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        mask[:, None] != 0 if mask.dim() == 3 else mask[:, None, None] != 0,
        scaling=self.head_dim**-0.5,
        dropout=dropout_of(self, self.dropout),
        output_attentions=output_attentions,
        **kwargs,
    )
    output = self.out_lin(output.flatten(2))
    return (output, weights) if output_attentions and weights is not None else (output,)
