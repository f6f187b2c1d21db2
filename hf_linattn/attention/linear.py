"""Linear attention by feature maps, computed in kernels where there are any, with their own maps or ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from hf_linattn.attention.call import Call
from hf_linattn.attention.prepared import Weights, dense
from hf_linattn.attention.site import AttentionSite
from hf_linattn.attention.stateful import StatefulAttention
from hf_linattn.attention.tokens import Tokens, in_backward_again, upcast
from hf_linattn.ops import gate as value_gates
from hf_linattn.ops import linear_attention, softmax_map
from hf_linattn.ops.cpp import linear as native
from hf_linattn.ops.cpp import plan
from hf_linattn.ops.dispatch import CHUNK, choose_backend
from hf_linattn.ops.eager import linear
from hf_linattn.ops.tracing import transforming
from hf_linattn.ops.triton import check, launch
from hf_linattn.ops.triton.selftest import Form
from hf_linattn.ops.types import Gate, Inputs, OpConfig, SoftmaxMap, State
from hf_linattn.parallel import carry
from hf_linattn.parallel.shard import Shard

WAY = ("attend", "_attend", "causal", "sums", "kernel_inputs")
"""Methods that a call goes through; a prepared token leaves them out."""


class LinearAttention(StatefulAttention):
    """o_i = sum_j (phi_q(q_i) . phi_k(k_j)) v_j / sum_j phi_q(q_i) . phi_k(k_j).

    Give `feature_map`, or `query_map` and `key_map` apart. Unless `denominator` says otherwise, features must
    not be negative, and the query's may be scaled by any positive factor per row: the sum divides it away.

    Attributes:
        features: number F of features; None for D. Set it in the constructor where it differs.
        sum_normalised: divided by the sum of its weights, so that it can share that with a window; False
            where `denominator` is another.
        fused: the maps are those that kernels compute themselves under this name, see `FEATURE_MAPS` in
            `ops.types`; eps: with "relu", what it adds.
        plain: kernels read queries, keys and values as they come, or features of these alone.
        has_decay: there is a `log_decay`; `gates`, where a class computes them, are its logarithm.
        fixed_decay: it is the same at every token, and gets keys and values as they come.
    """

    supports_packing = True
    in_kernels = True
    wrappable = True
    group = "feature map"
    fused: str = "none"
    eps: float = 0.0
    has_decay: ClassVar[bool] = False
    fixed_decay: ClassVar[bool] = False
    plain: ClassVar[bool] = True
    features: int | None = None
    sum_normalised: bool = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        maps = {"feature_map", "query_map", "key_map", "query_log_scale", "log_decay", "mapped"}
        if maps & own.keys() and "fused" not in own:
            cls.fused = "none"  # not the maps of the class that it derives from
        if {"log_decay", "mapped"} & own.keys() and "gate" not in own:
            cls.gate = LinearAttention.gate  # type: ignore[method-assign]
        if (maps - {"log_decay"}) & own.keys() and "softmax_map" not in own:
            cls.softmax_map = LinearAttention.softmax_map  # type: ignore[method-assign]
        if "log_decay" in own and "fixed_decay" not in own:
            cls.fixed_decay = False
        cls.has_decay = cls.log_decay is not LinearAttention.log_decay
        cls.plain = cls.kernel_inputs is LinearAttention.kernel_inputs
        if "denominator" in own and "sum_normalised" not in own:
            cls.sum_normalised = False

    def feature_map(self, x: Tensor) -> Tensor:
        """Map queries and keys, `[B, H, N, D]` -> `[B, H, N, F]`, in float32 (float64 in float64 models)."""
        raise NotImplementedError(f"{type(self).__name__} has neither feature_map nor query_map and key_map")

    def query_map(self, query: Tensor) -> Tensor:
        """Map queries by phi_q; they come after rotary embedding, without 1/sqrt(D)."""
        return self.feature_map(query)

    def key_map(self, key: Tensor) -> Tensor:
        """Map keys by phi_k; they come after rotary embedding."""
        return self.feature_map(key)

    def query_log_scale(self, query: Tensor) -> Tensor | None:
        """Return the logarithm of what `query_map` divided by, `[B, H, N]`; None for 1.

        An attention that shares the normaliser needs it.
        """
        return None

    def log_scale_of(self, query: Tensor) -> Tensor | None:
        """Return `query_log_scale` of queries in the model's dtype, in float32."""
        # what a kernel's map divides by is one of their numbers, which 16 bits do not round
        return self.query_log_scale(query if self.fused != "none" else upcast(query))

    def log_decay(self, key: Tensor, value: Tensor) -> Tensor | None:
        """Return the logarithm, at most 0, of the factor on all before each token; None for 1.

        Args:
            key: `[B, Hkv, N, D]`, float32 (float64 in float64 models).
            value: `[B, Hkv, N, Dv]`, likewise.

        Returns:
            `[B or 1, Hkv, N]`.
        """
        return None

    def gate(self) -> Gate | None:
        """Return the weights of `log_decay`, where kernels can compute it; None where they cannot."""
        return None

    def softmax_map(self) -> SoftmaxMap | None:
        """Return the weights of the maps, where they are [softmax(W x), softmax(-W x)]; None for others."""
        return None

    def denominator(self, total: Tensor, count: Tensor | None) -> Tensor:
        """Return what the numerator is divided by, `[B, H, N]`: the total, likewise, or another.

        `count` is n_i, `[B or 1, 1, N]`, where the class asks by `counts`.
        """
        return total

    def mapped(self, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return features of keys and values, zero at padded tokens; and the logarithm of the decay."""
        key, value = self.key_map(upcast(tokens.key)), upcast(tokens.value)
        return tokens.hide(key), tokens.hide(value), self._log_decays(tokens)

    def sums(self, tokens: Tokens, state: State | None, divide: bool = False) -> tuple[Tensor, Tensor, State]:
        """Sum over the past.

        Args:
            tokens: the new ones.
            state: that of the tokens before, None for nothing; written over where `tokens.in_place`.
            divide: return the output, numerator over total, in place of the numerator.

        Returns:
            Numerator `[B, H, N, Dv]`, total `[B, H, N]`, and the state after where `tokens.keep`: the
            very object that was passed if it was written over.
        """
        query, documents = tokens.query, tokens.documents
        assert query is not None
        given = query, tokens.key, tokens.value
        if divide and state is None and documents is None:
            planned = self._planned(tokens, True, tokens.keep)
            if planned is not None:
                return planned[0], planned[1], State(*planned[2:])
        form = Form(self.fused, True, divide, self.has_decay, documents is not None)
        backend = choose_backend(*given, self.fused, state, form, self.features)
        if backend == "vectorised":
            numerator, total, after = self._vectorised(tokens, state)
            output = linear.normalised(numerator, total) if divide else numerator.to(total.dtype)
            return output, total, after
        config = OpConfig(self.fused, self.eps, divide)
        if backend == "cpp" and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            gate = self.gate()
            inputs = self._rounded(self.kernel_inputs(tokens, divide, state, gate, backend), tokens)
            if state is not None and tokens.in_place and tokens.length == 1 and native.may_overwrite(state):
                output, total = native.step(inputs, config, gate)[:2]
                return output, total, state
            outputs = native.forward(inputs, config, tokens.keep, CHUNK, gate)
        else:
            # kernels on a GPU give numerators in float32, whatever the values
            inputs = self.kernel_inputs(tokens, divide or backend == "triton", state, backend=backend)
            if backend == "cpp":
                inputs = self._rounded(inputs, tokens)
            if backend == "triton":
                inputs = check.narrowed(inputs, query.dtype, tokens.value.dtype, form)
                if _may_step(tokens, state):
                    output, total = launch.step(inputs, config)
                    return output, total, state  # type: ignore[return-value]  # written over
            outputs = linear_attention.attention(inputs, config, tokens.keep, backend)
        return outputs.output, outputs.total, State(outputs.S, outputs.z)  # type: ignore[arg-type]

    def _vectorised(self, tokens: Tokens, state: State | None) -> linear.Sums:
        """Compute `sums` by torch operations, the maps too by spans: in float32 they are large."""
        documents, key, value = tokens.documents, tokens.key, tokens.value
        products = _products(key, value)
        # these maps round once as well where they compute in 16 bits
        narrow = products is not None and self.fused != "none"

        def run(part: slice | None, before: State | None) -> linear.Sums:
            cut = tokens if part is None else tokens.slice(part.start, min(part.stop, tokens.length))
            assert cut.query is not None
            labels = documents if part is None or documents is None else documents[:, part]
            phi_q, decay = self.query_map(cut.query if narrow else upcast(cut.query)), self._log_decays(cut)
            phi_k = cut.hide(self.key_map(cut.key if narrow else upcast(cut.key)))
            values = cut.hide(cut.value if products is not None else upcast(cut.value))
            return linear.causal(phi_q, phi_k, values, before, labels, decay, cut.in_place, products)

        if not torch.compiler.is_compiling():  # a graph would be bound to these sizes
            features = self.features or key.shape[3]
            most = linear.span(key.shape[0] * key.shape[1], features, value.shape[3])
            if tokens.length > most:
                return linear.in_spans(run, tokens.length, most, state, documents)
        return run(None, state)

    def causal(self, tokens: Tokens, state: State | None) -> tuple[Tensor, State]:
        """Compute the causal form in chunks."""
        output, total, after = self.sums(tokens, state, divide=self.sum_normalised)
        return output if self.sum_normalised else self._divided(output, total, tokens), after

    def _all_in_kernel(self) -> bool:
        """Tell whether one call in C++ can compute all, the maps and the decay too."""
        if any(getattr(type(self), name) is not getattr(LinearAttention, name) for name in WAY):
            return False
        return self.fused != "none" and self.sum_normalised and not (self.has_decay and self.gate() is None)

    def prefill(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> tuple[Tensor, State] | None:
        """Compute the first tokens by a call that was packed before."""
        tokens = Tokens(query, key, value, scaling)
        outputs = self._planned(tokens, True, True) if self._all_in_kernel() else None
        return None if outputs is None else (outputs[0], State(*outputs[2:]))

    def prepared_step(self, call: Call) -> PreparedToken | None:
        """Prepare the tokens behind this one, where one call in C++ computes each, maps and all."""
        layer, gate = call.layer, self.gate()
        if layer is None or not self._all_in_kernel():
            return None
        state, given = layer.state, (call.query, call.key, call.value)
        form = Form(self.fused, True, True, self.has_decay, False)
        if not isinstance(state, State) or not native.may_overwrite(state) or not dense(*given):
            return None
        if choose_backend(*given, self.fused, state, form, self.features) != "cpp":
            return None
        if call.value.dtype != call.query.dtype or any(x.is_inference() for x in self.parameters()):
            return None
        inputs = Inputs(*given, None, *state)
        return PreparedToken(self, native.Prepared(inputs, OpConfig(self.fused, self.eps, True), gate))

    def bidirectional(self, tokens: Tokens) -> Tensor:
        """Let every query read the sum of all keys."""
        output, total = self._sums_over_all(tokens)
        return output if self.sum_normalised else self._divided(output, total, tokens)

    def _sums_over_all(self, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return the numerator, or the output where `summed`, `[B, H, N, Dv]`, and the total `[B, H, N]`."""
        query, divide = tokens.query, self.sum_normalised
        assert query is not None
        given = query, tokens.key, tokens.value
        if divide:
            planned = self._planned(tokens, False, False)
            if planned is not None:
                return planned[:2]
        form = Form(self.fused, False, divide)
        backend = choose_backend(*given, self.fused, None, form, self.features)
        if backend == "vectorised":
            phi_q, (phi_k, value, _) = self.query_map(upcast(query)), self.mapped(tokens)
            numerator, total = linear.read(phi_q, linear.state_of(phi_k, value))
            return linear.normalised(numerator, total) if divide else numerator, total
        whole = divide or backend == "triton"
        inputs = self.kernel_inputs(tokens, whole)._replace(log_decay=None)  # decay is for what comes before
        if backend == "triton":
            inputs = check.narrowed(inputs, query.dtype, tokens.value.dtype, form)
        config = OpConfig(self.fused, self.eps, divide, causal=False)
        outputs = linear_attention.attention(inputs, config, keep=False, backend=backend)
        return outputs.output, outputs.total

    def _planned(self, tokens: Tokens, causal: bool, keep: bool) -> tuple[Any, ...] | None:
        """Compute outputs from the start by a call that was packed before: output, total, S and z after.

        None where `choose_backend` must decide.
        """
        query, decays = tokens.query, causal and self.has_decay
        assert query is not None
        if self.fused == "none" or not self.plain or not query.is_cpu:
            return None
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or transforming():
            return None
        given = query, tokens.key, tokens.value, tokens.valid, self.gate() if decays else None
        found = plan.find(*given, self.fused, self.eps, causal, keep, CHUNK)
        if found is None:
            return None
        return found.run(*given, self._log_decays(tokens) if decays and given[-1] is None else None)

    def kernel_inputs(
        self,
        tokens: Tokens,
        divide: bool,
        state: State | None = None,
        gate: Gate | None = None,
        backend: str = "",
    ) -> Inputs:
        """Collect what kernels read: queries and keys where the map is in the kernel, else features.

        Args:
            tokens: the new ones.
            divide: outputs are wanted; numerators are never rounded to 16 bits.
            state: of the tokens before.
            gate: in place of the logarithm of the decay.
            backend: who reads them, whose kernels then make learned maps, where they can.
        """
        assert tokens.query is not None
        S, z = state or (None, None)
        if self.fused == "none" and backend in ("cpp", "triton"):
            given = tokens.query, tokens.key
            if backend == "triton":
                maps = self.maps_by_kernels(*given, check.features_dtype(tokens.query.dtype), "triton")
            else:
                dtype = torch.bfloat16 if self._rounds(tokens) else torch.float32
                maps = self.maps_by_kernels(*given, dtype, "cpp")
            if maps is not None:
                value = tokens.value if divide else upcast(tokens.value)
                decay = None if gate is not None else self._log_decays(tokens)
                return Inputs(*maps, value, tokens.valid, S, z, decay, tokens.documents)
        if self.fused == "none" and gate is None:
            phi_q, (phi_k, value, decay) = self.query_map(upcast(tokens.query)), self.mapped(tokens)
            return Inputs(phi_q, phi_k, value, None, S, z, decay, tokens.documents)
        if self.fused != "none":
            query, key = tokens.query, tokens.key
            value = tokens.value if divide else upcast(tokens.value)
            decay = None if gate is not None else self._log_decays(tokens)
        else:
            query, key = self.query_map(upcast(tokens.query)), self.key_map(upcast(tokens.key))
            value, decay = upcast(tokens.value), None
        return Inputs(query, key, value, tokens.valid, S, z, decay, tokens.documents)

    def maps_by_kernels(
        self, query: Tensor, key: Tensor, dtype: torch.dtype, backend: Literal["cpp", "triton"]
    ) -> tuple[Tensor, Tensor] | None:
        """Compute features by kernels of learned maps; None where no kernel takes them.

        Args:
            query: `[B, H, N, D]`.
            key: `[B, Hkv, M, D]`.
            dtype: of the features.
            backend: whose kernels.
        """
        learned = self.softmax_map()
        if learned is None or not all(map(softmax_map.kernels_take, (query, key), learned[:2])):
            return None
        floor = learned.floor
        phi_q = softmax_map.features(query, learned.query, floor, dtype, backend)
        return phi_q, softmax_map.features(key, learned.key, floor, dtype, backend)

    def _rounded(self, inputs: Inputs, tokens: Tokens) -> Inputs:
        """Bring features to the model's bfloat16 where the kernels in C++ multiply in it."""
        if self.fused != "none" or not self._rounds(tokens):
            return inputs
        return inputs._replace(query=inputs.query.to(torch.bfloat16), key=inputs.key.to(torch.bfloat16))

    def _rounds(self, tokens: Tokens) -> bool:
        """Tell whether the kernels in C++ multiply in the model's bfloat16."""
        assert tokens.query is not None
        short = tokens.query.dtype == tokens.key.dtype == torch.bfloat16
        return short and tokens.length > 1 and native.rounds()

    def _log_decays(self, tokens: Tokens) -> Tensor | None:
        """Return the logarithm of the decay `[B, Hkv, N]`, 0 at padded tokens; None where there is none."""
        if not self.has_decay:
            return None
        if tokens.gates is not None:
            return tokens.hide(tokens.gates[..., 0])
        gate = self.gate()
        if gate is not None and value_gates.kernels_take(tokens.value):
            return value_gates.log_gates(tokens.value, tokens.valid, gate)
        key, value = tokens.key, tokens.value
        if not self.fixed_decay:
            key, value = key if self.gates_by_value else upcast(key), upcast(value)
        decay = self.log_decay(key, value)
        return None if decay is None else tokens.hide(decay.expand(*tokens.key.shape[:2], -1))

    def _divided(self, numerator: Tensor, total: Tensor, tokens: Tokens) -> Tensor:
        assert tokens.query is not None
        log_scale = self.log_scale_of(tokens.query)
        if log_scale is not None:  # what the map divided by does not divide away here
            numerator = numerator * log_scale.exp().unsqueeze(-1)
        count = None if tokens.count is None else tokens.count[:, None]
        return linear.normalised(numerator, self.denominator(total, count))

    def absorb(self, tokens: Tokens, state: State | None) -> State:
        """Sum without queries."""
        return linear.after(*self.mapped(tokens), state)

    def whole_rows(self) -> str:
        """Say nothing: states add up."""
        return ""

    def before(self, parts: Sequence[Tokens], shard: Shard) -> State:
        """Sum each process's tokens, and pass the sums on: S, z, and what all decays leave."""
        state: State | None = None
        left: Tensor | None = None
        for tokens in parts:
            batch, heads, length, size = tokens.key.shape
            step = linear.span(batch * heads, self.features or size, tokens.value.shape[3])
            for start in range(0, length, step):
                cut = tokens.slice(start, min(start + step, length))
                state, left = in_backward_again(self._added, cut, state, left)
        assert state is not None
        both = torch.cat([state.S, state.z.unsqueeze(-1)], -1)
        both = carry(both, None if left is None else left.exp(), shard)
        return State(both[..., :-1].contiguous(), both[..., -1].contiguous())

    def _added(self, tokens: Tokens, state: State | None, left: Tensor | None) -> tuple[State, Tensor | None]:
        """Return the state after more tokens, and the sum of the logarithms of all decays, `[B, Hkv]`."""
        key, value, decay = self.mapped(tokens)
        if decay is not None:
            own = decay.sum(-1)
            left = own if left is None else left + own
        return linear.after(key, value, decay, state), left

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """Count S and z in float32 (float64 in float64 models)."""
        features = self.features or site.head_dim
        if site.kv_heads is None or features is None or site.value_dim is None:
            return None
        return max(size, 4) * site.kv_heads * features * (site.value_dim + 1)


class PreparedToken:
    """Tokens that come one by one behind one state, none of them padding."""

    def __init__(self, attention: LinearAttention, prepared: native.Prepared) -> None:
        self.weights, self.prepared = Weights(attention), prepared

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, before: int) -> Tensor | None:
        """Compute a token: `[B, 1, H, Dv]`; None where something has changed."""
        return None if self.weights.changed() else self.prepared.run(query, key, value)


def _products(key: Tensor, value: Tensor) -> torch.dtype | None:
    """Choose the dtype of products: bfloat16 off the CPU, where those are many times as fast."""
    narrow = key.device.type != "cpu" and key.dtype == value.dtype == torch.bfloat16
    return torch.bfloat16 if narrow else None


def _may_step(tokens: Tokens, state: State | None) -> bool:
    """Tell whether one token may be written over the state before, as `StateLayer.may_overwrite` says."""
    if state is None or not tokens.in_place or tokens.length != 1 or torch.compiler.is_compiling():
        return False
    return not torch.is_grad_enabled() and native.may_overwrite(state)
