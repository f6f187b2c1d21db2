"""A call on a part of each row, the tokens before it being in other processes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_linattn.attention.call import Call
from hf_linattn.attention.visibility import Visibility
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.parallel.shard import Shard


def continue_row(call: Call, keeps_state: bool) -> None:
    """Let a call know how many tokens are before its own, and where there is no state, fetch their keys.

    Raises:
        UnsupportedCallError: it is not causal, or has a cache, padding, packed documents or a window.
    """
    assert call.shard is not None
    if call.layer is not None or call.gates is not None:
        raise _refusal(call.where, "has a cache. Pass use_cache=False")
    if call.cross or not call.causal:
        raise _refusal(call.where, "sees later tokens, or another text")
    if keeps_state:
        check_plain(call.visibility, call.where)
        before = torch.tensor([call.shard.rank * call.query.shape[2]], device=call.device)
        call.visibility = replace(call.visibility, documents=None, summed=before)
    else:
        call.key, call.value, call.visibility = with_earlier(
            call.key, call.value, call.visibility, call.shard, call.where
        )


def with_earlier(
    key: Tensor, value: Tensor, visibility: Visibility, shard: Shard, where: str
) -> tuple[Tensor, Tensor, Visibility]:
    """Put the keys and values of all tokens before a part in front of its own.

    Args:
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        visibility: of a part of a row by itself.
        shard: which part it is.
        where: the module, for messages.

    Raises:
        UnsupportedCallError: there is padding, a packed document or a window.
    """
    check_plain(visibility, where)
    both = shard.earlier(torch.cat([key, value], -1))
    size, queries = key.shape[3], key.shape[2]
    return both[..., :size], both[..., size:], Visibility(True, queries, both.shape[2])


def check_plain(visibility: Visibility, where: str) -> None:
    """Refuse all masks but the causal one.

    Raises:
        UnsupportedCallError: naming what else there is.
    """
    if visibility.window is not None:
        raise _refusal(where, "has a sliding or chunked window. Patch it with 'window', or sliding='global'")
    documents = visibility.documents  # of ones where a model's window was dropped
    plain = visibility.dense is None and visibility.bias is None and visibility.queries == visibility.keys
    if not (plain and visibility.causal) or (documents is not None and bool((documents != 1).any())):
        raise _refusal(
            where,
            "has padding, packed documents or a mask. Pass no attention_mask, and position_ids that go on "
            "from one process to the next",
        )


def _refusal(where: str, what: str) -> UnsupportedCallError:
    return UnsupportedCallError(f"{where}: rows are split over processes, and this attention {what}")
