"""Which keys each query sees: one reading of compact, boolean, additive and absent masks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_linattn.attention.masks import BIDIRECTIONAL, CAUSAL, is_compact, once
from hf_linattn.errors import UnsupportedMaskError
from hf_linattn.ops.tracing import exporting, transforming

HIDDEN = -9000.0
"""What an additive mask hides a key by, at most: BERT's -10,000 too, which is -9,984 in bfloat16."""


@dataclass
class Visibility:
    """The visible set V(i) of every query i. Either compact (`dense` is None) or `dense` alone.

    Attributes:
        causal: query i sees no key behind itself.
        batch, queries, keys: sizes B, N and S of the mask; S counts past keys too.
        columns: `[..., S]`, whose first row is `relative`; read where it is needed, a view takes time.
        documents: `[B, S]` document of each key from 1, 0 for padding; None where nothing is padded or
            packed.
        window: `[S]` filled with the sliding window's size, 0 for none; None without rows for windows.
        chunks: `[B, S]` chunk of each key.
        dense: boolean `[B, 1 or H, N, S]`.
        bias: what is added to the scores `[B, 1 or H, N, S]`, from an additive mask.
        may_be_packed: a row may hold more than one document; False where `documents` is padding alone.
        earlier: `[B]` tokens of each row that left the window before these keys; None for none.
        summed: `[B]` tokens of each row that a state holds; None where `columns` tell.
    """

    causal: bool
    queries: int
    keys: int
    columns: Tensor | None = None
    documents: Tensor | None = None
    window: Tensor | None = None
    chunks: Tensor | None = None
    dense: Tensor | None = None
    bias: Tensor | None = None
    may_be_packed: bool = True
    earlier: Tensor | None = None
    summed: Tensor | None = None

    @property
    def relative(self) -> Tensor | None:
        """`[S]` index of each key minus index of the first query; None where the sizes tell it."""
        return None if self.columns is None else self.columns[(0,) * (self.columns.ndim - 1)]

    @property
    def plain(self) -> bool:
        """Causal or bidirectional and nothing else, keys and queries in step: SDPA needs no mask."""
        compact = self.documents is None and self.window is None and self.dense is None and self.bias is None
        return compact and (not self.causal or self.queries == self.keys)

    @property
    def _separates(self) -> bool:
        """A query may have keys of other documents before it: packed without a cache only."""
        return self.may_be_packed and self.causal and self.queries == self.keys

    def sees_all(self) -> bool:
        """Tell whether a single query sees all keys, as in decoding; False where telling would take long."""
        if self.queries != 1 or self.documents is not None or self.window is not None:
            return False
        relative = self.relative
        if relative is None or relative.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        return int(relative[-1]) <= 0  # a static cache has keys that are still to come

    def without_window(self) -> Visibility:
        """Drop windows and chunks."""
        if self.window is None and (self.dense is not None or self.chunks is None):
            return self
        return Visibility(
            self.causal,
            self.queries,
            self.keys,
            self.columns,
            self.documents,
            dense=self.dense,
            bias=self.bias,
            may_be_packed=self.may_be_packed,
            earlier=self.earlier,
            summed=self.summed,
        )

    def windowed(self, size: int, device: torch.device) -> Visibility:
        """Restrict to the last keys, that of the query included, for layers whose mask does not say so."""
        relative = self._relative(device)
        if self.dense is None:
            ones = relative.new_ones(1, self.keys)
            documents = ones if self.documents is None else self.documents
            window = torch.full_like(relative, size)
            return replace(self, documents=documents, window=window, chunks=0 * documents)
        row = torch.arange(self.queries, device=device)[:, None]
        return replace(self, dense=self.dense & (relative > row - size))

    def packed(self, borders: Tensor, device: torch.device) -> Visibility:
        """Restrict to documents, whose borders `[documents + 1]` come as flash attention takes them."""
        row = (
            torch.bucketize(torch.arange(self.queries, device=device), borders[1:].long(), right=True)[None]
            + 1
        )
        if self.dense is None and self.causal and self.queries == self.keys:
            documents = row if self.documents is None else row * (self.documents > 0)
            return replace(self, documents=documents, may_be_packed=True)
        dense = self.mask(device) & (row[:, None, :, None] == row[:, None, None])
        return Visibility(self.causal, self.queries, self.keys, dense=dense, bias=self.bias)

    def compact(self, causal: bool) -> Visibility:
        """Return the compact form.

        Args:
            causal: the queries are the last of the keys; else both are the same tokens.

        Raises:
            UnsupportedMaskError: there is none.
        """
        return analyse(self, self.keys - self.queries if causal else 0)

    def own(self, causal: bool, device: torch.device) -> Tensor:
        """Find each query of a compact mask among the keys, `[N]`; `causal` as `compact` takes it."""
        relative = self.relative
        first = -(self.keys - self.queries if causal else 0) if relative is None else relative[0]
        return (torch.arange(self.queries, device=device) - first).clamp(0, self.keys - 1)

    def ranks(self, causal: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rank each query `[B or 1, N]` and key `[B or 1, S]` among the visible tokens of its document.

        Args:
            causal: the queries are the last of the keys; else both are the same tokens.
            device: of the answer.

        Raises:
            UnsupportedMaskError: a mask in which tokens have no places.
        """
        if self.dense is not None:
            return self.compact(causal).ranks(causal, device)
        index = torch.arange(self.keys, device=device)
        own = self.own(causal, device)
        earlier = 0 if self.earlier is None else self.earlier[:, None]
        if self.documents is None:
            return own[None] + earlier, index[None] + earlier
        seen = (self.documents > 0).long().cumsum(1) - 1
        if self._separates:
            start = _start_of_run(running_max(self.documents), index)
            seen = seen - (seen.gather(1, start) - (self.documents.gather(1, start) > 0).long()) - 1
        seen = seen.clamp_min(0) + earlier
        return seen[:, own], seen

    def selected(self, indices: Tensor, keys: int) -> Visibility:
        """Restrict to the keys that an indexer selects, `[B, N, top k]`, among the visible ones."""
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
        chosen = chosen.scatter(-1, indices.long(), True)[:, None]
        dense = self.mask(indices.device)[..., :keys] & chosen
        bias = None if self.bias is None else self.bias[..., :keys]
        return Visibility(self.causal, self.queries, keys, dense=dense, bias=bias)

    def mask(self, device: torch.device) -> Tensor:
        """Return the mask, boolean `[B or 1, 1 or H, N, S]`, True where the key is visible."""
        if self.dense is not None:
            return self.dense
        row = torch.arange(self.queries, device=device)[:, None]
        key = self._relative(device)[None, None, None]
        allowed = torch.ones(1, 1, self.queries, self.keys, dtype=torch.bool, device=device)
        if self.causal:
            allowed = allowed & (key <= row)
        if self.documents is not None:
            allowed = allowed & (self.documents > 0)[:, None, None]
            if self.causal and self.queries == self.keys:  # documents are packed without a cache only
                allowed = allowed & self._same(self.documents)
        if self.window is not None and self.chunks is not None:
            window = self.window[None, None, None]
            near = (key > row - window) if self.causal else ((key - row).abs() <= window)
            allowed = allowed & (near | (window == 0))
            own = (row[:, 0] - self._relative(device)[0]).clamp(0, self.keys - 1)
            allowed = allowed & (self.chunks[:, own][:, None, :, None] == self.chunks[:, None, None])
        return allowed

    def _same(self, documents: Tensor) -> Tensor:
        mine = documents[:, None, :, None]
        return (mine == documents[:, None, None]) | (mine == 0)

    def _relative(self, device: torch.device) -> Tensor:
        if (relative := self.relative) is not None:
            return relative
        return torch.arange(self.keys, device=device) - (self.keys - self.queries if self.causal else 0)

    def count(self, device: torch.device) -> Tensor:
        """Count the keys that each query sees, n_i = |V(i)|: float32 `[B or 1, 1 or H, N]`.

        Linear in N for compact masks.
        """
        if self.dense is not None:
            return self.dense.sum(-1).float()
        columns = self.columns
        if columns is None or self.summed is not None or torch.compiler.is_compiling() or transforming():
            return self._counted(device)
        own = columns.untyped_storage().data_ptr()
        if any(  # what a layer has by itself
            x is not None and x.untyped_storage().data_ptr() != own for x in (self.documents, self.window)
        ):
            return self._counted(device)
        parts = self.documents is None, self.window is None
        about = self.causal, self.queries, self.keys, device, *parts
        return once(columns, "count", about, lambda: self._counted(device))

    def _counted(self, device: torch.device) -> Tensor:
        plain = self.documents is None and self.window is None and self.summed is None
        eager = self.relative is None and not torch.compiler.is_compiling()
        if self.causal and plain and eager and self.queries <= self.keys:  # one operation in place of five
            first = self.keys - self.queries + 1
            return torch.arange(first, self.keys + 1, dtype=torch.float32, device=device)[None, None]
        relative = self._relative(device)
        if self.causal:
            own = (torch.arange(self.queries, device=device) - relative[0]).clamp(0, self.keys - 1)
        else:
            if self.window is not None:
                return self.mask(device).sum(-1).float()
            own = torch.full((self.queries,), self.keys - 1, device=device)
        if self.documents is None and self.window is None:
            count = (own + 1)[None, None]
            return (count if self.summed is None else count + self.summed[:, None, None]).float()
        documents = self.documents
        assert documents is not None
        seen = torch.nn.functional.pad((documents > 0).long().cumsum(1), (1, 0))  # [B, S + 1]
        start = torch.zeros_like(documents)
        index = torch.arange(self.keys, device=device)
        if self._separates:
            start = _start_of_run(running_max(documents), index)  # a padded hole does not end its document
        if self.window is not None and self.chunks is not None:
            window = torch.where(self.window > 0, self.window, self.keys + 1)
            start = torch.maximum(start, index - window + 1)
            start = torch.maximum(start, _start_of_run(self.chunks, index))
        start = start[:, own].clamp(min=0).long()
        counts: Tensor = seen[:, own + 1] - seen.gather(1, start)
        return counts.float()[:, None]


def _start_of_run(labels: Tensor, index: Tensor) -> Tensor:
    # rolled: slices of length N - 1 would forbid exported graphs to see N = 2; index 0 begins a run anyway
    return running_max(torch.where(labels != labels.roll(1, 1), index, 0))


def running_max(x: Tensor) -> Tensor:
    """Take the largest number so far, `[B, N]`, of integers that only grow, with zeros between them."""
    if not exporting():
        return x.cummax(1).values
    place = (x > 0).long().cumsum(1)  # ONNX has no running maximum: each number is put where its zeros look
    return x.new_zeros(x.shape[0], x.shape[1] + 1).scatter_add(1, place, x).gather(1, place)


def read_visibility(mask: Tensor | Visibility | None, queries: int, keys: int, is_causal: bool) -> Visibility:
    """Read the mask of one attention call.

    Args:
        mask: compact, boolean `[B, 1 or H, N, S]`, additive of the same shape, read already, or None.
        queries: number N of queries.
        keys: number of keys at hand; a state cache gives the new ones alone.
        is_causal: decides only where there is no mask.

    Raises:
        UnsupportedMaskError: it tells the padding of a longer text than the one at hand.
    """
    if isinstance(mask, Visibility):
        return mask
    if mask is None:
        return Visibility(is_causal and not (queries == 1 and keys > 1), queries, keys)
    if is_compact(mask):
        _, _, count, length = mask.shape
        if mask.dtype == BIDIRECTIONAL and count < 3 and keys < length:  # Informer's encoder halves its text
            if count == 1:
                return Visibility(False, queries, keys)
            raise UnsupportedMaskError(
                f"the attention mask tells the padding of {length} keys, and this layer has {keys} left: the "
                "model shortens its text between layers, and which of them are padding is not known. Pass "
                "no mask, and rows of one length"
            )
        keys = length
        documents = mask[:, 0, 1] if count > 1 else None
        window, chunks = (mask[0, 0, 2], mask[:, 0, 3]) if count > 3 else (None, None)
        causal, may_be_packed = mask.dtype == CAUSAL, count in (3, 5)
        return Visibility(causal, queries, keys, mask, documents, window, chunks, may_be_packed=may_be_packed)
    if mask.dtype == torch.bool:
        return Visibility(is_causal, queries, mask.shape[-1], dense=mask)
    visible = mask > HIDDEN
    return Visibility(is_causal, queries, mask.shape[-1], dense=visible, bias=mask)


def analyse(visibility: Visibility, past: int) -> Visibility:
    """Find the compact form of a dense mask: plain causal or bidirectional, with padding or documents.

    Args:
        visibility: the mask as read; compact ones come back unchanged.
        past: number of tokens before the first query.

    Raises:
        UnsupportedMaskError: additive values, masks that differ between heads, windows, prefixes, images,
            or a dense mask while tracing, when values cannot be looked at.
    """
    dense = visibility.dense
    if dense is None:
        return visibility
    if torch.compiler.is_compiling():
        raise UnsupportedMaskError(
            "a custom attention mask cannot be checked while compiling or exporting: run eagerly"
        )
    if visibility.bias is not None and bool((visibility.bias[dense] != 0).any()):
        raise UnsupportedMaskError(
            "the attention mask adds values to the scores, and this attention has none to add to"
        )
    if dense.shape[1] != 1 and bool((dense != dense[:, :1]).any()):
        raise UnsupportedMaskError("the attention mask differs between heads")
    queries, keys = visibility.queries, visibility.keys
    seen = dense[:, 0].expand(-1, queries, keys)
    row = torch.arange(queries, device=seen.device)[:, None] + past
    index = torch.arange(keys, device=seen.device)
    lower = index <= row
    padded = ~seen.any(1)
    blind = ~seen.any(-1, keepdim=True)  # padded queries: any output will do
    relative = index - past
    for causal, base in ((True, lower), (False, torch.ones_like(lower))):
        if bool(((seen == (base & ~padded[:, None])) | blind).all()):
            return Visibility(
                causal, queries, keys, relative, (~padded).long() if bool(padded.any()) else None
            )
    if past == 0 and queries == keys:  # documents: the key before is visible inside a document
        own = seen.diagonal(0, 1, 2)
        linked = torch.cat([torch.ones_like(own[:, :1]), seen.diagonal(-1, 1, 2) | ~own[:, 1:]], 1)
        documents = (~linked).long().cumsum(1) + 1
        want = lower & (documents[:, :, None] == documents[:, None]) & ~padded[:, None]
        if bool(((seen == want) | blind).all()):
            return Visibility(True, queries, keys, relative, documents * ~padded)
    raise UnsupportedMaskError(
        "the attention mask is neither causal nor bidirectional with padding or packed documents (a "
        "window, a prefix, tokens of an image that see one another, or a pattern of the caller's): this "
        "attention cannot express it. Use a softmax patch here."
    )
