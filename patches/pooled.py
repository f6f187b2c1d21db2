"""pooled: softmax over summaries of blocks of tokens."""

from typing import Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import Attention, AttentionSite, Call, Output, upcast
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops.eager.linear import grouped
from hf_linattn.ops.softmax import softmax_weights
from hf_linattn.registry import register


@register("pooled")
class Pooled(Attention):
    """Memory-compressed attention: keys and values pooled over blocks of tokens.

    k_b = sum_p a_p k_bp,  v_b = sum_p c_p v_bp,  p the place in block b;  a = c = 1 / size is the mean
    o_i = sum_{x in V(i)} exp(scaling q_i . k_x) v_x / sum_{x in V(i)} exp(scaling q_i . k_x)

    In encoders V(i) holds all summaries. In causal models (block-causal) it holds the summaries of the blocks
    that ended before i's own, and the single tokens of its own block up to i: a summary of that block would
    show the future. Blocks count visible tokens, each packed document from its own start; a short last block
    is pooled over what it has (times size / tokens). The cache keeps every key, and decoding pools it again.
    Keys are pooled after rotary embedding.

    Options:
        size: tokens in a block; at least 1, default 4. 1 is softmax.
        pool: "mean" (default); or "conv", a strided convolution with learned weights a, c per key head and
            place, which start at the mean.

    Use: long contexts of which the gist is enough; `size` trades detail for time. Copying single words from
        far away is lost.

    Source: "Generating Wikipedia by Summarizing Long Sequences", Liu et al. 2018, arXiv:1801.10198, section
        4.2.4 (convolution of width and stride 3).
    """

    group = "compressed"
    time = "O(n^2 / size)"

    def __init__(self, site: AttentionSite, *, size: int = 4, pool: Literal["mean", "conv"] = "mean") -> None:
        super().__init__(site)
        if size < 1:
            raise OptionError(f"size must be at least 1 token, got {size}")
        self.size = size
        self.key_pool = self.value_pool = None
        if pool == "conv":
            [heads] = site.require("kv_heads", reason="and each pools by itself: take pool='mean'")
            self.key_pool = nn.Parameter(torch.full((heads, size), 1 / size))
            self.value_pool = nn.Parameter(torch.full((heads, size), 1 / size))

    def attend(self, call: Call) -> Output:
        """Pool, then attend to summaries and, in causal modules, to the tokens of the own block."""
        if call.output_attentions:
            raise UnsupportedCallError(
                f"{call.where}: output_attentions=True, and {call.spec!r} weighs blocks, not tokens. "
                "hf_linattn.eval.diagnose shows what each token weighs."
            )
        visibility, queries, keys = call.visibility, call.query.shape[2], call.key.shape[2]
        causal = call.causal
        if visibility.dense is not None:
            causal = call.compact(keys - queries if causal else 0).causal
        mask = call.mask()[:, 0]
        query_place, key_place = call.ranks()
        valid = mask.any(1)
        block = (valid & (key_place % self.size == 0)).cumsum(1) - 1  # [B or 1, S]
        packed = causal and queries == keys and not visibility.plain and visibility.may_be_packed
        if torch.compiler.is_compiling():  # cannot count blocks; one more, or the graph is for a single one
            count = keys if packed else (keys + 2 * self.size - 1) // self.size
        elif packed:  # then short blocks may be many
            # at least one, which stays empty, where no token of any row is visible
            count = max(int(block.max()) + 1, 1)
        else:
            count = -(-keys // self.size)
        slot = torch.where(valid, block * self.size + key_place % self.size, count * self.size)
        filled = _scattered(valid, slot, count * self.size).unflatten(1, (count, self.size))
        column = _scattered(torch.arange(keys, device=slot.device).expand_as(slot), slot, count * self.size)
        key, value = (self._blocks(upcast(x), column, filled) for x in (call.key, call.value))
        sum_k, sum_v = self._pool(key, self.key_pool, filled), self._pool(value, self.value_pool, filled)
        query = grouped(upcast(call.query), key.shape[1])
        scores = torch.einsum("bhgnd,bhcd->bhgnc", query, sum_k) * call.scaling
        if not causal:
            weights = self._weights(scores, filled.any(-1)[:, None, None, None], call)
            output = torch.einsum("bhgnc,bhcd->bhgnd", weights, sum_v)
            return output.flatten(1, 2).to(call.query.dtype), None
        own = block if queries == keys else torch.where(mask, block[:, None], -1).amax(-1)  # [B or 1, N]
        index = torch.arange(count, device=own.device)
        first = own - query_place // self.size  # where the document starts
        far = (index >= first.unsqueeze(-1)) & (index < own.unsqueeze(-1))
        near = torch.arange(self.size, device=own.device) <= (query_place % self.size).unsqueeze(-1)
        own_k, own_v = (_rows(x, own.clamp_min(0)) for x in (key, value))
        scores = torch.cat([scores, torch.einsum("bhgnd,bhnpd->bhgnp", query, own_k) * call.scaling], -1)
        weights = self._weights(scores, torch.cat([far, near], -1)[:, None, None], call)
        output = torch.einsum("bhgnc,bhcd->bhgnd", weights[..., :count], sum_v)
        output = output + torch.einsum("bhgnp,bhnpd->bhgnd", weights[..., count:], own_v)
        return output.flatten(1, 2).to(call.query.dtype), None

    def _weights(self, scores: Tensor, mask: Tensor, call: Call) -> Tensor:
        weights = softmax_weights(scores, mask, None)
        return nn.functional.dropout(weights, call.dropout) if call.dropout else weights

    def _blocks(self, x: Tensor, column: Tensor, filled: Tensor) -> Tensor:
        """Cut `[B, Hkv, S, D]` into `[B, Hkv, blocks, size, D]`, 0 at places without a token."""
        index = column[:, None, :, None].expand(*x.shape[:2], -1, x.shape[3])
        blocks: Tensor = x.gather(2, index).unflatten(2, filled.shape[1:])
        return blocks.masked_fill(~filled[:, None, ..., None], 0)

    def _pool(self, blocks: Tensor, weight: Tensor | None, filled: Tensor) -> Tensor:
        """Pool blocks to summaries `[B, Hkv, blocks, D]`."""
        short = self.size / filled.sum(-1).clamp_min(1).to(blocks.dtype)
        if weight is None:
            weight = blocks.new_full((blocks.shape[1], self.size), 1 / self.size)
        summed = torch.einsum("bhcpd,hp->bhcd", blocks, weight.to(blocks.dtype))
        return summed * short[:, None, :, None]


def _scattered(x: Tensor, slot: Tensor, length: int) -> Tensor:
    """Scatter `[B, S]` to `[B, length]` by slot; the slot behind the end is dropped."""
    return x.new_zeros(x.shape[0], length + 1).scatter(1, slot, x)[:, :length]


def _rows(blocks: Tensor, index: Tensor) -> Tensor:
    """Select blocks: `[B, Hkv, blocks, size, D]`, `[B or 1, N]` -> `[B, Hkv, N, size, D]`."""
    index = index[:, None, :, None, None].expand(*blocks.shape[:2], -1, *blocks.shape[3:])
    return blocks.gather(2, index)
