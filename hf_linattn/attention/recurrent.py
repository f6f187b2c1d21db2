"""An attention with a state in one call of a model: masks read, documents told apart, state carried."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_linattn.attention.cache import StateLayer
from hf_linattn.attention.call import Call
from hf_linattn.attention.tokens import Tokens
from hf_linattn.attention.visibility import analyse
from hf_linattn.errors import CacheError, UnsupportedCallError, UnsupportedMaskError


def attend(attention: Any, call: Call) -> Tensor:
    """Output of one call, `[B, H, N, Dv]` in the dtype of the query.

    Args:
        attention: a `StatefulAttention`.
        call: what the model asks; its state is read and written.
    """
    device = call.query.device.type
    if not torch.is_autocast_enabled(device):
        return _attend(attention, call)
    with torch.autocast(device, enabled=False):  # sums stay in float32
        return _attend(attention, call)


def _attend(attention: Any, call: Call) -> Tensor:
    layer, query, key = call.layer, call.query, call.key
    past = 0 if layer is None else layer.seen
    visibility = call.visibility
    if visibility.dense is not None:
        visibility = analyse(visibility, int(past))
    if visibility.window is not None:
        raise UnsupportedMaskError(
            "a sliding or chunked window: a linear attention sees all keys. Use sliding='global'"
        )
    if layer is None and visibility.causal and query.shape[2] != key.shape[2]:
        raise CacheError(
            f"causal attention of {query.shape[2]} queries over {key.shape[2]} keys without a state"
        )
    documents = visibility.documents
    if documents is not None:
        documents = documents.expand(query.shape[0], -1)
    new = _new_columns(documents, past, key.shape[2])
    count = visibility.count(query.device)[:, 0] if attention.counts else None
    valid = None if new is None else new > 0
    tokens = Tokens(query, key, call.value, call.scaling, valid, count, keep=layer is not None)
    if not visibility.causal:
        if layer is not None:
            raise UnsupportedCallError(
                "a bidirectional attention with a growing cache has no constant-size state"
            )
        output: Tensor = attention.both_ways(tokens)
        return output.to(query.dtype)
    state = None
    if layer is not None:
        state = _state_before(layer, attention, documents)
        tokens.in_place = layer.spare()
    if new is not None and _is_packed(new, past):
        tokens.documents = new.long().cummax(1).values
        if layer is not None and _holds_many(tokens.documents):
            raise UnsupportedCallError(
                "packed documents cannot be continued from a cache: pass use_cache=False"
            )
        if not attention.packs:
            if torch.compiler.is_compiling():
                raise UnsupportedCallError(
                    f"{attention.name!r} takes packed documents one by one, and a compiled graph cannot "
                    "tell them from padding: run padded or packed batches eagerly"
                )
            if _holds_many(tokens.documents):
                return _one_by_one(attention, tokens).to(query.dtype)
            tokens.documents = None
    output, state = attention.causal(tokens, state)
    if layer is not None:
        layer.write(state, tokens)
    return output if output.dtype == query.dtype else output.to(query.dtype)


def _one_by_one(attention: Any, tokens: Tokens) -> Tensor:
    """Each document of each row by itself."""
    assert tokens.documents is not None
    rows = []
    for row, labels in enumerate(tokens.documents):
        lengths = torch.unique_consecutive(labels, return_counts=True)[1].tolist()
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        parts = [
            attention.causal(tokens.slice(start, start + length, row), None)[0]
            for start, length in zip(starts, lengths, strict=True)
        ]
        rows.append(torch.cat(parts, 2))
    return torch.cat(rows)


def _new_columns(documents: Tensor | None, past: int | Tensor, length: int) -> Tensor | None:
    if documents is None or documents.shape[-1] == length:
        return documents
    if isinstance(past, int):
        return documents[:, past : past + length]
    return documents.index_select(1, past + torch.arange(length, device=documents.device))


def _is_packed(new: Tensor, past: int | Tensor) -> bool:
    if not isinstance(past, int) or past:
        return False
    return torch.compiler.is_compiling() or bool((new > 1).any())


def _holds_many(labels: Tensor) -> bool:
    """Whether any row holds more than one document; not told while compiling."""
    return not torch.compiler.is_compiling() and bool((labels[:, -1] > 1).any())


def _state_before(layer: StateLayer, attention: Any, documents: Tensor | None) -> Any:
    """The state of all earlier tokens, once the mask still shows them as they were summed."""
    if isinstance(layer.seen, int) and layer.seen and not torch.compiler.is_compiling():
        valid = None if documents is None else documents[:, : layer.seen] > 0
        if layer.pending is not None:
            _absorb(layer, attention, valid)
        if (layer.visible is not None or valid is not None) and not layer.shows(valid):
            raise UnsupportedMaskError(
                "the attention mask shows other past tokens than those already summed into the "
                "state: pass the mask of all tokens so far, unchanged"
            )
    return layer.state


def _absorb(layer: StateLayer, attention: Any, valid: Tensor | None) -> None:
    """Sum tokens that another attention stored, or that were left when others were taken back."""
    tokens = layer.pending
    assert tokens is not None
    if tokens.query is None:  # all of an unpatched model's past
        tokens.valid = valid
        if attention.counts:
            ones = torch.ones(tokens.key.shape[0], tokens.length, dtype=torch.bool, device=tokens.key.device)
            tokens.count = (ones if valid is None else valid).cumsum(1).float()
    layer.take_pending(attention.absorb(tokens, layer.state))
