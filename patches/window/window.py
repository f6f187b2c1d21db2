"""window: softmax over the last tokens and the first ones; alone, or with a linear attention for the rest."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, LinearAttention, StatefulAttention, Tokens, upcast
from hf_linattn.attention.call import Call
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops import types, window_attention
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager import window as band
from hf_linattn.ops.softmax import sdpa
from hf_linattn.ops.tracing import exporting, transforming
from hf_linattn.ops.types import Elu1Sums, OtherSums, ScaledSums, State
from hf_linattn.parallel import Shard
from hf_linattn.patching.contexts import Branches
from hf_linattn.registry import register

from . import growing, ring, salient, split
from .fused import PreparedToken, Share, fused_step, prepare
from .prefill import prefill
from .rest import absorb, before_first, of_all_queries, scaled, sums, with_gates, without_gates
from .ring import KeyValues, Seen, WindowState
from .rotary import sinks_turned_by
from .salient import SalientState
from .sinks import Turn, for_cpp, for_triton, sink_sums, with_own_sink
from .unused import with_zero_gradients


@register("window")
class Window(StatefulAttention):
    """Softmax over the last `size` tokens and the first `sinks`; "window+elu1" adds the others linearly.

    o_i = sum_{j in W(i)} exp(s_ij) v_j / sum_{j in W(i)} exp(s_ij)
    W(i): i - size < j <= i, and the first `sinks` tokens; |i - j| < size in encoders

    i and j count visible tokens. As "window+<linear>" the tokens outside W(i) are not lost, but summed up
    with the features of that attention, f_ij = phi(q_i) . phi(k_j). mix="shared" has one normaliser:
    o_i = (sum_W exp(s_ij) v_j + sum_rest f_ij v_j) / (sum_W exp(s_ij) + sum_rest f_ij); "learned" has two:
    o_i = g_h o_window + (1 - g_h) o_rest, g_h = sigmoid(b_h) = 0.95 at the start, and 1 while there is no
    rest; "interpolated" likewise, with g_h itself learned and 1 at the start: patching changes no more than
    the window does. The cache holds `sinks + size` keys and the state: memory stays flat.

    With `salient`, W(i) also holds that many tokens of each key head which have left the window and which the
    state predicts worst. The tokens behind the sinks leave in blocks of 16, when the last of a block is
    `size` before the query; so up to 15 more than `size` are in W(i). Then the block's tokens and those kept
    so far are ranked by the error |v_j - S phi(k_j) / (z . phi(k_j))| of the state as it is then (|v_j| while
    it is empty): the largest stay, and the others go into the state for good. Keys keep their rotation. The
    choice has no gradient; keys and values have.

    A logit that the model learned as a sink of its own (gpt-oss) stays in the window's normaliser, and a cap
    of its scores (Gemma 2) in exp(s_ij).

    Options:
        size: tokens in the window, the query's own among them, at least 1; default 256.
        sinks: first tokens of a text that stay visible, at least 0; default 0.
        positions: "cache", a sink is never further than the cache is long (StreamingLLM's positions inside
            the cache); "text", its true distance; "auto" (default), "cache" where RoPE turns the layer's
            queries and can be turned back (not dynamic, longrope, complex, nor with a norm behind it, nor
            where images have positions of their own, as Qwen-VL's).
        mix: with a linear attention, "shared" (the default where it has a sum to share), "learned" or
            "interpolated" (the default for "window+delta", which has none).
        salient: tokens kept beside the window, at least 0; default 0. Needs an additive linear attention (not
            gated, decay, delta) in a causal model; computed in plain torch on all devices.

    Use: alone, text of any length with flat memory and no training, but nothing older is known; 4 sinks keep
        pretrained models stable. With a linear attention, the hybrid that loses least in conversion.

    Source: "Efficient Streaming Language Models with Attention Sinks", Xiao et al. 2023, arXiv:2309.17453,
        section 3.2; "LoLCATs", Zhang et al. 2024, arXiv:2410.10254, section 3.3 (shared normaliser); "LoLA",
        McDermott et al. 2025, arXiv:2505.23666 (salient tokens by self-recall error, here in fixed blocks).
    """

    group = "hybrid"
    time = "O(n w)"
    cross = False
    wraps = in_kernels = takes_own_heads = True
    supports = frozenset(("s_aux", "softcap"))
    branches: Branches | None = None  # of a hybrid: "both", unless `use_branches` says otherwise

    def __init__(
        self,
        site: AttentionSite,
        *,
        size: int = 256,
        sinks: int = 0,
        positions: Literal["auto", "cache", "text"] = "auto",
        mix: Literal["shared", "learned", "interpolated"] | None = None,
        salient: int = 0,
    ) -> None:
        super().__init__(site)
        if size < 1:
            raise OptionError(f"size must be at least 1 token, got {size}")
        if sinks < 0:
            raise OptionError(f"sinks must be at least 0 tokens, got {sinks}")
        if salient < 0:
            raise OptionError(f"salient must be at least 0 tokens, got {salient}")
        ring.refuse_excess(sinks=sinks, salient=salient)
        self.size, self.sinks, self.mix, self.salient = size, sinks, mix, salient
        self.rotary, self.note = sinks_turned_by(site, sinks, positions)
        self.needs_rope = self.rotary is not None
        self.needs_visible_count = sinks > 0
        self.inner = ""
        self.heads = site.heads

    def wrap(self, inner: Any) -> None:
        """Take in the linear attention of the tokens outside."""
        sums = isinstance(inner, LinearAttention)
        if isinstance(inner, LinearAttention) and not inner.sum_normalised:
            raise OptionError(
                f"{inner.name!r} has no sum to share with a window: its weights can be negative"
            )
        if not (sums or inner.one_tensor):
            raise OptionError(
                f"a window keeps one tensor of {inner.name!r}, which has more with these options: leave out "
                "its convolution (conv=1), the window sees the tokens before each"
            )
        self.mix = self.mix or ("shared" if sums else "interpolated")
        if self.mix == "shared" and not sums:
            raise OptionError(
                f"mix='shared': {inner.name!r} has no sum to share with a window; give 'interpolated' or "
                "'learned'"
            )
        self.inner, self.branches, self.needs_hidden = inner.name, "both", inner.needs_hidden
        self.gate_count = inner.gate_count
        self.directions, self.direction_reason = inner.directions, inner.direction_reason  # type: ignore[misc]
        if self.salient:
            self._keep_salient(inner)
        self.needs_visible_count = self.needs_visible_count or inner.needs_visible_count
        self.add_module("rest", inner)
        if self.mix != "shared":
            if self.heads is None:
                raise OptionError(f"mix={self.mix!r} needs the number of heads, which cannot be told here")
            self.gate = nn.Parameter(torch.full((self.heads,), 3.0 if self.mix == "learned" else 1.0))

    def _keep_salient(self, inner: Any) -> None:
        if not isinstance(inner, LinearAttention) or inner.has_decay:
            raise OptionError(
                f"salient={self.salient}: {inner.name!r} forgets by the order of tokens, and salient ones "
                "reach its state late. Give an attention of feature maps alone, as in 'window+hedgehog', or "
                "salient=0"
            )
        self.directions = "causal"  # type: ignore[misc]
        self.direction_reason = "salient tokens are those that a state of what was before predicts worst"  # type: ignore[misc]

    def check(self) -> None:
        """Refuse salient tokens where there is no state to predict them."""
        if self.salient and not self.inner:
            raise OptionError(
                f"salient={self.salient} needs a linear attention, which says what is salient, as in "
                "'window+hedgehog'"
            )

    def gates(self, call: Call) -> Tensor | None:
        """Compute what the linear attention needs of the hidden state."""
        gates: Tensor | None = self._linear().gates(call) if self.inner else None
        return gates

    def past_gates(self, tokens: Tokens) -> Tensor | None:
        """Compute what it needs of tokens that another attention has stored."""
        gates: Tensor | None = self._linear().past_gates(tokens) if self.inner else None
        return gates

    def calibrate(self, tokens: Tokens, target: Tensor) -> float:
        """Calibrate the linear attention, over all tokens."""
        error: float = self._linear().calibrate(tokens, target)
        return error

    def _linear(self) -> Any:
        return self._modules.get("rest")  # not by its own name, which may be one of our attributes

    def causal(self, tokens: Tokens, state: Any) -> tuple[Tensor, Any]:
        """Compute window and sinks exactly; what leaves the window goes to the linear attention's state."""
        if self.salient:
            found, kept = self._with_salient(tokens, state)
            assert found is not None
            return found, kept
        tokens = with_gates(tokens)
        one = tokens.valid is None or tokens.length == 1
        place = None if one else ring.places(tokens.valid, state is None, tokens.keep)
        if place is None:
            return self._causal(tokens, state)
        output, after = self._causal(ring.without_gaps(tokens, place), state)
        return output.gather(2, ring.spread(place, output)), after

    def _causal(self, tokens: Tokens, state: WindowState | None) -> tuple[Tensor, WindowState | None]:
        """Compute tokens without padding between them."""
        state = growing.with_room(self, tokens, state)
        if state is None and self._holds(tokens):
            after = self._begun(tokens) if tokens.keep else None
            return self._softmax(tokens, causal=True), after
        if state is not None and ring.is_step(tokens, state):
            return self._step(tokens, state)
        if state is None and not torch.compiler.is_compiling() and tokens.length > self.size:
            seen, evicted, after = ring.push_long_prompt(tokens, self.size, self.sinks)
        else:
            seen, evicted, after = ring.push(tokens, state or self._empty(tokens), begins=state is None)
        inside = partial(self._inside, tokens, seen, self.size)
        if not self.inner:
            return inside(None), after
        assert evicted is not None
        before = None if state is None else state.linear
        found = prefill(self, tokens, seen, evicted, before)
        output, rest = found or self._with_rest(tokens, evicted, before, inside)
        return output, None if after is None else after.with_linear(rest)

    def _step(self, tokens: Tokens, state: WindowState) -> tuple[Tensor, WindowState]:
        """Compute one token."""
        if self._sums_in_kernels() and tokens.is_plain:
            rest = growing.rest_of(self, state)
            fused = fused_step(rest, tokens, state, *self._turn_and_share())
            if fused is not None:
                return fused
        pushed = ring.push_one(tokens, state, wants_evicted=bool(self.inner))
        inside = partial(self._inside, tokens, pushed.seen, None)
        before = state.linear if self.inner else None
        if before is None or self._nothing_left(pushed.evicted, before):
            return inside(None), pushed.after
        output, after = self._with_rest(tokens, pushed.evicted or ring.nobody(tokens), before, inside)
        return output, pushed.after if after is before else pushed.after.with_linear(after)

    def _sums_in_kernels(self) -> bool:
        """Tell whether one call can compute a token: the rest are sums, and no branch is switched off."""
        summed = not self.inner or (isinstance(self._linear(), LinearAttention) and not self.gate_count)
        return summed and self.branches in (None, "both")

    def _turn_and_share(self) -> tuple[Turn | None, Share | None]:
        share = None if self.mix in (None, "shared") else Share(self.gate, self.mix == "learned")
        return self._turn(), share

    def _turn(self) -> Turn | None:
        """Say how queries meet the sinks: those further than the cache is long are turned to its end."""
        return None if self.rotary is None else Turn(self.rotary, self.sinks + self.size - 1)

    def prepared_step(self, call: Call) -> PreparedToken | None:
        """Prepare the tokens behind this one, where one call in C++ computes each."""
        if self.salient or not self._sums_in_kernels() or call.layer is None:
            return None
        return prepare(self, call, call.layer.state, *self._turn_and_share())

    def _nothing_left(self, evicted: Tokens | None, before: State) -> bool:
        """Whether no token has ever left the window, as far as it takes no time to ask."""
        if evicted is not None or self.branches != "both" or torch.compiler.is_compiling():
            return False
        return not before.z.any()

    def _with_rest(
        self,
        tokens: Tokens,
        evicted: Tokens,
        before: State | None,
        inside: Callable[[OtherSums | None], Tensor],
    ) -> tuple[Tensor, State]:
        """Compute the window and the linear attention, whose state goes on."""
        assert tokens.query is not None
        inside_all = tokens.length - evicted.length  # queries that see all before them inside the window
        summed = replace(evicted, query=tokens.query[:, :, inside_all:])
        if self.branches == "linear":
            summed, inside_all = tokens, 0
        numerator, total, after = sums(self._linear(), without_gates(summed, self.gate_count), before)
        return self._mixed(tokens, inside, numerator, total), after

    def _holds(self, tokens: Tokens) -> bool:
        """Whether a text begins that stays inside the window, so that torch's own kernel can take it."""
        # a graph would be for such lengths alone; torch's own kernel has no derivatives that go forward
        if torch.compiler.is_compiling() or transforming():
            return False
        if tokens.length > self.size or self.branches not in (None, "both", "window") or not tokens.is_plain:
            return False
        assert tokens.query is not None
        return tokens.query.dtype == tokens.key.dtype == tokens.value.dtype

    def _softmax(self, tokens: Tokens, causal: bool) -> Tensor:
        """Compute a text inside the window: none of its tokens has left."""
        assert tokens.query is not None
        query, key, value = tokens.query, tokens.hide(tokens.key), tokens.hide(self._values(tokens.value))
        output = None
        if causal and window_attention.native_is_faster(query):
            valid = ring.counted(tokens)
            window = types.Window(query, key, value, valid, tokens.length, tokens.scaling)
            if window_attention.native_takes(window, None):
                output = window_attention.native(window, None)
        if output is None:
            mask = None if tokens.valid is None else ring.pairs(tokens.valid, causal)
            output = sdpa(query, key, value, mask, 0.0, causal and mask is None, tokens.scaling)
        if not torch.is_grad_enabled():
            return output
        own = [weight for weight in self.parameters() if weight.requires_grad]
        return with_zero_gradients(output, own) if own else output

    def _begun(self, tokens: Tokens) -> WindowState:
        """Return the state after such a text."""
        return growing.with_rest(self, tokens, ring.from_prompt(tokens, self.size, self.sinks))

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> tuple[Tensor, WindowState] | None:
        """Compute a text inside the window; the ring after it grows with the tokens behind."""
        tokens = Tokens(query, key, value, scaling)
        if self.salient or self.gate_count or self.branches not in (None, "both") or not self._holds(tokens):
            return None
        return self._softmax(tokens, causal=True), growing.begun(self, tokens)

    def _absorbed(self, tokens: Tokens, before: State | None) -> State:
        return absorb(self._linear(), without_gates(tokens, self.gate_count), before)

    def _values(self, value: Tensor) -> Tensor:
        """Leave out the gates behind the values."""
        return value[..., : -self.gate_count] if self.gate_count else value

    def absorb(self, tokens: Tokens, state: Any) -> Any:
        """Return the state after tokens of which no queries are needed."""
        if self.salient:
            return self._with_salient(tokens, state)[1]
        tokens = with_gates(tokens)
        place = ring.places(tokens.valid, state is None, keep=True)
        tokens = tokens if place is None else ring.without_gaps(tokens, place)
        state = growing.with_room(self, tokens, state)
        pushed = ring.push(tokens, state or self._empty(tokens), begins=state is None)
        if not self.inner:
            return pushed.after
        summed = tokens if self.branches == "linear" else pushed.evicted
        assert summed is not None
        before = None if state is None else state.linear
        return pushed.after.with_linear(self._absorbed(summed, before))

    def _with_salient(self, tokens: Tokens, state: SalientState | None) -> tuple[Tensor | None, SalientState]:
        """Compute one segment after the other, and their state alone where there are no queries."""
        if exporting():
            raise UnsupportedCallError(
                f"salient={self.salient} chooses tokens in as many steps as the text has blocks, and a "
                "program for all lengths has no such number: export with salient=0"
            )
        if state is None:
            if tokens.query is None:
                begun = before_first(self._linear(), without_gates(tokens, self.gate_count))
            else:
                nobody = replace(ring.nobody(tokens), in_place=False, keep=True)
                begun = sums(self._linear(), replace(nobody, query=tokens.query[:, :, :1]), None)[2]
            state = SalientState.empty(tokens, self.size, self.sinks, self.salient, begun)
        parts = []
        for start in range(0, tokens.length, salient.SEGMENT):
            part = tokens.slice(start, min(start + salient.SEGMENT, tokens.length))
            if part.query is not None:
                output, state = self._segment(part, state)
                parts.append(output)
            elif self.branches == "linear":
                state = state.with_linear(self._absorbed(part, state.linear))
            else:
                state = salient.push(self._linear(), part, state, self.size).after
        return torch.cat(parts, 2) if parts else None, state

    def _segment(self, tokens: Tokens, state: SalientState) -> tuple[Tensor, SalientState]:
        assert tokens.query is not None
        if self.branches == "linear":
            kept = replace(tokens, in_place=False, keep=True)
            numerator, total, after = sums(self._linear(), kept, state.linear)
            return linear.normalised(numerator, total), state.with_linear(after)
        segment = salient.push(self._linear(), tokens, state, self.size)
        inside = partial(salient.attend, tokens, segment, bool(self.sinks), self._turn())
        if segment.phi_k is None and self._nothing_left(None, state.linear):
            return inside(None), segment.after
        numerator, total = salient.read(self._linear(), upcast(tokens.query), segment, state.linear)
        return self._mixed(tokens, inside, numerator, total), segment.after

    def whole_rows(self) -> str:
        """Say why rows cannot be split: salient tokens, or the attention of the rest."""
        if self.salient:
            return "which tokens are salient is chosen one block after the other. Give salient=0"
        reason: str = self._linear().whole_rows() if self.inner else ""
        return reason

    def before(self, parts: Sequence[Tokens], shard: Shard) -> WindowState:
        """Fetch the last tokens of the processes before, and the sinks; the rest passes its own state on."""
        rest = self._linear() if self.inner else None
        outside = self.branches != "linear"
        return split.before(parts[0], self.size, self.sinks, rest, self.gate_count, outside, shard)

    def _empty(self, tokens: Tokens) -> WindowState:
        return WindowState.empty(tokens, self.size, self.sinks)

    def bidirectional(self, tokens: Tokens) -> Tensor:
        """Compute a window to both sides; the rest in two streams, one from each end."""
        assert tokens.query is not None
        if self._holds(tokens):
            return self._softmax(tokens, causal=False)
        place = ring.places(tokens.valid, begins=True, keep=False)
        if place is None:
            return self._bidirectional(tokens)
        output = self._bidirectional(ring.without_gaps(tokens, place))
        return output.gather(2, ring.spread(place, output))

    def _bidirectional(self, tokens: Tokens) -> Tensor:
        assert tokens.query is not None
        valid, ranks = ring.ranked(tokens, self.sinks, causal=False)
        own = ring.masked(tokens, valid)
        sinks = ring.with_sinks(own, ranks, WindowState.empty(tokens, 0, self.sinks).sinks)
        seen = Seen(*ring.padded(own, self.size, self.size - 1), sinks, None)
        inside = partial(self._inside, tokens, seen, 2 * self.size - 1)
        if not self.inner:
            return inside(None)
        if self.branches == "linear":
            alone: Tensor = self._linear().bidirectional(tokens)
            return alone
        numerator, total = self._outside(tokens, own)
        mirrored = KeyValues(own.key.flip(2), own.value.flip(2), valid.flip(1))
        back, behind = self._outside(replace(tokens, query=tokens.query.flip(2)), mirrored)
        return self._mixed(tokens, inside, numerator + back.flip(2), total + behind.flip(2))

    def _outside(self, tokens: Tokens, own: KeyValues) -> tuple[Tensor, Tensor]:
        """Sum over the tokens that lie `size` or more before each query."""
        key, value, valid = ring.padded(own, self.size, 0)
        cut = tokens.length
        key, value, valid = key[:, :, :cut], value[:, :, :cut], valid[:, :cut]
        stream = Tokens(tokens.query, key, value, tokens.scaling, valid, keep=False)
        numerator, total, _ = sums(self._linear(), stream, None)
        return numerator, total

    def _inside(self, tokens: Tokens, seen: Seen, span: int | None, other: OtherSums | None) -> Tensor:
        """Compute softmax over the window, the sinks and other tokens.

        Args:
            tokens: whose queries.
            seen: what they see.
            span: query i sees the columns i < c <= i + span; None for a single query that sees all.
            other: sums over tokens elsewhere that share the normaliser.
        """
        assert tokens.query is not None
        query, key, value = tokens.query, seen.key, self._values(seen.value)
        window, turn, slots = None, self._turn(), seen.sinks.key.shape[2]  # of sinks: none while a ring grows
        sinks = seen.sinks._replace(value=self._values(seen.sinks.value))
        if not isinstance(other, Elu1Sums):
            other = with_own_sink(tokens, value.shape[-1], other)
        if span is not None:
            assert seen.valid is not None
            window = types.Window(query, key, value, seen.valid, span, tokens.scaling)
        whole = window if tokens.softcap is None else None
        if whole is not None and window_attention.kernels_take(whole, slots, other and type(other)):
            given = for_triton(query, sinks, seen.ranks, turn) if slots else None
            return window_attention.by_kernels(whole, given, other)
        if isinstance(other, Elu1Sums):
            other = scaled(self._linear(), query, *other)
        if whole is not None and window_attention.native_takes(whole, other):
            beside = for_cpp(query, sinks, seen.ranks, turn) if slots else None
            if beside is not None or not slots:
                return window_attention.native(whole, other, beside)
        if other is not None:
            other = ScaledSums(*of_all_queries(tokens.length, *other))
        if slots:
            first = sink_sums(upcast(query), sinks, seen.ranks, turn, tokens.scaling, tokens.softcap)
            other = first if other is None else band.add_sums(first, other)
        if window is not None:
            return window_attention.attention(window, other, tokens.softcap)
        wide = upcast(query), upcast(key), upcast(value)
        return window_attention.decode(*wide, seen.valid, tokens.scaling, other, tokens.softcap)

    def _mixed(
        self, tokens: Tokens, inside: Callable[[OtherSums | None], Tensor], numerator: Tensor, total: Tensor
    ) -> Tensor:
        """Join window and rest, or compute one of them.

        Numerator and total are of the rest, of all queries or of the last ones; `inside` is the window.
        """
        if self.branches == "both" and self.mix == "shared":
            assert tokens.query is not None
            rest = self._linear()
            if rest.fused == "elu1" and not self.salient and tokens.sink is None:
                return inside(Elu1Sums(numerator, total))
            return inside(scaled(rest, tokens.query, numerator, total))
        numerator, total = of_all_queries(tokens.length, numerator, total)
        if self.branches == "none":
            return torch.zeros_like(numerator)
        if self.branches in ("rest", "linear"):
            return linear.normalised(numerator, total)
        if self.branches == "window":
            return inside(None)
        gate = (self.gate.sigmoid() if self.mix == "learned" else self.gate).to(total.dtype)[:, None]
        gate = torch.where(total > 0, gate, 1.0).unsqueeze(-1)
        return gate * inside(None) + (1 - gate) * linear.normalised(numerator, total)

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count window and sinks in the model's dtype, a flag a token, and the linear attention's state."""
        if site.kv_heads is None or site.head_dim is None or site.value_dim is None:
            return None
        per_head = site.head_dim + site.value_dim + self.gate_count
        own = (self.size + self.sinks) * (site.kv_heads * per_head * size + 1) + 8
        if self.salient:  # tokens of the window need no flags, and up to a block waits
            own += self.salient * (site.kv_heads * per_head * size + 1) - self.size
            own += (salient.BLOCK - 1) * site.kv_heads * per_head * size
        inner = self._linear().state_bytes(site, size) if self.inner else 0
        if inner is None:
            return None
        flag = max(size, 4) if self.inner and not isinstance(self._linear(), LinearAttention) else 0
        return own + inner + flag
