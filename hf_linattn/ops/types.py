"""What goes into the forms of attention and what comes out: shapes, dtypes, units.

B is the batch, H the query heads, Hkv the key heads (H is a multiple of it), N the tokens, D the head dim of
queries and keys (or the number of features), Dv that of values. "The dtype of sums" is float32, float64 where
an input is float64. Queries, keys and values may be strided; outputs lie token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Number = TypeVar("Number", int, Tensor)

FEATURE_MAPS = ("none", "elu1", "relu")
"""Elementwise maps that kernels apply; "none" where the inputs are features already."""


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """Choose the dtype of sums: float64 where one of the tensors has it, else float32."""
    return torch.float64 if torch.float64 in [x.dtype for x in tensors] else torch.float32


def token_major(like: Tensor, batch: int, heads: int, length: int, value_dim: int) -> Tensor:
    """Allocate `[B, H, N, Dv]` that lies in memory as `[B, N, H, Dv]`, as the next projection reads it.

    Args:
        like: gives dtype and device.
        batch: B.
        heads: H.
        length: N.
        value_dim: Dv.
    """
    # a view of a new tensor takes longer
    strides = (length * heads * value_dim, value_dim, heads * value_dim, 1)
    return like.new_empty_strided((batch, heads, length, value_dim), strides)


class OpConfig(NamedTuple):
    """Which linear attention is computed.

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
        weight: w, `[Hkv, Dv]`, dense; float32 on CPUs, of any dtype on GPUs.
        bias: b, `[Hkv]`, likewise.
        temperature: above 0.
    """

    weight: Tensor
    bias: Tensor
    temperature: float


class SoftmaxMap(NamedTuple):
    """Maps that kernels make of weights: [softmax(W x), softmax(-W x)], held above a floor.

    Attributes:
        query: W of each query head, `[H, F / 2, D]`, of any dtype.
        key: W of each key head, `[Hkv, F / 2, D]`, likewise.
        floor: the least feature.
    """

    query: Tensor
    key: Tensor
    floor: float


class State(NamedTuple):
    """What a token sees of all tokens before it, in the dtype of sums.

    Attributes:
        S: sum_j phi(k_j) v_j^T, `[B, Hkv, D, Dv]`.
        z: sum_j phi(k_j), `[B, Hkv, D]`.
    """

    S: Tensor
    z: Tensor


class Inputs(NamedTuple):
    """What linear attention is computed from, forward and backward.

    Attributes:
        query: `[B, H, N, D]`; over all keys its N may be another than that of the keys.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        valid: boolean `[B, N]`, False at keys that do not count, which may hold NaN; None where all count.
        S: state before the first token, `[B, Hkv, D, Dv]`, in the dtype of sums; None for nothing.
        z: `[B, Hkv, D]`, likewise.
        log_decay: `[B, Hkv, N]`, at most 0, in the dtype of sums; None for no decay.
        documents: integers `[B, N]`, ascending: a query sees its own document, and the state belongs to the
            first of each row. None for one document.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None
    log_decay: Tensor | None = None
    documents: Tensor | None = None

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """Tensors that have gradients, in the order of `InputGrads`."""
        return self.query, self.key, self.value, self.S, self.z, self.log_decay

    def head_block(self, rows: slice, heads: slice) -> Inputs:
        """Cut out some rows and key heads, with the query heads that belong to them."""
        return Inputs(
            self.query[rows, self.query_heads(heads)],
            self.key[rows, heads],
            self.value[rows, heads],
            None if self.valid is None else self.valid[rows],
            None if self.S is None else self.S[rows, heads],
            None if self.z is None else self.z[rows, heads],
            None if self.log_decay is None else self.log_decay[rows, heads],
            None if self.documents is None else self.documents[rows],
        )

    def query_heads(self, heads: slice) -> slice:
        """Find the query heads that share some key heads."""
        shared = self.query.shape[1] // self.key.shape[1]
        return slice(heads.start * shared, heads.stop * shared)


class Outputs(NamedTuple):
    """What linear attention gives.

    Attributes:
        output: `[B, H, N, Dv]` in the dtype of the values, in memory `[B, N, H, Dv]`.
        total: `[B, H, N]` in the dtype of sums: what the output was, or would be, divided by.
        S: state after the last token, of the last document, `[B, Hkv, D, Dv]`; None where it is not wanted.
        z: `[B, Hkv, D]`, likewise.
    """

    output: Tensor
    total: Tensor
    S: Tensor | None = None
    z: Tensor | None = None

    @property
    def state(self) -> State:
        """The state after, where it was wanted."""
        assert self.S is not None
        assert self.z is not None
        return State(self.S, self.z)

    @classmethod
    def empty(
        cls, inputs: Inputs, keep: bool, sums: torch.dtype, over: tuple[Tensor, Tensor] | None = None
    ) -> Outputs:
        """Allocate what a form writes to.

        Args:
            inputs: what it is computed from.
            keep: the state after is wanted.
            sums: dtype of totals and state.
            over: S and z that the state is written over; None for new ones.
        """
        batch, heads, length, head_dim = inputs.query.shape
        kv_heads, value_dim = inputs.value.shape[1], inputs.value.shape[3]
        output = token_major(inputs.value, batch, heads, length, value_dim)
        total = output.new_empty(batch, heads, length, dtype=sums)
        if over is not None:
            return cls(output, total, *over)
        if not keep:
            return cls(output, total)
        S = total.new_empty(batch, kv_heads, head_dim, value_dim)
        return cls(output, total, S, total.new_empty(batch, kv_heads, head_dim))


class OutputGrads(NamedTuple):
    """Gradients of the loss by `Outputs`, in their shapes; None for 0. S and z come together."""

    output: Tensor
    total: Tensor | None = None
    S: Tensor | None = None
    z: Tensor | None = None


class InputGrads(NamedTuple):
    """Gradients of the loss by `Inputs`, in their shapes and dtypes; None where there was no input."""

    query: Tensor
    key: Tensor
    value: Tensor
    S: Tensor | None = None
    z: Tensor | None = None
    log_decay: Tensor | None = None


class Window(NamedTuple):
    """What a softmax over a sliding window is computed from.

    Attributes:
        query: `[B, H, N, D]`.
        key: `[B, Hkv, N + span, D]`, 0 where it does not count; the first columns may be missing.
        value: `[B, Hkv, N + span, Dv]`, likewise.
        valid: boolean `[B, N + span]`, True at columns that count; likewise.
        span: query i sees the columns i < c <= i + span.
        scaling: of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    valid: Tensor
    span: int
    scaling: float

    @property
    def n_missing(self) -> int:
        """How many columns before the first key are missing: none of them counts."""
        return self.query.shape[2] + self.span - self.key.shape[2]

    def padded(self) -> Window:
        """Fill the missing columns with zeros that do not count."""
        if not self.n_missing:
            return self
        key, value = (F.pad(x, (0, 0, self.n_missing, 0)) for x in (self.key, self.value))
        return self._replace(key=key, value=value, valid=F.pad(self.valid, (self.n_missing, 0)))


class WindowSinks(NamedTuple):
    """Tokens that are seen beside a window, the first ones of a text.

    Attributes:
        key: `[B, Hkv, n, D]`.
        value: `[B, Hkv, n, Dv]`.
        valid: boolean `[B, n]`, True at sinks that are there.
        ranks: int64 `[B, N]`: a query sees sinks up to its own; None for all.
        turn: cosines and sines by which queries are turned to where they meet them, `[B or 1, N, R]` each,
            float32, as Llama's rotary embedding has them; None for as they are.
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    ranks: Tensor | None = None
    turn: tuple[Tensor, Tensor] | None = None


class ScaledSums(NamedTuple):
    """Weighted sums over tokens, kept apart from their scale so that neither overflows.

    Attributes:
        values: `[B, H, N, Dv]`; exp(log_scale) times it is sum_j f_j v_j.
        total: `[B, H, N]`; exp(log_scale) times it is sum_j f_j. 0 means that there are no tokens.
        log_scale: `[B, H, N]`.
    """

    values: Tensor
    total: Tensor
    log_scale: Tensor


class Elu1Sums(NamedTuple):
    """Sums over features of elu1, kept apart from their scale: what its map divided the queries by.

    Kernels that have the queries find that scale, min(max_d q_d, 0), themselves.

    Attributes:
        values: `[B, H, N, Dv]`, as in `ScaledSums`.
        total: `[B, H, N]`, likewise.
    """

    values: Tensor
    total: Tensor

    def scaled(self, query: Tensor) -> ScaledSums:
        """Find the scale, by the last of these queries `[B, H, M, D]`; it has no gradient."""
        last = query.detach()[:, :, query.shape[2] - self.total.shape[2] :]
        return ScaledSums(*self, last.amax(-1).clamp(max=0).to(self.total.dtype))


OtherSums: TypeAlias = ScaledSums | Elu1Sums
"""Sums over tokens beside a window, which share its normaliser."""


class HeavyPlaces(NamedTuple):
    """Where the visible tokens of a call stand.

    Attributes:
        seen: visible tokens before the call, int32 `[B]`.
        new: visible tokens in it, int32 `[B]`.
        order: places of the visible ones, in order, then others, int32 `[B, N]`; None where all are visible.
    """

    seen: Tensor
    new: Tensor
    order: Tensor | None = None


class HeavyColumns(NamedTuple):
    """What a cache with heavy hitters keeps, and how attention once got fades.

    Attributes:
        size: tokens in the window when a block has left.
        heavy: heavy hitters.
        sinks: first tokens.
        block: tokens that leave at once.
        half_life: tokens after which attention counts half; None for always in full.
        reach: tokens; heavy hitters further back than that go first; None for no end.
    """

    size: int
    heavy: int
    sinks: int
    block: int
    half_life: float | None
    reach: int | None = None

    @property
    def fade(self) -> float:
        """Return what attention once got is multiplied by at each token."""
        return 1.0 if self.half_life is None else 0.5 ** (1 / self.half_life)

    @property
    def total(self) -> int:
        """Count the columns, the spare one too."""
        return self.sinks + self.heavy + self.size + self.block

    def left(self, ranks: Number) -> Number:
        """Count the blocks that have left the window of queries of these ranks; not positive for none."""
        return (ranks - self.sinks + 1 - self.size) // self.block

    def begin(self, number: Number) -> Number:
        """Return the rank of the first query behind so many evictions, at least one."""
        return number * self.block + self.size + self.sinks - 1


class HeavyState(NamedTuple):
    """A cache of constant size: sinks, heavy hitters, the window, oldest first, then columns of nobody.

    Which columns hold a token follows from how many were seen. Padding goes to the last one.

    Attributes:
        key: `[B, Hkv, columns, D]`.
        value: `[B, Hkv, columns, Dv]`.
        weight: attention that each has got, `[B, Hkv, columns]`, float32 (float64 in float64 models).
        rank: of each among the visible tokens of its text, int32 `[B, Hkv, columns]`.
    """

    key: Tensor
    value: Tensor
    weight: Tensor
    rank: Tensor


@dataclass
class HeavyChoices:
    """What a forward with heavy hitters tells its backward, of a text from its first token on.

    Attributes:
        chosen: tokens that stay after each choice, -1 for none, int32 `[B, Hkv, choices, heavy]`; the
            forward writes into it.
        count: visible tokens of each row, int32 `[B]`; None where the forward has no backward of its own.
        log_sum: logarithms to base 2 of the sums that outputs are divided by, float32 `[B, H, N]`, likewise.
    """

    chosen: Tensor
    count: Tensor | None = None
    log_sum: Tensor | None = None


class DeltaConfig(NamedTuple):
    """Which delta rule is computed.

    Attributes:
        decay: "none"; "head", one for each key head; "channel", one for each feature.
        beta: the largest b_t, above 0 and at most 2.
        temperature: of the decay, sigmoid(...)^(1 / temperature).
    """

    decay: Literal["none", "head", "channel"]
    beta: float
    temperature: float


class DeltaGate(NamedTuple):
    """What gates of a delta rule are made of, for kernels, which read values; float32, dense.

    Attributes:
        weight: of the logits of b_t and, by head, of a_t: `[Hkv, 1 or 2, Dv]`.
        bias: `[Hkv, 1 or 2]`.
        down: first layer of the logits of a_t by channel, `[Hkv, R, Dv]`; None where there are none.
        up: the second one, `[Hkv, D, R]`, likewise.
        up_bias: `[Hkv, D]`, likewise.
    """

    weight: Tensor
    bias: Tensor
    down: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None


class DeltaInputs(NamedTuple):
    """What the delta rule is computed from.

    Attributes:
        query: `[B, H, N, D]`, of any length; None where the state alone is wanted.
        key: `[B, Hkv, N, D]`, of any length.
        value: `[B, Hkv, N, Dv]`.
        gates: logits of b_t, and of what a_t is made of, `[B, Hkv, N, 1, 2 or 1 + D]`, in the dtype of sums;
            None where a kernel makes them.
        state: S `[B, Hkv, D, Dv]` of the tokens before, likewise; None for nothing.
        valid: boolean `[B, N]`, False at tokens that do not count, which may hold NaN; None where all do.
        documents: integers `[B, N]`, ascending; None for one document.
    """

    query: Tensor | None
    key: Tensor
    value: Tensor
    gates: Tensor | None
    state: Tensor | None = None
    valid: Tensor | None = None
    documents: Tensor | None = None


class DeltaGrads(NamedTuple):
    """Gradients of `DeltaInputs`, as they are there; that of the state is None where there is none."""

    query: Tensor
    key: Tensor
    value: Tensor
    gates: Tensor
    state: Tensor | None
