"""The delta rule by fla's kernels: what `eager.delta_rule.causal` computes, in the words of that library.

Tensors lie as `[B, N, H, D]` there, S as `[B, H, D, Dv]` in float32, decays are logarithms. What it has no
words for is said otherwise:

* Padding writes and ages nothing: its b, its key and its log a are 0.
* A document begins with a token that forgets all there was: log a is `LOWEST` there. fla's own packing wants
  the number of documents, for which Python would wait for the device.
* Query heads that share a key head. In chunks keys and values are repeated for each of them. Token by token
  that would copy the state as often, so the queries of a group come one after the other, as tokens of their
  own of which only the first one writes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops.eager.delta_rule import LOWEST

Kind = Literal["delta_rule", "gated_delta_rule", "kda"]
"""Which kernels: without a decay, with one for each key head, with one for each channel."""
SHORT = 64
"""Tokens, times query heads per key head, up to which recurrent kernels compute; they have no backward."""


def kind_of(log_decay: Tensor | None, documents: Tensor | None) -> Kind:
    """Choose the kernels of a call: documents begin by a decay."""
    if log_decay is None:
        return "delta_rule" if documents is None else "gated_delta_rule"
    return "gated_delta_rule" if log_decay.shape[-1] == 1 else "kda"


def is_recurrent(query: Tensor | None, key: Tensor, *others: Tensor | None) -> bool:
    """Tell whether the recurrent kernels take a call: a few tokens, and no gradient is wanted."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, *others)):
        return False
    group = 1 if query is None else query.shape[1] // key.shape[1]
    return key.shape[2] * group <= SHORT


@functools.cache
def function(kind: Kind, recurrent: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Look a function of fla up; importing it takes some seconds.

    Raises:
        ImportError: fla is not installed or has no such function; and whatever else its import raises.
    """
    module = importlib.import_module(f"fla.ops.{kind}")
    name = f"{'fused_recurrent' if recurrent else 'chunk'}_{kind}"
    found: Callable[..., tuple[Tensor, Tensor]] | None = getattr(module, name, None)
    if found is None:
        raise ImportError(f"fla.ops.{kind} has no {name}")
    return found


def causal(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    documents: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Compute the delta rule; arguments and results as `eager.delta_rule.causal`.

    Products are in the dtype of the values, as is the output; S is float32.

    Raises:
        UnsupportedCallError: by the backward, where it is to be differentiated itself.
    """
    kind = kind_of(log_decay, documents)
    recurrent = is_recurrent(query, key, value, beta, log_decay, state)
    gates = _decays(key, log_decay, documents)
    group = 1 if query is None else query.shape[1] // key.shape[1]
    run = _in_steps if recurrent else _in_chunks
    output, after = run(
        function(kind, recurrent), key if query is None else query, key, value, beta, gates, state, group
    )
    for result in (output, after):
        if result.requires_grad:
            result.register_hook(_only_once)
    return (None if query is None else output), after


def _in_chunks(
    compute: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    gates: Tensor | None,
    state: Tensor | None,
    group: int,
) -> tuple[Tensor, Tensor]:
    def repeated(x: Tensor) -> Tensor:
        return x if group == 1 else x.repeat_interleave(group, 1)

    query, key = query.to(value.dtype), repeated(key.to(value.dtype))
    options: dict[str, Any] = {"beta": repeated(beta).transpose(1, 2)}
    if gates is not None:
        options["g"] = repeated(gates).transpose(1, 2)
    output, after = compute(
        *(x.transpose(1, 2) for x in (query, key, repeated(value))),
        **options,
        scale=1.0,
        initial_state=None if state is None else repeated(state),
        output_final_state=True,
    )
    return output.transpose(1, 2), after if group == 1 else after[:, ::group]


def _in_steps(
    compute: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    gates: Tensor | None,
    state: Tensor | None,
    group: int,
) -> tuple[Tensor, Tensor]:
    def spread(x: Tensor) -> Tensor:
        """Bring `[B, Hkv, N, ...]` to `[B, N G, Hkv, ...]`, with zeros for all but the first of a group."""
        x = x.transpose(1, 2)
        if group == 1:
            return x
        wide = x.new_zeros(*x.shape[:2], group, *x.shape[2:])
        wide[:, :, 0] = x
        return wide.flatten(1, 2)

    options = {} if gates is None else {"g": spread(gates)}
    output, after = compute(
        query.unflatten(1, (-1, group)).permute(0, 3, 2, 1, 4).flatten(1, 2),
        *(spread(x) for x in (key, value)),
        beta=spread(beta),
        **options,
        scale=1.0,
        initial_state=state,
        output_final_state=True,
    )
    return output.unflatten(1, (-1, group)).permute(0, 3, 2, 1, 4).flatten(1, 2), after


def _decays(key: Tensor, log_decay: Tensor | None, documents: Tensor | None) -> Tensor | None:
    """Return log a, `[B, Hkv, N]` or `[B, Hkv, N, D]`, where documents begin too; None where all is 0."""
    if log_decay is None:
        if documents is None:
            return None
        log_decay = key.new_zeros(*key.shape[:3], 1, dtype=torch.float32)
    if documents is not None:  # the first one goes on from the state
        begins = torch.zeros_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        log_decay = log_decay.masked_fill(begins[:, None, :, None], LOWEST)
    return log_decay.squeeze(-1) if log_decay.shape[-1] == 1 else log_decay


def _only_once(grad: Tensor) -> None:
    """Refuse gradients of gradients: those of fla's backward would be taken for 0."""
    if torch.is_grad_enabled():
        raise UnsupportedCallError(
            "gradients of gradients: fla's kernels of the delta rule have none. HF_LINATTN_TRITON=0 takes "
            "torch operations, which have"
        )
