"""Gates of past tokens, kept in transformers' cache beside their keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from hf_linattn.errors import CacheError, UnsupportedCallError
from hf_linattn.ops.tracing import exporting

FOLLOWED = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "reorder_cache",
    "reset",
)
"""What happens to keys and must happen to their gates. Gates are few, so offloading leaves them in place."""
ANOTHER_WAY = "Start from a new cache, or compute gates of values, which the cache has: source='value'"


class GateLayer(CacheLayerMixin):
    """A cache layer that keeps the gates of its tokens too, as the keys of a second layer of its kind.

    Attributes:
        gates: that second layer.
        written_as: the patch whose gates they are, and its options.
    """

    gates: Any
    written_as = ""

    def is_empty(self) -> bool:
        """Tell whether no token has come yet."""
        return not int(self.get_seq_length())

    def with_past(self, gates: Tensor, where: str) -> Tensor:
        """Add the gates of new tokens, `[B, H, N]`, and return those of all keys, `[B, H, S]`.

        Raises:
            CacheError: the cache holds keys without gates.
            UnsupportedCallError: while exporting.
        """
        if exporting():
            raise UnsupportedCallError(
                f"{where}: gates in a cache cannot be exported: pass use_cache=False and the whole text"
            )
        new = gates.unsqueeze(-1)
        kept: Tensor = self.gates.update(new, new[..., :0])[0].squeeze(-1)
        mine: Any = self.get_seq_length()
        others = self.gates.get_seq_length()
        if not isinstance(mine, Tensor) and mine != others:
            raise CacheError(f"{where}: the cache has {mine} tokens and gates of {others}. {ANOTHER_WAY}")
        return kept


def _both(name: str) -> Callable[..., None]:
    def both(self: GateLayer, *args: Any) -> None:
        getattr(super(GateLayer, self), name)(*args)
        getattr(self.gates, name)(*args)

    return both


PLAIN: dict[type, Callable[[Any], Any]] = {
    DynamicLayer: lambda layer: DynamicLayer(),
    DynamicSlidingWindowLayer: lambda layer: DynamicSlidingWindowLayer(layer.sliding_window),
    StaticLayer: lambda layer: StaticLayer(layer.max_cache_len),
    StaticSlidingWindowLayer: lambda layer: StaticSlidingWindowLayer(
        layer.max_cache_len, layer.max_cache_len
    ),
}
"""Cache layers -> a new one that keeps as many tokens; those derived from others come later."""
HYBRIDS = ("FullAttention", "SlidingWindowAttention", "StaticFullAttention", "StaticSlidingWindowAttention")
"""Middles of the names of layers that hold recurrent states too, as far as this transformers has them."""


def _known() -> list[type]:
    hybrids = (getattr(cache_utils, f"LinearAttentionAnd{name}Layer", None) for name in HYBRIDS)
    return [*PLAIN, *filter(None, hybrids)]


WITH_GATES: dict[type, Any] = {
    cls: type(
        f"Gate{cls.__name__}",
        (GateLayer, cls),
        {name: _both(name) for name in FOLLOWED if hasattr(cls, name)} | {"__module__": __name__},
    )
    for cls in _known()
}
globals().update({cls.__name__: cls for cls in WITH_GATES.values()})  # where pickle looks for them


def with_gates(layer: Any, where: str) -> GateLayer:
    """Return a cache layer in place of an empty one, which keeps gates too.

    Raises:
        CacheError: the layer holds keys already, or is of a kind that keeps none.
    """
    cls = type(layer)
    if cls not in WITH_GATES:
        raise CacheError(
            f"{where}: a cache layer of type {cls.__name__} cannot keep gates of the hidden state. Use a "
            "dynamic or static cache, or compute gates of values: source='value'"
        )
    if layer.is_initialized and int(layer.get_seq_length()) > 0:
        raise CacheError(
            f"{where}: gates are computed from the hidden state of past tokens too, and this cache holds "
            f"none. {ANOTHER_WAY}"
        )
    new: GateLayer = object.__new__(WITH_GATES[cls])
    new.__dict__.update(layer.__dict__)
    new.gates = next(make for kind, make in reversed(PLAIN.items()) if issubclass(cls, kind))(layer)
    if getattr(layer, "record_past", False) and hasattr(new.gates, "record_past"):
        new.gates.activate_past_recording()
    return new
