"""What Python hands to the C++ kernels: structs whose fields are listed here once, for both sides.

The annotations of a `Struct` are its fields, in order. `header` writes them as structs of C++ into `layout.h`
when the kernels are compiled, and `pack` of a struct gives the bytes that a kernel reads. So a field that is
added here is there on both sides: a call of `pack` without it fails, and a kernel that wants another one does
not compile. Tensors go by their address: whoever calls a kernel keeps them alive, dense where that is said.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import ClassVar, NewType, get_type_hints

import torch
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import types
from hf_linattn.ops.types import FEATURE_MAPS

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What kernels read and write; sums are float32."""

forked: list[bool] = []
"""Not empty in a process that was forked: threads of OpenMP that the other one had are waited for in vain."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: forked.append(True))

Address = NewType("Address", int)
"""Of the first number of a tensor; 0 where there is none."""


class Struct:
    """A struct of C++: what its annotations name. Fields that are structs themselves are passed packed.

    Attributes:
        pack: a function of all fields, by name or in order, that gives the bytes.
        size: bytes.
    """

    pack: ClassVar[Callable[..., bytes]]
    size: ClassVar[int]

    def __init_subclass__(cls) -> None:
        fields = list(cls.fields())
        layout = struct.Struct("".join(form for _, form, _ in fields))
        names = ", ".join(name for name, _, _ in fields)
        # as namedtuple does: names are checked, and cost little more than a call without them
        scope = {"layout": layout.pack}
        exec(f"def pack({names}): return layout({names})", scope)
        cls.pack, cls.size = staticmethod(scope["pack"]), layout.size

    @classmethod
    def fields(cls) -> Iterator[tuple[str, str, str]]:
        """List name, format in the words of `struct`, and type in C++ of each field."""
        for name, hint in get_type_hints(cls).items():
            if name in Struct.__annotations__:
                continue
            if isinstance(hint, type) and issubclass(hint, Struct):
                yield name, f"{hint.size}s", hint.__name__
            else:
                yield (name, "d", "double") if hint is float else (name, "q", "int64_t")

    @classmethod
    def offset(cls, name: str) -> int:
        """Count the bytes before a field, of a part's own fields too."""
        before, hints = 0, get_type_hints(cls)
        for field, form, _ in cls.fields():
            if field == name:
                return before
            hint = hints[field]
            if isinstance(hint, type) and issubclass(hint, Part) and name in get_type_hints(hint):
                return before + hint.offset(name)
            before += struct.calcsize(form)
        raise KeyError(name)

    @classmethod
    def declaration(cls) -> str:
        """Write the struct in C++."""
        fields = [(name, kind) for name, _, kind in cls.fields()]
        parts = [kind for _, kind in fields if kind in _PARTS]
        assert parts == [kind for _, kind in fields[: len(parts)]], f"{cls.__name__}: parts come first"
        own = [f"    {kind} {name};\n" for name, kind in fields[len(parts) :]]
        bases = f" : {', '.join(parts)}" if parts else ""
        size = f'static_assert(sizeof({cls.__name__}) == {cls.size}, "layout of {cls.__name__}");\n'
        return f"struct {cls.__name__}{bases} {{\n{''.join(own)}}};\n{size}"


class Part(Struct):
    """Fields that a struct takes over: in C++ it derives from them, so they come before all others."""


class Array(Struct):
    """A tensor `[B, H, N, D]` of any dtype in `DTYPES`, dense along D. Strides are in elements."""

    data: Address
    dtype: int
    batch: int
    head: int
    token: int


class Gate(Struct):
    """A decay made of the values: as `types.Gate`."""

    weight: Address  # float32 [Hkv, Dv], dense; 0 for no gate
    bias: Address  # float32 [Hkv], dense
    temperature: float


class Sizes(Part):
    """Of every problem."""

    batch: int
    heads: int
    kv_heads: int
    length: int  # queries
    head_dim: int
    value_dim: int
    threads: int


class LinearOptions(Part):
    """What `LinearProblem` computes."""

    feature_map: int  # index in FEATURE_MAPS
    normalise: bool
    causal: bool
    keep_state: bool  # S_after and z_after are to be written
    keys: int  # as many as queries where causal
    chunk: int  # tokens


class LinearGrads(Part):
    """Of the backward: gradients of what the forward gave, 0 for none, and of what it was given."""

    d_output: Array
    d_query: Array
    d_key: Array
    d_value: Array
    d_total: Address
    d_S_after: Address
    d_z_after: Address
    d_S: Address
    d_z: Address
    d_decay: Address  # float32 [B, Hkv, N]: of the running sums of log_decay


class LinearProblem(Struct):
    """Linear attention, causal or over all keys, forward and backward."""

    sizes: Sizes
    options: LinearOptions
    grads: LinearGrads
    gate: Gate  # in place of log_decay
    query: Array
    key: Array
    value: Array
    output: Array  # read by the backward
    valid: Address  # bool [B, N], False at keys that do not count; 0 where all do
    valid_row: int  # its stride
    S: Address  # float32 [B, Hkv, D, Dv], dense: the state before; 0 for none
    z: Address  # float32 [B, Hkv, D], dense
    log_decay: Address  # float32 [B, Hkv, N], dense, at most 0; 0 for none
    documents: Address  # int64 [B, N], dense, ascending; 0 for one
    total: Address  # float32 [B, H, N], dense
    S_after: Address  # as S and z
    z_after: Address


class DeltaGrads(Part):
    """Of the backward: gradients of what the forward gave, and of what it was given."""

    d_output: Array
    d_query: Array
    d_key: Array
    d_value: Array
    d_gates: Array
    d_S_after: Address  # as S; 0 for none
    d_S: Address


class DeltaGate(Part):
    """What logits of one token are made of, in place of gates; float32, dense; all of it 0 for none."""

    weight: Address  # [Hkv, 1 or 2, Dv]
    bias: Address  # [Hkv, 1 or 2]
    rank: int
    down: Address  # [Hkv, rank, Dv]; 0 where no channel decays by itself
    up: Address  # [Hkv, D, rank]
    up_bias: Address  # [Hkv, D]


class DeltaProblem(Struct):
    """The delta rule, forward and backward, or one token of it."""

    sizes: Sizes
    grads: DeltaGrads
    gate: DeltaGate
    step: bool  # one token behind a state
    chunk: int  # tokens
    decays: int  # of a token, 0, 1 or D: the numbers of its gates behind the first
    query: Array  # data 0 where the state alone is wanted
    key: Array
    value: Array
    output: Array
    gates: Array  # float32 [B, Hkv, N, 1 + decays]: logits
    valid: Address  # bool [B, N], False at tokens that do not count; 0 where all do
    valid_row: int  # its stride
    documents: Address  # int64 [B, N], dense, ascending; 0 for one
    S: Address  # float32 [B, Hkv, D, Dv], dense: the state before; 0 for none
    S_after: Address  # 0 where it is not wanted
    scale: Address  # float32 [H], dense: factors of the output; 0 for 1
    beta: float  # the largest
    temperature: float


class WindowGrads(Part):
    """Of the backward: gradients of the output, and of what the forward was given."""

    d_output: Array
    d_query: Array
    d_key: Array
    d_value: Array
    d_others: Array
    d_total: Address  # float32, dense, as total
    d_log_scale: Address
    d_sink_key: Address  # float32 [B, Hkv, sinks, D], dense
    d_sink_value: Address  # float32 [B, Hkv, sinks, Dv], dense


class WindowSinks(Part):
    """Tokens that are seen beside the window, all of it 0 for none."""

    sinks: int
    sink_key: Array
    sink_value: Array
    sink_valid: Address  # bool [B, sinks], dense, True where they count
    ranks: Address  # int64 [B, N], dense: a query sees the sinks up to its rank; 0 for all of them
    turn_cos: (
        Address  # float32 [B or 1, N, turned], dense: queries meet sinks turned by it; 0 for as they are
    )
    turn_sin: Address
    turned: int  # features, of which the first half is turned into the second one
    turn_row: int  # stride of rows


class WindowProblem(Struct):
    """Softmax over a window, with sums over other tokens, forward and backward."""

    sizes: Sizes
    grads: WindowGrads
    beside: WindowSinks
    span: int  # query i sees the columns i < c <= i + span
    n_missing: int  # first columns that are not there
    block: int  # queries, and columns of a tile; a multiple of all vectors
    query: Array
    key: Array  # of length + span - n_missing columns
    value: Array
    output: Array
    valid: Address  # bool, of the same columns, True where they count
    valid_row: int  # its stride
    others: Array  # float32 [B, H, N - others_from, Dv]: sums over other tokens; data 0 for none
    others_from: int  # first query that has any
    total: Address  # float32 [B, H, N - others_from], dense, of the others
    log_scale: Address  # likewise
    lse: Address  # float32 [B, H, N], dense


class SoftmaxMapGrads(Part):
    """Of the backward: gradients of the features, and of what they are made of."""

    d_features: Array
    d_input: Array
    d_weight: Address  # float32 [B, H, F / 2, D], dense: of each row


class SoftmaxMapProblem(Struct):
    """Features [softmax(W x), softmax(-W x)] held above a floor, forward and backward."""

    sizes: Sizes  # value_dim is F / 2
    grads: SoftmaxMapGrads
    input: Array  # x
    weight: Array  # W of each head, [1, H, F / 2, D]
    features: Array


class DecodeTail(Part):
    """The linear attention of `WindowDecodeProblem`, all of it 0 for none."""

    feature_map: int  # what it makes features of; index in FEATURE_MAPS
    features: int
    tail_query: Array
    evicted_key: Array  # data 0 where the oldest token is as in the window
    evicted_value: Array
    S: Address  # float32 [B, Hkv, F, Dv], dense
    z: Address  # float32 [B, Hkv, F], dense
    log_decay: Address  # float32 [B, Hkv, 1], dense, at most 0: of the evicted token; 0 for none
    gate: Gate  # in place of log_decay
    query_log_scale: Address  # float32 [B, H, 1], dense: log of a divisor of tail_query; 0 for none
    map_query: Address  # W of [softmax(W x), softmax(-W x)], [H, F / 2, D], dense; 0 for another map
    map_key: Address  # [Hkv, F / 2, D], likewise
    map_dtype: int  # of both, float32 or bfloat16
    eps: float  # of the learned map the least feature
    mix: Address  # float32 [H], dense: the window's share, each part divided by itself; 0 for one normaliser
    mix_logit: bool  # its sigmoid is the share


class WindowDecodeProblem(Struct):
    """One token behind a window, with a linear attention for the token that it evicts."""

    sizes: Sizes
    tail: DecodeTail
    columns: int  # of the ring
    sinks: int  # tokens beside the ring, all of which count
    query: Array  # of the token
    key: Array
    value: Array
    output: Array
    ring_key: Array  # the window
    ring_value: Array
    sink_query: Array  # of the token, as it meets them
    sink_key: Array
    sink_value: Array
    turn_cos: (
        Address  # float32 [B or 1, turned], dense: the query meets the sinks turned by it; 0 for as it is
    )
    turn_sin: Address
    turned: int  # features, of which the first half is turned into the second one
    turn_row: int  # stride of rows
    ring_valid: Address  # bool [B, columns], True at columns that count
    ring_valid_row: int  # its stride
    head_index: Address  # int64 [B]: the oldest column, the same in all rows
    token_valid: Address  # bool [B, 1], whether the token counts; 0 for all
    token_valid_row: int


class HeavyProblem(Struct):
    """Softmax over a window, sinks and heavy hitters, which are written over in place."""

    sizes: Sizes
    window: int  # tokens in it when a block has left
    heavy: int
    sinks: int
    block: int  # tokens that leave at once
    reach: int  # tokens kept that are further back go first; 0 for none
    fade: float  # what attention once got is multiplied by at each token
    query: Array
    near: Array  # queries as they meet the sinks; data 0 for as they are
    key: Array
    value: Array
    output: Array
    kept_key: Array  # [B, Hkv, sinks + heavy + size + block, D]: sinks, heavy hitters, the window, then 0
    kept_value: Array
    kept_weight: Address  # float32, likewise, dense: attention that each has got
    kept_rank: Address  # int32, likewise, dense: of each among the visible tokens
    seen: Address  # int32 [B], dense: visible tokens before
    visible: Address  # int32 [B], dense: of the call
    order: Address  # int32 [B, N], dense: places of those, then others; 0 where all are
    chosen: Address  # int32 [B, Hkv, choices, heavy], dense: ranks of what stays after each; 0 for not wanted
    choices: int


_PARTS = {part.__name__ for part in Part.__subclasses__()}
_STRUCTS: list[type[Struct]] = [Array, Gate, *Part.__subclasses__()]
_STRUCTS += [LinearProblem, DeltaProblem, WindowProblem, SoftmaxMapProblem, WindowDecodeProblem, HeavyProblem]
NO_ARRAY, NO_GATE, NO_LINEAR_GRADS, NO_DELTA_GRADS, NO_DELTA_GATE, NO_WINDOW_GRADS, NO_TAIL = (
    bytes(each.size) for each in (Array, Gate, LinearGrads, DeltaGrads, DeltaGate, WindowGrads, DecodeTail)
)
NO_SINKS, NO_MAP_GRADS = bytes(WindowSinks.size), bytes(SoftmaxMapGrads.size)


def array(x: Tensor) -> bytes:
    """Pack a tensor `[B, H, N, D]` that is dense along D."""
    batch, head, token, _ = x.stride()
    return Array.pack(_pointer(x), DTYPES[x.dtype], batch, head, token)


def sizes(heads: int, length: int, key: Tensor, value: Tensor) -> bytes:
    """Pack the sizes of a problem.

    Args:
        heads: of queries.
        length: number of queries.
        key: `[B, Hkv, S, D]`, or queries of so many rows and of the same size.
        value: `[B, Hkv, S, Dv]`.
    """
    batch, kv_heads, _, value_dim = value.shape
    return Sizes.pack(batch, heads, kv_heads, length, key.shape[3], value_dim, threads())


def threads() -> int:
    """Count the threads of a call."""
    return 1 if forked else torch.get_num_threads()


def gate(given: types.Gate | None) -> bytes:
    """Pack a gate; None for none."""
    if given is None:
        return NO_GATE
    return Gate.pack(address(given.weight), address(given.bias), given.temperature)


def address(x: Tensor | None) -> int:
    """Tell where the numbers of a tensor lie; 0 where there are none.

    Raises:
        UnsupportedCallError: they are kept elsewhere.
    """
    return 0 if x is None or not x.numel() else _pointer(x)


def _pointer(x: Tensor) -> int:
    place = x.data_ptr()
    if not place and x.numel():
        raise UnsupportedCallError(
            f"a tensor of {tuple(x.shape)} on {x.device} has no memory that a kernel in C++ could read: "
            "load weights that are offloaded first"
        )
    return place


def header() -> str:
    """Write the C++ of all structs, and of the numbers that stand for dtypes and feature maps."""
    dtypes = ", ".join(str(x).split(".")[1].upper() for x in DTYPES)
    lines = [
        "// Written by ops/cpp/layout.py.\n#pragma once\n#include <cstdint>\n",
        f"enum Dtype : int64_t {{ {dtypes} }};\n",
        f"enum FeatureMap : int64_t {{ {', '.join(FEATURE_MAPS).upper()} }};\n",
        *(each.declaration() for each in _STRUCTS),
    ]
    return "".join(lines)
