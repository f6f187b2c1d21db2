"""The mask function registered with transformers: it keeps what a mask means, not its picture.

For plain patterns it returns a *compact mask*, an integer tensor `[B, 1, R, S]` over the S keys with rows

    0  index of the key minus index of the first query: with a static cache nothing else tells the offset
    1  document of the key, counted from 1; 0 for padding; absent where nothing is padded or packed
    2  size of the sliding window, 0 for none; rows 2 and 3 come together
    3  chunk of the key, for chunked attention

and once more row 1 at the end where a row may hold several documents, so that their number R tells that to
graphs, which cannot look at values. int32 says causal, int64 bidirectional. Every other pattern becomes the
ordinary boolean mask of transformers, `[B, 1, N, S]`, which each attention reads for itself. Nothing is ever
approximated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import masking_utils

from hf_linattn.errors import UnsupportedMaskError
from hf_linattn.ops.tracing import transforming

CAUSAL, BIDIRECTIONAL = torch.int32, torch.int64
DENSE_MASKS, ADDITIVE_MASKS, WHOLE_MASKS, UNREAD_MASKS, NO_CHUNKS = FLAGS = (
    "_linattn_dense_masks",
    "_linattn_additive_masks",
    "_linattn_whole_masks",
    "_linattn_unread_masks",
    "_linattn_no_chunks",
)
"""Attributes of a patched model's configs, about what its modules do with masks.

They compute with boolean ones, or with additive ones, so no compact ones; windows are kept in some layers and
dropped in others, so masks count all keys; masks are only handed on, even where the model asks for real ones;
chunks are dropped.
"""


SHARED = "_linattn_shared"
"""Attribute of a compact mask: what the layers of a forward have found out about it, by name."""
MATCHES = "matches"
"""Name of the answer whether the past of a mask is what a state has summed."""
T = TypeVar("T")
_asked = threading.local()  # .past: of the cache layer that the next mask is made for


def fingerprint(valid: Tensor, start: int = 0) -> Tensor:
    """Hash which tokens count: boolean `[B, N]` -> int64 `[B]`. Hashes of pieces from `start` add up."""
    x = torch.arange(start + 1, start + valid.shape[1] + 1, device=valid.device)
    # lowbias32 (Wellons): of a linear hash places 1 and 4 add up to what 2 and 3 do
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return (valid * (x ^ (x >> 16))).sum(1)


def expect_past(length: int, visible: Tensor | None) -> None:
    """Note what a layer has summed, before its mask is made: one wait then answers for both.

    Args:
        length: tokens.
        visible: their `fingerprint`; None where none of them is padded.
    """
    _asked.past = length, visible


def with_notes(x: Tensor) -> Tensor:
    """Let layers share what they compute of a tensor, by `once`; not in a graph that is being traced."""
    if not torch.compiler.is_compiling():
        setattr(x, SHARED, {})
    return x


def once(on: Tensor | None, name: str, about: tuple[Any, ...], make: Callable[[], T]) -> T:
    """Compute what every layer of a forward would compute of one mask: the first one does.

    Args:
        on: the mask, or what else layers have in common; one that has no notes, or None, shares nothing.
        name: of what is computed.
        about: on what else it depends: tensors count as equal where they are the same object.
        make: computes it.
    """
    notes: dict[str, tuple[tuple[Any, ...], Any]] | None = getattr(on, SHARED, None)
    if on is None or notes is None or torch.compiler.is_compiling() or transforming():
        return make()
    about = (*about, None if on.is_inference() else on._version)
    known = notes.get(name)
    if known is None or not all(
        a is b or (isinstance(a, int | float | torch.device) and a == b)
        for a, b in zip(known[0], about, strict=True)
    ):
        known = notes[name] = about, make()
    found: T = known[1]
    return found


def is_compact(mask: Tensor | None) -> bool:
    """Tell whether a mask was written by `compact_mask`."""
    return mask is not None and mask.dtype in (CAUSAL, BIDIRECTIONAL)


class Pattern:
    """What a mask function of transformers means: its kind, its documents, its window.

    Packed tokens have the places `[B, N]` in their documents that they were given. `size` is the window's, in
    tokens, where the function itself says it.
    """

    def __init__(
        self,
        kind: str | None,
        documents: Tensor | None = None,
        overlay: str | None = None,
        places: Tensor | None = None,
        size: int | None = None,
    ):
        self.kind, self.documents, self.overlay, self.places = kind, documents, overlay, places
        self.size = size


UNKNOWN = Pattern(None)


def _closure(function: Callable[..., Any], name: str) -> Any:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))[name]


def read_pattern(function: Callable[..., Any]) -> Pattern:
    """Recognise a mask function by identity and by the closures that transformers builds."""
    if function is masking_utils.causal_mask_function:
        return Pattern("causal")
    if function is masking_utils.bidirectional_mask_function:
        return Pattern("bidirectional")
    name = getattr(function, "__qualname__", "").removesuffix(".<locals>.inner_mask")
    if name == "and_masks.<locals>.and_mask":
        parts = [read_pattern(part) for part in _closure(function, "mask_functions")]
        kinds = {part.kind for part in parts if part.kind != "any"}
        documents = [part.documents for part in parts if part.documents is not None]
        overlays = [part.overlay for part in parts if part.overlay is not None]
        places = [part.places for part in parts if part.places is not None]
        if len(kinds) == 1 and max(len(documents), len(overlays), len(places)) < 2:
            document, overlay, place = (
                next(iter(documents), None),
                next(iter(overlays), None),
                next(iter(places), None),
            )
            size = next((part.size for part in parts if part.size is not None), None)
            return Pattern(kinds.pop(), document, overlay, place, size)
    elif name == "or_masks.<locals>.or_mask":
        first, *others = _closure(function, "mask_functions")
        if all(map(_adds_nothing, others)):
            return read_pattern(first)
    elif name == "packed_sequence_mask_function":
        return Pattern("any", documents=_closure(function, "packed_sequence_mask"))
    elif name == "remap_positions_for_packed_sequence":
        inner = read_pattern(_closure(function, "mask_function"))
        places = _closure(function, "position_ids")
        return Pattern(inner.kind, inner.documents, inner.overlay, places, inner.size)
    elif name == "sliding_window_overlay":
        return Pattern("any", overlay="window", size=_closure(function, "sliding_window"))
    elif name == "sliding_window_bidirectional_overlay":
        return Pattern("any", overlay="window")
    elif name == "chunked_overlay":
        return Pattern("any", overlay="chunk")
    return UNKNOWN


def _adds_nothing(function: Callable[..., Any]) -> bool:
    """Tell whether a function lets tokens of one image see one another, and there is no image."""
    name = getattr(function, "__qualname__", "")
    blocks = name == "blockwise_overlay.<locals>.inner_mask"
    return blocks and not bool((_closure(function, "block_sequence_ids") >= 0).any())


def _traced_pattern(
    function: Callable[..., Any],
    local_size: int | None,
    config: Any,
    batch: int,
    length: int | None,
    device: Any,
) -> Pattern:
    """Recognise a mask function while tracing, when closures cannot be read.

    Transformers then wraps every mask as if documents were packed.

    By elimination (custom parts set `use_vmap`, islands are an `or_mask`) an `and_mask` is causal with
    documents, a window or chunks. Documents and chunks end where a key no longer sees the one before it.

    Raises:
        UnsupportedMaskError: chunks that are to be dropped.
    """
    if (
        function is masking_utils.causal_mask_function
        or function is masking_utils.bidirectional_mask_function
    ):
        return read_pattern(function)
    if getattr(function, "__name__", "") != "and_mask" or not getattr(config, "is_causal", True):
        return UNKNOWN
    chunked = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    if chunked and NO_CHUNKS in getattr(config, "__dict__", ()):
        raise UnsupportedMaskError(
            "a compiled graph cannot tell chunks, which sliding='global' drops, from packed documents: "
            "run eagerly"
        )
    if length is None:
        return UNKNOWN if chunked or local_size is None else Pattern("causal", overlay="window")
    # a tensor of length N - 1 would forbid exported graphs to see N = 2; the first key sees itself
    index = torch.arange(length, device=device)[None]
    linked = function(torch.arange(batch, device=device)[:, None], 0, index, (index - 1).clamp_min(0))
    documents = (~linked).expand(batch, -1).long().cumsum(1)
    return Pattern("causal", documents, None if chunked or local_size is None else "window")


def compact_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Encode a mask: the function registered with transformers, which passes the arguments.

    Args:
        batch_size: rows B.
        q_length: queries N.
        kv_length: keys S.
        q_offset: index of the first query in its text, in tokens; a tensor with a static cache.
        kv_offset: index of the first key.
        mask_function: which keys a query sees, as transformers builds it.
        attention_mask: boolean `[B, tokens]`, False for padding; None where nothing is padded.
        local_size: tokens in a sliding window or chunk; None for neither.
        use_vmap: the caller changed the mask function.
        device: of the mask.
        config: of the model; may carry `FLAGS`.
        **kwargs: what else `sdpa_mask` takes.

    Returns:
        A compact mask, or a boolean mask `[B, 1, N, S]` for patterns that have no compact form; None
        where one of those is asked for, and all keys are visible to all queries.
    """
    tracing = torch.compiler.is_compiling()
    own = getattr(config, "__dict__", ())
    flags = [flag for flag in FLAGS if flag in own]  # torch 2.11 cannot trace an intersection of sets
    across = mask_function is masking_utils.bidirectional_mask_function  # or all keys, at once
    if WHOLE_MASKS in flags and isinstance(q_offset, int) and not across:
        kv_length, kv_offset = q_offset + q_length, 0  # not only the columns that a window's cache keeps
    whole = attention_mask is None and isinstance(q_offset, int) and q_length == kv_length
    if (use_vmap and tracing) or DENSE_MASKS in flags or ADDITIVE_MASKS in flags:
        pattern = UNKNOWN
    elif tracing:
        pattern = _traced_pattern(
            mask_function, local_size, config, batch_size, q_length if whole else None, device
        )
    else:
        pattern = read_pattern(mask_function)
    # a model that asks for a real mask combines it with one of its own (sparse indexers)
    combines = kwargs.get("allow_is_causal_skip") is False and local_size is None and q_length > 1
    combines = combines and UNREAD_MASKS not in flags
    if mask_function is masking_utils.causal_mask_function and combines and not tracing:
        pattern = UNKNOWN
    packed_both_ways = pattern.kind == "bidirectional" and pattern.documents is not None
    if pattern.kind not in ("causal", "bidirectional") or packed_both_ways:
        if across and attention_mask is None and kwargs.get("allow_is_bidirectional_skip"):
            return None  # as transformers: Informer's encoder halves the text, and hands one mask on
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = (
            False  # None would lose the padding
        )
        additive = ADDITIVE_MASKS in flags
        dense: Any = masking_utils.eager_mask if additive else masking_utils.sdpa_mask  # any kind of offsets
        mask: Tensor = dense(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            use_vmap=use_vmap,
            device=device,
            **kwargs,
        )
        return mask
    return _encode(pattern, batch_size, kv_length, q_offset, kv_offset, attention_mask, local_size, device)


def _encode(
    pattern: Pattern,
    batch: int,
    length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    attention_mask: Tensor | None,
    local_size: int | None,
    device: torch.device | str,
) -> Tensor:
    dtype = CAUSAL if pattern.kind == "causal" else BIDIRECTIONAL
    index = torch.arange(length, device=device) + kv_offset
    rows = [(index - q_offset)[None]]
    visible = None
    told: list[tuple[tuple[Any, ...], bool]] = []
    if pattern.documents is not None:
        visible = pattern.documents + 1
    elif attention_mask is not None:
        width = attention_mask.shape[-1]
        visible = attention_mask[:, index.clamp(max=width - 1)] & (index < width)
        if not torch.compiler.is_compiling():
            all_visible, told = _ask(visible, q_offset)
            visible = None if all_visible else visible
    if visible is not None or pattern.overlay is not None:
        ones = torch.ones_like(index)[None]
        rows.append(ones if visible is None else visible)
    if pattern.overlay is not None:
        local_size = pattern.size or local_size
        assert local_size is not None
        window = local_size if pattern.overlay == "window" else 0
        first: int | Tensor = 0
        if pattern.overlay == "chunk" and attention_mask is not None:
            first = (attention_mask.cumsum(-1) == 0).sum(-1, keepdim=True)
        place = index[None] - first if pattern.places is None else pattern.places
        chunk = place // local_size if pattern.overlay == "chunk" else torch.zeros_like(index)[None]
        rows += [torch.full_like(index, window)[None], chunk]
    if pattern.documents is not None:
        rows.append(rows[1])
    mask = torch.stack([row.to(dtype).expand(batch, length) for row in rows], 1)[:, None]
    if not torch.compiler.is_compiling():
        with_notes(mask)
        for about, matches in told:
            once(mask, MATCHES, about, matches.__bool__)
    return mask


def _ask(visible: Tensor, q_offset: int | Tensor) -> tuple[bool, list[tuple[tuple[Any, ...], bool]]]:
    """Ask whether all tokens are visible, and whether those before are visible as a layer has summed them."""
    length, before = _asked.__dict__.pop("past", (0, None))
    here = q_offset, visible.shape[:1], visible.device
    if before is None or not isinstance(q_offset, int) or (length, before.shape, before.device) != here:
        return bool(visible.all()), []
    same = (fingerprint(visible[:, :length]) == before).all()
    all_visible, matches = torch.stack([visible.all(), same]).tolist()  # waits once
    return all_visible, [((length, before), matches)]
