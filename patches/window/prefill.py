"""Many tokens behind a window, and the linear attention of the rest, in one kernel on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention, Tokens
from hf_linattn.ops import window_attention
from hf_linattn.ops.triton import check, window_rest
from hf_linattn.ops.triton.selftest import Form
from hf_linattn.ops.triton.window_rest import Rest
from hf_linattn.ops.triton.window_rest_selftest import RestForm
from hf_linattn.ops.types import State, Window

from .rest import without_gates
from .ring import Seen
from .sinks import for_triton


def prefill(
    window: Any, tokens: Tokens, seen: Seen, evicted: Tokens, before: State | None
) -> tuple[Tensor, State] | None:
    """Compute tokens behind a window, its sinks and the rest at once, without gradients.

    Args:
        window: the attention.
        tokens: the new ones.
        seen: by them.
        evicted: the tokens that leave as each of them comes.
        before: the state of those that have left; None for nothing.

    Returns:
        Output `[B, H, N, Dv]` and the state of the rest after; None where the kernel does not take these.
    """
    rest, query = window._linear(), tokens.query
    assert query is not None
    summed = isinstance(rest, LinearAttention) and type(rest).sums is LinearAttention.sums
    if torch.is_grad_enabled() or not summed or window.mix != "shared" or window.branches != "both":
        return None
    if tokens.softcap is not None or tokens.sink is not None or not evicted.length:
        return None
    alone = tokens.length - evicted.length
    assert seen.valid is not None
    value, slots = window._values(seen.value), window.sinks
    inside = Window(query, seen.key, value, seen.valid, window.size, tokens.scaling)
    form = RestForm(rest.features or query.shape[-1], rest.fused, slots > 0, rest.has_decay)
    if (alone and before is not None) or not window_attention.one_kernel_takes(
        inside, form, evicted.length, slots
    ):
        return None
    behind = without_gates(replace(evicted, query=query[:, :, alone:]), window.gate_count)
    inputs = rest.kernel_inputs(behind, True, before)
    inputs = check.narrowed(inputs, query.dtype, value.dtype, Form(rest.fused))
    scale = rest.log_scale_of(query[:, :, alone:]) if rest.fused == "none" else None
    sinks = None
    if slots:
        sinks = for_triton(
            query, seen.sinks._replace(value=window._values(seen.sinks.value)), seen.ranks, window._turn()
        )
    output, S, z = window_rest.forward(inside, sinks, Rest(inputs, rest.fused, rest.eps, scale))
    return output, State(S, z)
