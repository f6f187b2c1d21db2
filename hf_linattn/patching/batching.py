"""Continuous batching of patched models: transformers' manager, with a slot a request for states.

A slot holds the states of all layers that keep one. To transformers' paged cache it is a block of its own
kind, which a request gets once and never outgrows: so its scheduler, cancelling, forking and offloading move
slots as they move pages. Where all layers keep states, the slot of a request that ended stays until its place
is wanted: a request that goes on with its text, as the next turn of a chat does, takes it over.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Sequence
from math import lcm
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import (
    ATTN_TYPE_TO_ALLOCATOR,
    group_layers_by_attn_type,
)
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    CacheAllocator,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads

from hf_linattn.attention.cache import state_like
from hf_linattn.attention.site import AttentionSite
from hf_linattn.errors import CacheError, NotPatchedError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patching.cache_layers import output_cache
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.paged import CACHE, STEP, Request, Step

STATES = "linattn_state"
"""Type of layers that keep a state, among transformers' "full_attention" and "sliding_attention"."""
ALIGNMENT = 128
SLOTS = 256
"""Most slots that are made where nobody says how many (`num_blocks`, `max_requests_per_batch`)."""


class Part(NamedTuple):
    """A tensor of a state in a slot: its place in bytes, and its shape without rows."""

    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class KeptSlots(BlockLedger):
    """Slots of requests that ended, by the tokens in their states, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[tuple[int, ...], int] = {}

    def reset(self) -> None:
        """Forget all."""
        super().reset()
        self.slots.clear()

    def evict_cached_blocks(self) -> list[int]:
        """Give all back."""
        slots = list(self.slots.values())
        self.slots.clear()
        return slots


class StateAllocator(CacheAllocator):
    """Slots for the layers that keep a state: one block a request, however long it gets.

    A slot that is taken again is not cleared: a request that begins writes it before it reads.

    Attributes:
        state_bytes: of the states of one request.
        ended: request -> its state as transformers has it, and how many of its tokens are in the slot.

    Args:
        index: of this kind of layers in the paged cache.
        layer_indices: of these layers.
        config: a text config that has under `STATES` the state of each of these layers, of one row.
        num_key_value_heads, cache_dtype, page_size: of the layers that keep keys.
        allow_block_sharing: keep the slots of requests that ended; only where no layer keeps keys.
    """

    supports_block_sharing = True
    supports_block_table = False
    rows_per_token = 1
    layer_type = STATES

    def __init__(
        self,
        index: int,
        layer_indices: list[int],
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        allow_block_sharing: bool,
    ) -> None:
        self.states: dict[int, Any] = config.__dict__[STATES]
        self.parts, size = slot_parts(self.states)
        self.state_bytes = sum(part.stop - part.start for parts in self.parts.values() for part in parts)
        page = _page_bytes(config, num_key_value_heads, cache_dtype, page_size)
        blocks = [config.layer_types.count(kind) * page for kind in set(config.layer_types) - {STATES}]
        self._before_cache_tensor_init(
            index,
            layer_indices[:1],  # a slot is not divided among layers
            1,
            _slot_bytes(size, lcm(*blocks, ALIGNMENT)),
            allow_block_sharing and not blocks,
        )
        self.layer_indices = layer_indices
        self.ledger: KeptSlots = KeptSlots()
        self.ended: dict[str, tuple[Any, int]] = {}

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Take the memory of the paged cache, bytes, and see each state in it: `[slots, ...]`."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = slots = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, slots, pool)
        self.views = {
            layer: [
                slots[:, part.start : part.stop].view(part.dtype).view(len(slots), *part.shape)
                if part.stop > part.start
                else slots.new_empty(len(slots), *part.shape, dtype=part.dtype)
                for part in parts
            ]
            for layer, parts in self.parts.items()
        }

    def _slots(self, requests: Sequence[Request]) -> Tensor:
        slots = [self.block_table[request.name][0] for request in requests]
        return torch.tensor(slots, device=self.cache_tensor.device)

    def read_state(self, layer: int, requests: Sequence[Request]) -> Any:
        """Copy the states of some requests, rows in their order."""
        slots = self._slots(requests)
        return state_like(self.states[layer], [x.index_select(0, slots) for x in self.views[layer]])

    def write_state(self, layer: int, requests: Sequence[Request], state: Any) -> None:
        """Put the states of some requests back.

        Raises:
            CacheError: they have grown.
        """
        slots = self._slots(requests)
        for view, new in zip(self.views[layer], state, strict=True):
            if new.shape[1:] != view.shape[1:]:
                raise CacheError(
                    f"layer {layer}: a state of {tuple(new.shape[1:])} does not fit into its slot, "
                    f"{tuple(view.shape[1:])}: its attention cannot be served, use generate"
                )
            view.index_copy_(0, slots, new)

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Count the slots that a request needs: one, once. A kept one gives way if none is free."""
        if self.block_table.get(request_id):
            return 0
        kept = self.ledger.slots
        if kept and not self.pool.count_free_blocks(self.index) and not self.pool.num_free_sectors:
            self.pool.free_blocks(self.index, [kept.pop(next(iter(kept)))])
        return 1

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Give a request its slot."""
        if not self.block_table.get(request_id):
            self.block_table[request_id] = self.pool.get_free_blocks(self.index, 1)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Take a request's slot back, or keep it under the tokens that its states hold."""
        slots, ended = self.block_table.pop(request_id, []), self.ended.pop(request_id, None)
        if slots and ended is not None and self.use_block_sharing and not no_cache:
            request, length = ended
            text = tuple((request.initial_tokens + request.generated_tokens)[:length])
            earlier = self.ledger.slots.pop(text, None)
            self.ledger.slots[text] = slots[0]
            slots = [] if earlier is None else [earlier]
        self.pool.free_blocks(self.index, slots)

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Find the kept slot with the longest beginning of a prompt, named once for each of its tokens."""
        fitting = [
            text
            for text in self.ledger.slots
            if len(text) < len(prompt_ids) and tuple(prompt_ids[: len(text)]) == text
        ]
        text = max(fitting, key=len, default=())
        return [self.ledger.slots[text]] * len(text) if text else []

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Hand a kept slot to the request that goes on with its text."""
        slot = block_ids[0]
        self.ledger.slots = {text: kept for text, kept in self.ledger.slots.items() if kept != slot}
        self.block_table[request_id] = [slot]

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Count none: a fork gets a copy."""
        return 0

    def mark_complete_blocks(self, *args: Any) -> None:
        """Do nothing: a slot is kept as a whole, when its request ends."""

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Count the tokens that a request's queries see."""
        return past_length + query_length

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return none: there are no keys to read."""
        return []

    get_write_indices = get_read_indices

    def fill_block_table(self, *args: Any) -> None:
        """Refuse: no kernel reads states by a table of blocks."""
        raise UnsupportedCallError("a state has no block table")

    def update(self, *args: Any) -> Any:
        """Refuse: keys of these layers do not exist."""
        raise UnsupportedCallError("these layers keep a state, and the attention that asks wants keys")

    def get_cache_for_block_table(self, layer_idx: int) -> Any:
        """Refuse, likewise."""
        return self.update()


KINDS: dict[str, Any] = ATTN_TYPE_TO_ALLOCATOR
KINDS[STATES] = StateAllocator
try:
    group_layers_by_attn_type(SimpleNamespace(layer_types=[STATES]))  # type: ignore[arg-type]
except ValueError as error:  # as in transformers 5.18, which has a list of its own besides
    del KINDS[STATES]
    raise ImportError("its paged cache takes no layers of another kind") from error


def _page_bytes(config: Any, heads: int, dtype: torch.dtype, page_size: int) -> int:
    """Count the bytes of a page: keys and values of one layer."""
    return FullAttentionCacheAllocator.get_bytes_per_page(heads, find_head_dim(config), dtype, page_size)


def slot_parts(states: dict[int, Any]) -> tuple[dict[int, list[Part]], int]:
    """Lay the states of all layers out in a slot, each tensor aligned, and count its bytes."""
    parts: dict[int, list[Part]] = {}
    end = 0
    for layer, state in states.items():
        parts[layer] = []
        for x in state:
            parts[layer].append(Part(end, end + x.nbytes, tuple(x.shape[1:]), x.dtype))
            end += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return parts, end


def _slot_bytes(needed: int, pages: int) -> int:
    """Round a slot up so that it and the blocks of pages, `pages` bytes, share a small sector."""
    if needed >= pages:
        return -(-needed // pages) * pages
    parts = pages // max(needed, ALIGNMENT)
    while pages % (parts * ALIGNMENT):
        parts -= 1
    return pages // parts


def layer_kinds(model: Any, sites: list[AttentionSite]) -> list[str]:
    """Tell what the cache keeps for each layer of a patched model: all keys, those of a window, or a state.

    Raises:
        UnsupportedModelError: layers that transformers' paged cache cannot hold, or that do not route.
    """
    config = model.config.get_text_config()
    kinds: dict[int, str] = {}
    who = type(model).__name__
    if config.is_encoder_decoder:
        raise UnsupportedModelError(f"{who}: continuous batching serves decoders alone: use generate")
    sizes = (find_num_key_value_heads(config), find_head_dim(config), find_head_dim(config))
    for site in sites:
        if site.module.config is not config or site.causal is False or site.layer_idx is None:
            continue
        child: Any = site.module._modules.get(NAME)
        if site.layer_idx in kinds or site.shares:
            raise UnsupportedModelError(
                f"{who}: continuous batching serves one attention a layer, and {site.name} shares layer "
                f"{site.layer_idx}: use generate"
            )
        if child is not None and child.keeps_state:
            kinds[site.layer_idx] = STATES
            continue
        if child is not None and child.keeps_gates:
            raise UnsupportedModelError(
                f"{who}: {child.spec!r} at {site.name} keeps gates of the hidden state beside keys, and "
                "transformers' paged cache holds none: use generate, or options={'source': 'value'}"
            )
        own = (site.kv_heads, site.head_dim, site.value_dim)
        if any(mine is not None and mine != size for mine, size in zip(own, sizes, strict=True)):
            raise UnsupportedModelError(
                f"{who}: transformers' paged cache keeps {sizes[0]} heads of {sizes[1]} for every layer, and "
                f"{site.name} has others: use generate, or a patch with a state there"
            )
        window = None if child is not None and child.drops_window else site.window
        size = getattr(site.module, "sliding_window", None) or config.__dict__.get("sliding_window")
        if window == "chunked" or (window and size != config.__dict__.get("sliding_window")):
            raise UnsupportedModelError(
                f"{who}: {site.name} has a {window} window of its own, which transformers' paged cache "
                "cannot hold: use generate"
            )
        kinds[site.layer_idx] = FULL_ATTENTION if window is None else SLIDING_ATTENTION
    wanted = range(config.num_hidden_layers)
    if missing := [str(layer) for layer in wanted if layer not in kinds]:
        raise UnsupportedModelError(
            f"{who}: continuous batching needs one causal attention in every layer, and layers "
            f"{', '.join(missing)} have none that routes: use generate"
        )
    return [kinds[layer] for layer in wanted]


@torch.enable_grad()  # the ring of a text without gradients grows with it, and a slot is for a whole one
def _probed_states(model: Any, kinds: list[str]) -> dict[int, Any]:
    """Learn the state of each layer that keeps one, of one row and without data, from one token."""
    if STATES not in kinds:
        return {}
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    cache = output_cache(model(input_ids=ids, use_cache=True))
    states = {}
    for layer, kind in enumerate(kinds):
        if kind == STATES:
            state = cache.layers[layer].state
            states[layer] = state_like(state, [x.detach().to("meta") for x in state])
    return states


def _under_our_keyword(inputs: Any, use_padding: bool = False) -> Any:
    """Make the keywords of a step, without the one by which models take a cache.

    Since 5.24 that is "cache", as transformers names its paged cache. Models would ask it for what it does
    not have (opt its length), or not tell it the step (gpt_neox); the attention is all that needs it.
    """
    kwargs = type(inputs).get_model_kwargs(inputs, use_padding)
    kwargs[CACHE] = kwargs.pop("cache")
    return kwargs


class PatchedBatchingManager(ContinuousBatchingManager):
    """transformers' manager for a patched model: its attention stays ours, and states have slots.

    Args:
        model: patched.
        sites: its attention modules.
        generation_config, continuous_batching_config, workload_hints: as transformers' manager takes them.

    Raises:
        UnsupportedModelError: layers that cannot be served. UnsupportedCallError: CUDA graphs, compiled
            steps or asynchronous batching were asked for.
    """

    def __init__(
        self,
        model: Any,
        sites: list[AttentionSite],
        generation_config: Any,
        continuous_batching_config: Any,
        workload_hints: Any = None,
    ) -> None:
        self._children = [(site.module, site.module._modules.get(NAME)) for site in sites]
        kinds = layer_kinds(model, sites)
        super().__init__(model, generation_config, continuous_batching_config, workload_hints)
        settings: Any = self.continuous_batching_config
        asked = {
            "use_cuda_graph": any(settings.cuda_graph_booleans),
            "use_async_batching": settings.use_async_batching,
            "varlen_compile_config": settings.varlen_compile_config,
        }
        if names := [name for name, value in asked.items() if value]:
            raise UnsupportedCallError(
                "continuous batching of a patched model runs step by step and eagerly: leave "
                f"{', '.join(names)} off"
            )
        config = copy.copy(model.config.get_text_config())
        config.__dict__.update({"layer_types": kinds, STATES: _probed_states(self.model, kinds)})
        self.config = config
        self._fits_requests = set(kinds) == {STATES} and settings.num_blocks is None
        if set(kinds) == {STATES}:  # which do not grow: as many slots as requests in a batch, and no margin
            settings.safety_margin = settings.safety_margin or 0.0
        if self._fits_requests:
            told = continuous_batching_config.max_requests_per_batch or workload_hints
            most = settings.max_requests_per_batch if told else SLOTS
            size = slot_parts(config.__dict__[STATES])[1] * most
            page = _page_bytes(config, find_num_key_value_heads(config), model.dtype, settings.page_size)
            settings.num_blocks = -(-size // (page * len(kinds)))

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Leave the attention as it is.

        Raises:
            NotPatchedError: it is no longer the one that this manager was made for.
        """
        if any(module._modules.get(NAME) is not child for module, child in self._children):
            raise NotPatchedError(
                "this manager was made for another patch: call "
                "model.destroy_cached_continuous_batching_manager() first"
            )

    def _create_batch_processor(self) -> Any:
        """Have the cache made for our kinds of layers, by a stand-in that has the sizes of the model."""
        whole = self.model
        self.model = SimpleNamespace(  # type: ignore[assignment]
            config=self.config,
            device=whole.device,
            dtype=whole.dtype,
            _supports_logits_to_keep=getattr(whole, "_supports_logits_to_keep", None),
        )
        try:
            try:
                processor = super()._create_batch_processor()
            except MemoryError:
                if not self._fits_requests:
                    raise
                self.continuous_batching_config.num_blocks = None  # as many slots as there is memory for
                processor = super()._create_batch_processor()
        finally:
            self.model = whole
        cache: Any = processor.cache
        inputs: Any = processor.inputs_and_outputs
        kinds = set(cache.cache_allocators)
        if STATES in kinds:
            if FULL_ATTENTION not in kinds:  # tokens that a request reads from pages
                windows = kinds & {SLIDING_ATTENTION}
                cache.read_cache_limit = self.config.sliding_window if windows else 0
            rows = inputs.max_requests_per_batch + 1
            inputs.cumulative_seqlens_k[STATES] = torch.zeros(rows, dtype=torch.int32, device=whole.device)
            inputs.total_seqlen_k[STATES] = inputs.max_length_k[STATES] = 0
        inputs.get_model_kwargs = functools.partial(_under_our_keyword, inputs)
        return processor

    def _generation_loop_body(self, batch_processor: Any, bootstrapping: bool) -> bool:
        """Go on unless the program has ended: its thread would keep a stopped server alive."""
        alive = threading.main_thread().is_alive()
        return alive and bool(super()._generation_loop_body(batch_processor, bootstrapping))

    def _generation_step(self) -> None:
        """Tell the attentions which requests the step holds, and run it."""
        if self.model.config.get_text_config()._attn_implementation != NAME:
            raise NotPatchedError(
                "the model was unpatched while its requests are served: stop the manager first"
            )
        processor: Any = self.batch_processor
        batch = processor.inputs_and_outputs.requests_in_batch
        requests = [
            Request(each.state.request_id, each.query_length, each.state.position_offset - each.query_length)
            for each in batch
        ]
        step = Step(requests, self.model.device)
        setattr(processor.cache, STEP, step)
        slots: Any = processor.cache.cache_allocators.get(STATES)
        if slots is not None:
            for request in requests:  # a step that fails leaves states that are of no use
                slots.ended.pop(request.name, None)
        super()._generation_step()
        if slots is not None:
            for each, request in zip(batch, requests, strict=True):
                slots.ended[request.name] = (each.state, request.past + request.length)
        if missing := set(range(len(self.config.layer_types))) - step.layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not hand the packed requests to the attention of layers "
                f"{', '.join(map(str, sorted(missing)))}: use generate"
            )
