"""Many tokens behind a window, and the linear attention of the rest, at once on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_linattn.attention import LinearAttention, Tokens
from hf_linattn.ops import dispatch, gate, window_attention, window_rest_operator
from hf_linattn.ops.triton import check, window_rest
from hf_linattn.ops.triton.selftest import Form
from hf_linattn.ops.triton.window_rest import Rest
from hf_linattn.ops.triton.window_rest_selftest import RestForm
from hf_linattn.ops.types import Elu1Sums, ScaledSums, State, Window

from .rest import without_gates
from .ring import Seen
from .sinks import for_triton


def prefill(
    window: Any, tokens: Tokens, seen: Seen, evicted: Tokens, before: State | None
) -> tuple[Tensor, State | None] | None:
    """Compute tokens behind a window, its sinks and the rest at once: in one kernel, or for a backward.

    Args:
        window: the attention.
        tokens: the new ones.
        seen: by them.
        evicted: the tokens that leave as each of them comes.
        before: the state of those that have left; None for nothing.

    Returns:
        Output `[B, H, N, Dv]` and the state of the rest after, None with gradients, where nobody keeps it;
        None where the kernels do not take these.
    """
    rest, query = window._linear(), tokens.query
    assert query is not None
    summed = isinstance(rest, LinearAttention) and type(rest).sums is LinearAttention.sums
    if not summed or window.mix != "shared" or window.branches != "both":
        return None
    if tokens.softcap is not None or tokens.sink is not None or not evicted.length:
        return None
    assert seen.valid is not None
    inside = Window(query, seen.key, window._values(seen.value), seen.valid, window.size, tokens.scaling)
    if torch.is_grad_enabled():
        output = _with_gradients(window, tokens, seen, evicted, inside) if before is None else None
        return None if output is None else (output, None)
    alone, slots = tokens.length - evicted.length, window.sinks
    form = RestForm(rest.features or query.shape[-1], rest.fused, slots > 0, rest.has_decay)
    if (alone and before is not None) or not window_attention.one_kernel_takes(
        inside, form, evicted.length, slots
    ):
        return None
    behind = without_gates(replace(evicted, query=query[:, :, alone:]), window.gate_count)
    inputs = rest.kernel_inputs(behind, True, before, backend="triton")
    inputs = check.narrowed(inputs, query.dtype, inside.value.dtype, Form(rest.fused))
    scale = rest.log_scale_of(query[:, :, alone:]) if rest.fused == "none" else None
    sinks = None
    if slots:
        sinks = for_triton(
            query, seen.sinks._replace(value=window._values(seen.sinks.value)), seen.ranks, window._turn()
        )
    output, S, z = window_rest.forward(inside, sinks, Rest(inputs, rest.fused, rest.eps, scale))
    return output, State(S, z)


def _with_gradients(
    window: Any, tokens: Tokens, seen: Seen, evicted: Tokens, inside: Window
) -> Tensor | None:
    """Compute a text that begins, of which nothing is kept; None where the kernels do not take it."""
    rest, query, slots = window._linear(), inside.query, window.sinks
    # of features autograd brings the gradients to the text by itself
    if tokens.keep or rest.fused == "none" or not rest.plain or window.gate_count:
        return None
    if torch.compiler.is_compiling() or seen.key.shape[2] != tokens.length:
        return None
    weights = rest.gate()
    if rest.has_decay and (weights is None or not gate.kernels_take(inside.value)):
        return None
    form = Form(rest.fused, True, False, rest.has_decay)
    if not window_attention.kernels_take(inside, slots, Elu1Sums if rest.fused == "elu1" else ScaledSums):
        return None
    if dispatch.choose_backend(query, tokens.key, inside.value, rest.fused, None, form) != "triton":
        return None
    sinks = for_triton(query, seen.sinks, seen.ranks, window._turn()) if slots else None
    left = window_rest_operator.Rest(evicted.length, evicted.valid, rest.fused, rest.eps, gate=weights)
    plain = tokens.valid is None and tokens.length >= slots  # then the first tokens are the sinks
    return window_rest_operator.attention(inside, sinks, left, slots if plain else 0)
