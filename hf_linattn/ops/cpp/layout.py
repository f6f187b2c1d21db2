"""What Python hands to the C++ kernels: structs whose fields are listed here, once for both sides.

A struct is a NamedTuple. `header` writes its C++ twin, the same fields in the same order, into `layout.h`
when the kernels are compiled; a packer of it gives the bytes that a kernel reads. So a field that is added
here is there on both sides, and one that only a kernel knows does not compile. Tensors go by their address:
whoever calls a kernel keeps them alive, dense where that is said, and on the CPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NewType, get_type_hints

import torch
from torch import Tensor

from hf_linattn.ops import types
from hf_linattn.ops.types import FEATURE_MAPS

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What kernels read and write; sums are float32."""

Address = NewType("Address", int)
"""Of the first number of a tensor; 0 where there is none."""
Array = NewType("Array", bytes)
"""A packed `ArrayFields`."""
Gate = NewType("Gate", bytes)
"""A packed `GateFields`."""


class ArrayFields(NamedTuple):
    """A tensor `[B, H, N, D]` of any dtype in `DTYPES`, dense along D. Strides are in elements."""

    data: Address
    dtype: int
    batch: int
    head: int
    token: int


class GateFields(NamedTuple):
    """A decay made of the values: as `types.Gate`."""

    weight: Address  # float32 [Hkv, Dv], dense; 0 for no gate
    bias: Address  # float32 [Hkv], dense
    temperature: float


def _formats(fields: Any) -> Iterator[tuple[str, str, str]]:
    """Name, format of `struct` and type in C++ of each field."""
    known = {
        int: ("q", "int64_t"),
        bool: ("q", "int64_t"),
        Address: ("q", "int64_t"),
        float: ("d", "double"),
        Array: (f"{8 * len(ArrayFields._fields)}s", "Array"),
        Gate: (f"{8 * len(GateFields._fields)}s", "Gate"),
    }
    for name, hint in get_type_hints(fields).items():
        yield name, *known[hint]


def _packer(fields: Any) -> Callable[..., bytes]:
    return struct.Struct("".join(form for _, form, _ in _formats(fields))).pack


_pack_array, _pack_gate = _packer(ArrayFields), _packer(GateFields)
NO_ARRAY, NO_GATE = Array(_pack_array(0, 0, 0, 0, 0)), Gate(_pack_gate(0, 0, 1.0))
NOWHERE = Address(0)


def array(x: Tensor) -> Array:
    """Pack a tensor `[B, H, N, D]` that is dense along D."""
    batch, head, token, _ = x.stride()
    return Array(_pack_array(x.data_ptr(), DTYPES[x.dtype], batch, head, token))


def gate(given: types.Gate | None) -> Gate:
    """Pack a gate; None for none."""
    if given is None:
        return NO_GATE
    return Gate(_pack_gate(given.weight.data_ptr(), given.bias.data_ptr(), given.temperature))


def address(x: Tensor | None) -> Address:
    """Tell where the numbers of a tensor lie; 0 where there are none."""
    return Address(0 if x is None or not x.numel() else x.data_ptr())


class LinearProblem(NamedTuple):
    """Linear attention, causal or over all keys, forward and backward."""

    batch: int
    heads: int
    kv_heads: int
    length: int  # queries
    keys: int  # as many as queries where causal
    head_dim: int
    value_dim: int
    feature_map: int  # index in FEATURE_MAPS
    normalise: bool
    causal: bool
    keep_state: bool  # S_after and z_after are to be written
    chunk: int  # tokens
    threads: int
    gate: Gate  # in place of log_decay
    query: Array
    key: Array
    value: Array
    output: Array  # read by the backward
    hidden: Address  # bool [B, N], True at keys that do not count; 0 for none
    hidden_row: int  # its stride
    S: Address  # float32 [B, Hkv, D, Dv], dense: the state before; 0 for none
    z: Address  # float32 [B, Hkv, D], dense
    log_decay: Address  # float32 [B, Hkv, N], dense, at most 0; 0 for none
    documents: Address  # int64 [B, N], dense, ascending; 0 for one
    total: Address  # float32 [B, H, N], dense
    S_after: Address = NOWHERE  # as S and z
    z_after: Address = NOWHERE
    # of the backward: gradients of what the forward gave, 0 for none, and of what it was given
    d_output: Array = NO_ARRAY
    d_query: Array = NO_ARRAY
    d_key: Array = NO_ARRAY
    d_value: Array = NO_ARRAY
    d_total: Address = NOWHERE
    d_S_after: Address = NOWHERE
    d_z_after: Address = NOWHERE
    d_S: Address = NOWHERE
    d_z: Address = NOWHERE
    d_decay: Address = NOWHERE  # float32 [B, Hkv, N]: of the running sums of log_decay


class WindowProblem(NamedTuple):
    """Softmax over a window, with sums over other tokens, forward and backward."""

    batch: int
    heads: int
    kv_heads: int
    length: int  # queries
    head_dim: int
    value_dim: int
    span: int  # query i sees the columns i < c <= i + span
    n_missing: int  # first columns that are not there
    block: int  # queries, and columns of a tile; a multiple of all vectors
    threads: int
    query: Array
    key: Array  # of length + span - n_missing columns
    value: Array
    output: Array
    valid: Address  # bool, of the same columns, True where they count
    valid_row: int  # its stride
    others: Array  # float32 [B, H, N, Dv]: sums over other tokens; data 0 for none
    total: Address  # float32 [B, H, N], dense, of the others
    log_scale: Address  # likewise
    lse: Address  # float32 [B, H, N], dense
    # of the backward: gradients of the output, and of what the forward was given
    d_output: Array = NO_ARRAY
    d_query: Array = NO_ARRAY
    d_key: Array = NO_ARRAY
    d_value: Array = NO_ARRAY
    d_others: Array = NO_ARRAY
    d_total: Address = NOWHERE  # float32 [B, H, N], dense
    d_log_scale: Address = NOWHERE


class WindowDecodeProblem(NamedTuple):
    """One token behind a window, with a linear attention for the token that it evicts."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    columns: int  # of the ring
    threads: int
    query: Array  # of the token
    key: Array
    value: Array
    output: Array
    ring_key: Array  # the window
    ring_value: Array
    ring_valid: Address  # bool [B, columns], True at columns that count
    ring_valid_row: int  # its stride
    head_index: Address  # int64 [B]: the oldest column, the same in all rows
    token_valid: Address  # bool [B, 1], whether the token counts; 0 for all
    token_valid_row: int
    # of the linear attention, all of it 0 for none: features, or what `feature_map` makes them of
    feature_map: int = 0
    features: int = 0
    tail_query: Array = NO_ARRAY
    evicted_key: Array = NO_ARRAY  # data 0 where the oldest token is as in the window
    evicted_value: Array = NO_ARRAY
    S: Address = NOWHERE  # float32 [B, Hkv, F, Dv], dense
    z: Address = NOWHERE  # float32 [B, Hkv, F], dense
    log_decay: Address = NOWHERE  # float32 [B, Hkv, 1], dense, at most 0: of the evicted token; 0 for none
    gate: Gate = NO_GATE  # in place of log_decay
    query_log_scale: Address = NOWHERE  # float32 [B, H, 1], dense: log of a divisor of tail_query; 0 for none
    eps: float = 0.0


pack_linear, pack_window, pack_window_decode = map(
    _packer, (LinearProblem, WindowProblem, WindowDecodeProblem)
)


def header() -> str:
    """Write the C++ of all structs, and of the numbers that stand for dtypes and feature maps."""
    structs = {"Array": ArrayFields, "Gate": GateFields}
    structs |= {each.__name__: each for each in (LinearProblem, WindowProblem, WindowDecodeProblem)}
    lines = ["// Written by ops/cpp/layout.py.", "#pragma once", "#include <cstdint>"]
    for name, values in (("Dtype", [str(x).split(".")[1] for x in DTYPES]), ("FeatureMap", FEATURE_MAPS)):
        lines.append(f"enum {name} : int64_t {{ {', '.join(values).upper()} }};")
    for name, fields in structs.items():
        formats = list(_formats(fields))
        lines += [f"struct {name} {{", *(f"    {kind} {field};" for field, _, kind in formats), "};"]
        size = struct.calcsize("".join(form for _, form, _ in formats))
        lines.append(f'static_assert(sizeof({name}) == {size}, "layout of {name}");')
    return "\n".join(lines) + "\n"
