"""A state of constant size as a layer of transformers' cache.

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

from hf_linattn.attention.masks import MATCHES, expect_past, fingerprint, once, with_notes
from hf_linattn.attention.tokens import Tokens, joined
from hf_linattn.errors import CacheError
from hf_linattn.ops.tracing import transforming


def all_valid_fingerprint(batch: int, length: int, device: torch.device) -> Tensor:
    """Hash this many tokens, none of them padding: int64 `[B]`."""
    return fingerprint(torch.ones(batch, length, dtype=torch.bool, device=device))


def state_like(state: Any, tensors: list[Tensor]) -> Any:
    """Return a state of the same type, a tuple or a named one, of other tensors."""
    kind = type(state)
    # not `_make`: what it makes cannot leave a program that torch 2.11 compiles
    return kind(*tensors) if hasattr(kind, "_fields") else tuple(tensors)


def own_storage(x: Tensor) -> Tensor:
    """Give a tensor memory of its own where it is a small part of something larger.

    A state is often the last chunk's, and as a view of all chunks it would keep them alive.
    """
    if torch.compiler.is_compiling() or transforming() or x.untyped_storage().nbytes() <= x.nbytes:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class StateLayer(CacheLayerMixin):
    """State of one attention layer: a tuple of tensors with rows first, and the number of tokens seen.

    Args:
        max_cache_len: length announced by a static cache; None grows without bound (in tokens, not in bytes).
        pending: tokens that are not in the state yet, summed at the next call: keys and values that another
            attention stored, or what a `crop` left.
        seen: number of tokens in all.
    """

    is_sliding = False
    is_croppable = True  # after activate_past_recording(); crop() says so otherwise
    supports_early_init = False  # shapes are those of the state: known at the first update

    def __init__(
        self, max_cache_len: int | None = None, pending: Tokens | None = None, seen: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.static = max_cache_len is not None
        self.is_compileable = self.static
        self.max_cache_len = max_cache_len
        self.pending = pending
        self.state: Any = None
        self.seen: int | Tensor = torch.tensor(0) if self.static else seen
        self.visible: Tensor | None = None  # [B] fingerprint of the keys in the state; None: none was padded
        self.record_past = False
        self.tail: list[Tokens] = []  # while recording: what came since the last crop
        self.base: tuple[Any, Tensor | None] | None = None  # state and fingerprint before the tail
        self.expecting_update = False
        self.beside_others = False  # layers in front keep keys, and are cropped before this one is asked
        self.torn = False  # they were, and this one could not be
        self.written_as = ""  # the patch whose state it is, and its options
        self.shape: tuple[int, ...] | None = None  # query and key heads, widths of keys and of values
        self.prepared: Any = None  # how the next token is computed; see patching/steps.py
        self.device: Any = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Remember the device; the tensors come with the first write."""
        self.device = key_states.device
        # some model code asks every layer for keys.numel(), or cuts them into rows
        self.keys, self.values = (
            x.new_empty((*x.shape[:2], 0, x.shape[3])) for x in (key_states, value_states)
        )
        if isinstance(self.seen, Tensor):
            self.seen = self.seen.to(self.device)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone; the attention itself reads and writes the state.

        Raises:
            CacheError: an attention that is not patched asks.
        """
        if not self.expecting_update:
            raise CacheError(
                "this cache holds linear-attention states and cannot serve an attention that is not "
                "patched: the past keys no longer exist. Start from a new cache."
            )
        self.expecting_update = False
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return key_states, value_states

    def _summed(self) -> int:
        """Count the tokens in the state."""
        assert isinstance(self.seen, int)
        return self.seen - (0 if self.pending is None else self.pending.length)

    def is_empty(self) -> bool:
        """Tell whether no token has come yet."""
        if isinstance(self.seen, Tensor):  # tensors of a static layer stay where they are
            return self.state is None
        return self.seen == 0

    def check(self, query: Tensor, key: Tensor, value: Tensor, where: str, exact: bool = False) -> None:
        """Refuse a call that this state cannot serve: kernels read it by its address.

        Args:
            query: `[B, H, N, D]`.
            key: `[B, Hkv, N, D]`.
            value: `[B, Hkv, N, Dv]`.
            where: the module, for the message.
            exact: the state is in the dtype of the keys; else in float32, or in float64 where they are.

        Raises:
            CacheError: it has other rows, another dtype, or heads of another model; a static cache is full
                (known on a CPU).
        """
        if isinstance(self.seen, Tensor) and self.seen.is_cpu and not torch.compiler.is_compiling():
            assert self.max_cache_len is not None
            if int(self.seen) + key.shape[2] > self.max_cache_len:
                raise CacheError(
                    f"{where}: the static cache is for {self.max_cache_len} tokens, and these are "
                    f"{key.shape[2]} behind {int(self.seen)}: make it longer (max_cache_len), or reset() it"
                )
        shape = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        before = self.state[0] if self.state else None if self.pending is None else self.pending.key
        if before is None:
            self.shape = shape
            return
        if before.shape[0] != key.shape[0]:
            raise CacheError(
                f"{where}: the cache is of a batch of {before.shape[0]}, and this call of {key.shape[0]}: "
                "start from a new cache, or bring its rows to those of the call "
                "(cache.batch_repeat_interleave, cache.batch_select_indices)"
            )
        if before.dtype != key.dtype and (exact or torch.float64 in (before.dtype, key.dtype)):
            raise CacheError(
                f"{where}: the cache is of {before.dtype}, and this call of {key.dtype}: start from a new "
                "cache, or keep the model's dtype"
            )
        if self.shape is None:
            self.shape = shape
        elif self.shape != shape:
            raise CacheError(
                f"{where}: the state in the cache is of {self._heads(self.shape)}, and this call of "
                f"{self._heads(shape)}: it is another model's. Start from a new cache"
            )

    def begin(self, state: Any, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Store the state after the first tokens of a text, none of them padding; its memory is its own."""
        self.shape = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        self.state, self.seen = state, key.shape[2]

    @staticmethod
    def _heads(shape: tuple[int, ...]) -> str:
        return "{} heads with {} for keys, of {} and {} numbers".format(*shape)

    def may_overwrite(self) -> bool:
        """Tell whether the next state may be written over this one: nobody goes back to it."""
        traced = torch.compiler.is_compiling() or transforming()
        if self.record_past or traced or torch.is_grad_enabled() or not self.state:
            return False
        if any(x.requires_grad for x in self.state):  # a backward that is still to come reads it
            return False
        return torch.is_inference_mode_enabled() or not any(x.is_inference() for x in self.state)

    def mask_matches(self, valid: Tensor | None, mask: Tensor | None = None) -> bool:
        """Tell whether a mask shows the tokens that are in the state.

        Args:
            valid: of all tokens before, boolean `[B, seen]`; None shows all.
            mask: that it was read from, by which layers whose states hold the same tokens ask once.
        """

        def answer() -> bool:
            shown = valid
            if shown is None:
                assert self.visible is not None
                batch, device = self.visible.shape[0], self.visible.device
                shown = torch.ones(batch, self._summed(), dtype=torch.bool, device=device)
            before = self.visible
            if before is None:
                before = all_valid_fingerprint(shown.shape[0], self._summed(), shown.device)
            return bool((fingerprint(shown) == before).all())

        return once(mask, MATCHES, (self._summed(), self.visible), answer)

    def _advance(self, tokens: Tokens, mask: Tensor | None = None) -> None:
        """Add tokens to the fingerprint, which is one object for all layers that have seen the same."""
        valid, batch, device = tokens.valid, tokens.key.shape[0], tokens.key.device
        start, before = self._summed(), self.visible
        if valid is None and before is None:
            return

        def after() -> Tensor:
            new = (
                torch.ones(batch, tokens.length, dtype=torch.bool, device=device) if valid is None else valid
            )
            past = all_valid_fingerprint(batch, start, device) if before is None else before
            return with_notes(past + fingerprint(new, start))

        about = start, tokens.length, batch, before, valid is None
        self.visible = once(mask, "after", about, after)

    def write(self, state: Any, tokens: Tokens, mask: Tensor | None = None) -> None:
        """Store the state after a call.

        Args:
            state: after every token so far.
            tokens: the new ones; kept only while the past is recorded.
            mask: that shows them, by which layers share what they keep of it.
        """
        if isinstance(self.seen, Tensor):
            self._write_static(state, tokens.length)
            return
        if self.record_past:
            if self.base is None:
                self.base = (self.state, self.visible)
            self.tail.append(tokens)
        self._advance(tokens, mask)
        if state is not self.state:  # not written over
            self.state = state_like(state, [own_storage(x) for x in state])
        self.seen += tokens.length

    def take_pending(self, state: Any) -> None:
        """Store the state that the pending tokens are in."""
        assert self.pending is not None
        self._advance(self.pending)
        self.state, self.pending = state_like(state, [own_storage(x) for x in state]), None

    def _write_static(self, state: Any, length: int) -> None:
        assert isinstance(self.seen, Tensor)
        if self.state is None:
            self.state = state_like(state, [torch.zeros_like(x) for x in state])
            self.batch_size = state[0].shape[0]
            if not torch.compiler.is_compiling():
                for tensor in (*self.state, self.seen):
                    torch._dynamo.mark_static_address(tensor)
        for mine, new in zip(self.state, state, strict=True):
            mine.copy_(new)
        self.seen.add_(length)

    def get_seq_length(self) -> int:
        """Return the tokens seen; a tensor with a static cache, as transformers' own static layers answer."""
        return self.seen  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns, offset) of the mask, past columns included."""
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        if not torch.compiler.is_compiling():
            expect_past(self._summed(), self.visible)
        return int(self.seen) + query_length, 0

    def get_max_length(self) -> int:
        """Return the length of a static cache, -1 for no bound."""
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

        What is left of the recorded tokens is summed again at the next call.

        Raises:
            ValueError: a positive number. CacheError: tokens that were not recorded.
        """
        count = abs(int(tokens_to_remove))  # transformers before 5.20 hands over a tensor
        if tokens_to_remove > 0:
            raise ValueError("`crop` takes a negative number of tokens to remove")
        if count and (self.is_initialized or self.pending is not None):
            tail = self.tail if self.pending is None else [self.pending, *self.tail]
            recorded = sum(part.length for part in tail)
            if recorded < count or (self.base is None and self.pending is None):
                self.torn = self.beside_others
                raise CacheError(
                    f"crop({-count}): a constant-size state cannot forget tokens unless recording was on "
                    "when they came: call cache.activate_past_recording() once the model has read its first "
                    "ones, as assisted decoding does."
                )
            if self.base is not None:
                self.state, self.visible = self.base
            assert isinstance(self.seen, int)
            self.seen -= count
            self.pending = joined(tail).slice(0, recorded - count) if recorded > count else None
        self.tail, self.base = [], None

    def _map(self, function: Callable[[Tensor], Tensor], about: object = None) -> None:
        """Change every tensor, the fingerprint once for all layers where `about` says by what."""

        def each(state: Any) -> Any:
            return None if state is None else state_like(state, [function(x) for x in state])

        self.state = each(self.state)
        if (before := self.visible) is not None:
            on = None if about is None else before
            self.visible = once(on, "moved", (about,), lambda: with_notes(function(before)))
        self.tail = [part.map(function) for part in self.tail]
        if self.base is not None:
            state, visible = self.base
            self.base = each(state), None if visible is None else function(visible)
        self.pending = None if self.pending is None else self.pending.map(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Put rows into a new order (beam search)."""
        self._map(lambda x: x.index_select(0, beam_idx.to(x.device)), beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._map(lambda x: x.repeat_interleave(repeats, dim=0), repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._map(lambda x: x[indices, ...], indices)

    def reset(self) -> None:
        """Forget everything; static tensors stay where compiled code expects them."""
        if isinstance(self.seen, Tensor):
            self.seen.zero_()
            for tensor in self.state or ():
                tensor.zero_()
        else:
            self.seen, self.state = 0, None
        self.pending, self.tail, self.base, self.visible = None, [], None, None
        self.torn = False

    def offload(self) -> None:
        """Move the state to the CPU."""
        self._map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self._map(lambda x: x.to(self.device, non_blocking=True))


class HybridStateLayer(StateLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A state together with the convolutional and recurrent states of a layer that has both kinds of mixers.

    Args:
        old: the layer whose place it takes; its convolutional and recurrent states are kept.
        pending, seen: as `StateLayer`.
    """

    is_compileable = False

    def __init__(self, old: LinearAttentionLayer, pending: Tokens | None = None, seen: int = 0) -> None:
        StateLayer.__init__(self, pending=pending, seen=seen)
        for name in (*vars(LinearAttentionLayer()), "device", "dtype"):
            self.__dict__[name] = getattr(old, name, None)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Remember the device: keys and values come by position, the other states by keyword."""
        if args:
            StateLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether transformers can crop the recurrent states too."""
        own = getattr(LinearAttentionLayer, "is_croppable", None)
        return bool(own.__get__(self)) if isinstance(own, property) else False

    def crop(self, tokens_to_remove: int) -> None:
        """Crop both kinds of states."""
        StateLayer.crop(self, tokens_to_remove)
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def _map(self, function: Callable[[Tensor], Tensor], about: object = None) -> None:
        super()._map(function, about)
        for name in ("conv_states", "recurrent_states"):
            states = getattr(self, name)
            if isinstance(states, dict):
                setattr(self, name, {key: None if x is None else function(x) for key, x in states.items()})
            elif states is not None:
                setattr(self, name, function(states))

    def reset(self) -> None:
        """Forget everything."""
        StateLayer.reset(self)
        LinearAttentionLayer.reset(self)
