"""What a diagnosis holds: numbers per layer and per head, and small pictures of the matrices."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CELLS = 128
"""Rows and columns of the matrices kept for pictures, at most."""


@dataclass(frozen=True)
class Layer:
    """One attention call of the model; shared modules that are called again make further layers.

    Attributes:
        layer: index in the order of the calls; module: dotted name of the attention module.
        attention: composition of its patch, "softmax" for the model's own attention.
        heads, head_dim: H and D of its queries.
        kurtosis, inf_norm, outliers: of the hidden states that enter the layer, see
            `statistics.activation_statistics`; None where the layer is not given them as a tensor.
    """

    layer: int
    module: str
    attention: str
    heads: int
    head_dim: int
    kurtosis: float | None
    inf_norm: float | None
    outliers: float | None


@dataclass(frozen=True)
class Head:
    """One attention head, p_ij its weights as shares of their row. Means over windows.

    The first seven are means over the queries of the second half of each window, which see half of it at
    least, but for layers with a window. None where nothing could be measured.

    Attributes:
        entropy: H in nats; relative_entropy: H / log n, 1 for uniform attention over the n visible keys.
        effective_share: exp(H) / n, the share of the visible keys that is really in use.
        keys90: number of keys that hold 90 % of the mass.
        mass: sum_j w_ij, 1 for softmax; what is missing goes to a sink or to nothing (softmax1).
        negative_mass: share of the mass with a negative sign.
        sink: share of the first token.
        rank, effective_rank: of the whole matrix as it is used, mask included.
        block_rank, block_effective_rank: of the lower left block, queries of the second half over keys of
            the first, where no causal mask is: at most the number of features for linear attention. None
            where a window hides a part of it.
        score_variance, scaled_score_variance: of q . k of visible pairs, without and with the scaling.
        query_std, key_std: of the elements of queries and keys.
        curve: entropy by the number of keys seen, a `{"up_to", "keys", "entropy", "relative_entropy"}` per
            bin: `up_to` 2^k holds the queries with 2^(k-1) < n <= 2^k, `keys` is their mean n.
        top: the keys with most mass, a `{"position", "mass", "tokens"}` each; tokens has one per window.
    """

    layer: int
    head: int
    entropy: float | None
    relative_entropy: float | None
    effective_share: float | None
    keys90: float | None
    mass: float | None
    negative_mass: float | None
    sink: float | None
    rank: float | None
    effective_rank: float | None
    block_rank: float | None
    block_effective_rank: float | None
    score_variance: float | None
    scaled_score_variance: float | None
    query_std: float | None
    key_std: float | None
    curve: list[dict[str, Any]] = field(default_factory=list)
    top: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` measured.

    Attributes:
        model: class of the model.
        length: tokens per window; windows: their number.
        layers: one entry per layer; heads: one per layer and head, in order.
        matrices: (layer, head) -> attention weights of the first window, pooled to at most
            `[CELLS, CELLS]` by means over equal blocks; not part of `to_dict`.
    """

    model: str
    length: int
    windows: int
    layers: list[Layer]
    heads: list[Head]
    matrices: dict[tuple[int, int], NDArray[np.float32]] = field(default_factory=dict, repr=False)

    def grid(self, name: str) -> NDArray[np.float64]:
        """Arrange a number of `Head` as `[layers, heads]`; NaN where there is none."""
        values = np.full((len(self.layers), max(layer.heads for layer in self.layers)), np.nan)
        for head in self.heads:
            value = getattr(head, name)
            values[head.layer, head.head] = np.nan if value is None else value
        return values

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as JSON takes them."""
        content = {"model": self.model, "length": self.length, "windows": self.windows}
        return {**content, "layers": list(map(asdict, self.layers)), "heads": list(map(asdict, self.heads))}

    def to_json(self) -> str:
        """Write `to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Diagnosis:
        """Read what `to_dict` gives; other keys are passed over."""
        layers = [Layer(**layer) for layer in content["layers"]]
        heads = [Head(**head) for head in content["heads"]]
        return cls(content["model"], content["length"], content["windows"], layers, heads)
