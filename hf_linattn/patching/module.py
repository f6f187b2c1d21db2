"""The child module `linattn` of a patched attention module: one attention and its modifiers."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_linattn.attention import Attention, Modifier, Patch, ScoreAttention
from hf_linattn.attention.base import PatchHolder
from hf_linattn.attention.cache import StateLayer
from hf_linattn.attention.call import Call
from hf_linattn.attention.gate_layer import GateLayer
from hf_linattn.attention.row_parts import continue_row
from hf_linattn.attention.site import EXTRAS, ROTARY_ARGUMENT, AttentionSite
from hf_linattn.attention.visibility import Visibility, read_visibility
from hf_linattn.errors import (
    OptionError,
    RegistrationError,
    UnsupportedCallError,
    UnsupportedMaskError,
    UnsupportedModelError,
)
from hf_linattn.ops.tracing import exporting
from hf_linattn.parallel.shard import Shard
from hf_linattn.patching.heads import HeadShare
from hf_linattn.patching.steps import begin, prepare, run_again
from hf_linattn.registry import Recipe

SEEN_IN_CALLS = EXTRAS.keys() - {"attention_mask"}


class CallContext(NamedTuple):
    """The running call of an attention module, as its pre-hook sees it.

    Attributes:
        layer: the state to read and write; None without a cache.
        cross: keys come from another sequence.
        used: the state was handed out in this call already.
        hidden: the module's input `[B, N, C]`, where its attention asks for it.
        gates: where gates of past tokens are kept; None without a cache.
    """

    layer: StateLayer | None = None
    cross: bool = False
    used: bool = False
    hidden: Tensor | None = None
    gates: GateLayer | None = None


NO_CONTEXT = CallContext()
USED = CallContext(used=True)


class PatchedAttention(PatchHolder):
    """A recipe built at one site: an attention and its modifiers, as a child of the attention module.

    Args:
        recipe: what to build.
        site: where; gives sizes to learned maps.
        keep_window: honour the layer's window; False drops it.
    """

    def __init__(self, recipe: Recipe, site: AttentionSite, *, keep_window: bool) -> None:
        super().__init__()
        self.spec, self.where, self.keep_window = (
            recipe.spec,
            f"{site.name} ({type(site.module).__name__})",
            keep_window,
        )
        self.written_as = recipe.spelled_out  # in the cache, beside the state
        self.drops_window = site.window is not None and not keep_window
        self.forward_info = site.forward_info  # kept: dynamo cannot look it up in the cache of read_source
        self.calls = threading.local()  # .context: of the running call, set by the pre-hook
        self.has_place = False  # a layer of the cache is its own, and `generate` should find that replaced
        self.bypass: str | None = None  # the module's own implementation, while that computes in its place
        self.shard: Shard | None = None  # the part of each row that this process has, while rows are split
        self.head_share: HeadShare | None = None  # the heads that it has, where processes share them
        self.leaves_out_dropout = False  # of weights that there are not; set by commands that train
        self.base = ""
        self.modifiers: list[str] = []
        parts = [self._part(cls, site, recipe.options.get(cls.name, {})) for cls in recipe.parts]
        self._compose(parts, site)
        self.drops_rope = any(not part.rope for part in parts)
        self.needs_hidden = any(part.needs_hidden for part in parts)
        self.keeps_gates = any(part.keeps_gates for part in parts)
        self.changes_output = [
            part.name for part in parts if isinstance(part, Modifier) and part.changes_output()
        ]
        self._check_saved()
        self.refuse(site)

    def _part(self, cls: type[Patch], site: AttentionSite, options: dict[str, Any]) -> Patch:
        if hasattr(type(self), cls.name) or cls.name in self.__dict__:
            raise RegistrationError(f"no patch can be called {cls.name!r}: it is an attribute of modules")
        try:
            return cls(site, **options)
        except (TypeError, ValueError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"{cls.name!r} cannot be built for {self.where}: {error}") from error

    def _compose(self, parts: list[Patch], site: AttentionSite) -> None:
        """Put modifiers and the attention side by side; an attention that another holds goes inside it."""
        attentions = [part for part in parts if isinstance(part, Attention)]
        wrapper = next((part for part in attentions if part.wraps), None)
        for part in parts:
            if wrapper is not None and part is not wrapper and isinstance(part, Attention) and part.wrappable:
                wrapper.wrap(part)
                continue
            self.add_module(part.name, part)
            if isinstance(part, Modifier):
                self.modifiers.append(part.name)
            else:
                self.base = part.name
        if not self.base:
            self.base = "softmax"
            self.add_module(self.base, ScoreAttention(site))

    def _check_saved(self) -> None:
        """Refuse tensors that are not saved: loading builds modules without data, and leaves them empty."""
        for name, module in self.named_modules():
            loose = [key for key, value in module.__dict__.items() if isinstance(value, Tensor)]
            if unsaved := sorted(module._non_persistent_buffers_set) + loose:
                raise RegistrationError(
                    f"{name}.{unsaved[0]} is a tensor that is not saved: make it a parameter or a buffer "
                    "that is"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "calls"} | {"shard": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.calls = threading.local()

    @property
    def attention(self) -> Attention:
        """The attention; softmax where only modifiers were named."""
        return self._modules[self.base]  # type: ignore[return-value]

    @property
    def keeps_state(self) -> bool:
        """Whether the state is of constant size."""
        return self.attention.linear

    def whole_rows(self) -> str:
        """Say why rows cannot be split over processes; "" where they can."""
        for name in self.modifiers:
            if type(self._modules[name]).log_gates is not Modifier.log_gates:  # type: ignore[union-attr]
                return f"{name!r} needs the gates of all tokens"
        return self.attention.whole_rows()

    def refuse(self, site: AttentionSite) -> None:
        """Raise what can be known before the first call.

        Raises:
            UnsupportedModelError: the module does more to its scores than this attention can express, or
                attends in a direction that the attention does not have.
        """
        attention = self.attention
        attention.check()
        for keyword, what in site.extras.items():
            if keyword not in attention.supports:
                softmax = keyword in ScoreAttention.supports
                advice = "a softmax patch (softmax1, logn)" if softmax else "its own attention"
                raise UnsupportedModelError(
                    f"{self.where} {what} ({keyword!r}), which {self.spec!r} cannot express. Leave it out of "
                    f"the plan, or keep {advice} there."
                )
        if site.causal is not None:
            self._refuse_direction(site.causal)
        for name in self.modifiers:
            modifier: Any = self.get_submodule(name)
            if modifier.needs_scores() and not isinstance(attention, ScoreAttention):
                raise OptionError(
                    f"{name!r} changes the scores of an attention, and {self.base!r} has none to change: "
                    "compose it with an attention over scores (softmax, softmax1, ...)"
                )
        if self.drops_rope and ROTARY_ARGUMENT not in site.forward_info.parameters:
            raise OptionError(
                f"rope=False: {self.where} gets no rotary embedding to switch off; leave rope=True"
            )
        if self.drops_rope and attention.needs_rope:
            raise OptionError(
                f"{self.where}: {self.base!r} turns queries by the rotary embedding that {self.spec!r} "
                "switches off. Give positions='text'"
            )
        if self.keeps_state or self.keeps_gates:
            self._refuse_state(site)

    def _refuse_state(self, site: AttentionSite) -> None:
        """Refuse modules whose place in the cache cannot hold a state, or gates beside keys."""
        kept = "gates" if self.keeps_gates else "states"
        instead = "source='value' (which keeps none)" if self.keeps_gates else "softmax1 or logn"
        if site.forward_info.calls > 1:
            raise UnsupportedModelError(
                f"{self.where} combines {site.forward_info.calls} attentions in one forward (differential "
                f"attention): one layer of {kept} cannot serve them, so {self.spec!r} does not apply. Use "
                f"{instead} there."
            )
        if site.shares:
            raise UnsupportedModelError(
                f"{self.where} shares keys and values with other layers, and a cache that holds "
                f"{self.spec!r} {kept} has none to share. Leave it out of the plan, or use {instead} there."
            )
        if site.forward_info.updates and site.forward_info.slot is None:
            raise UnsupportedModelError(
                f"{self.where} chooses its cache layer in a way that cannot be followed"
            )
        grows = site.forward_info.updates and site.causal is not False  # marian's encoder shares the class
        if grows and site.layer_idx is None and site.forward_info.slot != "argument":
            raise UnsupportedModelError(
                f"{self.where} has no layer_idx, so its place in the cache cannot be found"
            )

    def _refuse_direction(self, causal: bool) -> None:
        for name in (self.base, *self.modifiers):
            part: Any = self._modules[name]
            if part.directions == ("bidirectional" if causal else "causal"):
                kind = "causal" if causal else "bidirectional"
                raise UnsupportedModelError(
                    f"{self.where} is {kind}, and {name!r} is {part.directions} only: "
                    f"{part.direction_reason}. Leave it out: name {part.directions} modules in the plan, if "
                    "the model has any (describe(model) lists all)"
                )

    def forward(
        self,
        context: CallContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | Visibility | None,
        scaling: float | None,
        dropout: float,
        causal: bool,
        extras: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one attention call.

        Args:
            context: from the pre-hook.
            query: `[B, H, N, D]`.
            key: `[B, Hkv, S, D]`.
            value: `[B, Hkv, S, Dv]`.
            mask: see `masks`.
            scaling: of the scores; None for D^-0.5.
            dropout: probability, on the weights.
            causal: a query sees no later keys.
            extras: the other keywords of the interface call.

        Returns:
            Output `[B, N, H, Dv]`, and the weights `[B, H, N, S]` where they were asked for.
        """
        how = scaling, dropout, causal
        if self.head_share is None:
            return self._compute(context, query, key, value, mask, how, extras)
        if context.hidden is not None:
            context = context._replace(hidden=self.head_share.shared(context.hidden))
        with self.head_share.in_place(query, key):
            return self._compute(context, query, key, value, mask, how, extras)

    def _compute(
        self,
        context: CallContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | Visibility | None,
        how: tuple[float | None, float, bool],
        extras: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        if torch._C._get_tracing_state() is not None:
            raise UnsupportedCallError(
                f"{self.where}: torch.jit.trace, and torch.onnx.export(dynamo=False), would keep what is "
                "read of masks and lengths as constants, and wrong results with them. Take torch.export, or "
                "torch.onnx.export(dynamo=True)"
            )
        (scaling, dropout, causal), layer = how, context.layer
        if layer is not None:
            directly = begin if layer.prepared is None else run_again
            output = directly(self, layer, query, key, value, mask, how, extras)
            if output is not None:
                return output, None
        self._refuse_call(context.cross, dropout, causal, extras)
        if key.shape[1] != value.shape[1]:  # kernels read both by one number of heads
            raise UnsupportedCallError(
                f"{self.where}: keys have {key.shape[1]} heads and values {value.shape[1]}: leave it out of "
                "the plan"
            )
        if query.shape[0] != key.shape[0]:  # learned queries of one row (granite speech)
            query = query.expand(key.shape[0], -1, -1, -1)
        visibility = read_visibility(mask, query.shape[2], key.shape[2], causal)
        if self.keep_window and extras.get("window") is not None:
            visibility = visibility.windowed(extras["window"], query.device)
        if not self.keep_window:
            visibility = visibility.without_window()
            if self.drops_window and not self.keeps_state:
                if visibility.dense is not None:  # the window is one with the rest of it
                    raise UnsupportedMaskError(
                        f"{self.where}: sliding='global' drops windows, and this call's mask has no plain "
                        "form to drop one from (the model's own, an image's, or a caller's): patch with "
                        "sliding='keep'"
                    )
                # a static layer in place of a window is longer than the mask
                key, value = key[:, :, : visibility.keys], value[:, :, : visibility.keys]
        visibility = self._restricted(visibility, query, key.shape[2], extras)
        bias = visibility.bias
        if (position_bias := extras.get("position_bias")) is not None:
            bias = position_bias if bias is None else bias + position_bias
        # a compiler would keep a graph for each name
        anonymous = torch.compiler.is_compiling() and not exporting()
        call = Call(
            query,
            key,
            value,
            visibility,
            causal,
            context.cross,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            "the attention" if anonymous else self.where,
            self.spec,
            context.layer,
            dropout,
            bias,
            extras.get("softcap"),
            extras.get("s_aux") if extras.get("sinks") is None else extras["sinks"],
            bool(extras.get("output_attentions")),
            context.hidden,
            gates=context.gates,
            shard=self.shard,
        )
        if self.shard is not None:
            continue_row(call, self.keeps_state)
        for name in self.modifiers:
            modifier: Any = self.get_submodule(name)
            modifier.change(call)
        output, weights = self.attention(call)
        for name in self.changes_output:
            output = self.get_submodule(name)(call, output)
        if layer is not None and query.shape[2] == 1:
            prepare(self, call, how, extras)
        return output.transpose(1, 2).contiguous(), weights

    def _restricted(
        self, visibility: Visibility, query: Tensor, keys: int, extras: dict[str, Any]
    ) -> Visibility:
        """Leave only the keys that an indexer selects, and those of a query's own document."""
        if extras.get("indices") is not None:
            visibility = visibility.selected(extras["indices"], keys)
        if extras.get("cu_seq_lens_q") is not None:
            if query.shape[0] != 1:
                raise UnsupportedCallError(
                    f"{self.where}: cu_seq_lens_q tells the documents of one row, and there are "
                    f"{query.shape[0]}"
                )
            visibility = visibility.packed(extras["cu_seq_lens_q"], query.device)
        return visibility

    def _refuse_call(self, cross: bool, dropout: float, causal: bool, extras: dict[str, Any]) -> None:
        attention = self.attention
        seen = () if SEEN_IN_CALLS.isdisjoint(extras) else [name for name in extras if name in SEEN_IN_CALLS]
        for keyword in seen:
            if keyword not in attention.supports and extras[keyword] is not None:
                raise UnsupportedCallError(f"{self.where}: {self.spec!r} cannot express {keyword!r}")
        if cross and not attention.cross:
            raise UnsupportedCallError(
                f"{self.where}: {self.base!r} needs queries and keys of one sequence, and this is "
                "cross-attention. Leave it out: name modules of self-attention in the plan (describe(model) "
                f"lists all), e.g. patch_model(model, {{'*.self_attn': {self.spec!r}}})"
            )
        if not cross:
            self._refuse_direction(causal)
        if attention.linear and dropout and not self.leaves_out_dropout:
            raise UnsupportedCallError(
                f"{self.where}: attention dropout of {dropout} in training, and {self.spec!r} has no "
                "weights to drop. Load the model with it off, e.g. from_pretrained(..., "
                "attention_dropout=0.0) (attn_pdrop for GPT-2, attention_probs_dropout_prob for BERT)."
            )
        if attention.linear and extras.get("output_attentions"):
            raise UnsupportedCallError(
                f"{self.where}: output_attentions=True, and {self.spec!r} has no attention weights. Pass "
                "output_attentions=False"
            )

    def extra_repr(self) -> str:
        """Show the composition in `print(model)`."""
        return self.spec
