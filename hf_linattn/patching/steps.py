"""Short ways on a CPU: a text's first tokens, and those decoded one by one, as the call before found them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention.cache import StateLayer
from hf_linattn.attention.masks import CAUSAL
from hf_linattn.attention.site import EXTRAS
from hf_linattn.ops.tracing import exporting

WATCHED = EXTRAS.keys() | {"window", "cu_seq_lens_q", "output_attentions"}
"""Keywords of the interface call that change what is computed."""


class PreparedStep(NamedTuple):
    """One token of one cache layer, of which nothing but its tensors changes from call to call.

    Attributes:
        run: takes query, key, value, and the number of tokens before; gives `[B, 1, H, Dv]`, or None where
            something has changed.
        child: the module's `PatchedAttention`, whose weights it reads.
        state: that it writes over.
        given: how query, key and value lie in memory; scaling; names of keywords.
    """

    run: Callable[[Tensor, Tensor, Tensor, int], Tensor | None]
    child: Any
    state: Any
    given: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy to nothing: a copy of the cache has its numbers elsewhere."""
        return type(None), ()


def run_again(
    child: Any,
    layer: StateLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    how: tuple[float | None, float, bool],
    extras: dict[str, Any],
) -> Tensor | None:
    """Compute a token as the one before it was computed; None where anything is not as it was then.

    Args:
        child: the module's `PatchedAttention`.
        layer: with a prepared step.
        query: `[B, H, 1, D]`.
        key: `[B, Hkv, 1, D]`.
        value: `[B, Hkv, 1, Dv]`.
        mask: see `masks`.
        how: scaling, dropout, and whether the attention is causal.
        extras: the other keywords of the interface call.
    """
    step: PreparedStep = layer.prepared
    if (
        torch.is_grad_enabled()
        or step.state is not layer.state
        or step.child is not child
        or not _is_simple(child, layer, mask, how, extras, 1)
    ):
        return None
    if _given(query, key, value, how, extras) != step.given:
        return None
    output = step.run(query, key, value, layer.seen)  # type: ignore[arg-type]
    if output is not None:
        layer.seen += 1
    return output


def begin(
    child: Any,
    layer: StateLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    how: tuple[float | None, float, bool],
    extras: dict[str, Any],
) -> Tensor | None:
    """Compute the first N tokens of a text, none of them padding; None where more must be looked at.

    Arguments as of `run_again`, of N tokens; nothing is prepared in the layer.
    """
    if not query.is_cpu or torch.is_grad_enabled() or torch.compiler.is_compiling() or exporting():
        return None
    if layer.static or layer.state is not None or layer.seen or torch.is_autocast_enabled("cpu"):
        return None
    if query.shape[0] != key.shape[0] or query.shape[2] != key.shape[2] or key.shape[:3] != value.shape[:3]:
        return None
    if query.dtype != value.dtype or child.attention.directions == "bidirectional":
        return None
    if not (_is_plain(child) and _is_simple(child, layer, mask, how, extras, query.shape[2])):
        return None
    scaling = query.shape[3] ** -0.5 if how[0] is None else how[0]
    found = child.attention.prefill(query, key, value, scaling)
    if found is None:
        return None
    output, state = found
    layer.begin(state, query, key, value)
    return output.transpose(1, 2).contiguous()  # type: ignore[no-any-return]


def prepare(child: Any, call: Any, how: tuple[float | None, float, bool], extras: dict[str, Any]) -> None:
    """Let the next token behind this call's be computed by `run_again`, if the attention can.

    Args:
        child: the module's `PatchedAttention`.
        call: of one token, which is done.
        how: as the call was given it.
        extras: likewise.
    """
    layer = call.layer
    layer.prepared = None
    if not call.query.is_cpu:  # kernels in C++ alone are prepared
        return
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or exporting():
        return
    if not _is_plain(child):
        return
    if not isinstance(layer.seen, int) or layer.seen < 2 or not layer.may_overwrite():
        return  # a first token alone may be all there is: preparing takes as long as computing it
    if (
        not _is_simple(child, layer, None, how, extras, 1)
        or torch.is_inference_mode_enabled() != layer.state[0].is_inference()
    ):
        return
    run = child.attention.prepared_step(call)
    if run is not None:
        given = _given(call.query, call.key, call.value, how, extras)
        layer.prepared = PreparedStep(run, child, layer.state, given)


def _is_plain(child: Any) -> bool:
    """Tell whether a module needs queries, keys and values alone, and has its weights at hand."""
    return not (
        child.modifiers or child.needs_hidden or child.keeps_gates or child.attention.offloaded_inside()
    )


def _is_simple(
    child: Any,
    layer: StateLayer,
    mask: Any,
    how: tuple[float | None, float, bool],
    extras: dict[str, Any],
    length: int,
) -> bool:
    """Tell whether each new token sees all before it, none of which is padding, and nothing else matters."""
    if mask is not None and not (
        type(mask) is Tensor
        and mask.dtype == CAUSAL
        and mask.shape[2] == 1
        and mask.shape[3] == layer.seen + length
    ):
        return False
    attention = child.attention
    return (
        layer.visible is None
        and layer.pending is None
        and not layer.record_past
        and child.shard is None
        and how[1] == 0
        and how[2]
        and not (attention._forward_hooks or attention._forward_pre_hooks or "forward" in attention.__dict__)
        and all(extras[name] is None or extras[name] is False for name in extras if name in WATCHED)
    )


def _given(
    query: Tensor, key: Tensor, value: Tensor, how: tuple[float | None, float, bool], extras: dict[str, Any]
) -> tuple[Any, ...]:
    return (
        *(query.shape, query.stride(), query.dtype, query.device),
        *(key.shape, key.stride(), key.dtype, value.shape, value.stride(), value.dtype),
        *(how[0], *extras),
    )
