"""Count the bytes of a cache, patched and unpatched, and tell how they grow with the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from hf_linattn import bypassed, is_patched
from hf_linattn.attention.cache import StateLayer
from hf_linattn.errors import UnsupportedModelError
from hf_linattn.patching.cache_layers import output_cache, self_attention_cache

from ..common.models import UNPATCHED
from ..common.nll import forward, scoring

PATCHED = "patched"
PROBE = 8
"""Tokens of the text from whose cache the bytes at other lengths are computed."""


@dataclass(frozen=True)
class Growth:
    """Bytes of one cache layer, all rows together: constant + per_token * min(tokens, window)."""

    constant: int
    per_token: int
    window: int | None

    def at(self, tokens: int) -> int:
        """Return the bytes after this many tokens."""
        seen = tokens if self.window is None else min(tokens, self.window)
        return self.constant + self.per_token * seen


def sides(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return name -> context to compute in: the model as it is and, if it is patched, unpatched."""
    if not is_patched(model):
        return {UNPATCHED: nullcontext}
    return {PATCHED: nullcontext, UNPATCHED: lambda: bypassed(model)}


def tensors_of(layer: Any) -> list[Tensor]:
    """Return every tensor that a cache layer holds, each once."""
    tensors: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            tensors[id(value)] = value
        elif isinstance(value, Mapping):
            visit(tuple(value.values()))
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part)

    visit(vars(layer))
    return list(tensors.values())


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the elements of all its tensors."""
    return sum(_elements(tensors_of(layer)) for layer in cache.layers)


def held_bytes(cache: Any) -> int:
    """Return the bytes that its tensors keep alive: whole storages, also where a tensor shows a part."""
    storages = [x.untyped_storage() for layer in cache.layers for x in tensors_of(layer)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def growth(cache: Any) -> list[Growth] | None:
    """Tell how each layer of a cache grows, from its tensors; None where a layer's kind is not known.

    Raises:
        UnsupportedModelError: the cache is empty.
    """
    layers = []
    for layer in cache.layers:
        size = _elements(tensors_of(layer))
        if isinstance(layer, StateLayer):
            layers.append(Growth(size, 0, None))
            continue
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            return None
        kept = _elements([layer.keys, layer.values])
        tokens = int(layer.keys.shape[-2])
        if tokens == 0 or kept % tokens:
            raise UnsupportedModelError(f"a cache layer of type {type(layer).__name__} holds no tokens")
        window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
        # transformers keeps what the next token can see: one fewer than the window is wide
        layers.append(Growth(size - kept, kept // tokens, None if window is None else window - 1))
    return layers


def bytes_at(layers: Sequence[Growth], tokens: int) -> int:
    """Return the bytes of all layers after this many tokens."""
    return sum(layer.at(tokens) for layer in layers)


def random_tokens(model: Any, batch: int, length: int, seed: int) -> Tensor:
    """Draw random tokens `[B, N]`, the same on every machine.

    Args:
        model: whose vocabulary is drawn from, and on whose device they are.
        batch: B.
        length: N.
        seed: of the generator.
    """
    size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(size, (batch, length), generator=generator).to(next(model.parameters()).device)


def growth_by_side(model: nn.Module, ids: Tensor) -> dict[str, list[Growth] | None]:
    """Return the growth of the cache on each side, from a short text [B, N]."""
    growths = {}
    with scoring(model):
        for name, side in sides(model).items():
            with side(), torch.enable_grad():  # without gradients a window's ring grows with its text
                growths[name] = growth(read(model, ids)[1])
    return growths


def read(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    """Read tokens [B, N] into an empty cache; return the logits of the last one and the cache.

    Raises:
        UnsupportedModelError: the model gives no cache of transformers' kind.
    """
    out = forward(model, ids, 1, use_cache=True)
    cache = self_attention_cache(output_cache(out))
    if not getattr(cache, "layers", None):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives no cache of transformers' kind, so that neither its bytes nor "
            "decoding can be measured: a causal language model is wanted"
        )
    return out.logits, cache
