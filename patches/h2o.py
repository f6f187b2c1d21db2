"""h2o: a window, the first tokens, and of all others those that got the most attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, StatefulAttention, Tokens, upcast
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops.softmax import capped, scores_of, sink_column
from hf_linattn.ops.tracing import exporting
from hf_linattn.patches.window.ring import spread
from hf_linattn.patches.window.rotary import rotary_of
from hf_linattn.patches.window.sinks import Turn
from hf_linattn.registry import register


class HeavyState(NamedTuple):
    """A cache of constant size: sinks, heavy hitters and last tokens, one column each, then a spare one.

    Which columns hold a token follows from `seen`. The spare one is nobody's: padding goes there.

    Attributes:
        key, value: `[B, Hkv, M, D]`.
        weight: attention that each has got, `[B, Hkv, M]`, in float32 (float64 in float64 models).
        seen: visible tokens so far, int64 `[B]`.
    """

    key: Tensor
    value: Tensor
    weight: Tensor
    seen: Tensor


class Round(NamedTuple):
    """Queries between two evictions, of each row its own.

    Attributes:
        number: blocks that have left the window by then, `[B]`.
        index: places of the tokens in the call, `[B, N]`.
        ranks: their places among the visible ones.
        live: which of them there are.
    """

    number: Tensor
    index: Tensor
    ranks: Tensor
    live: Tensor


@register("h2o")
class H2O(StatefulAttention):
    """Softmax over the last tokens, the first ones, and `heavy` tokens between that got the most attention.

    o_i = sum_{j in W(i) or K(i)} exp(s_ij) v_j / sum_{j in W(i) or K(i)} exp(s_ij)
    W(i): the first `sinks` tokens, and the last `size` to size + size / 8 - 1 before and with i
    K(i): of those that have left, the `heavy` ones of the largest sum_{t < i} 2^(-(i - t) / half_life) p_tj

    p_tj is the attention that token t paid to j, summed over the query heads of a key head: each key head
    keeps tokens of its own. Tokens leave the window in blocks of an eighth of its size, counted among the
    visible tokens behind the sinks, so that neither padding nor the cuts of a prefill move a block. When a
    block leaves, its tokens and those kept so far are ranked; what is not kept is lost for good. The choice
    has no gradient; keys and values have, and keep their rotation. The cache holds
    `sinks + heavy + size + size / 8` columns: memory stays flat.

    Options:
        size: tokens in the window, the query's own among them, at least 1; default 256.
        heavy: tokens kept beside the window, at least 1; default 128.
        sinks: first tokens of a text that stay visible, at least 0; default 4.
        half_life: tokens after which attention once got counts half, above 0; None for always in full, as
            published; default 512: better from some thousand tokens on.
        positions: "cache", a sink is never further than the window is long (StreamingLLM's positions inside
            the cache); "text", its true distance; "auto" (default), "cache" where RoPE turns the layer's
            queries and can be turned back. Heavy hitters keep their true distance.

    Use: a pretrained model on long text with flat memory and no training. Byte for byte it keeps more of the
        model than a longer window does.

    Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", Zhang et
        al. 2023, arXiv:2306.14048, section 4 and algorithm 1 (here in blocks, with sinks and a half-life).
    """

    group = "hybrid"
    time = "O(n (w + heavy))"
    cross = False
    directions = "causal"
    direction_reason = "what is kept is what earlier queries attended to"
    supports = frozenset(("s_aux", "softcap"))

    def __init__(
        self,
        site: AttentionSite,
        *,
        size: int = 256,
        heavy: int = 128,
        sinks: int = 4,
        half_life: float | None = 512.0,
        positions: Literal["auto", "cache", "text"] = "auto",
    ) -> None:
        super().__init__(site)
        if size < 1:
            raise OptionError(f"size must be at least 1 token, got {size}")
        if heavy < 1:
            raise OptionError(f"heavy must be at least 1 token, got {heavy}; the patch 'window' keeps none")
        if sinks < 0:
            raise OptionError(f"sinks must be at least 0 tokens, got {sinks}")
        if half_life is not None and not half_life > 0:
            raise OptionError(f"half_life must be above 0 tokens, or None, got {half_life}")
        self.size, self.heavy, self.sinks, self.half_life = size, heavy, sinks, half_life
        self.block = max(1, size // 8)
        self.first = sinks + heavy
        """Column of the oldest token of the window."""
        self.columns = self.first + size + self.block
        self.rotary = rotary_of(site, positions) if sinks else None
        self.needs_rope = self.rotary is not None
        if sinks and positions == "auto" and self.rotary is None:
            self.note = "sinks at the text's positions"

    def causal(self, tokens: Tokens, state: HeavyState | None) -> tuple[Tensor, HeavyState]:
        """Compute round after round: queries between two evictions see the same tokens kept."""
        if exporting():
            raise UnsupportedCallError(
                "'h2o' chooses tokens in as many steps as the text has blocks, and a program for all lengths "
                "has no such number: leave it out of the plan, or export 'window'"
            )
        after = state or self._empty(tokens)
        in_place = tokens.in_place and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        outputs, done = [], 0
        place = after.seen.new_zeros(len(after.seen), tokens.length + 1)  # the last one is nobody's
        for turn in self._rounds(tokens, after.seen):
            after = self._without_evicted(after, turn)
            output, after = self._attended(tokens, after, turn, in_place)
            outputs.append(output)
            spot = torch.arange(done, done + output.shape[2], device=place.device).expand_as(turn.index)
            place = place.scatter(1, turn.index.masked_fill(~turn.live, tokens.length), spot)
            done += output.shape[2]
        found = torch.cat(outputs, 2)
        return tokens.hide(found.gather(2, spread(place[:, :-1], found))), after

    def _empty(self, like: Tokens) -> HeavyState:
        """Return the state before the first token."""
        key, value = (x.new_zeros(*x.shape[:2], self.columns, x.shape[3]) for x in (like.key, like.value))
        seen = key.new_zeros(key.shape[0], dtype=torch.int64)
        return HeavyState(key, value, upcast(key[..., 0]), seen)

    def _left(self, ranks: Tensor) -> Tensor:
        """Count the blocks that have left the window of queries of these ranks; not positive for none."""
        return (ranks - self.sinks + 1 - self.size).div(self.block, rounding_mode="floor")

    def _rounds(self, tokens: Tokens, seen: Tensor) -> Iterator[Round]:
        """Divide the visible tokens of each row by how many blocks have left the window of their queries."""
        order, count = None, torch.full_like(seen, tokens.length)
        if tokens.valid is not None:
            order, count = tokens.valid.logical_not().long().argsort(dim=1, stable=True), tokens.valid.sum(1)
        number = self._left(seen)
        rounds, compiling = -(-tokens.length // self.block) + 1, torch.compiler.is_compiling()
        if not compiling:  # else no number of the state is known, and all rounds are as long
            last = self._left(seen + count - 1).clamp_min(0)
            number = number.clamp_min(0)
            rounds = max(int((last - number).max()) + 1, 1)
        for _ in range(rounds):
            start, stop = ((self._begin(at, compiling) - seen).clamp_min(0) for at in (number, number + 1))
            start, stop = torch.minimum(start, count), torch.minimum(stop, count)
            width = min(tokens.length, self.block) if compiling else max(int((stop - start).max()), 1)
            index = start[:, None] + torch.arange(width, device=seen.device)
            live = index < stop[:, None]
            index = index.clamp_max(tokens.length - 1)
            ranks = seen[:, None] + index
            yield Round(number.clamp_min(0), index if order is None else order.gather(1, index), ranks, live)
            number = number + 1

    def _begin(self, number: Tensor, compiling: bool) -> Tensor:
        """Return the rank of the first query behind so many evictions."""
        first = number * self.block + self.size + self.sinks - 1
        return first if compiling else first.masked_fill(number == 0, 0)

    def _without_evicted(self, before: HeavyState, turn: Round) -> HeavyState:
        """Choose what stays of the block that leaves and of what was kept, in rows where a round begins."""
        first = turn.number * self.block + self.size + self.sinks - 1
        begins = turn.live[:, 0] & (turn.number > 0) & (turn.ranks[:, 0] == first)
        if not torch.compiler.is_compiling() and not begins.any():
            return before
        key, value, weight, seen = before
        column = torch.arange(self.columns, device=seen.device)
        held = ((turn.number - 1) * self.block)[:, None] > column[: self.heavy]
        candidates = weight[..., self.sinks : self.first + self.block].detach()
        mantissa, exponent = torch.frexp(candidates)  # to 16 bits: cuts of a prefill round otherwise
        candidates = torch.ldexp((mantissa * 2**16).round(), exponent)
        nobody = candidates[..., : self.heavy].masked_fill(~held[:, None], -1.0)
        candidates = torch.cat([nobody, candidates[..., self.heavy :]], -1)
        chosen = candidates.sort(stable=True, dim=-1, descending=True).indices[..., : self.heavy]
        rest = (column[self.first :] + self.block).clamp_max(self.columns - 1)
        columns = [x.expand(*chosen.shape[:2], -1) for x in (column[: self.sinks], rest)]
        index = torch.cat([columns[0], chosen + self.sinks, columns[1]], -1)
        index = torch.where(begins[:, None, None], index, column)
        key, value = (x.gather(2, index.unsqueeze(-1).expand(-1, -1, -1, x.shape[3])) for x in (key, value))
        return HeavyState(key, value, weight.gather(2, index), seen)

    def _attended(
        self, tokens: Tokens, before: HeavyState, turn: Round, in_place: bool
    ) -> tuple[Tensor, HeavyState]:
        """Compute the queries of a round, `[B, H, N, Dv]`, and what their keys have got since."""
        assert tokens.query is not None
        query, new_key, new_value = (
            x.gather(2, spread(turn.index, x)).masked_fill(~turn.live[:, None, :, None], 0)
            for x in (tokens.query, tokens.key, tokens.value)
        )
        past = self.first - self.sinks - (turn.number * self.block)[:, None]
        column = torch.where(turn.ranks < self.sinks, turn.ranks, turn.ranks + past)
        column = torch.where(turn.live, column, self.columns - 1)
        put = Tensor.scatter_ if in_place else Tensor.scatter
        key, value = (
            put(old, 2, spread(column, x), x) for old, x in zip(before[:2], (new_key, new_value), strict=True)
        )
        weight = before.weight.scatter(2, column[:, None].expand(-1, key.shape[1], -1), 0.0)
        probabilities, found = self._softmax(tokens, query, key, value, turn)
        count = turn.live.sum(1, keepdim=True)
        fade = 1.0 if self.half_life is None else 0.5 ** (1 / self.half_life)
        later = (count - 1 - torch.arange(turn.live.shape[1], device=count.device)).clamp_min(0)
        share = (fade ** later.to(weight.dtype)) * turn.live
        got = torch.einsum("bhgnm,bn->bhm", probabilities.detach(), share)
        weight = weight * (fade ** count.to(weight.dtype))[..., None] + got
        return found, HeavyState(key, value, weight, before.seen + count[:, 0])

    def _softmax(
        self, tokens: Tokens, query: Tensor, key: Tensor, value: Tensor, turn: Round
    ) -> tuple[Tensor, Tensor]:
        """Compute the weights of all columns, `[B, Hkv, G, N, M]`, and the output."""
        query, key, value = upcast(query), upcast(key), upcast(value)
        scores = scores_of(query, key, tokens.scaling)
        if self.rotary is not None:
            near = Turn(self.rotary, self.sinks + self.size - 1).of(query, turn.ranks)
            sinks = scores_of(near, key[:, :, : self.sinks], tokens.scaling)
            scores = torch.cat([sinks, scores[..., self.sinks :]], -1)
        scores = capped(scores, tokens.softcap, None)
        scores = scores.masked_fill(~self._visible(turn)[:, None], float("-inf"))
        if tokens.sink is not None:
            own = sink_column(tokens.sink, scores).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, own], -1)
        weights = scores.softmax(-1)[..., : self.columns].unflatten(1, (key.shape[1], -1))
        return weights, torch.einsum("bhgnm,bhme->bhgne", weights, value).flatten(1, 2)

    def _visible(self, turn: Round) -> Tensor:
        """Tell which columns the queries of a round see, boolean `[B, N, M]`."""
        column, gone = torch.arange(self.columns, device=turn.ranks.device), turn.number * self.block
        ranks = turn.ranks[..., None]
        sinks = column[: self.sinks] <= ranks
        heavy = (column[: self.heavy] < gone[:, None])[:, None].expand(-1, ranks.shape[1], -1)
        window = column[: self.columns - self.first] + gone[:, None, None] <= ranks - self.sinks
        seen = torch.cat([sinks, heavy, window], -1)
        return seen & (column < self.columns - 1)

    def whole_rows(self) -> str:
        """Say why rows cannot be split: each block waits for the choice before."""
        return "which tokens stay is chosen one block after the other"

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count keys and values in the model's dtype, their weights in float32, and the number of tokens."""
        if site.kv_heads is None or site.head_dim is None or site.value_dim is None:
            return None
        column = (site.head_dim + site.value_dim) * size + max(size, 4)
        return self.columns * site.kv_heads * column + 8
