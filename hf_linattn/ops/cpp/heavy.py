"""A window with heavy hitters by the C++ kernels, many tokens or one at a time; without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_linattn.ops.cpp import build, layout
from hf_linattn.ops.cpp.layout import address, array
from hf_linattn.ops.cpp.linear import SUMS, rows
from hf_linattn.ops.types import HeavyColumns, HeavyPlaces, HeavyState, token_major


def forward(
    query: Tensor,
    near: Tensor | None,
    key: Tensor,
    value: Tensor,
    places: HeavyPlaces,
    before: HeavyState | None,
    columns: HeavyColumns,
    scaling: float,
    in_place: bool = False,
    chosen: Tensor | None = None,
) -> tuple[Tensor, HeavyState]:
    """Attend to sinks, heavy hitters and window, choosing anew whenever a block leaves.

    Args:
        query: `[B, H, N, D]`.
        near: as it meets the sinks, likewise; None for as it is.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        places: of the tokens that are no padding, which may hold anything.
        before: the cache, in the dtypes of key and value; None for nothing.
        columns: its sizes.
        scaling: of the scores.
        in_place: the cache before may be written over.
        chosen: where ranks of what stays after each choice are written, of a text from its first token on,
            int32 `[B, Hkv, choices, heavy]`; nothing is written for who is not there. None for nowhere.

    Returns:
        Output `[B, H, N, Dv]`, in memory `[B, N, H, Dv]`, 0 for padding; and the cache after.

    Raises:
        UnsupportedCallError: the kernels cannot be compiled.
    """
    query, key, value = map(rows, (query, key, value))
    batch, heads, length, _ = query.shape
    output = token_major(value, batch, heads, length, value.shape[3])
    if places.order is not None:
        output.zero_()
    after = _cache(before, key, value, columns.total, in_place)
    problem = layout.HeavyProblem.pack(
        sizes=layout.sizes(heads, length, key, value),
        window=columns.size,
        heavy=columns.heavy,
        sinks=columns.sinks,
        block=columns.block,
        reach=columns.reach or 0,
        fade=columns.fade,
        query=array(query),
        near=layout.NO_ARRAY if near is None else array(near := rows(near)),
        key=array(key),
        value=array(value),
        output=array(output),
        kept_key=array(after.key),
        kept_value=array(after.value),
        kept_weight=address(after.weight),
        kept_rank=address(after.rank),
        seen=address(places.seen),
        visible=address(places.new),
        order=address(places.order),
        chosen=address(chosen),
        choices=0 if chosen is None else chosen.shape[2],
    )
    build.library().linattn_heavy(problem, scaling)
    return output, after


def _cache(before: HeavyState | None, key: Tensor, value: Tensor, columns: int, in_place: bool) -> HeavyState:
    """Return memory for the cache after, with what was before."""
    if before is None:
        shape = *key.shape[:2], columns
        new_key, new_value = (x.new_zeros(*shape, x.shape[3]) for x in (key, value))
        weight, rank = (key.new_zeros(shape, dtype=dtype) for dtype in (SUMS, torch.int32))
        return HeavyState(new_key, new_value, weight, rank)
    if in_place and all(x.is_contiguous() for x in before):
        return before
    return HeavyState(*(x.clone(memory_format=torch.contiguous_format) for x in before))
