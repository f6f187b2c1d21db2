"""One attention call, as every patch sees it: what the model computed, and what it asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_linattn.attention.cache import StateLayer
from hf_linattn.attention.gate_layer import GateLayer
from hf_linattn.attention.visibility import Visibility, analyse
from hf_linattn.errors import UnsupportedMaskError
from hf_linattn.parallel.shard import Shard


@dataclass
class Call:
    """Input of an attention.

    Attributes:
        query: `[B, H, N, D]`, rotated by the model.
        key: `[B, Hkv, S, D]`; for attentions with a state the new tokens alone.
        value: `[B, Hkv, S, Dv]`.
        visibility: which keys each query sees.
        causal: the module attends to the past of its own sequence; False for encoders and cross-attention.
        cross: keys come from another sequence.
        scaling: of the scores.
        where: the module, for messages; spec: the composition in force.
        layer: the state to read and write, None without a cache.
        dropout: probability, on the weights.
        bias: added to the scores, broadcast to `[B, H, N, S]`.
        factor: what scores are multiplied by before that, likewise; None for 1.
        softcap: c in c tanh(s / c).
        sink: logits of the model's own sinks, `[H]` or `[B, H, N, 1]`.
        output_attentions: the weights are wanted.
        hidden: the module's input `[B, N, C]`, for attentions that ask for it; otherwise None.
        gates: where gates of past tokens are kept, for modifiers that ask for it; None without a cache.
        decay: c_i of the queries `[B, H, N]` and c_j of the keys `[B, H, S]`, float32 (float64 in float64
            models): c_i - c_j is added to the scores behind any cap.
        shard: the part of each row that these tokens are, the others being in other processes; None for all.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visibility: Visibility
    causal: bool
    cross: bool
    scaling: float
    where: str
    spec: str
    layer: StateLayer | None = None
    dropout: float = 0.0
    bias: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    output_attentions: bool = False
    hidden: Tensor | None = None
    factor: Tensor | None = None
    gates: GateLayer | None = None
    decay: tuple[Tensor, Tensor] | None = None
    shard: Shard | None = None

    @property
    def device(self) -> torch.device:
        """Device of the query."""
        return self.query.device

    def mask(self) -> Tensor:
        """Return the mask, boolean `[B or 1, 1 or H, N, S]`, True where the key is visible."""
        return self.visibility.mask(self.device)[..., : self.key.shape[2]]

    def ranks(self) -> tuple[Tensor, Tensor]:
        """Rank each query `[B or 1, N]` and key `[B or 1, S]` among the visible tokens of its document.

        Counted from 0; padding does not count, so a pattern of ranks is the same wherever a row is padded.
        """
        query, key = self.visibility.ranks(self.causal, self.device)
        return query, key[:, : self.key.shape[2]]

    def distance(self) -> Tensor:
        """Count the tokens from key to query, `[B or 1, N, S]`; negative for keys behind the query."""
        query, key = self.ranks()
        return query[:, :, None] - key[:, None]

    def stretch(self, factor: Tensor) -> None:
        """Multiply the scores, and any bias there is, by a factor, broadcast to `[B, H, N, S]`."""
        self.factor = factor if self.factor is None else self.factor * factor

    def compact(self, past: int) -> Visibility:
        """Return the mask in its compact form, with `past` tokens before the first query.

        Raises:
            UnsupportedMaskError: it has none; the module is named.
        """
        try:
            return analyse(self.visibility, past)
        except UnsupportedMaskError as error:
            raise UnsupportedMaskError(f"{self.where}: {error}") from None

    def forget(self, gates: Tensor) -> None:
        """Add to each score the logarithms of the gates that came after its key: those of l, j < l <= i.

        Args:
            gates: logarithms, `[B, H, S]`, float32 (float64 in float64 models); those of padding are left
                out.

        Raises:
            UnsupportedMaskError: the mask shows keys behind the query, or hides more than padding.
        """
        visibility = self.compact(self.visibility.keys - self.visibility.queries if self.causal else 0)
        if not visibility.causal and visibility.queries > 1:
            raise UnsupportedMaskError(
                f"{self.where}: {self.spec!r} forgets from past to future, and this attention mask shows a "
                "query the keys behind it. Leave it out of the plan"
            )
        own = visibility.own(self.causal, self.device)
        if visibility.documents is not None:
            padded = visibility.documents[:, : gates.shape[2]] == 0
            gates = gates.masked_fill(padded[:, None], 0)
        c = gates.cumsum(-1)
        c = c - c.detach().mean(-1, keepdim=True)  # differences alone count: numbers stay small
        self.decay = c[..., own], c

    def add_bias(self, bias: Tensor) -> None:
        """Add a bias, broadcast to `[B, H, N, S]`, to the scores."""
        self.bias = bias if self.bias is None else self.bias + bias
