"""GPT: a causal mask of the module's own, and no cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import create_causal_mask

from hf_linattn.patching.adapters.base import (
    adapts,
    attention_interface,
    dropout_of,
    heads_of,
    index_of,
    visible_of,
)


def _mask(self: Any, x: Tensor, attention_mask: Tensor | None) -> Any:
    """The mask of the config's attention, from an additive one of the padding, `[B, 1, 1, S]`."""
    visible = visible_of(attention_mask)
    return create_causal_mask(self.config, x, None if visible is None else visible[:, 0, 0], None)


def _attributes(module: Any, config: Any, name: str) -> dict[str, Any]:
    return {"head_dim": module.split_size // module.n_head, "layer_idx": index_of(name)}


@adapts("openai.Attention", attributes=_attributes)
def forward(
    self: Any, x: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
) -> list[Tensor | None]:
    """Attend as the module's own forward does; that one hides later tokens by -10,000."""
    query, key, value = (heads_of(part, self.head_dim) for part in self.c_attn(x).split(self.split_size, 2))
    output, weights = attention_interface(
        self,
        query,
        key,
        value,
        _mask(self, x, attention_mask),
        scaling=self.head_dim**-0.5 if self.scale else 1.0,
        dropout=dropout_of(self, self.attn_dropout),
        output_attentions=output_attentions,
    )
    output = self.resid_dropout(self.c_proj(output.flatten(2)))
    return [output, weights] if output_attentions else [output]
