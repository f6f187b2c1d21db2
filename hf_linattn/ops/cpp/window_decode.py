"""A decoded token behind a window, with a linear attention for what leaves it, in one call of C++."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout
from hf_linattn.ops.cpp.layout import address, array, threads
from hf_linattn.ops.cpp.linear import rows
from hf_linattn.ops.types import FEATURE_MAPS, Gate, token_major

_MOVED = ("query", "tail_query", "sink_query", "key", "value", "output", "turn_cos")
OFFSETS = {name: layout.WindowDecodeProblem.offset(name) for name in _MOVED}
ADDRESS, TURN = struct.Struct("q"), struct.Struct("4q")
"""The fields from `turn_cos` on lie together."""


class RingBuffer(NamedTuple):
    """The window's tokens, in memory that is written over.

    Attributes:
        key: `[B, Hkv, W, D]`, dense along D.
        value: `[B, Hkv, W, Dv]`, likewise.
        valid: boolean `[B, W]`, True at columns that count.
        head_index: int64 `[B]`, dense: the column of the oldest token.
    """

    key: Tensor
    value: Tensor
    valid: Tensor
    head_index: Tensor


class Sinks(NamedTuple):
    """The first tokens, beside the window.

    Attributes:
        query: of the token, `[B, H, 1, D]`.
        key: `[B, Hkv, n, D]`, all of which count.
        value: `[B, Hkv, n, Dv]`.
        turn: cosines and sines by which it is turned to where it meets them, `[B or 1, R]` each, float32,
            dense, as Llama's rotary embedding has them; None where it is met as it is.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    turn: tuple[Tensor, Tensor] | None = None


class LinearTail(NamedTuple):
    """What lies behind the window, as a linear attention has it.

    Attributes:
        query: features of the query, `[B, H, 1, F]`, or what the kernel's map or `learned` makes them of.
        evicted: features of the window's oldest token, `[B, Hkv, 1, F]`, and its value, `[B, Hkv, 1, Dv]`:
            they go over into the state. None for the token as it lies in the window.
        S: the state, `[B, Hkv, F, Dv]`, float32, dense: written over.
        z: `[B, Hkv, F]`, likewise.
        log_decay: of the evicted token, `[B, Hkv, 1]`, at most 0; None for no decay.
        gate: in place of `log_decay`.
        kind: as in `OpConfig`.
        eps: likewise.
        query_log_scale: logarithm of what the query's features were divided by, `[B, H, 1]`; None for 1,
            and where the map is the kernel's.
        mix: the window's share of the output, `[H]`, float32, dense, where each part has a normaliser of its
            own and the tail is not empty; None for one normaliser.
        mix_logit: the sigmoid of `mix` is the share.
        learned: W_q `[H, F / 2, D]` and W_k `[Hkv, F / 2, D]` of the features [softmax(W x), softmax(-W x)]
            held above `eps`, of query and evicted key; None for `kind`.
    """

    query: Tensor
    evicted: tuple[Tensor, Tensor] | None
    S: Tensor
    z: Tensor
    log_decay: Tensor | None = None
    gate: Gate | None = None
    kind: str = "none"
    eps: float = 0.0
    query_log_scale: Tensor | None = None
    mix: Tensor | None = None
    mix_logit: bool = False
    learned: tuple[Tensor, Tensor] | None = None


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    ring: RingBuffer,
    scaling: float,
    tail: LinearTail | None = None,
    sinks: Sinks | None = None,
) -> Tensor:
    """Put a token into the window and let its query read all: `[B, H, 1, Dv]` in the dtype of the query.

    A token that does not count changes neither window nor state.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, Hkv, 1, D]`, in the dtype of the window's.
        value: `[B, Hkv, 1, Dv]`, likewise.
        valid: boolean `[B, 1]`, whether the token counts; None for all.
        ring: what the window holds, written over.
        scaling: of the scores.
        tail: what lies behind the window; its state is written over.
        sinks: tokens that are seen with the window; None for none.

    Raises:
        UnsupportedCallError: the kernels cannot be compiled.
    """
    query, key, value = rows(query), rows(key), rows(value)
    output = token_major(query, query.shape[0], query.shape[1], 1, ring.value.shape[3])
    tail = None if tail is None else _dense(tail)  # held until the kernel is done
    if sinks is not None:
        sinks = Sinks(rows(sinks.query), rows(sinks.key), rows(sinks.value), sinks.turn)
    problem = _problem((query, key, value), valid, ring, output, tail, sinks)
    build.library().linattn_window_decode(problem, scaling)
    return output


class Prepared:
    """Tokens behind one window, of which the call is packed once: `run` fills in where a token lies.

    Args:
        token: query `[B, H, 1, D]`, key and value, in memory as all tokens will be, none of them padding.
        ring: as `decode` takes it; it must stay where it is, as what follows.
        scaling: of the scores.
        tail: likewise; of the token's query itself.
        sinks: likewise.
    """

    def __init__(
        self,
        token: tuple[Tensor, Tensor, Tensor],
        ring: RingBuffer,
        scaling: float,
        tail: LinearTail | None,
        sinks: Sinks | None,
    ) -> None:
        query, _, value = token
        self.shape, self.scaling = (query.shape[0], 1, query.shape[1], value.shape[3]), scaling
        tail = None if tail is None else _dense(tail)
        if sinks is not None:
            sinks = sinks._replace(query=query, key=rows(sinks.key), value=rows(sinks.value))
        output = query.new_empty(self.shape).transpose(1, 2)
        self.threads = threads()
        self.problem = bytearray(_problem(token, None, ring, output, tail, sinks))
        self.call = (ctypes.c_char * len(self.problem)).from_buffer(self.problem)
        self.held = ring, tail, sinks
        self.queries = [OFFSETS["query"], *(OFFSETS["tail_query"],) * (tail is not None)]
        self.queries += [OFFSETS["sink_query"]] * (sinks is not None)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, turn: tuple[Tensor, Tensor] | None
    ) -> Tensor | None:
        """Compute a token: `[B, 1, H, Dv]`; None where threads are not as many as they were.

        Args:
            query: `[B, H, 1, D]`.
            key: `[B, Hkv, 1, D]`.
            value: `[B, Hkv, 1, Dv]`.
            turn: as `Sinks` has it.
        """
        if threads() != self.threads:
            return None
        output, problem, put = query.new_empty(self.shape), self.problem, ADDRESS.pack_into
        at = query.data_ptr()
        for offset in self.queries:
            put(problem, offset, at)
        put(problem, OFFSETS["key"], key.data_ptr())
        put(problem, OFFSETS["value"], value.data_ptr())
        put(problem, OFFSETS["output"], output.data_ptr())
        TURN.pack_into(problem, OFFSETS["turn_cos"], *_turn(turn))
        build.library().linattn_window_decode(self.call, self.scaling)
        return output


def _problem(
    token: tuple[Tensor, Tensor, Tensor],
    valid: Tensor | None,
    ring: RingBuffer,
    output: Tensor,
    tail: LinearTail | None,
    sinks: Sinks | None,
) -> bytes:
    query, key, value = token
    packed_query, beside = array(query), (layout.NO_ARRAY,) * 3
    if sinks is not None:
        met = packed_query if sinks.query is query else array(sinks.query)
        beside = met, array(sinks.key), array(sinks.value)
    cos, sin, turned, turn_row = _turn(None if sinks is None else sinks.turn)
    return layout.WindowDecodeProblem.pack(
        sizes=layout.sizes(query.shape[1], 1, query, ring.value),
        tail=layout.NO_TAIL if tail is None else _packed(tail, query, packed_query),
        columns=ring.value.shape[2],
        sinks=0 if sinks is None else sinks.key.shape[2],
        query=packed_query,
        key=array(key),
        value=array(value),
        output=array(output),
        ring_key=array(ring.key),
        ring_value=array(ring.value),
        sink_query=beside[0],
        sink_key=beside[1],
        sink_value=beside[2],
        turn_cos=cos,
        turn_sin=sin,
        turned=turned,
        turn_row=turn_row,
        ring_valid=ring.valid.data_ptr(),
        ring_valid_row=ring.valid.stride(0),
        head_index=ring.head_index.data_ptr(),
        token_valid=0 if valid is None else valid.data_ptr(),
        token_valid_row=0 if valid is None else valid.stride(0),
    )


def _turn(turn: tuple[Tensor, Tensor] | None) -> tuple[int, int, int, int]:
    """Tell where cosines and sines lie, how many there are, and the stride of rows."""
    if turn is None:
        return 0, 0, 0, 0
    cos, sin = turn
    size = cos.shape[1]
    return cos.data_ptr(), sin.data_ptr(), size, 0 if cos.shape[0] == 1 else size


def _dense(tail: LinearTail) -> LinearTail:
    """Make the last axes dense, and decay and scale all of them, as the kernel reads them."""
    evicted, decay, scale, learned = tail.evicted, tail.log_decay, tail.query_log_scale, tail.learned
    if learned is not None:
        dtypes = {x.dtype for x in learned}
        dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
        learned = learned[0].to(dtype).contiguous(), learned[1].to(dtype).contiguous()
    return tail._replace(
        learned=learned,
        query=rows(tail.query),
        evicted=None if evicted is None else (rows(evicted[0]), rows(evicted[1])),
        log_decay=None if decay is None else decay.contiguous(),
        query_log_scale=None if scale is None else scale.contiguous(),
    )


def _packed(tail: LinearTail, query: Tensor, packed_query: bytes) -> bytes:
    key, value = (layout.NO_ARRAY,) * 2 if tail.evicted is None else map(array, tail.evicted)
    return layout.DecodeTail.pack(
        feature_map=FEATURE_MAPS.index(tail.kind),
        features=tail.S.shape[2],
        tail_query=packed_query if tail.query is query else array(tail.query),
        evicted_key=key,
        evicted_value=value,
        S=tail.S.data_ptr(),
        z=tail.z.data_ptr(),
        log_decay=address(tail.log_decay),
        gate=layout.gate(tail.gate),
        query_log_scale=address(tail.query_log_scale),
        map_query=0 if tail.learned is None else address(tail.learned[0]),
        map_key=0 if tail.learned is None else address(tail.learned[1]),
        map_dtype=0 if tail.learned is None else layout.DTYPES[tail.learned[1].dtype],
        eps=tail.eps,
        mix=address(tail.mix),
        mix_logit=tail.mix_logit,
    )
