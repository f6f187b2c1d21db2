"""window: softmax over the last tokens and the first ones; alone, or with a linear attention for the rest."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.attention import LinearAttention, Site, StatefulAttention, Tokens, upcast
from hf_linattn.errors import OptionError
from hf_linattn.ops import types, window_attention
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.softmax import scores_of
from hf_linattn.ops.types import ScaledSums, State
from hf_linattn.patching.contexts import Branches
from hf_linattn.registry import register

from . import fused_decode, ring
from .ring import Kept, Recent
from .rotary import Rotary, is_rotated


@register("window")
class Window(StatefulAttention):
    """Softmax over the last `size` tokens and the first `sinks`; "window+elu1" adds the others linearly.

    o_i = sum_{j in W(i)} exp(s_ij) v_j / sum_{j in W(i)} exp(s_ij)
    W(i): i - size < j <= i, and the first `sinks` tokens; |i - j| < size in encoders

    As "window+<linear>" the tokens outside W(i) are not lost, but summed up with the features of that
    attention, f_ij = phi(q_i) . phi(k_j). mix="shared" has one normaliser:
    o_i = (sum_W exp(s_ij) v_j + sum_rest f_ij v_j) / (sum_W exp(s_ij) + sum_rest f_ij); "learned" has two:
    o_i = g_h o_window + (1 - g_h) o_rest, g_h = 0.95 at the start, and 1 while there is no rest. The cache
    holds `sinks + size` keys and the state: memory stays flat.

    Options:
        size: tokens in the window, the query's own among them, at least 1; default 256.
        sinks: first tokens of a text that stay visible, at least 0; default 0.
        positions: "cache", a sink is never further than the cache is long (StreamingLLM's positions inside
            the cache); "text", its true distance; "auto" (default), "cache" in models with RoPE.
        mix: "shared" (default) or "learned", with a linear attention.

    Use: alone, text of any length with flat memory and no training, but nothing older is known; 4 sinks keep
        pretrained models stable. With a linear attention, the hybrid that loses least in conversion.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al. 2023, arXiv:2309.17453,
        section 3.2; "LoLCATs", Zhang et al. 2024, arXiv:2410.10254, section 3.3 (shared normaliser).
    """

    group = "hybrid"
    time = "O(n w)"
    cross = False
    hosts = True
    branches: Branches | None = None  # of a hybrid: "both", unless `use_branches` says otherwise

    def __init__(
        self,
        site: Site,
        *,
        size: int = 256,
        sinks: int = 0,
        positions: Literal["auto", "cache", "text"] = "auto",
        mix: Literal["shared", "learned"] = "shared",
    ) -> None:
        super().__init__(site)
        if size < 1:
            raise OptionError(f"size must be at least 1 token, got {size}")
        if sinks < 0:
            raise OptionError(f"sinks must be at least 0 tokens, got {sinks}")
        self.size, self.sinks, self.mix = size, sinks, mix
        turned = positions == "cache" or (positions == "auto" and is_rotated(site))
        self.rotary = Rotary(site) if sinks and turned else None
        self.turns = self.rotary is not None
        self.counts = sinks > 0
        self.inner = ""
        self.heads = site.heads

    def host(self, inner: LinearAttention) -> None:
        """Take in the linear attention of the tokens outside."""
        if not inner.summed:
            raise OptionError(
                f"{inner.name!r} has no sum to share with a window: its weights can be negative"
            )
        self.inner, self.branches = inner.name, "both"
        self.directions, self.why = inner.directions, inner.why  # type: ignore[misc]
        self.counts = self.counts or inner.counts
        self.add_module("rest", inner)
        if self.mix == "learned":
            if self.heads is None:
                raise OptionError("mix='learned' needs the number of heads, which cannot be told here")
            self.gate = nn.Parameter(torch.full((self.heads,), 3.0))

    def _linear(self) -> LinearAttention:
        rest: Any = self._modules["rest"]  # not by its own name, which may be one of our attributes
        return rest  # type: ignore[no-any-return]

    def causal(self, tokens: Tokens, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Window and sinks exactly; what leaves the window goes to the linear attention's state."""
        if state is None and self._holds(tokens):
            return self._softmax(tokens, causal=True), self._begun(tokens) if tokens.keep else ()
        before = self._before(tokens, state)
        if state is not None and ring.steps(tokens, before):
            return self._step(tokens, state, before)
        if state is None and tokens.length > self.size and not torch.compiler.is_compiling():
            seen, ranks, leaving, after = ring.longer(tokens, self.size, self.sinks)
        else:
            seen, ranks, leaving, after = ring.advance(tokens, before)
        inside = partial(self._inside, tokens, seen, ranks, after.sinks, self.size)
        if not self.inner:
            return inside(None), after.flat()
        output, inner = self._with_rest(tokens, leaving, self._inner_state(state), inside)
        return output, (*after.flat(), *inner)

    def _step(
        self, tokens: Tokens, state: tuple[Tensor, ...], before: Recent
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One token."""
        if not self.sinks and self.mix == "shared" and self.branches in (None, "both"):
            made = fused_decode.step(self._linear() if self.inner else None, tokens, state)
            if made is not None:
                return made
        seen, rank, leaving, after = ring.step(tokens, before, wants_leaving=bool(self.inner))
        inside = partial(self._inside, tokens, seen, rank, after.sinks, None)
        inner = self._inner_state(state)
        if inner is None or self._nothing_left(leaving, inner):
            output = inside(None)
        else:
            output, inner = self._with_rest(tokens, leaving or _nobody(tokens), inner, inside)
        found = (*after.flat(), *(inner or ()))
        return output, state if all(map(operator.is_, found, state)) else found

    def _nothing_left(self, leaving: Tokens | None, inner: State) -> bool:
        """Whether no token has ever left the window, as far as it takes no time to ask."""
        return leaving is None and self.branches == "both" and not inner.z.any()

    def _with_rest(
        self,
        tokens: Tokens,
        leaving: Tokens,
        inner: State | None,
        inside: Callable[[ScaledSums | None], Tensor],
    ) -> tuple[Tensor, State]:
        """The window and the linear attention, whose state goes on."""
        assert tokens.query is not None
        inside_all = tokens.length - leaving.length  # queries that see all before them inside the window
        summed = replace(leaving, query=tokens.query[:, :, inside_all:])
        if self.branches == "linear":
            summed, inside_all = tokens, 0
        numerator, total, inner = self._linear().sums(summed, inner)
        if inside_all:
            numerator, total = F.pad(numerator, (0, 0, inside_all, 0)), F.pad(total, (inside_all, 0))
        return self._mixed(tokens, inside, numerator, total), inner

    def _holds(self, tokens: Tokens) -> bool:
        """Whether a text begins that stays inside the window, so that torch's own kernel can take it."""
        if tokens.length > self.size or self.branches not in (None, "both", "window"):
            return False
        if torch.compiler.is_compiling():  # the graph would be for such lengths alone
            return False
        assert tokens.query is not None
        return tokens.query.dtype == tokens.key.dtype == tokens.value.dtype

    def _softmax(self, tokens: Tokens, causal: bool) -> Tensor:
        """Of a text inside the window: none of its tokens has left."""
        assert tokens.query is not None
        key, value, mask = tokens.hide(tokens.key), tokens.hide(tokens.value), None
        if tokens.valid is not None:
            mask = _seen(tokens.valid, causal)
        output = F.scaled_dot_product_attention(
            *(tokens.query, key, value, mask),
            is_causal=causal and mask is None,
            scale=tokens.scaling,
            enable_gqa=True,
        )
        own = [weight for weight in self.parameters() if weight.requires_grad]
        if not own or not torch.is_grad_enabled():
            return output
        beside: Tensor = _Beside.apply(output, *own)  # type: ignore[no-untyped-call]
        return beside

    def _begun(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """The state after such a text."""
        after = ring.begun(tokens, self.size, self.sinks).flat()
        return (*after, *self._linear().absorb(_nobody(tokens), None)) if self.inner else after

    def absorb(self, tokens: Tokens, state: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """No queries are needed."""
        _, _, leaving, after = ring.advance(tokens, self._before(tokens, state))
        if not self.inner:
            return after.flat()
        summed = tokens if self.branches == "linear" else leaving
        return *after.flat(), *self._linear().absorb(summed, self._inner_state(state))

    def _before(self, tokens: Tokens, state: tuple[Tensor, ...] | None) -> Recent:
        return Recent.nothing(tokens, self.size, self.sinks) if state is None else Recent.of(state)

    def _inner_state(self, state: tuple[Tensor, ...] | None) -> State | None:
        return None if state is None or not self.inner else State(*state[ring.TENSORS :])

    def both_ways(self, tokens: Tokens) -> Tensor:
        """A window to both sides; the rest in two streams, one from each end."""
        assert tokens.query is not None
        if self._holds(tokens):
            return self._softmax(tokens, causal=False)
        marks, ranks = ring.ranked(tokens, self.sinks, causal=False)
        own = ring.own(tokens, marks)
        first = ring.with_sinks(own, ranks, self._before(tokens, None).sinks)
        reach = 2 * self.size - 1
        seen = ring.padded(own, self.size, self.size - 1)
        inside = partial(self._inside, tokens, seen, None, first, reach)
        if not self.inner:
            return inside(None)
        if self.branches == "linear":
            return self._linear().both_ways(tokens)
        numerator, total = self._outside(tokens, own)
        mirrored = Kept(own.key.flip(2), own.value.flip(2), marks.flip(1))
        back, behind = self._outside(replace(tokens, query=tokens.query.flip(2)), mirrored)
        return self._mixed(tokens, inside, numerator + back.flip(2), total + behind.flip(2))

    def _outside(self, tokens: Tokens, own: Kept) -> tuple[Tensor, Tensor]:
        """Sums over the tokens that lie `size` or more before each query."""
        key, value, marks = ring.padded(own, self.size, 0)
        cut = tokens.length
        key, value, marks = key[:, :, :cut], value[:, :, :cut], marks[:, :cut]
        stream = Tokens(tokens.query, key, value, tokens.scaling, marks, keep=False)
        return self._linear().sums(stream, None)[:2]

    def _inside(
        self,
        tokens: Tokens,
        seen: tuple[Tensor, Tensor, Tensor | None],
        ranks: Tensor | None,
        first: Kept,
        reach: int | None,
        other: ScaledSums | None,
    ) -> Tensor:
        """Softmax over the window, the sinks and other tokens; a causal query sees sinks up to its rank.

        Without a reach a single query sees all of `seen`.
        """
        assert tokens.query is not None
        query, key, value = map(upcast, (tokens.query, *seen[:2]))
        if self.sinks:
            sinks = self._sink_sums(tokens.scaling, query, ranks, first)
            other = sinks if other is None else band.add_sums(sinks, other)
        if reach is None:
            return window_attention.decode(query, key, value, seen[2], tokens.scaling, other)
        assert seen[2] is not None
        return window_attention.attention(
            types.Window(query, key, value, seen[2], reach, tokens.scaling), other
        )

    def _sink_sums(self, scaling: float, query: Tensor, ranks: Tensor | None, first: Kept) -> ScaledSums:
        key, value = upcast(first.key), upcast(first.value)
        visible = first.marks[:, None].expand(-1, query.shape[2], -1)
        if ranks is not None:
            visible = visible & (torch.arange(self.sinks, device=ranks.device) <= ranks[:, :, None])
            if self.rotary is not None:
                query = self.rotary.back(query, (ranks - (self.sinks + self.size - 1)).clamp_min(0))
        scores = scores_of(query, key, scaling).masked_fill(~visible[:, None], float("-inf"))
        return band.softmax_sums(scores, value)

    def _mixed(
        self, tokens: Tokens, inside: Callable[[ScaledSums | None], Tensor], numerator: Tensor, total: Tensor
    ) -> Tensor:
        """Window and rest as one, or one of them."""
        if self.branches == "none":
            return torch.zeros_like(numerator)
        if self.branches in ("rest", "linear"):
            return linear.normalised(numerator, total)
        if self.branches == "window":
            return inside(None)
        if self.mix == "learned":
            gate = self.gate.to(total.dtype).sigmoid()[:, None]
            gate = torch.where(total > 0, gate, 1.0).unsqueeze(-1)
            return gate * inside(None) + (1 - gate) * linear.normalised(numerator, total)
        assert tokens.query is not None
        left_out = self._linear().left_out(upcast(tokens.query))
        return inside(ScaledSums(numerator, total, torch.zeros_like(total) if left_out is None else left_out))

    def state_bytes(self, site: Site, size: int) -> int | None:
        """Window and sinks in the model's dtype, a mark for each token; and the linear attention's state."""
        if site.kv_heads is None or site.head_dim is None or site.value_dim is None:
            return None
        own = (self.size + self.sinks) * (site.kv_heads * (site.head_dim + site.value_dim) * size + 1) + 8
        inner = self._linear().state_bytes(site, size) if self.inner else 0
        return None if inner is None else own + inner


def _nobody(tokens: Tokens) -> Tokens:
    """A single one of these tokens, which does not count."""
    unseen = torch.zeros(tokens.key.shape[0], 1, dtype=torch.bool, device=tokens.key.device)
    return replace(tokens.slice(0, 1), query=None, valid=unseen)


def _seen(valid: Tensor, causal: bool) -> Tensor:
    """`[B, N]` -> `[B, 1, N, N]`; a query that sees nothing sees itself, whose value is hidden."""
    length = valid.shape[1]
    seen = valid[:, None, None].expand(-1, 1, length, -1)
    seen = seen.tril() if causal else seen
    alone = ~seen.any(-1, keepdim=True)
    return seen | (alone & torch.eye(length, dtype=torch.bool, device=valid.device))


class _Beside(torch.autograd.Function):
    """A result that these weights have no part in, though they are asked for a gradient: zeros.

    Without one, processes that train together wait for each other's in vain.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *map(torch.zeros_like, ctx.saved_tensors)
