"""The cache layer that a patched attention needs, put at its place in transformers' cache."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_linattn.attention.cache import HybridStateLayer, StateLayer
from hf_linattn.attention.gate_layer import GateLayer, with_gates
from hf_linattn.attention.site import CACHE_ARGUMENTS
from hf_linattn.attention.tokens import Tokens
from hf_linattn.errors import CacheError, UnsupportedCallError
from hf_linattn.ops.tracing import exporting

CACHE_NAME = next(x.name for x in fields(BaseModelOutputWithPast) if x.name in CACHE_ARGUMENTS)
"""How transformers' models call a cache that they take and return: "cache", before 5.24 "past_key_values"."""
UNROTATED = "_linattn_still"
"""Attribute of a cache layer whose keys came without rotation."""


def cache_argument(model: Any) -> str:
    """Name the argument by which a model's forward takes a cache: code of its own may have an older name."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in (CACHE_NAME, *CACHE_ARGUMENTS) if name in parameters), CACHE_NAME)


def output_cache(output: Any) -> Any:
    """Return the cache of a model's output, or None."""
    return getattr(output, CACHE_NAME, None)


def self_attention_cache(cache: Any) -> Any:
    """Return the cache of the decoder's self-attention; encoder-decoder caches hold two."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _layer_at(cache: Any, index: int, where: str) -> Any:
    if not isinstance(cache, Cache):
        raise CacheError(
            f"{where}: a patched attention needs a transformers Cache, got {type(cache).__name__}"
        )
    while len(cache.layers) <= index:
        if cache.layer_class_to_replicate is None:
            raise CacheError(f"{where}: the cache has {len(cache.layers)} layers, and this is layer {index}")
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index]


def _static_length(cache: Any, where: str) -> int:
    if all(getattr(layer, "is_sliding", False) for layer in cache.layers):
        raise CacheError(
            f"{where}: a static cache of windows alone does not tell its length: use a dynamic one"
        )
    return int(cache.get_max_length())


def refuse_rotated_keys(cache: Any, index: int, where: str) -> None:
    """Refuse a cache whose keys another attention has rotated, at a layer without rotary embedding.

    Raises:
        CacheError: it does.
    """
    layer: Any = _layer_at(cache, index, where)
    if getattr(layer, UNROTATED, False) or isinstance(layer, StateLayer):
        return
    if layer.is_initialized and int(layer.get_seq_length()) > 0:
        raise CacheError(
            f"{where}: the keys in this cache were turned by a rotary embedding, which is switched off here: "
            "start from a new cache"
        )
    setattr(layer, UNROTATED, True)


def put_layer(child: Any, cache: Any, index: int, where: str) -> StateLayer | GateLayer | None:
    """Put the layer that a patched module needs at `index` of the cache.

    Args:
        child: the module's `PatchedAttention`.
        cache: of transformers; with two of them, that of self-attention.
        index: of the layer.
        where: the module, for messages.

    Returns:
        The layer; None where transformers' own will do.

    Raises:
        CacheError: what is there cannot become that layer exactly.
    """
    if child.keeps_state:
        return put_state_layer(cache, index, where, child.written_as)
    if child.drops_window:
        put_full_cache(cache, index, where)
    if not child.keeps_gates:
        return None
    layer: Any = _layer_at(cache, index, where)
    if not isinstance(layer, GateLayer):
        layer = cache.layers[index] = with_gates(layer, where)
    _claim(layer, where, child.written_as)
    return layer  # type: ignore[no-any-return]


def _claim(layer: StateLayer | GateLayer, where: str, written_as: str) -> None:
    """Note whose a layer is that is there already, unless it holds what another patch has written."""
    if layer.written_as == written_as:
        return
    if not layer.is_empty():
        raise CacheError(
            f"{where}: what this cache holds is of another patch or of other options, {layer.written_as}, "
            f"and here is {written_as}: start from a new cache"
        )
    layer.written_as = written_as


def put_full_cache(cache: Any, index: int, where: str) -> None:
    """Keep all keys at `index` of the cache, where transformers would keep those of a window.

    Raises:
        CacheError: keys were dropped already, or the layer is of another kind.
    """
    old: Any = _layer_at(cache, index, where)
    if not getattr(old, "is_sliding", False):
        return
    seen = int(old.get_seq_length())
    if type(old) is DynamicSlidingWindowLayer:
        if seen and (old.keys is None or old.keys.shape[-2] != seen):
            raise CacheError(f"{where}: a sliding-window cache has dropped keys that 'global' would need")
        new: Any = DynamicLayer()
        if seen:
            new.update(old.keys, old.values)
    elif type(old) is StaticSlidingWindowLayer and not seen:
        new = StaticLayer(max_cache_len=_static_length(cache, where))
    else:
        raise CacheError(f"{where}: a cache layer of type {type(old).__name__} cannot keep all keys")
    setattr(new, UNROTATED, getattr(old, UNROTATED, False))
    cache.layers[index] = new


def put_state_layer(cache: Any, index: int, where: str, written_as: str) -> StateLayer:
    """Put a state layer at `index` of the cache; keys already there are absorbed at the next call.

    Args:
        cache: of transformers.
        index: of the layer.
        where: the module, for messages.
        written_as: the patch and all of its options, which another state would mean something else to.

    Raises:
        CacheError: what is there cannot become a state exactly.
        UnsupportedCallError: `torch.export` is given a static cache.
    """
    old: Any = _layer_at(cache, index, where)
    if isinstance(old, StateLayer):
        if old.torn:
            raise CacheError(
                f"{where}: crop() has taken tokens from layers in front of it, and could not take them from "
                "its state: start from a new cache"
            )
        _claim(old, where, written_as)
        return old
    hybrid = isinstance(old, LinearAttentionLayer)
    if hybrid and not isinstance(old, DynamicLayer):
        raise CacheError(
            f"{where}: a cache layer of type {type(old).__name__} cannot hold a linear-attention state"
        )
    if (
        hybrid
        or type(old) is DynamicLayer
        or (getattr(old, "is_sliding", False) and isinstance(old, DynamicLayer))
    ):
        seen = int(old.get_seq_length())
        if type(old) is DynamicLayer and old.is_initialized and not seen:
            raise CacheError(
                f"{where}: this cache was used, and holds no keys: it was cut out of one with "
                "linear-attention states, or cropped to nothing. Start from a new one"
            )
        if seen and old.keys.shape[-2] != seen:
            raise CacheError(
                f"{where}: a sliding-window cache has dropped keys, so its past cannot become a state"
            )
        pending = Tokens(None, old.keys, old.values, 1.0) if seen else None
        new = HybridStateLayer(old, pending, seen) if hybrid else StateLayer(pending=pending, seen=seen)
        new.record_past = getattr(old, "record_past", False)
    elif isinstance(old, StaticLayer):
        if old.is_initialized and exporting():  # how many tokens it holds is an input of the program
            raise UnsupportedCallError(
                f"{where}: a linear-attention state cannot be exported in a StaticCache. "
                "Pass use_cache=False and the whole text"
            )
        if old.is_initialized and int(old.get_seq_length()) > 0:
            raise CacheError(
                f"{where}: a StaticCache that already holds keys cannot be absorbed: start from an empty one"
            )
        new = StateLayer(max_cache_len=_static_length(cache, where))
    else:
        raise CacheError(
            f"{where}: a cache layer of type {type(old).__name__} cannot hold a linear-attention state"
        )
    new.written_as = written_as
    new.beside_others = not all(isinstance(layer, StateLayer) for layer in cache.layers[:index])
    cache.layers[index] = new
    return new
