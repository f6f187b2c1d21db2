"""h2o: a window, the first tokens, and of all others those that got the most attention."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import AttentionSite, StatefulAttention, Tokens, upcast
from hf_linattn.attention.masks import once, with_notes
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops import heavy_operator
from hf_linattn.ops.cpp import heavy as cpp_heavy
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager.heavy import HeavyText, Options, kept, table_rows
from hf_linattn.ops.heavy_attention import attention
from hf_linattn.ops.softmax import capped
from hf_linattn.ops.tracing import by_torch_alone, exporting
from hf_linattn.ops.triton import heavy as triton_heavy
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.ops.types import HeavyChoices, HeavyColumns, HeavyPlaces, HeavyState
from hf_linattn.ops.window_attention import native_takes_heavy, one_kernel_takes_heavy
from hf_linattn.patches.window.ring import counted, refuse_excess, spread, to_16_bits
from hf_linattn.patches.window.rotary import sinks_turned_by
from hf_linattn.patches.window.sinks import Turn
from hf_linattn.registry import register

Kernel = Callable[..., tuple[Tensor, HeavyState]]


class Part(NamedTuple):
    """Tokens between two evictions, of each row its own.

    Attributes:
        left: blocks that have left the window before them, `[B]`.
        start, stop: where they begin and end among the new tokens that are no padding, `[B]`.
        width: the most tokens that a row has, at least 1.
        evicts: rows in which a block leaves just before them, `[B]`; None for no row.
        span: start and stop if they are the same in all rows, and known; None else.
    """

    left: Tensor
    start: Tensor
    stop: Tensor
    width: int
    evicts: Tensor | None
    span: tuple[int, int] | None = None


class Step(NamedTuple):
    """Queries between two evictions, of each row its own; all layers of a forward share it.

    Attributes:
        places: of the tokens in the call, `[B, N]`.
        live: which of them there are; the others repeat some token.
        span: where they begin and end if they are the same in all rows; None else.
        column: where their keys go.
        ranks: of the tokens among the visible ones, `[B, N]`, int32.
        hidden: columns that each does not see, `[B, 1, 1, N, M]`.
        share: what its attention counts when the step is over, `[B, N]`: 0 where there is no token.
        fade: what attention got before counts then, `[B]`.
        evicts: rows in which a block leaves before them, `[B]`; None for no row.
        oldest: rank of the first token that is not too far back then, `[B, 1, 1]`.
        held: heavy hitters there are before that, `[B, 1, heavy]`.
    """

    places: Tensor
    live: Tensor
    span: tuple[int, int] | None
    column: Tensor
    ranks: Tensor
    hidden: Tensor
    share: Tensor
    fade: Tensor
    evicts: Tensor | None
    oldest: Tensor
    held: Tensor


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
        reach: tokens; what is kept and further back than that goes first when a block leaves, above
            size + size / 8; None for no end; "auto" (default), what keeps all distances within the model's
            context, which RoPE knows nothing beyond, or None where the context leaves no room.
        positions: "cache", a sink is never further than the window is long (StreamingLLM's positions inside
            the cache); "text", its true distance; "auto" (default), "cache" where RoPE turns the layer's
            queries and can be turned back. Heavy hitters keep their true distance.

    Use: a pretrained model on long text with flat memory and no training. Byte for byte it keeps more of the
        model than a longer window does. What no query looked at is gone, though: a passkey is found no
        further back than the window.

    Source: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", Zhang et
        al. 2023, arXiv:2306.14048, section 4 and algorithm 1 (here in blocks, with sinks and a half-life).
    """

    group = "hybrid"
    time = "O(n (w + heavy))"
    cross = False
    directions = "causal"
    direction_reason = "what is kept is what earlier queries attended to"
    supports = frozenset(("s_aux", "softcap"))
    exact_dtype = True
    in_kernels = True
    needs_visible_count = True

    def __init__(
        self,
        site: AttentionSite,
        *,
        size: int = 256,
        heavy: int = 128,
        sinks: int = 4,
        half_life: float | None = 512.0,
        reach: int | Literal["auto"] | None = "auto",
        positions: Literal["auto", "cache", "text"] = "auto",
    ) -> None:
        super().__init__(site)
        if size < 1:
            raise OptionError(f"size must be at least 1 token, got {size}")
        if heavy < 1:
            raise OptionError(f"heavy must be at least 1 token, got {heavy}; the patch 'window' keeps none")
        if sinks < 0:
            raise OptionError(f"sinks must be at least 0 tokens, got {sinks}")
        refuse_excess(size=size, heavy=heavy, sinks=sinks)
        if half_life is not None and not half_life > 0:
            raise OptionError(f"half_life must be above 0 tokens, or None, got {half_life}")
        self.size, self.heavy, self.sinks, self.half_life = size, heavy, sinks, half_life
        self.block = max(1, size // 8)
        self.first = sinks + heavy
        """Column of the oldest token of the window."""
        self.reach = self._reach(site.max_positions, reach)
        self.sizes = HeavyColumns(size, heavy, sinks, self.block, half_life, self.reach)
        self.columns = self.sizes.total
        self.rotary, self.note = sinks_turned_by(site, sinks, positions)
        self.needs_rope = self.rotary is not None

    def _reach(self, context: int | None, reach: int | Literal["auto"] | None) -> int | None:
        """Check the option; what is too far back is gone some blocks later, as a block drops a block."""
        least = self.size + self.block + 1
        if reach == "auto":
            reach = None if context is None else context - 2 * self.block - self.heavy
            return None if reach is None or reach < least else reach
        if reach is not None and reach < least:
            raise OptionError(f"reach must be at least size + size / 8 + 1 = {least} tokens, got {reach}")
        return reach

    def causal(self, tokens: Tokens, state: HeavyState | None) -> tuple[Tensor, HeavyState]:
        """Compute step after step: queries between two evictions see the same tokens kept."""
        if exporting():
            raise UnsupportedCallError(
                "'h2o' chooses tokens in as many steps as the text has blocks, and a program for all lengths "
                "has no such number: leave it out of the plan, or export 'window'"
            )
        if self._learns(tokens, state):
            return self._with_gradients(tokens)
        return self._forward(tokens, state)

    def _forward(
        self, tokens: Tokens, state: HeavyState | None, choices: HeavyChoices | None = None
    ) -> tuple[Tensor, HeavyState]:
        """Compute step after step; tells `choices` what stays after each of them."""
        kernel = self._kernel(tokens, state, choices)
        if kernel is not None:
            return self._by_kernel(kernel, tokens, state)
        after, ours = state or self._empty(tokens), state is None or tokens.in_place
        functional = torch.is_grad_enabled() or torch.compiler.is_compiling()
        outputs = []
        first = state is None
        about = tokens.valid, tokens.key.shape[0], self.sizes
        steps = once(tokens.count, "h2o steps", about, lambda: list(self._steps(tokens, first)))
        queries = self._queries(tokens)
        for number, step in enumerate(steps):
            after = self._without_evicted(after, step)
            if choices is not None and number:
                ranks = after.rank[..., self.sinks : self.first]
                holds = torch.arange(self.heavy, device=ranks.device) < number * self.block
                choices.chosen[:, :, number - 1] = ranks.masked_fill(~holds, -1)
            output, after = self._attended(tokens, queries, after, step, in_place=ours and not functional)
            outputs.append(output)
            ours = True
        return self._in_order(tokens, steps, outputs), after

    def _learns(self, tokens: Tokens, state: HeavyState | None) -> bool:
        """Tell whether there are gradients of a text from its first token on."""
        if state is not None or tokens.query is None or by_torch_alone() or not self._has_gradients(tokens):
            return False
        return not torch.compiler.is_compiling() or self._operator(tokens, None, learns=True) is not None

    def _has_gradients(self, tokens: Tokens, state: HeavyState | None = None) -> bool:
        inputs = (tokens.query, tokens.key, tokens.value, tokens.sink, *(state or ()))
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)

    def _operator(self, tokens: Tokens, state: HeavyState | None, *, learns: bool) -> Kernel | None:
        """Return what computes all steps in a compiled graph; None where no kernel does."""
        if tokens.query is None or not tokens.is_plain:
            return None
        form = HeavyForm(self.rotary is not None, learns)
        backend = heavy_operator.backend_of(tokens.query, tokens.key, tokens.value, state, form)
        if backend is None:
            return None
        return functools.partial(heavy_operator.forward, backend=backend, learns=learns)

    def _with_gradients(self, tokens: Tokens) -> tuple[Tensor, HeavyState]:
        """Choose without gradients, and compute from what was chosen in the backward."""
        order = None
        if tokens.valid is not None:
            about = tokens.valid, tokens.key.shape[0]
            order, *places = once(tokens.count, "h2o in order", about, lambda: self._visible_first(tokens))
            tokens = self._ordered(tokens, order, *places)
        assert tokens.query is not None
        assert tokens.count is not None
        if torch.compiler.is_compiling():
            operator = self._operator(tokens, None, learns=True)
            assert operator is not None
            output, after = self._by_kernel(operator, tokens, None)
        else:
            near = self._near(upcast(tokens.query), tokens)
            text = HeavyText(tokens.query, near, tokens.key, tokens.value, tokens.sink)

            def forward(choices: HeavyChoices) -> tuple[Tensor, HeavyState]:
                return self._forward(tokens, None, choices)

            output, after = attention(text, Options(self.sizes, tokens.scaling, tokens.softcap), forward)
        if tokens.keep:
            count = tokens.count[:, -1]
            key, value = (kept(x, after.rank, self.sizes, count) for x in (tokens.key, tokens.value))
            after = after._replace(key=key, value=value)
        if order is not None:  # padding has no output, so none that a gradient comes from
            output = tokens.hide(output).gather(2, spread(order.argsort(1), output))
        return output, after

    def _visible_first(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Return places with visible tokens first, which are visible then, and how many each has seen."""
        valid = counted(tokens)
        order = valid.logical_not().long().argsort(dim=1, stable=True)
        valid = valid.gather(1, order)
        return order, valid, with_notes(valid.long().cumsum(1))

    def _ordered(self, tokens: Tokens, order: Tensor, valid: Tensor, count: Tensor) -> Tokens:
        """Bring visible tokens to the front of their rows; zeros behind them."""

        def each(x: Tensor) -> Tensor:
            return x.gather(2, spread(order, x)).masked_fill(~valid[:, None, :, None], 0)

        assert tokens.query is not None
        query, key, value = map(each, (tokens.query, tokens.key, tokens.value))
        return replace(tokens, query=query, key=key, value=value, valid=valid, count=count)

    def _queries(self, tokens: Tokens) -> list[Tensor]:
        """Return the scaled queries, and as they meet the sinks where they are turned for that."""
        assert tokens.query is not None
        query = upcast(tokens.query) * tokens.scaling
        near = self._near(query, tokens)
        return [query] if near is None else [query, near]

    def _near(self, query: Tensor, tokens: Tokens) -> Tensor | None:
        """Turn queries to where they meet the sinks; None for as they are."""
        count = tokens.count
        assert count is not None
        if self.rotary is None:
            return None
        ranks = once(count, "h2o ranks", (), lambda: with_notes(count - 1))
        return Turn(self.rotary, self.sinks + self.size - 1).of(query, ranks)

    def _kernel(
        self, tokens: Tokens, state: HeavyState | None, choices: HeavyChoices | None
    ) -> Kernel | None:
        """Return what computes all steps at once, without gradients."""
        query, key, value = tokens.query, tokens.key, tokens.value
        if query is None or not tokens.is_plain:
            return None
        if torch.compiler.is_compiling():
            return None if self._has_gradients(tokens, state) else self._operator(tokens, state, learns=False)
        if native_takes_heavy(query, key, value, state):
            chosen = None if choices is None else choices.chosen
            return functools.partial(cpp_heavy.forward, in_place=tokens.in_place, chosen=chosen)
        if not (state is None or state.key.dtype == state.value.dtype == key.dtype):
            return None
        form = HeavyForm(self.rotary is not None, choices is not None)
        takes = one_kernel_takes_heavy(query, key, value, form)
        return functools.partial(triton_heavy.forward, choices=choices) if takes else None

    def _by_kernel(
        self, kernel: Kernel, tokens: Tokens, state: HeavyState | None
    ) -> tuple[Tensor, HeavyState]:
        """Compute outputs and the state after in one kernel; the steps are known on the device."""
        query, count = tokens.query, tokens.count
        assert query is not None
        assert count is not None
        near = self._near(upcast(query), tokens)
        near = None if near is None else near.to(query.dtype)
        about = tokens.valid, tokens.key.shape[0]
        places = once(count, "h2o places", about, lambda: self._places_on_device(tokens))
        return kernel(query, near, tokens.key, tokens.value, places, state, self.sizes, tokens.scaling)

    def _places_on_device(self, tokens: Tokens) -> HeavyPlaces:
        """Count what each row has seen before and sees now, and put visible tokens first."""
        assert tokens.count is not None
        valid = counted(tokens)
        seen, order = tokens.count[:, 0].long() - valid[:, 0].long(), None
        if tokens.valid is not None:
            order = valid.logical_not().long().argsort(dim=1, stable=True).int()
        return HeavyPlaces(seen.int(), valid.sum(1).int(), order)

    def _in_order(self, tokens: Tokens, steps: list[Step], outputs: list[Tensor]) -> Tensor:
        """Bring what the steps computed to the places of the tokens; 0 for padding."""
        found = torch.cat(outputs, 2)
        if all(step.span is not None for step in steps):
            return found
        place = torch.zeros_like(steps[0].places[:, :1]).expand(-1, tokens.length + 1)
        done = 0  # the last place is nobody's
        for step in steps:
            spot = torch.arange(done, done + step.places.shape[1], device=place.device).expand_as(step.places)
            place = place.scatter(1, step.places.masked_fill(~step.live, tokens.length), spot)
            done += step.places.shape[1]
        return tokens.hide(found.gather(2, spread(place[:, :-1], found)))

    def _empty(self, like: Tokens) -> HeavyState:
        """Return the state before the first token."""
        key, value = (x.new_zeros(*x.shape[:2], self.columns, x.shape[3]) for x in (like.key, like.value))
        weight = torch.zeros_like(upcast(key[..., 0]))
        return HeavyState(key, value, weight, torch.zeros_like(weight, dtype=torch.int32))

    def _steps(self, tokens: Tokens, first: bool) -> Iterator[Step]:
        """Divide the visible tokens of each row by how many blocks have left the window of their queries.

        Args:
            tokens: of the call.
            first: nothing was seen before them.
        """
        assert tokens.count is not None
        valid = counted(tokens)
        seen, count = tokens.count[:, 0].long() - valid[:, 0].long(), valid.sum(1)
        if torch.compiler.is_compiling() or (tokens.length == 1 and seen.device.type != "cpu"):
            parts = self._unknown_parts(tokens.length, seen, count)
        elif first and tokens.valid is None:  # nothing waits for the device
            parts = self._known_parts([0] * len(seen), [tokens.length] * len(seen), seen.device)
        else:
            known: list[list[int]] = torch.stack([seen, count]).tolist()
            parts = self._known_parts(known[0], known[1], seen.device)
        order = None if tokens.valid is None else valid.logical_not().long().argsort(dim=1, stable=True)
        for part in parts:
            yield self._step(part, tokens, seen, order)

    def _unknown_parts(self, length: int, seen: Tensor, count: Tensor) -> Iterator[Part]:
        """Divide tokens without a look at the numbers: into as many parts as there can be."""
        number = self.sizes.left(seen)
        for _ in range(-(-(length - 1) // self.block) + 1):
            begin, end = self.sizes.begin(number), self.sizes.begin(number + 1)
            start, stop = (torch.minimum((x - seen).clamp_min(0), count) for x in (begin, end))
            evicts = (start < stop) & (number > 0) & (seen + start == begin)
            yield Part(number.clamp_min(0), start, stop, min(length, self.block), evicts)
            number = number + 1

    def _known_parts(self, seen: list[int], count: list[int], device: torch.device) -> Iterator[Part]:
        """Divide tokens into the parts there are; the first is as long as it takes to fill the window."""
        first = [max(self.sizes.left(before), 0) for before in seen]
        last = [max(self.sizes.left(before + new - 1), 0) for before, new in zip(seen, count, strict=True)]
        steps = range(max(0, *map(operator.sub, last, first)) + 1)
        numbers = [[number + step for number in first] for step in steps]
        of_rows = [list(zip(*map(self._places, seen, count, row), strict=True)) for row in numbers]
        lefts, table = (torch.tensor(x, device=device) for x in (numbers, of_rows))  # copied at once
        for (starts, stops, leaves), left, (start, stop, evicts) in zip(of_rows, lefts, table, strict=True):
            span = (starts[0], stops[0]) if len({*starts}) == len({*stops}) == 1 else None
            width = max(1, *map(operator.sub, stops, starts))
            yield Part(left, start, stop, width, evicts.bool() if any(leaves) else None, span)

    def _places(self, seen: int, count: int, number: int) -> tuple[int, int, bool]:
        """Tell which of a row's new tokens come behind so many evictions, and whether one is just before."""
        begin = self.sizes.begin(number) if number else 0
        start, stop = (min(max(x - seen, 0), count) for x in (begin, self.sizes.begin(number + 1)))
        return start, stop, number > 0 and start < stop and seen + start == begin

    def _step(self, part: Part, tokens: Tokens, seen: Tensor, order: Tensor | None) -> Step:
        places = part.start[:, None] + torch.arange(part.width, device=seen.device)
        live, places = places < part.stop[:, None], places.clamp_max(tokens.length - 1)
        ranks, gone = seen[:, None] + places, (part.left * self.block)[:, None]
        column = torch.arange(self.columns, device=ranks.device)
        sinks = column[: self.sinks] <= ranks[..., None]
        heavy = (column[: self.heavy] < gone)[:, None].expand(-1, ranks.shape[1], -1)
        window = column[: self.columns - self.first] + gone[..., None] <= (ranks - self.sinks)[..., None]
        visible = torch.cat([sinks, heavy, window], -1) & (column < self.columns - 1)
        held = (column[: self.heavy] < gone - self.block)[:, None]
        target = torch.where(ranks < self.sinks, ranks, ranks + self.heavy - gone)
        target = torch.where(live, target, self.columns - 1)  # the spare one
        total = live.sum(1)
        behind = (total[:, None] - torch.arange(1, part.width + 1, device=live.device)).clamp_min(0)
        half = self.sizes.fade
        dtype = upcast(tokens.key[:0]).dtype
        share, fade = half ** behind.to(dtype) * live, half ** total.to(dtype)
        index = places if order is None else order.gather(1, places)
        span = part.span if order is None else None
        oldest = self.sizes.begin(part.left)[:, None, None] - (self.reach or 0)
        hidden = ~visible[:, None, None]
        return Step(index, live, span, target, ranks.int(), hidden, share, fade, part.evicts, oldest, held)

    def _without_evicted(self, before: HeavyState, step: Step) -> HeavyState:
        """Choose what stays of the block that leaves and of what was kept, in rows where one does."""
        if step.evicts is None:
            return before
        candidates = to_16_bits(before.weight[..., self.sinks : self.first + self.block])
        kept = candidates[..., : self.heavy].masked_fill(~step.held, -1.0)
        if self.reach is not None:
            far = before.rank[..., self.sinks : self.first] < step.oldest
            kept = kept.masked_fill(far & step.held, -0.5)
        ranked = torch.cat([kept, candidates[..., self.heavy :]], -1)
        chosen = ranked.sort(stable=True, dim=-1, descending=True).indices[..., : self.heavy]
        column = torch.arange(self.columns, device=chosen.device)
        rest = (column[self.first :] + self.block).clamp_max(self.columns - 1)
        sinks, rest = (x.expand(*chosen.shape[:2], -1) for x in (column[: self.sinks], rest))
        index = torch.cat([sinks, chosen + self.sinks, rest], -1)
        index = torch.where(step.evicts[:, None, None], index, column)
        rows = table_rows(index, self.columns)
        return HeavyState(*(x.flatten(0, 2).index_select(0, rows).view_as(x) for x in before))

    def _attended(
        self, tokens: Tokens, queries: list[Tensor], before: HeavyState, step: Step, in_place: bool
    ) -> tuple[Tensor, HeavyState]:
        """Compute the queries of a step, `[B, H, N, Dv]`, and what their keys have got since."""
        put = Tensor.scatter_ if in_place else Tensor.scatter
        key, value = (
            put(old, 2, spread(step.column, x), x)
            for old, x in zip(
                before[:2], (self._of(step, x) for x in (tokens.key, tokens.value)), strict=True
            )
        )
        column, ranks = (x[:, None].expand(-1, key.shape[1], -1) for x in (step.column, step.ranks))
        weight, rank = put(before.weight, 2, column, 0.0), put(before.rank, 2, column, ranks)
        weights = self._weights(tokens, [self._of(step, x) for x in queries], upcast(key), step)
        found = (weights @ upcast(value)).unflatten(2, (-1, step.live.shape[1])).flatten(1, 2)
        share = step.share[:, None, None].expand(-1, -1, found.shape[1] // key.shape[1], -1).flatten(2)
        got = (share[:, :, None] @ weights.detach())[:, :, 0]
        return found, HeavyState(key, value, weight * step.fade[:, None, None] + got, rank)

    def _of(self, step: Step, x: Tensor) -> Tensor:
        """Take the tokens of a step; zeros where there is none, as padding may be NaN."""
        if step.span is not None:
            return x[:, :, step.span[0] : step.span[1]]
        return x.gather(2, spread(step.places, x)).masked_fill(~step.live[:, None, :, None], 0)

    def _weights(self, tokens: Tokens, queries: list[Tensor], key: Tensor, step: Step) -> Tensor:
        """Compute the softmax over all columns, `[B, Hkv, G N, M]`."""
        heads = key.shape[1]
        query, *near = (linear.grouped(x, heads).flatten(2, 3) for x in queries)
        scores = query @ key.mT
        if near:
            scores = torch.cat([near[0] @ key[:, :, : self.sinks].mT, scores[..., self.sinks :]], -1)
        scores = capped(scores, tokens.softcap, None).unflatten(2, (-1, step.live.shape[1]))
        scores = scores.masked_fill(step.hidden, float("-inf"))
        if tokens.sink is not None:
            own = tokens.sink.to(scores.dtype).view(heads, -1, 1, 1).expand(*scores.shape[:4], 1)
            scores = torch.cat([scores, own], -1)
        return scores.softmax(-1)[..., : self.columns].flatten(2, 3)

    def whole_rows(self) -> str:
        """Say why rows cannot be split: each block waits for the choice before."""
        return "which tokens stay is chosen one block after the other"

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count keys and values in the model's dtype, their weights in float32 and ranks."""
        if site.kv_heads is None or site.head_dim is None or site.value_dim is None:
            return None
        column = (site.head_dim + site.value_dim) * size + max(size, 4) + 4
        return self.columns * site.kv_heads * column
