"""Base classes of patches: what one file in `patches/` fills in, and what it gets for that.

    LinearAttention    feature maps of query and key  -> causal, bidirectional, cached, padded, packed:
    StatefulAttention  any state of constant size        everything else is done here
    ScoreAttention     weights of the scores, chosen keys, a sink logit
    Attention          anything else: output from a `Call`
    Modifier           changes query or scores before any of them

A patch is an `nn.Module`, made once per attention module. The keyword-only parameters of its constructor are
its options; its parameters, if any, are learned. Parameters are read inside `forward` only, where offloading
loads them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from hf_linattn.attention import recurrent, scores, sums
from hf_linattn.attention.call import Call
from hf_linattn.attention.site import Site
from hf_linattn.attention.tokens import Tokens, upcast
from hf_linattn.errors import CacheError, OptionError, UnsupportedCallError
from hf_linattn.ops.eager import linear
from hf_linattn.ops.softmax import scores_of, softmax_weights
from hf_linattn.ops.types import Gate, State

Output = tuple[Tensor, Tensor | None]
SINKS = frozenset(("s_aux", "sinks"))
SCORE_EXTRAS = frozenset(("position_bias", "softcap", "indices", "attention_mask"))
"""What models do to their scores, as the attention interface names it: biases, caps, masks of an indexer."""


class Patch(nn.Module):
    """What is registered under a name.

    Docstring, as docs/patches.md shows it: a one-line summary; the formula; prose; `Options:` with ranges;
    `Use:` when to take it; `Source:`.

    Class attributes:
        name: set by `@register`.
        group: heading in docs/patches.md.
        time: cost in the number of tokens n.
        directions: causal, bidirectional or both; why: the reason where it is one.
        linear: the state is of constant size.
        modifier: changes another attention instead of being one.
        identity: leaves the module's own attention in force.
        refused: why there cannot be such a patch; the name is known only to say so.
        default_for: what `hf_linattn.convert` takes this patch for by default: "conversion" where none is
            named, "learned front" for a learned layer in front of another patch's map. Not inherited.
    """

    name: ClassVar[str] = ""
    group: ClassVar[str] = "scores"
    time: ClassVar[str] = "O(n^2)"
    directions: ClassVar[Literal["both", "causal", "bidirectional"]] = "both"
    why: ClassVar[str] = ""
    linear: ClassVar[bool] = False
    modifier: ClassVar[bool] = False
    identity: ClassVar[bool] = False
    refused: ClassVar[str] = ""
    default_for: ClassVar[str] = ""

    def __init__(self, site: Site) -> None:
        super().__init__()

    def extra_repr(self) -> str:
        """Name in `print(model)`."""
        return self.name


class Attention(Patch):
    """Any attention: `attend` makes the output from a call.

    Class attributes:
        cross: also serves cross-attention.
        windowed: honours a sliding or chunked window of the model; else such layers keep their own attention.
        expresses: keywords of the attention interface that it can honour; others are refused at patch time.
        hosts: takes a linear attention inside, as in "window+elu1".
        turns: turns queries by the model's rotary embedding, which must then be there.
    """

    cross: ClassVar[bool] = True
    windowed: ClassVar[bool] = False
    expresses: ClassVar[frozenset[str]] = frozenset()
    hosts: ClassVar[bool] = False
    turns: bool = False

    def attend(self, call: Call) -> Output:
        """`[B, H, N, Dv]`, and the weights `[B, H, N, S]` or None."""
        raise NotImplementedError(f"{type(self).__name__} has no attend")

    def host(self, inner: LinearAttention) -> None:
        """Take in the linear attention that it is composed with."""
        raise OptionError(f"{self.name!r} holds no other attention")

    def forward(self, call: Call) -> Output:
        """Parameters are read below this."""
        return self.attend(call)


class StatefulAttention(Attention):
    """An attention whose past is a state of constant size: a tuple of tensors with rows first.

    Tensors of zeros mean that nothing was seen. Sums and denominators belong in float32 (`upcast`).

    Class attributes:
        counts: `Tokens.count` is wanted.
        packs: `causal` honours `Tokens.documents`; else documents come one by one.
    """

    linear = True
    time = "O(n)"
    counts: bool = False
    packs: ClassVar[bool] = False

    def causal(self, tokens: Tokens, state: Any) -> tuple[Tensor, Any]:
        """Output `[B, H, N, Dv]` and the state after the last token; `state` is None at the start."""
        raise NotImplementedError(f"{type(self).__name__} has no causal form")

    def both_ways(self, tokens: Tokens) -> Tensor:
        """Every query sees all keys: `[B, H, N, Dv]`."""
        raise NotImplementedError(f"{type(self).__name__} has no bidirectional form")

    def absorb(self, tokens: Tokens, state: Any) -> Any:
        """The state after tokens whose output nobody needs; `tokens.query` may be None."""
        if tokens.query is None:
            raise CacheError(
                f"{self.name!r} needs the queries of past tokens too, and a cache of the unpatched model "
                "holds none: start from a new cache"
            )
        return self.causal(tokens, state)[1]

    def state_bytes(self, site: Site, size: int) -> int | None:
        """Bytes of one sequence's state; `size` is that of a number in the model's dtype."""
        return None

    def attend(self, call: Call) -> Output:
        """State read and written by `recurrent`."""
        return recurrent.attend(self, call), None


class LinearAttention(StatefulAttention):
    """o_i = sum_j (phi_q(q_i) . phi_k(k_j)) v_j / sum_j phi_q(q_i) . phi_k(k_j).

    Give `feature_map`, or `query_map` and `key_map` apart. Unless `denominator` says otherwise, features must
    not be negative, and the query's may be scaled by any positive factor per row: the sum divides it away.

    Attributes:
        features: number F of features; None for D. Set it in the constructor where it differs.
        summed: divided by the sum of its weights, so that it can share that with a window beside it; False
            where `denominator` is another.
        fused: the maps are those that kernels compute themselves under this name, see `ops.chunks`; eps: with
            "relu", what it adds.
        fades: there is a `log_decay`.
    """

    packs = True
    group = "feature map"
    fused: str = "none"
    eps: float = 0.0
    fades: ClassVar[bool] = False
    features: int | None = None
    summed: bool = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        maps = {"feature_map", "query_map", "key_map", "left_out", "log_decay", "mapped"}
        if maps & own.keys() and "fused" not in own:
            cls.fused = "none"  # not the maps of the class that it was made from
        if {"log_decay", "mapped"} & own.keys() and "gate" not in own:
            cls.gate = LinearAttention.gate  # type: ignore[method-assign]
        cls.fades = cls.log_decay is not LinearAttention.log_decay
        if "denominator" in own and "summed" not in own:
            cls.summed = False

    def feature_map(self, x: Tensor) -> Tensor:
        """phi: `[B, H, N, D]` -> `[B, H, N, F]`; float32 in and out (float64 in float64 models)."""
        raise NotImplementedError(f"{type(self).__name__} has neither feature_map nor query_map and key_map")

    def query_map(self, query: Tensor) -> Tensor:
        """phi_q; after rotary embedding, without 1/sqrt(D)."""
        return self.feature_map(query)

    def key_map(self, key: Tensor) -> Tensor:
        """phi_k."""
        return self.feature_map(key)

    def left_out(self, query: Tensor) -> Tensor | None:
        """Logarithm of what `query_map` divided by, `[B, H, N]`, for a shared normaliser; None for 1."""
        return None

    def log_decay(self, key: Tensor, value: Tensor) -> Tensor | None:
        """Logarithm, at most 0, of the factor `[B or 1, Hkv, N]` on all before each token; None for 1."""
        return None

    def gate(self) -> Gate | None:
        """What `log_decay` is made of, where kernels can make it themselves."""
        return None

    def denominator(self, total: Tensor, count: Tensor | None) -> Tensor:
        """What the numerator is divided by, `[B, H, N]`: the total, likewise, or another.

        `count` is n_i, `[B or 1, 1, N]`, where the class asks by `counts`.
        """
        return total

    def mapped(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features of keys and values, zero at padded tokens; and the logarithm of the decay."""
        key, value = self.key_map(upcast(tokens.key)), upcast(tokens.value)
        return tokens.hide(key), tokens.hide(value), sums.decays(self, tokens)

    def sums(self, tokens: Tokens, state: State | None, divide: bool = False) -> tuple[Tensor, Tensor, State]:
        """Causal numerator `[B, H, N, Dv]`, total `[B, H, N]`, and the state after where `tokens.keep`.

        `state` is that of the tokens before, None for nothing; `divide` gives the output, numerator over
        total, in place of the numerator.
        """
        return sums.causal(self, tokens, state, divide)

    def causal(self, tokens: Tokens, state: State | None) -> tuple[Tensor, State]:
        """In chunks."""
        output, total, after = self.sums(tokens, state, divide=self.summed)
        return output if self.summed else self._divided(output, total, tokens), after

    def both_ways(self, tokens: Tokens) -> Tensor:
        """Every query reads the sum of all keys."""
        output, total = sums.both_ways(self, tokens, divide=self.summed)
        return output if self.summed else self._divided(output, total, tokens)

    def _divided(self, numerator: Tensor, total: Tensor, tokens: Tokens) -> Tensor:
        count = None if tokens.count is None else tokens.count[:, None]
        return linear.normalised(numerator, self.denominator(total, count))

    def absorb(self, tokens: Tokens, state: State | None) -> State:
        """Sums alone."""
        return linear.after(*self.mapped(tokens), state)

    def state_bytes(self, site: Site, size: int) -> int | None:
        """S and z in float32 (float64 in float64 models)."""
        features = self.features or site.head_dim
        if site.kv_heads is None or features is None or site.value_dim is None:
            return None
        return max(size, 4) * site.kv_heads * features * (site.value_dim + 1)


class ScoreAttention(Attention):
    """o_i = sum_j w_ij v_j with weights from the scores s_ij = scaling q_i . k_j of the visible keys.

    Softmax as it stands. Override `sink_logit` to add a key of value 0, or `select` to see fewer keys (fused
    kernels stay in use); `weights` for any other function of the scores, `scores` for other scores
    (quadratic).
    """

    windowed = True
    expresses = SCORE_EXTRAS | SINKS

    def sink_logit(self, query: Tensor) -> Tensor | None:
        """Logit b of an extra key with value 0: scalar or `[H]`; None for no such key."""
        return None

    def select(self, call: Call) -> Tensor | None:
        """Boolean, broadcast to `[B, H, N, S]`: the keys to see among the visible ones; None for all.

        Patterns are made of `call.ranks()` or `call.distance()`, so that padding does not move them.
        """
        return None

    def scores(self, query: Tensor, key: Tensor, scaling: float) -> Tensor:
        """`[B, H, N, D]`, `[B, Hkv, S, D]` -> `[B, H, N, S]` in float32 (float64 in float64 models)."""
        return scores_of(query, key, scaling)

    def weights(self, scores: Tensor, mask: Tensor | None, sink: Tensor | None) -> Tensor:
        """`[B, H, N, S]` -> weights of the same shape.

        Args:
            scores: scaled, capped and biased, float32 (float64 in float64 models).
            mask: True where visible, broadcast to the scores; None where all is.
            sink: from `sink_logit`, joined with the model's own sinks.
        """
        return softmax_weights(scores, mask, sink)

    def attend(self, call: Call) -> Output:
        """Through torch's fused kernels where weights and scores are softmax's."""
        cls = type(self)
        fused = cls.weights is ScoreAttention.weights and cls.scores is ScoreAttention.scores
        return scores.attend(self, call, fused)


class Modifier(Patch):
    """Changes query or scores before the attention that it is composed with.

    Attributes:
        rope: False switches the model's rotary embedding off in its module.
    """

    modifier = True
    rope: bool = True

    def query_scale(self, visible: Tensor) -> Tensor:
        """Factor of each query, and so of its scores.

        Args:
            visible: number n_i of keys that query i sees, `[B or 1, 1 or H, N]`, float32 (float64 in float64
                models).

        Returns:
            Broadcast to `[B, H, N]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no query_scale")

    def scaling(self, scaling: float, head_dim: int) -> float:
        """The scores' factor, in place of the model's."""
        return scaling

    def score_bias(self, distance: Tensor) -> Tensor:
        """What is added to the scores after scaling.

        Args:
            distance: tokens from key to query, `[B or 1, N, S]`, float32 (float64 in float64 models);
                negative for keys behind the query.

        Returns:
            Broadcast to `[B, H, N, S]`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no score_bias")

    @classmethod
    def needs_scores(cls) -> bool:
        """Whether it has no meaning for an attention without scores."""
        return cls.score_bias is not Modifier.score_bias or cls.scaling is not Modifier.scaling

    def forward(self, call: Call) -> None:
        """Changes the call in place."""
        cls, query = type(self), call.query
        dtype = torch.promote_types(query.dtype, torch.float32)
        if cls.query_scale is not Modifier.query_scale:
            visible = call.visibility.count(call.device).to(dtype)
            call.query = (query.to(dtype) * self.query_scale(visible).unsqueeze(-1)).to(query.dtype)
        call.scaling = self.scaling(call.scaling, query.shape[-1])
        if cls.score_bias is not Modifier.score_bias:
            if call.cross:
                raise UnsupportedCallError(
                    f"{call.where}: {self.name!r} goes by distance, and queries and keys of cross-attention "
                    f"are of different texts. Leave it out of the plan, e.g. {{'*.self_attn': {call.spec!r}}}"
                )
            call.add_bias(self.score_bias(call.distance().to(dtype)))
