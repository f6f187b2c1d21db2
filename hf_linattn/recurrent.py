"""A linear attention in one call of a model: masks read, state carried, sums done by `ops.linear`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_linattn.cache import StateLayer, fingerprint
from hf_linattn.errors import CacheError, UnsupportedCallError, UnsupportedMaskError
from hf_linattn.ops import linear
from hf_linattn.ops.linear import State
from hf_linattn.visibility import Visibility, analyse


def attend(
    features: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility,
    layer: StateLayer | None,
    cu_seq_lens: Tensor | None,
) -> Tensor:
    """Linear attention of one call.

    Args:
        features: a `LinearAttention`; called as `features(query, key)`.
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`, the new ones alone where there is a state.
        value: `[B, Hkv, S, Dv]`.
        visibility: the mask, over past and new keys.
        layer: the state to read and write, None without a cache.
        cu_seq_lens: borders of packed documents in one row, as flash attention takes them.

    Returns:
        `[B, H, N, Dv]` in the dtype of the query.
    """
    past = 0 if layer is None else layer.seen
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
    if cu_seq_lens is not None:
        documents = _packed(cu_seq_lens, documents, query, visibility, layer)
    if documents is not None:
        documents = documents.expand(query.shape[0], -1)
    with torch.autocast(query.device.type, enabled=False):
        phi_q, phi_k = features(query, key)
        new = _new_columns(documents, past, key.shape[2])
        values = value.to(phi_k.dtype)
        if new is not None:
            hidden = (new <= 0)[:, None, :, None]
            # not a product: padded rows may hold NaN
            phi_k, values = phi_k.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        if not visibility.causal:
            if layer is not None:
                raise UnsupportedCallError(
                    "a bidirectional attention with a growing cache has no constant-size state"
                )
            return linear.read(phi_q, linear.state_of(phi_k, values)).to(query.dtype)
        state = None if layer is None else _state_before(layer, features, documents)
        labels = None
        packed = cu_seq_lens is not None or _is_packed(new, past)
        if new is not None and packed:
            labels = new.long().cummax(1).values
        output, state = linear.causal(phi_q, phi_k, values, state, labels)
        if layer is not None:
            if labels is not None and not torch.compiler.is_compiling() and bool((labels[:, -1] > 1).any()):
                raise UnsupportedCallError(
                    "packed documents cannot be continued from a cache: pass use_cache=False"
                )
            layer.write(state, phi_k, values, None if new is None else new > 0)
    return output.to(query.dtype)


def _packed(
    borders: Tensor, documents: Tensor | None, query: Tensor, visibility: Visibility, layer: StateLayer | None
) -> Tensor:
    if not visibility.causal or query.shape[0] != 1 or layer is not None:
        raise UnsupportedCallError("cu_seq_lens_q: supported for one causal row without a cache")
    index = torch.arange(query.shape[2], device=query.device)
    row = torch.bucketize(index, borders[1:].long(), right=True)[None] + 1
    return row if documents is None else row * (documents > 0)


def _new_columns(documents: Tensor | None, past: int | Tensor, length: int) -> Tensor | None:
    if documents is None or documents.shape[-1] == length:
        return documents
    if isinstance(past, int):
        return documents[:, past : past + length]
    return documents.index_select(1, past + torch.arange(length, device=documents.device))


def _is_packed(new: Tensor | None, past: int | Tensor) -> bool:
    if new is None or not isinstance(past, int) or past:
        return False
    return torch.compiler.is_compiling() or bool((new > 1).any())


def _state_before(layer: StateLayer, features: nn.Module, documents: Tensor | None) -> State | None:
    """The state of all earlier tokens, once the mask still shows them as they were summed."""
    if isinstance(layer.seen, int) and layer.seen and not torch.compiler.is_compiling():
        if layer.pending is not None:
            _absorb(layer, features, documents)
        elif layer.visible is not None or documents is not None:
            some = layer.visible if documents is None else documents
            assert some is not None
            ones = torch.ones(some.shape[0], layer.seen, dtype=torch.bool, device=some.device)
            seen = fingerprint(ones if documents is None else documents[:, : layer.seen] > 0)
            if bool((seen != (fingerprint(ones) if layer.visible is None else layer.visible)).any()):
                raise UnsupportedMaskError(
                    "the attention mask shows other past tokens than those already summed into the "
                    "state: pass the mask of all tokens so far, unchanged"
                )
    return layer.state


def _absorb(layer: StateLayer, features: nn.Module, documents: Tensor | None) -> None:
    assert layer.pending is not None
    assert isinstance(layer.seen, int)
    keys, values = layer.pending
    phi_k = features(None, keys)[1]
    values = values.to(phi_k.dtype)
    if documents is not None:
        valid = documents[:, : layer.seen] > 0
        hidden = ~valid[:, None, :, None]
        phi_k, values = phi_k.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
        layer.visible = fingerprint(valid)
    layer.state, layer.pending = linear.state_of(phi_k, values), None
