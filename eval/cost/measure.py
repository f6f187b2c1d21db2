"""What a sequence costs: bytes of the cache that a model leaves, tokens per second of reading and writing."""

from __future__ import annotations

import statistics
import time
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
from hf_linattn.patching.cache_layers import self_attention_cache

from ..common.nll import forward, scoring

PATCHED, UNPATCHED = "patched", "unpatched"


@dataclass(frozen=True)
class Growth:
    """Bytes of one cache layer, all rows together: constant + per_token * min(tokens, window)."""

    constant: int
    per_token: int
    window: int | None

    def at(self, tokens: int) -> int:
        """Bytes after this many tokens."""
        seen = tokens if self.window is None else min(tokens, self.window)
        return self.constant + self.per_token * seen


@dataclass(frozen=True)
class Speed:
    """Tokens per second over the repeats.

    Attributes:
        median, low, high: of the repeats.
        ratio: median over repeats of this model's speed over that of the unpatched one, measured right beside
            it; None for the unpatched one, and where there is none. ratio_low, ratio_high: its range.
    """

    median: float
    low: float
    high: float
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass(frozen=True)
class Cost:
    """One model at one length.

    Attributes:
        length: tokens read in one forward pass.
        cache_bytes: elements of the cache's tensors behind that pass, all rows together.
        peak_bytes: the most memory that these tensors kept alive behind any pass, reading or writing. More
            than `cache_bytes` where a layer keeps a part of a larger tensor.
        prefill, decode: tokens per second of reading `length` tokens, and of writing behind them.
    """

    length: int
    cache_bytes: int
    peak_bytes: int
    prefill: Speed
    decode: Speed


def sides(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The model as it is and, if it is patched, with its own attention: name -> what to compute under."""
    if not is_patched(model):
        return {UNPATCHED: nullcontext}
    return {PATCHED: nullcontext, UNPATCHED: lambda: bypassed(model)}


def tensors_of(layer: Any) -> list[Tensor]:
    """Every tensor that a cache layer holds, each once."""
    found: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, Mapping):
            visit(tuple(value.values()))
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part)

    visit(vars(layer))
    return list(found.values())


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def cache_bytes(cache: Any) -> int:
    """Elements of all its tensors."""
    return sum(_elements(tensors_of(layer)) for layer in cache.layers)


def held_bytes(cache: Any) -> int:
    """Memory that its tensors keep alive: of each storage all, also where a tensor shows a part of it."""
    storages = [x.untyped_storage() for layer in cache.layers for x in tensors_of(layer)]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def growth(cache: Any) -> list[Growth] | None:
    """How each layer of a cache goes on, from its tensors; None where a layer's kind is not known.

    Raises:
        UnsupportedModelError: the cache is empty.
    """
    found = []
    for layer in cache.layers:
        size = _elements(tensors_of(layer))
        if isinstance(layer, StateLayer):
            found.append(Growth(size, 0, None))
            continue
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            return None
        kept = _elements([layer.keys, layer.values])
        tokens = int(layer.keys.shape[-2])
        if tokens == 0 or kept % tokens:
            raise UnsupportedModelError(f"a cache layer of type {type(layer).__name__} holds no tokens")
        window = getattr(layer, "sliding_window", None) if layer.is_sliding else None
        # transformers keeps what the next token can see: one fewer than the window is wide
        found.append(Growth(size - kept, kept // tokens, None if window is None else window - 1))
    return found


def computed(model: nn.Module, ids: Tensor) -> dict[str, list[Growth] | None]:
    """Growth of the cache on each side, from a short text [B, N]."""
    found = {}
    with scoring(model):
        for name, side in sides(model).items():
            with side():
                found[name] = growth(_read(model, ids)[1])
    return found


def measure(
    model: nn.Module,
    ids: Tensor,
    *,
    new_tokens: int = 16,
    repeats: int = 5,
    after: Callable[[], Any] = lambda: None,
) -> dict[str, Cost]:
    """Both sides at one length, their repeats in turn, so that a busy machine slows down both.

    Args:
        model: a causal language model; left as it is found.
        ids: [B, N + new_tokens] tokens: the first N are read in one pass, the others one by one.
        new_tokens: tokens "written" behind them. They are given, not sampled: only the model is timed.
        repeats: of each side; one more of each comes first and is not counted.
        after: called after every repeat of a side.

    Raises:
        UnsupportedModelError: the model gives no cache, or has no positions for so many tokens.
    """
    chosen = sides(model)
    length = ids.shape[1] - new_tokens
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    sizes = dict.fromkeys(chosen, (0, 0))
    with scoring(model):
        for repeat in range(repeats + 1):
            # who goes first takes turns: the second finds the machine warm
            for name in list(chosen)[:: 1 if repeat % 2 else -1]:
                with chosen[name]():
                    reading, writing, small, large = _once(model, ids, length)
                sizes[name] = (small, max(large, sizes[name][1]))
                if repeat:
                    times[name].append((reading, writing))
                after()
    batch = ids.shape[0]
    found = {}
    for name, pairs in times.items():
        own = [(batch * length / a, batch * new_tokens / b) for a, b in pairs]
        others = [(batch * length / a, batch * new_tokens / b) for a, b in times[UNPATCHED]]
        alone = name == UNPATCHED
        speeds = [_speed([p[k] for p in own], None if alone else [p[k] for p in others]) for k in (0, 1)]
        found[name] = Cost(length, *sizes[name], *speeds)
    return found


def _once(model: nn.Module, ids: Tensor, length: int) -> tuple[float, float, int, int]:
    """Seconds of reading and of writing; bytes of the cache behind the first, and the most that was held."""
    _wait(ids)
    start = time.perf_counter()
    first, cache = _read(model, ids[:, :length])
    _wait(first)
    reading = time.perf_counter() - start
    size, held, writing = cache_bytes(cache), held_bytes(cache), 0.0
    for place in range(length, ids.shape[1]):
        start = time.perf_counter()
        out = forward(model, ids[:, place : place + 1], 1, past_key_values=cache, use_cache=True)
        _wait(out.logits)
        writing += time.perf_counter() - start
        held = max(held, held_bytes(cache))
    return reading, writing, size, held


def _read(model: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    out = forward(model, ids, 1, use_cache=True)
    cache = self_attention_cache(getattr(out, "past_key_values", None))
    if not getattr(cache, "layers", None):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives no cache of transformers' kind, so that neither its bytes nor "
            "decoding can be measured: a causal language model is wanted"
        )
    return out.logits, cache


def _wait(on: Tensor) -> None:
    """Until the accelerator is done."""
    if on.device.type != "cpu":
        torch.accelerator.synchronize()


def _speed(own: list[float], beside: list[float] | None) -> Speed:
    if beside is None:
        return Speed(statistics.median(own), min(own), max(own))
    ratios = [a / b for a, b in zip(own, beside, strict=True)]
    spread = (statistics.median(ratios), min(ratios), max(ratios))
    return Speed(statistics.median(own), min(own), max(own), *spread)
