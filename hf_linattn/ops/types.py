"""What the forms of linear attention take and give."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FEATURE_MAPS = ("none", "elu1", "relu")
"""Elementwise maps that kernels apply; "none" where the inputs are features already."""


class How(NamedTuple):
    """What is computed.

    Attributes:
        kind: one of `FEATURE_MAPS`.
        eps: added to the features of "relu".
        normalise: divide by the totals, rows whose total is 0 giving 0; False for the numerator.
        causal: a query sees the keys up to its own; False for all keys.
    """

    kind: str = "none"
    eps: float = 0.0
    normalise: bool = True
    causal: bool = True


class Gate(NamedTuple):
    """A decay that kernels make of the values: log g_t = log sigmoid(w_h . v_t + b_h) / temperature.

    Attributes:
        weight: w, `[Hkv, Dv]`, float32, dense.
        bias: b, `[Hkv]`, likewise.
        temperature: above 0.
    """

    weight: Tensor
    bias: Tensor
    temperature: float


def accumulator(*tensors: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def by_token(like: Tensor, batch: int, heads: int, length: int, wide: int) -> Tensor:
    """New numbers `[B, H, N, Dv]`, token by token in memory, as transformers wants them."""
    # a view of a new tensor takes longer
    strides = (length * heads * wide, wide, heads * wide, 1)
    return like.new_empty_strided((batch, heads, length, wide), strides)


class Inputs(NamedTuple):
    """Of `causal` and its backward.

    Attributes:
        query: `[B, H, N, D]`; H a multiple of Hkv.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        hidden: boolean `[B, N]`, True at keys that do not count; None for none.
        S, z: the state before, `[B, Hkv, D, Dv]` and `[B, Hkv, D]`, in the dtype of sums; None for nothing.
        log_decay: `[B, Hkv, N]`, at most 0, in the dtype of sums; None for no decay.
        documents: `[B, N]` ascending; S and z belong to the first of each row. None for one document.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None
    log_decay: Tensor | None = None
    documents: Tensor | None = None

    @property
    def learned(self) -> tuple[Tensor | None, ...]:
        """What there are gradients of, in the order of `loop_backward.Gradients`."""
        return self.query, self.key, self.value, self.S, self.z, self.log_decay

    def part(self, rows: slice, heads: slice) -> Inputs:
        """Some rows and key heads, and the queries that belong to them."""
        return Inputs(
            self.query[rows, self.queries(heads)],
            self.key[rows, heads],
            self.value[rows, heads],
            None if self.hidden is None else self.hidden[rows],
            None if self.S is None else self.S[rows, heads],
            None if self.z is None else self.z[rows, heads],
            None if self.log_decay is None else self.log_decay[rows, heads],
            None if self.documents is None else self.documents[rows],
        )

    def queries(self, heads: slice) -> slice:
        """Query heads of key heads."""
        shared = self.query.shape[1] // self.key.shape[1]
        return slice(heads.start * shared, heads.stop * shared)


class Outputs(NamedTuple):
    """Of `causal`.

    Attributes:
        output: `[B, H, N, Dv]` in the dtype of the values; a view of `[B, N, H, Dv]`, as transformers wants.
        total: `[B, H, N]` in the dtype of sums.
        S, z: the state after, of the last document; None where it is not wanted.
    """

    output: Tensor
    total: Tensor
    S: Tensor | None = None
    z: Tensor | None = None

    @property
    def after(self) -> tuple[Tensor, Tensor]:
        """S and z where they were wanted."""
        assert self.S is not None
        assert self.z is not None
        return self.S, self.z

    @classmethod
    def empty(
        cls, inputs: Inputs, keep: bool, sums: torch.dtype, over: tuple[Tensor, Tensor] | None = None
    ) -> Outputs:
        """Not written yet.

        Args:
            inputs: as `causal`.
            keep: with S and z.
            sums: their dtype.
            over: S and z to write over.
        """
        batch, heads, length, size = inputs.query.shape
        kv_heads, wide = inputs.value.shape[1], inputs.value.shape[3]
        output = by_token(inputs.value, batch, heads, length, wide)
        total = output.new_empty(batch, heads, length, dtype=sums)
        if over is not None:
            return cls(output, total, *over)
        if not keep:
            return cls(output, total)
        S = total.new_empty(batch, kv_heads, size, wide)
        return cls(output, total, S, total.new_empty(batch, kv_heads, size))


class Given(NamedTuple):
    """The loss by the outputs of these names; None for 0. S and z come together."""

    output: Tensor
    total: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None


class Gradients(NamedTuple):
    """The loss by the inputs of these names; None where there was none."""

    query: Tensor
    key: Tensor
    value: Tensor
    S: Tensor | None = None
    z: Tensor | None = None
    log_decay: Tensor | None = None


class State(NamedTuple):
    """S = sum_j phi(k_j) v_j^T, `[B, Hkv, D, Dv]`, and z = sum_j phi(k_j), `[B, Hkv, D]`."""

    S: Tensor
    z: Tensor


class Window(NamedTuple):
    """What the softmax is taken of.

    Attributes:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, N + reach, D]`, zero where it does not count; the first columns may be missing.
        value: `[B, Hkv, N + reach, Dv]`, likewise.
        marks: boolean `[B, N + reach]`, which columns count; likewise.
        reach: query i sees the columns i < c <= i + reach.
        scaling: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    marks: Tensor
    reach: int
    scaling: float

    @property
    def missing(self) -> int:
        """Columns before the first that is given: none of them counts."""
        return self.query.shape[2] + self.reach - self.key.shape[2]

    def whole(self) -> Window:
        """With all columns."""
        if not self.missing:
            return self
        key, value = (F.pad(x, (0, 0, self.missing, 0)) for x in (self.key, self.value))
        return self._replace(key=key, value=value, marks=F.pad(self.marks, (self.missing, 0)))


class Sums(NamedTuple):
    """A sum over tokens: exp(log_scale) times sum_j f_j v_j `[B, H, N, Dv]` and sum_j f_j `[B, H, N]`.

    `log_scale` is `[B, H, N]`. A total of 0 means that there are none.
    """

    values: Tensor
    total: Tensor
    log_scale: Tensor
