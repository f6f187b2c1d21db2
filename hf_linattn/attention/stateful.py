"""Attention whose past is a state of constant size: masks read, documents separated, the state carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_linattn.attention.base import Attention, Output
from hf_linattn.attention.cache import StateLayer, state_like
from hf_linattn.attention.call import Call
from hf_linattn.attention.documents import DocumentRows
from hf_linattn.attention.masks import once, with_notes
from hf_linattn.attention.site import AttentionSite
from hf_linattn.attention.tokens import Tokens
from hf_linattn.attention.visibility import Visibility, running_max
from hf_linattn.errors import CacheError, UnsupportedCallError, UnsupportedMaskError
from hf_linattn.ops.tracing import exporting, transforming
from hf_linattn.parallel.shard import Shard


class StatefulAttention(Attention):
    """An attention whose past is a state of constant size: a tuple of tensors with rows first.

    Tensors of zeros mean that nothing was seen. Sums and denominators belong in float32 (`upcast`).

    Class attributes:
        needs_visible_count: `Tokens.count` is wanted.
        gate_count: numbers that `gates` makes for each token and key head.
        one_tensor: its state is S alone, which `state_of` makes it of, so that a window can keep it.
        supports_packing: `causal` honours `Tokens.documents`; else documents come in rows of their own.
        exact_dtype: the state is in the dtype of the keys, and serves no other.
        in_kernels: kernels in C++ or Triton can compute it; else torch operations do.
    """

    linear = True
    time = "O(n)"
    needs_visible_count: bool = False
    gate_count: int = 0
    one_tensor: bool = False
    supports_packing: ClassVar[bool] = False
    exact_dtype: ClassVar[bool] = False
    in_kernels: ClassVar[bool] = False

    def causal(self, tokens: Tokens, state: Any) -> tuple[Tensor, Any]:
        """Compute the causal form.

        Args:
            tokens: the new ones.
            state: of all tokens before them; None at the start. Where `tokens.in_place`, its tensors may be
                written over.

        Returns:
            Output `[B, H, N, Dv]`, and the state after the last token: the very object that was passed if its
            tensors were written over, else a new one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no causal form")

    def bidirectional(self, tokens: Tokens) -> Tensor:
        """Let every query see all keys: `[B, H, N, Dv]`."""
        raise NotImplementedError(f"{type(self).__name__} has no bidirectional form")

    def gates(self, call: Call) -> Tensor | None:
        """Compute what is needed of the hidden state of each token, `[B, Hkv, N, F]`; None for nothing."""
        return None

    def past_gates(self, tokens: Tokens) -> Tensor | None:
        """Compute the gates of tokens that another attention has stored, from key and value alone.

        Raises:
            CacheError: they depend on the hidden state.
        """
        return None

    def absorb(self, tokens: Tokens, state: Any) -> Any:
        """Return the state after tokens whose output nobody needs; `tokens.query` may be None."""
        if tokens.query is None:
            raise CacheError(
                f"{self.name!r} needs the queries of past tokens too, and a cache of the unpatched model or "
                "a learned prefix holds none: start from a new cache, or tune a prompt in place of a prefix"
            )
        return self.causal(tokens, state)[1]

    def state_of(self, S: Tensor) -> Any:
        """Make a state of its one tensor, for a window that keeps it in place of sums."""
        raise NotImplementedError(f"{type(self).__name__} has no state of one tensor")

    def whole_rows(self) -> str:
        """Say why rows cannot be split over processes; "" where they can, by `before`."""
        return "its state has no form that one process could hand to the next"

    def before(self, parts: Sequence[Tokens], shard: Shard) -> Any:
        """Return the state of all tokens that the processes before this one hold; every process calls it.

        Args:
            parts: this process's tokens, in order; queries are not looked at.
            shard: which of the processes this is.
        """
        raise NotImplementedError(f"{type(self).__name__}: {self.whole_rows()}")

    def calibrate(self, tokens: Tokens, target: Tensor) -> float:
        """Set the first weights by what another attention makes of these tokens, `[B, H, N, Dv]`.

        Returns:
            The squared error that is left, over the target's square.
        """
        raise NotImplementedError(f"{type(self).__name__} has nothing to calibrate")

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count the bytes of one sequence's state; `size` is that of a number in the model's dtype."""
        return None

    def attend(self, call: Call) -> Output:
        """Read and write the state of one call; `[B, H, N, Dv]` in the dtype of the query, no weights.

        Under autocast queries, keys and values are in its dtype, as torch's own attention has them there.
        """
        device = call.query.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._attend(call), None
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (
            x.to(dtype) if x.dtype == torch.float32 else x for x in (call.query, call.key, call.value)
        )
        with torch.autocast(device, enabled=False):  # sums stay in float32
            return self._attend(replace(call, query=query, key=key, value=value)), None

    def _attend(self, call: Call) -> Tensor:
        layer, query = call.layer, call.query
        past = 0 if layer is None else layer.seen
        if layer is not None:
            layer.check(query, call.key, call.value, call.where, self.exact_dtype)
        if isinstance(past, int) and past and exporting():
            raise UnsupportedCallError(
                f"{call.where}: {call.spec!r} cannot be exported behind a cache: the number of tokens before "
                "would stay the same in the program. Pass use_cache=False and the whole text"
            )
        visibility = _compact(call, past)
        documents = visibility.documents
        mask = None if visibility.columns is None else _common_mask(visibility)
        if documents is not None:
            documents = documents.expand(query.shape[0], -1)
        new = None if documents is None else _new_columns(documents, past, call.key.shape[2])
        count = _count(visibility, query.device) if self.needs_visible_count else None
        valid = None if new is None else once(mask, "valid", (past, *new.shape), lambda: new > 0)
        gates = self.gates(call)
        if gates is not None:
            _check_gates(call, gates, valid)
        known = valid, count, gates, call.sink, call.softcap
        tokens = Tokens(query, call.key, call.value, call.scaling, *known, keep=layer is not None)
        if not visibility.causal:
            if self.directions == "causal":  # of a module that does not say what it is, as LayoutLM's
                raise UnsupportedMaskError(
                    f"{call.where}: {call.spec!r} is causal only: {self.direction_reason}, and this "
                    "attention mask shows a query the keys behind it. Leave it out of the plan"
                )
            if layer is not None:
                raise UnsupportedCallError(
                    f"{call.where}: a bidirectional attention with a growing cache has no constant-size "
                    "state. Pass use_cache=False, or use a softmax patch here"
                )
            return self.bidirectional(tokens).to(query.dtype)
        state = None
        if call.shard is not None:
            state = self.before([tokens], call.shard)
        if layer is not None:
            state = self._state_before(layer, documents, mask)
            tokens.in_place = layer.may_overwrite()
        if new is not None and visibility.may_be_packed and _is_packed(new, past, mask):
            tokens.documents = labels = running_max(new.long())
            if self._take_apart(layer):
                rows = once(mask, "document rows", (), lambda: DocumentRows.of(labels))
                return self._side_by_side(tokens, rows).to(query.dtype)
        output, state = self.causal(tokens, state)
        if layer is not None:
            layer.write(state, tokens, mask)
        return output if output.dtype == query.dtype else output.to(query.dtype)

    def _take_apart(self, layer: StateLayer | None) -> bool:
        """Whether packed documents must be computed in rows of their own.

        Raises:
            UnsupportedCallError: documents that would go on from a cache, or must be separated in a graph.
        """
        compiling = torch.compiler.is_compiling()
        if layer is not None and not compiling:
            raise UnsupportedCallError(
                "packed documents cannot be continued from a cache: pass use_cache=False"
            )
        if self.supports_packing:
            return False
        if compiling:
            raise UnsupportedCallError(
                f"{self.name!r} takes packed documents apart, and a graph that is compiled or exported "
                "cannot: give it an attention_mask (of ones where nothing is padded), or run packed batches "
                "eagerly"
            )
        return True

    def _side_by_side(self, tokens: Tokens, rows: DocumentRows) -> Tensor:
        """Compute each document by itself, those of like lengths together."""
        found = [self.causal(tokens.take(places), None)[0].transpose(1, 2) for places in rows.groups]
        return torch.cat([output.flatten(0, 1) for output in found])[rows.back].transpose(1, 2)

    def _state_before(self, layer: StateLayer, documents: Tensor | None, mask: Tensor | None) -> Any:
        """Return the state of all earlier tokens, once the mask still shows them as they were summed.

        Raises:
            UnsupportedMaskError: it shows others.
        """
        if isinstance(layer.seen, int) and layer.seen and not torch.compiler.is_compiling():
            valid = None if documents is None else documents[:, : layer.seen] > 0
            if layer.pending is not None:
                self._absorb_pending(layer, valid)
            if (layer.visible is not None or valid is not None) and not layer.mask_matches(valid, mask):
                raise UnsupportedMaskError(
                    "the attention mask shows other past tokens than those already summed into the "
                    "state: pass the mask of all tokens so far, unchanged"
                )
        state = layer.state
        learns = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if learns and state is not None and any(x.is_inference() for x in state):
            # autograd could not keep these for a backward
            layer.state = state_like(state, [x.clone() for x in state])
        return layer.state

    def _absorb_pending(self, layer: StateLayer, valid: Tensor | None) -> None:
        """Sum tokens that another attention stored, or that were left when others were taken back."""
        tokens = layer.pending
        assert tokens is not None
        if tokens.query is None:  # all of an unpatched model's past
            tokens.valid, tokens.gates = valid, self.past_gates(tokens)
            if self.needs_visible_count:
                key = tokens.key
                ones = torch.ones(key.shape[0], tokens.length, dtype=torch.bool, device=key.device)
                tokens.count = (ones if valid is None else valid).cumsum(1).float()
        layer.take_pending(self.absorb(tokens, layer.state))


def _compact(call: Call, past: int | Tensor) -> Visibility:
    """Return the mask of a call in its compact form.

    Raises:
        UnsupportedMaskError: it has none, or limits the window. CacheError: past keys without a state.
    """
    visibility = call.visibility
    if visibility.dense is not None:
        visibility = call.compact(int(past))
    if visibility.window is not None:
        raise UnsupportedMaskError(
            f"{call.where}: a sliding or chunked window: a linear attention sees all keys. Use "
            "sliding='global'"
        )
    queries, keys = call.query.shape[2], call.key.shape[2]
    if call.layer is None and visibility.causal and queries != keys:
        raise CacheError(
            f"{call.where}: causal attention of {queries} queries over {keys} keys without a state"
        )
    return visibility


def _count(visibility: Visibility, device: torch.device) -> Tensor:
    """Count the visible keys of each query, `[B or 1, N]`; all layers of a forward share them."""
    count = visibility.count(device)
    return once(visibility.columns, "row count", (count,), lambda: with_notes(count[:, 0]))


def _check_gates(call: Call, gates: Tensor, valid: Tensor | None) -> None:
    """Refuse gates that are not numbers: a state keeps them for ever.

    On a CPU alone, and not for a single token: the answer would be waited for.

    Raises:
        UnsupportedCallError: a gate of a token that counts is NaN.
    """
    if gates.shape[2] == 1 or gates.device.type != "cpu":
        return
    if torch.compiler.is_compiling() or transforming():
        return
    wrong = gates.isnan()
    if bool(wrong.any()) and bool((wrong if valid is None else wrong & valid[:, None, :, None]).any()):
        raise UnsupportedCallError(
            f"{call.where}: gates of {call.spec!r} are NaN, and its state would keep them. The hidden state "
            "or the weights of the gates hold NaN: look for a training that diverged, or a dtype too narrow"
        )


def _new_columns(documents: Tensor, past: int | Tensor, length: int) -> Tensor:
    """Return the documents of the new tokens alone, `[B, N]`."""
    if documents.shape[-1] == length:
        return documents
    if isinstance(past, int):
        return documents[:, past : past + length]
    return documents.index_select(1, past + torch.arange(length, device=documents.device))


def _is_packed(new: Tensor, past: int | Tensor, mask: Tensor | None) -> bool:
    """Whether the new tokens may be of several documents."""
    if not isinstance(past, int) or past:
        return False
    return torch.compiler.is_compiling() or once(mask, "packed", (), lambda: bool((new > 1).any()))


def _common_mask(visibility: Visibility) -> Tensor | None:
    """Return the mask that all layers have in common; None where this one has read something else."""
    columns, documents = visibility.columns, visibility.documents
    assert columns is not None
    if documents is None or torch.compiler.is_compiling():
        return columns
    if transforming():  # whose tensors have no memory to compare
        return None
    same = documents.untyped_storage().data_ptr() == columns.untyped_storage().data_ptr()
    return columns if same else None
