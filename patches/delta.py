"""delta: a state that corrects what it holds under a key before it writes, with gates that forget."""

import itertools
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, StatefulAttention, Tokens, upcast
from hf_linattn.attention.call import Call
from hf_linattn.attention.tokens import in_backward_again
from hf_linattn.errors import OptionError
from hf_linattn.ops import delta_rule
from hf_linattn.ops.types import DeltaConfig, DeltaGate, DeltaInputs, accumulator_dtype
from hf_linattn.parallel import Shard, carry
from hf_linattn.registry import register

from ._convolution import convolve, identity
from ._feature_maps import input_projections, named_map, project
from ._gates import (
    TEMPERATURE,
    Source,
    gate_bias,
    half_lives,
    missing_hidden,
    per_head,
    source_of,
    source_width,
)

HALF_LIFE = 16384.0
LIVES = [4.0**power for power in range(1, 8)]
"""Half-lives that are tried out, from 4 to 16,384 tokens."""
SPAN = 1024
"""Tokens of a part of a row that are written at once, before the parts are put together."""
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 0.95)
"""Of the largest b, likewise."""


class DeltaState(NamedTuple):
    """S `[B, Hkv, F, Dv]`: what is held under each key; last keys and values `[B, Hkv, conv - 1, D + Dv]`."""

    S: Tensor
    recent: Tensor


@register("delta")
class Delta(StatefulAttention):
    """A state that corrects itself: under each key it holds the newest value in place of a sum of all.

    S_t = a_t S_{t-1} (I - b_t k_t k_t^T) + b_t v_t k_t^T,  o_t = c_h S_t q_t
    k_t, q_t: phi(key), phi(query) over their length; S `[Dv, F]` a key head
    b_t = beta sigmoid(w_b . x_t + d_b),  a_t = sigmoid(w_a . x_t + d_a)^(1/16)

    A sum of keys and values blurs what it holds once there are more tokens than features. Here a key first
    reads what stands under it, and the difference to its value is written: what is under other directions
    stays. No denominator; c_h is learned for each query head, 1 at the start, where w = 0 too. Padding is
    neither written nor does it age anything.

    Options:
        decay: what fades: "head" (default), one a_t per key head (Gated DeltaNet); "channel", one for each
            feature (KDA), from x_t through a layer of rank D; "none", a_t = 1 (DeltaNet).
        source: x_t, what gates read: "hidden" (default), the module's input; "value", the head's value, for
            modules that are not given a hidden state.
        beta: largest b_t, above 0 and at most 2; default 1. Above 1 what stands under a key can change its
            sign, which tracking of states needs (arXiv:2411.12537).
        feature_map: phi, the map of another linear patch with its learned weights, such as "elu1" or
            "taylor2(features=32)"; default None, phi(x) = x. Of the keys a head can tell apart there are no
            more than features.
        front: True puts a learned linear layer before the map, x -> W x with W_q `[H, D, D]` and W_k
            `[Hkv, D, D]`, the identity at the start; default False.
        conv: taps of a causal convolution over each channel of keys and values, which learns; k_t and v_t
            then depend on the conv - 1 tokens before them too, so that what follows a token can be found
            under that token. The token itself alone at the start. From 1, the default, which is none, to 16;
            not behind a window.
        rope: False switches the model's rotary embedding off in these layers; default True.
        half_life: tokens after which a past token counts half, at the start; at least 1, default 16384.
        shortest: tokens; heads then start with different half-lives, from this one to `half_life` in equal
            ratios; at least 1, default None for the same in all heads.

    Use: where details must be found again without softmax.

    Source: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", Yang et al. 2024,
        arXiv:2406.06484; "Gated Delta Networks", Yang et al. 2024, arXiv:2412.06464, equation 10; by channel:
        "Kimi Linear", 2025, arXiv:2510.26692, section 3.
    """

    group = "state that forgets"
    directions = "causal"
    direction_reason = "a state that is corrected has one direction, from past to future"
    cross = False
    supports_packing = True
    in_kernels = True
    wrappable = True

    def __init__(
        self,
        site: AttentionSite,
        *,
        decay: Literal["head", "channel", "none"] = "head",
        source: Source = "hidden",
        beta: float = 1.0,
        feature_map: str | None = None,
        front: bool = False,
        conv: int = 1,
        rope: bool = True,
        half_life: float | None = None,
        shortest: float | None = None,
    ) -> None:
        super().__init__(site)
        if not 1 <= conv <= 16:
            raise OptionError(f"conv must be from 1 to 16 taps, got {conv}")
        if not 0 < beta <= 2:
            raise OptionError(f"beta must be above 0 and at most 2, got {beta}")
        if decay == "none" and (half_life is not None or shortest is not None):
            raise OptionError("decay='none' forgets nothing: leave half_life and shortest out")
        sizes = ("heads", "kv_heads", "head_dim", "value_dim")
        heads, kv_heads, head_dim, value_dim = site.require(*sizes, reason="so its state has no size")
        self.source, self.rope = source, rope
        self.needs_hidden = source == "hidden"
        self.gates_by_value = source == "value"
        self.width = source_width(site, source)
        self.map = None if feature_map is None else named_map("feature_map", feature_map, site)
        self.features = head_dim if self.map is None else self.map.features or head_dim
        self.past, self.one_tensor = conv - 1, conv == 1
        if conv > 1:
            self.conv = identity(kv_heads, head_dim + value_dim, conv)
        self.fronts = input_projections(site) if front else nn.ParameterDict()
        self.plain = self.map is None and not front
        self.config = DeltaConfig(decay, beta, TEMPERATURE)
        self.scale = nn.Parameter(torch.ones(heads))
        given = half_life is not None or shortest is not None
        self.lives = [] if decay == "none" or given else LIVES  # to be tried out
        own = half_lives(kv_heads, shortest, HALF_LIFE if half_life is None else half_life)
        start = self._start(0.5, own, {"none": 0, "head": 1, "channel": self.features}[decay])
        self.gate_count = start.shape[1] if self.needs_hidden else 0
        gates = 2 if decay == "head" else 1
        self.gate_weight = nn.Parameter(torch.zeros(kv_heads, gates, self.width))
        self.gate_bias = nn.Parameter(start[:, :gates].clone())
        if decay == "channel":
            down = torch.randn(kv_heads, head_dim, self.width, generator=site.generator())
            self.channel_down = nn.Parameter(down * self.width**-0.5)
            self.channel_weight = nn.Parameter(torch.zeros(kv_heads, self.features, head_dim))
            self.channel_bias = nn.Parameter(start[:, 1:].clone())

    @staticmethod
    def _start(share: float, lives: list[float], count: int) -> Tensor:
        """Return logits that are the same for all tokens, `[Hkv, 1 + count]`.

        Args:
            share: b over its largest value.
            lives: half-life of each key head, in tokens.
            count: of decays.
        """
        of_beta = torch.full((len(lives), 1), math.log(share / (1 - share)))
        return torch.cat([of_beta, gate_bias(lives)[:, None].expand(-1, count)], -1)

    def state_of(self, S: Tensor) -> DeltaState:
        """Make a state of S."""
        return DeltaState(S, S[:, :, :0])

    def past_gates(self, tokens: Tokens) -> Tensor | None:
        """Refuse tokens whose hidden state is not known, where that is read."""
        if self.needs_hidden:
            raise missing_hidden(self.name)
        return None

    def gates(self, call: Call) -> Tensor | None:
        """Compute the logits of b_t and a_t from the hidden state, `[B, Hkv, N, 1, 2 or 1 + F]`.

        None where they are made of values, which stay with their tokens.
        """
        return self._logits(source_of(call, "hidden", self.width)) if self.needs_hidden else None

    def _logits(self, x: Tensor) -> Tensor:
        """Compute them from x `[B, 1 or Hkv, N, C]`."""
        if self.config.decay != "channel":
            return per_head(x, self.gate_weight, self.gate_bias)
        if x.shape[0] * x.shape[2] > self.width:  # then one product is less than two
            weight = torch.cat(
                [upcast(self.gate_weight), upcast(self.channel_weight) @ upcast(self.channel_down)], 1
            )
            return per_head(x, weight, torch.cat([self.gate_bias, self.channel_bias], 1))
        logits = per_head(x, self.gate_weight, self.gate_bias)
        channels = per_head(per_head(x, self.channel_down), self.channel_weight, self.channel_bias)
        return torch.cat([logits, channels], -1)

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, target: Tensor) -> float:
        """Choose b and, unless an option gives it, the half-life of each key head, by trying them out.

        The gates are the same for all tokens, as they are at the start; the scale of each query head is that
        of least squares.
        """
        assert tokens.query is not None
        query, key = self._mapped("query_map", tokens.query), self._mapped("key_map", tokens.key)
        (batch, kv_heads, length, _), device = key.shape, key.device
        config = self.config._replace(decay="none" if self.config.decay == "none" else "head")
        power = target.float().square().sum((0, 2, 3))
        least, scale, best = power.new_full((kv_heads,), float("inf")), self.scale.float(), self._head_bias()
        lives: list[float | None] = [*self.lives] or [None]
        for share, life in itertools.product(SHARES, lives):
            logits = best.clone() if life is None else self._start(share, [life] * kv_heads, 1).to(device)
            logits[:, 0] = math.log(share / (1 - share))
            gates = logits[None, :, None].expand(batch, -1, length, -1).to(upcast(key))
            inputs = DeltaInputs(query, key, tokens.value, gates)
            output, _ = delta_rule.attention(inputs, config, torch.ones_like(scale), keep=False)
            assert output is not None
            along, own = ((output.float() * x.float()).sum((0, 2, 3)) for x in (target, output))
            factor = along / own.clamp_min(1e-30)
            error = (power - along * factor).view(kv_heads, -1).sum(1)
            better = error < least
            least, best = torch.where(better, error, least), torch.where(better[:, None], logits, best)
            scale = torch.where(better.repeat_interleave(scale.shape[0] // kv_heads), factor, scale)
        self.scale.copy_(scale)
        self.gate_bias.copy_(best[:, : self.gate_bias.shape[1]])
        if self.config.decay == "channel":
            self.channel_bias.copy_(best[:, 1:])
        return float(least.sum() / power.sum())

    def _head_bias(self) -> Tensor:
        """Return the logits of b and of a head's decay, `[Hkv, 1 or 2]`, as they are now."""
        channel = [self.channel_bias[:, :1]] if self.config.decay == "channel" else []
        return torch.cat([self.gate_bias, *channel], 1).float()

    def _mapped(self, side: Literal["query_map", "key_map"], x: Tensor) -> Tensor:
        """Map queries or keys, `[B, H, N, F]`; they are brought to length 1 later."""
        if self.plain:
            return x
        if self.map is None:
            return project(self.fronts, side, x)
        mapped: Tensor = getattr(self.map, side)(project(self.fronts, side, upcast(x)))
        return mapped

    def causal(self, tokens: Tokens, state: DeltaState | None) -> tuple[Tensor, DeltaState | None]:
        """Compute the causal form in chunks."""
        assert tokens.query is not None
        output, after = self._run(tokens, self._mapped("query_map", tokens.query), state, tokens.keep)
        assert output is not None
        return output, after

    def absorb(self, tokens: Tokens, state: DeltaState | None) -> DeltaState:
        """Write without queries, which do not change the state."""
        after = self._run(tokens, None, state, keep=True)[1]
        assert after is not None
        return after

    def _convolved(self, tokens: Tokens, state: DeltaState | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values behind the convolution, and the last ones before it."""
        key, value = tokens.key, tokens.value
        if not self.past:
            return key, value, key[:, :, :0]
        before, width = None if state is None else state.recent, key.shape[3]
        both, recent = convolve(
            torch.cat([key, value], -1), before, self.conv, tokens.valid, tokens.documents
        )
        return both[..., :width], both[..., width:], recent

    def _run(
        self, tokens: Tokens, query: Tensor | None, state: DeltaState | None, keep: bool
    ) -> tuple[Tensor | None, DeltaState | None]:
        key, value, recent = self._convolved(tokens, state)
        if not self.plain:
            key = self._mapped("key_map", tokens.hide(key))
        before = None if state is None else state.S
        inputs = DeltaInputs(query, key, value, tokens.gates, before, tokens.valid, tokens.documents)
        output, S = self._ruled(inputs, tokens, keep)
        if S is None:
            return output, state
        if S is before:  # written over
            assert state is not None
            if self.past:
                state.recent.copy_(recent)
            return output, state
        return output, DeltaState(S, recent)

    def _ruled(self, inputs: DeltaInputs, tokens: Tokens, keep: bool) -> tuple[Tensor | None, Tensor | None]:
        """Compute output and state, with gates made of the values where they are not there yet."""
        if inputs.gates is None:
            single = tokens.length == 1 and inputs.query is not None and inputs.state is not None
            if single and keep and self.one_tensor:  # a convolution changes the values
                done = delta_rule.step(inputs, self._gate(), self.config, self.scale, tokens.in_place)
                if done is not None:
                    return done
            inputs = inputs._replace(gates=self._logits(upcast(tokens.value)))
        return delta_rule.attention(inputs, self.config, self.scale, keep, tokens.in_place)

    def _gate(self) -> DeltaGate:
        """Return the weights of the logits for kernels, which read values."""
        weights = [self.gate_weight, self.gate_bias]
        if self.config.decay == "channel":
            weights += [self.channel_down, self.channel_weight, self.channel_bias]
        return DeltaGate(*(x.float().contiguous() for x in weights))

    def whole_rows(self) -> str:
        """Say nothing: what a part leaves of a state before it is a matrix."""
        return ""

    def before(self, parts: Sequence[Tokens], shard: Shard) -> DeltaState:
        """Write each process's tokens over nothing and over the identity, and pass both on."""
        tokens = parts[0]
        key, value, size = tokens.key, tokens.value, tokens.value.shape[3]
        recent = key[:, :, :0]
        if self.past:
            recent = shard.tail(torch.cat([key, value], -1)[:, :, -self.past :], self.past)
        eye = torch.eye(self.features, dtype=accumulator_dtype(key, value), device=key.device)
        eye = eye.expand(*key.shape[:2], -1, -1)
        both, last = torch.cat([eye.new_zeros(*eye.shape[:3], size), eye], -1), recent
        for tokens in parts:
            for start in range(0, tokens.length, SPAN):
                cut = tokens.slice(start, min(start + SPAN, tokens.length))
                both, last = in_backward_again(self._written, cut, both, last)
        return DeltaState(carry(both[..., :size], both[..., size:], shard).contiguous(), recent)

    def _written(self, tokens: Tokens, both: Tensor, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Write tokens over states `[B, Hkv, F, Dv + F]`, with 0 in the last columns."""
        key, value, recent = self._convolved(tokens, DeltaState(both, recent))
        if not self.plain:
            key = self._mapped("key_map", tokens.hide(key))
        value = torch.cat([value, value.new_zeros(*value.shape[:3], self.features)], -1)
        gates = self._logits(upcast(tokens.value)) if tokens.gates is None else tokens.gates
        inputs = DeltaInputs(None, key, value, gates, both, tokens.valid)
        after = delta_rule.attention(inputs, self.config, self.scale, keep=True)[1]
        assert after is not None
        return after, recent

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count S in float32 (float64 in float64 models), and the last keys and values."""
        if site.kv_heads is None or site.value_dim is None or site.head_dim is None:
            return None
        recent = size * self.past * (site.head_dim + site.value_dim)
        return site.kv_heads * (max(size, 4) * self.features * site.value_dim + recent)
