"""A decoded token behind a window, with a linear attention for what leaves it, in one call of C++."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build
from hf_linattn.ops.cpp import linear as native
from hf_linattn.ops.types import FEATURE_MAPS, Gate, by_token

_STEP = struct.Struct("64qdqd").pack
"""`StepProblem` of ops/cpp/window_step.h."""


class Ring(NamedTuple):
    """The window's tokens, in memory that may be written over.

    Attributes:
        key: `[B, Hkv, W, D]`, dense along D.
        value: `[B, Hkv, W, Dv]`, likewise.
        marks: boolean `[B, W]`, which columns count.
        turn: int64 `[B]`, dense: the column of the oldest, the same in all rows.
    """

    key: Tensor
    value: Tensor
    marks: Tensor
    turn: Tensor


class Rest(NamedTuple):
    """What is outside of the window, as a linear attention has it.

    Attributes:
        query: its features, `[B, H, 1, F]`, or what the kernel's map makes them of.
        oldest: features of the window's oldest token, `[B, Hkv, 1, F]`, and its value, `[B, Hkv, 1, Dv]`,
            which go over into the state; None for the token as it lies in the window.
        S, z: the state, `[B, Hkv, F, Dv]` and `[B, Hkv, F]`, dense: written over.
        log_decay: of the oldest token, `[B, Hkv, 1]`; None for none.
        gate: in place of `log_decay`.
        kind, eps: as `How`.
        left_out: logarithm of what the query's features were divided by, `[B, H, 1]`; None for 1, and where
            the map is the kernel's.
    """

    query: Tensor
    oldest: tuple[Tensor, Tensor] | None
    S: Tensor
    z: Tensor
    log_decay: Tensor | None = None
    gate: Gate | None = None
    kind: str = "none"
    eps: float = 0.0
    left_out: Tensor | None = None


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    ring: Ring,
    scaling: float,
    rest: Rest | None = None,
) -> Tensor:
    """Put a token into the window and read all: `[B, H, 1, Dv]` in the dtype of the query.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, Hkv, 1, D]`, in the dtype of the window's.
        value: `[B, Hkv, 1, Dv]`, likewise.
        valid: boolean `[B, 1]`, whether it counts; None for all.
        ring: what the window holds, written over.
        scaling: of the scores.
        rest: what is outside; its state is written over.

    Raises:
        UnsupportedCallError: they cannot be compiled.
    """
    query, key, value = native.rows(query), native.rows(key), native.rows(value)
    (batch, heads, _, size), (_, kv_heads, columns, wide) = query.shape, ring.value.shape
    output, array = by_token(query, batch, heads, 1, wide), native.array
    rest = None if rest is None else _dense(rest)
    problem = _STEP(
        *(batch, heads, kv_heads, size, wide, columns, torch.get_num_threads()),
        *(*array(query), *array(key), *array(value), *array(output), *array(ring.key), *array(ring.value)),
        *(ring.marks.data_ptr(), ring.marks.stride(0), ring.turn.data_ptr()),
        *((0, 0) if valid is None else (valid.data_ptr(), valid.stride(0))),
        *(_NOTHING if rest is None else _of_rest(rest)),
    )
    build.library().linattn_window_step(problem, scaling)
    return output


_NO_ARRAY = (0,) * 5
_NOTHING = (0, 0, *_NO_ARRAY * 3, 0, 0, 0, *native.gated(None), 0, 0.0)


def _dense(rest: Rest) -> Rest:
    """As the kernel reads it."""
    query, oldest, S, z, log_decay, gate, kind, eps, left_out = rest
    if oldest is not None:
        oldest = native.rows(oldest[0]), native.rows(oldest[1])
    log_decay, left_out = (None if x is None else x.contiguous() for x in (log_decay, left_out))
    return Rest(native.rows(query), oldest, S, z, log_decay, gate, kind, eps, left_out)


def _of_rest(rest: Rest) -> tuple[float, ...]:
    query, oldest, S, z, log_decay, gate, kind, eps, left_out = rest
    key, value = (_NO_ARRAY, _NO_ARRAY) if oldest is None else map(native.array, oldest)
    return (
        *(FEATURE_MAPS.index(kind), query.shape[3], *native.array(query), *key, *value),
        *(S.data_ptr(), z.data_ptr(), native.address(log_decay), *native.gated(gate)),
        *(native.address(left_out), eps),
    )
