"""The constant-size state as a layer of transformers' cache.

It answers questions of length as if every key were there, so that masks cover past and new columns, and it
refuses to serve an attention that would need the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_linattn.errors import CacheError
from hf_linattn.ops.linear import State, state_of


def fingerprint(valid: Tensor, start: int = 0) -> Tensor:
    """Which of the tokens from `start` count: boolean `[B, N]` -> int64 `[B]`. Pieces add up to the whole."""
    index = torch.arange(start + 1, start + valid.shape[1] + 1, device=valid.device)
    return (valid * (index * 2654435761 % 2**32)).sum(1)  # multiplicative hashing, Knuth 6.4


class StateLayer(CacheLayerMixin):
    """State of one attention layer: S `[B, Hkv, D, Dv]`, z `[B, Hkv, D]`, tokens seen.

    Args:
        max_cache_len: length announced by a static cache; None grows without bound (in tokens, not in bytes).
        pending: keys and values `[B, Hkv, N, D]` stored by another attention, absorbed at the next call.
        seen: number of tokens behind `pending`.
    """

    is_sliding = False
    is_croppable = True  # after activate_past_recording(); crop() says so otherwise
    supports_early_init = False  # shapes are those of phi(k): known at the first update

    def __init__(
        self, max_cache_len: int | None = None, pending: tuple[Tensor, Tensor] | None = None, seen: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.static = max_cache_len is not None
        self.is_compileable = self.static
        self.max_cache_len = max_cache_len
        self.pending = pending
        self.state: State | None = None
        self.seen: int | Tensor = torch.tensor(0) if self.static else seen
        self.visible: Tensor | None = None  # [B] fingerprint of the keys; None while nothing was padded
        self.record_past = False
        self.tail: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # while recording: phi(k), v, valid since the last crop
        self.base: tuple[State | None, Tensor | None] | None = None  # the state before the tail
        self.armed = False
        self.device: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember the device; the tensors come with the first write."""
        self.device = key_states.device
        self.keys = self.values = key_states.new_empty(0)  # some model code asks every layer for keys.numel()
        if isinstance(self.seen, Tensor):
            self.seen = self.seen.to(self.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone; the attention itself reads and writes the state.

        Raises:
            CacheError: an attention that is not patched asks.
        """
        if not self.armed:
            raise CacheError(
                "this cache holds linear-attention states and cannot serve an attention that is not "
                "patched: the past keys no longer exist. Start from a new cache."
            )
        self.armed = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def write(self, state: State, phi_k: Tensor, value: Tensor, valid: Tensor | None) -> None:
        """Store the state after a call.

        Args:
            state: sums over every token so far.
            phi_k: `[B, Hkv, N, D]`, the new tokens; kept only while the past is recorded.
            value: `[B, Hkv, N, Dv]`, the same.
            valid: boolean `[B, N]`, False for padding; None when all new tokens count.
        """
        batch, length = phi_k.shape[0], phi_k.shape[2]
        if isinstance(self.seen, Tensor):
            self._write_static(state, length)
            return
        if valid is None and (self.visible is not None or self.record_past):
            valid = torch.ones(batch, length, dtype=torch.bool, device=phi_k.device)
        if self.record_past:
            if self.base is None:
                self.base = (self.state, self.visible)
            assert valid is not None
            self.tail.append((phi_k, value, valid))
        if valid is not None and (self.visible is not None or not bool(valid.all())):
            ones = torch.ones(batch, self.seen, dtype=torch.bool, device=valid.device)
            before = fingerprint(ones) if self.visible is None else self.visible
            self.visible = before + fingerprint(valid, self.seen)
        self.state, self.seen = state, self.seen + length

    def _write_static(self, state: State, length: int) -> None:
        assert isinstance(self.seen, Tensor)
        if self.state is None:
            self.state = State(torch.zeros_like(state.S), torch.zeros_like(state.z))
            self.batch_size = state.S.shape[0]
            if not torch.compiler.is_compiling():
                for tensor in (*self.state, self.seen):
                    torch._dynamo.mark_static_address(tensor)
        self.state.S.copy_(state.S)
        self.state.z.copy_(state.z)
        self.seen.add_(length)

    def get_seq_length(self) -> int:
        """Tokens seen; a tensor with a static cache, as transformers' own static layers answer."""
        return self.seen  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) of the mask, past columns included."""
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        return int(self.seen) + query_length, 0

    def get_max_length(self) -> int:
        """Length of a static cache, -1 for no bound."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    @property
    def nbytes(self) -> int:
        """Bytes of the state, all rows together."""
        return 0 if self.state is None else sum(x.numel() * x.element_size() for x in self.state)

    def activate_past_recording(self) -> None:
        """Keep the tokens since the last `crop`, so that assisted decoding can take candidates back."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens, exactly: from the snapshot, never by subtraction.

        Raises:
            ValueError: a positive number. CacheError: tokens that were not recorded.
        """
        count = abs(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError("`crop` takes a negative number of tokens to remove")
        if count and self.pending is not None:
            raise CacheError(
                "`crop` came before the keys of the unpatched model were absorbed: run one step first"
            )
        if count and self.is_initialized:
            recorded = sum(phi_k.shape[2] for phi_k, _, _ in self.tail)
            if recorded < count or self.base is None:
                raise CacheError(
                    f"crop({-count}): a constant-size state cannot forget tokens unless recording was on "
                    "when they came: call cache.activate_past_recording() first, as assisted decoding does."
                )
            phi_k = torch.cat([x[0] for x in self.tail], 2)[:, :, : recorded - count]
            value = torch.cat([x[1] for x in self.tail], 2)[:, :, : recorded - count]
            valid = torch.cat([x[2] for x in self.tail], 1)[:, : recorded - count]
            kept = state_of(phi_k, value)
            state, visible = self.base
            self.state = kept if state is None else State(state.S + kept.S, state.z + kept.z)
            assert isinstance(self.seen, int)
            self.seen -= count
            if self.visible is not None:
                start = self.seen - (recorded - count)
                ones = torch.ones(valid.shape[0], start, dtype=torch.bool, device=valid.device)
                before = fingerprint(ones) if visible is None else visible
                self.visible = before + fingerprint(valid, start)
        self.tail, self.base = [], None

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        def each(x: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(None if y is None else function(y) for y in x)

        if self.state is not None:
            self.state = State(*each(self.state))
        self.visible = None if self.visible is None else function(self.visible)
        self.tail = [each(x) for x in self.tail]
        if self.base is not None:
            state, visible = self.base
            self.base = (
                None if state is None else State(*each(state)),
                None if visible is None else function(visible),
            )
        self.pending = None if self.pending is None else each(self.pending)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order (beam search)."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows."""
        self._map(lambda x: x[indices, ...])

    def reset(self) -> None:
        """Nothing seen; static tensors stay where compiled code expects them."""
        if isinstance(self.seen, Tensor):
            self.seen.zero_()
            for tensor in self.state or ():
                tensor.zero_()
        else:
            self.seen, self.state = 0, None
        self.pending, self.tail, self.base, self.visible = None, [], None, None

    def offload(self) -> None:
        """State to the CPU."""
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """State back to its device."""
        self._map(lambda x: x.to(self.device, non_blocking=True))


class HybridStateLayer(StateLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A state beside the convolutional and recurrent states of a layer that has both kinds of mixers.

    Args:
        old: the layer whose place it takes; its convolutional and recurrent states are kept.
        pending, seen: as `StateLayer`.
    """

    is_compileable = False

    def __init__(
        self, old: LinearAttentionLayer, pending: tuple[Tensor, Tensor] | None = None, seen: int = 0
    ) -> None:
        StateLayer.__init__(self, pending=pending, seen=seen)
        for name in (*vars(LinearAttentionLayer()), "device", "dtype"):
            self.__dict__[name] = getattr(old, name, None)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come by position, the other states by keyword."""
        if args:
            StateLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Recurrent states cannot be cropped."""
        own = getattr(LinearAttentionLayer, "is_croppable", None)
        return bool(own.__get__(self)) if isinstance(own, property) else False

    def crop(self, tokens_to_remove: int) -> None:
        """Both kinds of states."""
        StateLayer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def _map(self, function: Callable[[Tensor], Tensor]) -> None:
        super()._map(function)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(self, name)
            if isinstance(states, dict):
                setattr(self, name, {key: None if x is None else function(x) for key, x in states.items()})
            elif states is not None:
                setattr(self, name, function(states))

    def reset(self) -> None:
        """Nothing seen."""
        StateLayer.reset(self)
        LinearAttentionLayer.reset(self)
