"""Attention over the packed requests of transformers' continuous batching, each as if it were alone.

All tokens of a step stand in one row, request behind request. Requests with equally many new tokens become
the rows of one call: their keys are those of their own pages, padded on the left; their states those of their
slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention.cache import StateLayer
from hf_linattn.attention.visibility import Visibility
from hf_linattn.errors import UnsupportedCallError

CACHE = "linattn_pages"
"""Keyword by which the paged cache gets to the attention interface; no model takes one of that name."""
PACKED = "write_index"
"""Keyword that every call with a packed row has, of attention modules and of the interface."""
STEP = "_linattn_step"
"""Attribute of that cache: the requests of the running step."""
PACKING = (
    CACHE,
    "block_table",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "read_index",
    PACKED,
    "logits_indices",
    "logits_processor_args",
)
"""Keywords that describe the packed row; what is left is the attention's own."""
WHOLE_ROW = ("position_bias", "indices")
Compute = Callable[[Tensor, Tensor, Tensor, "Group", "StateLayer | None"], Tensor]


class Request(NamedTuple):
    """A request's part of the packed row: its new tokens, behind those that the cache has."""

    name: str
    length: int
    past: int


class Group(NamedTuple):
    """Requests with equally many new tokens N, as R rows.

    Attributes:
        requests: which they are.
        queries: columns of their tokens in the packed row, `[R, N]`.
        keys: columns of their keys among those of all requests, `[R, S]`; None where these are the new ones.
        visibility: of the keys.
    """

    requests: list[Request]
    queries: Tensor
    keys: Tensor | None
    visibility: Visibility


@dataclass
class Step:
    """The requests of one forward, in the order of the packed row.

    Attributes:
        requests: with their lengths.
        device: of the tensors.
        layers: indices of the layers that were computed.
        groups: by the allocator of a layer's cache, made once a step.
    """

    requests: list[Request]
    device: torch.device
    layers: set[int] = field(default_factory=set)
    groups: dict[int, list[Group]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """First column of each request."""
        return _running([request.length for request in self.requests])

    def _columns(self, rows: list[int], starts: list[int], stops: list[int], length: int) -> Tensor:
        first = torch.tensor([stops[row] - length for row in rows], device=self.device)[:, None]
        columns = first + torch.arange(length, device=self.device)
        return columns.maximum(torch.tensor([starts[row] for row in rows], device=self.device)[:, None])

    def _rows_by(self, key: Callable[[Request], Any]) -> list[list[int]]:
        rows: dict[Any, list[int]] = {}
        for row, request in enumerate(self.requests):
            if request.length:  # a prompt of one token that will be forked waits for its fork
                rows.setdefault(key(request), []).append(row)
        return list(rows.values())

    def _group(self, rows: list[int], keys: Tensor | None, visibility: Visibility) -> Group:
        length = self.requests[rows[0]].length
        stops = [start + request.length for start, request in zip(self.starts, self.requests, strict=True)]
        queries = self._columns(rows, self.starts, stops, length)
        return Group([self.requests[row] for row in rows], queries, keys, visibility)

    def with_states(self) -> list[Group]:
        """Group requests for a state: those that begin stand apart."""
        groups = []
        for rows in self._rows_by(lambda request: (request.length, request.past == 0)):
            length = self.requests[rows[0]].length
            summed = torch.tensor([self.requests[row].past for row in rows], device=self.device)
            groups.append(self._group(rows, None, Visibility(True, length, length, summed=summed)))
        return groups

    def with_keys(self, window: int | None) -> list[Group]:
        """Group requests for layers whose keys are paged: all of them, or those of a window of this size."""
        longest = [
            request.past if window is None else min(request.past, window - 1) for request in self.requests
        ]
        counts = [kept + request.length for kept, request in zip(longest, self.requests, strict=True)]
        starts = _running(counts)
        stops = [start + count for start, count in zip(starts, counts, strict=True)]
        groups = []
        for rows in self._rows_by(lambda request: request.length):
            length, most = self.requests[rows[0]].length, max(counts[row] for row in rows)
            missing = torch.tensor([most - counts[row] for row in rows], device=self.device)[:, None]
            index = torch.arange(most, device=self.device)
            limited = window is not None and most > window
            padded = any(counts[row] < most for row in rows)
            visibility = Visibility(not (length == 1 and not padded), length, most)
            if limited or padded:
                visibility.documents = (index >= missing).long()
            if limited:
                visibility.window = torch.full_like(index, window or 0)
                visibility.chunks = torch.zeros_like(index)[None]
            if window is not None:
                gone = [self.requests[row].past - longest[row] for row in rows]
                visibility.earlier = torch.tensor(gone, device=self.device)
            groups.append(self._group(rows, self._columns(rows, starts, stops, most), visibility))
        return groups


def _running(lengths: list[int]) -> list[int]:
    starts = [0]
    for length in lengths[:-1]:
        starts.append(starts[-1] + length)
    return starts


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    compute: Compute,
    keeps_state: bool,
) -> Tensor:
    """Compute the attention of packed requests.

    Args:
        module: the attention module.
        query: `[1, H, N, D]`, the tokens of all requests.
        key: `[1, Hkv, N, D]`.
        value: `[1, Hkv, N, Dv]`.
        kwargs: of the interface call; what describes the packed row is taken out.
        compute: the attention of R rows.
        keeps_state: it reads and writes a state.

    Returns:
        Output `[1, N, H, Dv]`.

    Raises:
        UnsupportedCallError: the paged cache was not made for this model as it is patched, or the module does
            something to the scores of the packed row as a whole.
    """
    packing = {name: kwargs.pop(name, None) for name in PACKING}
    cache, where = packing[CACHE], f"{type(module).__name__} {module.layer_idx}"
    step: Step | None = getattr(cache, STEP, None)
    if step is None:
        raise UnsupportedCallError(
            f"{where} was handed no paged cache that was made for a patched model: use model.generate_batch "
            "or model.init_continuous_batching after patch_model, or generate"
        )
    for name in WHOLE_ROW:
        if kwargs.get(name) is not None:
            raise UnsupportedCallError(f"{where}: {name!r} of requests in one row (continuous batching)")
    allocator = cache.layer_to_allocator[module.layer_idx]
    slots = hasattr(allocator, "read_state")
    if slots != keeps_state:
        raise UnsupportedCallError(
            f"{where}: its patch was changed while requests are served: stop the manager first"
        )
    if module.layer_idx in step.layers:
        raise UnsupportedCallError(
            f"{where} runs more than once in a forward, and a request keeps one past for it (continuous "
            "batching): use generate"
        )
    step.layers.add(module.layer_idx)
    if allocator.index not in step.groups:
        window = getattr(allocator, "sliding_window", None)
        step.groups[allocator.index] = step.with_states() if slots else step.with_keys(window)
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if not slots:
        place = (packing[name][allocator.index] for name in ("read_index", "write_index"))
        keys, values = allocator.update(keys, values, module.layer_idx, *place)
    output: Tensor | None = None
    for group in step.groups[allocator.index]:
        requests, queries, columns, _ = group
        layer = StateLayer() if slots else None
        if layer is not None and requests[0].past:
            layer.state = allocator.read_state(module.layer_idx, requests)
        rows = queries if columns is None else columns
        part = compute(
            query[0, :, queries].transpose(0, 1),
            keys[rows].transpose(1, 2),
            values[rows].transpose(1, 2),
            group,
            layer,
        )
        if layer is not None:
            allocator.write_state(module.layer_idx, requests, layer.state)
        if output is None:
            output = part.new_empty(query.shape[2], *part.shape[2:])
        output[queries.flatten()] = part.flatten(0, 1)
    assert output is not None
    return output[None]
