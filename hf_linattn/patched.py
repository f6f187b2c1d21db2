"""The child module `linattn` of a patched attention module: one attention and its modifiers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_linattn import recurrent
from hf_linattn.attention import LinearAttention, Modifier, Patch, ScoreAttention
from hf_linattn.cache import StateLayer
from hf_linattn.errors import OptionError, RegistrationError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.ops.softmax import scores_of, softmax_attention
from hf_linattn.registry import Recipe
from hf_linattn.sites import Site
from hf_linattn.visibility import Visibility, read_visibility

SOFTMAX_EXTRAS = frozenset(("position_bias", "softcap", "s_aux", "sinks", "indices", "attention_mask"))
"""Extras that an attention over scores can honour: biases, caps, sinks, and masks made by an indexer."""


class PatchedAttention(nn.Module):
    """Attention of one site.

    Args:
        recipe: what to build.
        site: where; gives sizes to learned maps.
        keep_window: honour the layer's window; False drops it.
    """

    def __init__(self, recipe: Recipe, site: Site, *, keep_window: bool) -> None:
        super().__init__()
        self.spec, self.where, self.keep_window = (
            recipe.spec,
            f"{site.name} ({type(site.module).__name__})",
            keep_window,
        )
        self.drops_window = site.window is not None and not keep_window
        self.source = site.source  # kept: dynamo cannot look it up in the cache of read_source
        self.layer: StateLayer | str | None = None  # the cache layer of the running call, set by the pre-hook
        self.cross = False
        self.base = ""
        self.modifiers: list[str] = []
        for cls in recipe.parts:
            try:
                patch = cls(site, **recipe.options.get(cls.name, {}))
            except (TypeError, ValueError) as error:
                if isinstance(error, OptionError):
                    raise
                raise OptionError(f"{cls.name!r} cannot be built for {self.where}: {error}") from error
            if hasattr(type(self), cls.name) or cls.name in self.__dict__:
                raise RegistrationError(f"no patch can be called {cls.name!r}: it is an attribute of modules")
            self.add_module(cls.name, patch)
            if isinstance(patch, Modifier):
                self.modifiers.append(cls.name)
            else:
                self.base = cls.name
        if not self.base:
            self.base = "softmax"
            self.add_module(self.base, ScoreAttention(site))
        self._check_saved()
        self.refuse(site)

    def _check_saved(self) -> None:
        """Loading makes modules without data and fills in what was saved; other tensors would stay empty."""
        for name, module in self.named_modules():
            loose = [key for key, value in module.__dict__.items() if isinstance(value, Tensor)]
            if unsaved := sorted(module._non_persistent_buffers_set) + loose:
                raise RegistrationError(
                    f"{name}.{unsaved[0]} is a tensor that is not saved: make it a parameter or a buffer "
                    "that is"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "layer": None}

    @property
    def attention(self) -> Patch:
        """The attention; softmax where only modifiers were named."""
        return self.get_submodule(self.base)  # type: ignore[return-value]

    @property
    def linear(self) -> bool:
        """Whether the state is of constant size."""
        return self.attention.linear

    def refuse(self, site: Site) -> None:
        """Raise what can be known before the first call.

        Raises:
            UnsupportedModelError: the module does more to its scores than this attention can express.
        """
        extras = site.extras()
        allowed: frozenset[str] = frozenset() if self.linear else SOFTMAX_EXTRAS
        for keyword, what in extras.items():
            if keyword not in allowed:
                advice = (
                    "a softmax patch (softmax1, logn)" if keyword in SOFTMAX_EXTRAS else "its own attention"
                )
                raise UnsupportedModelError(
                    f"{self.where} {what} ({keyword!r}), which {self.spec!r} cannot express. Leave it out of "
                    f"the plan, or keep {advice} there."
                )
        if self.linear and site.source.calls > 1:
            raise UnsupportedModelError(
                f"{self.where} combines {site.source.calls} attentions in one forward (differential "
                f"attention): one state cannot serve them, so {self.spec!r} does not apply. Use softmax1 "
                "or logn there."
            )
        if self.linear and site.shares():
            raise UnsupportedModelError(
                f"{self.where} shares keys and values with other layers, and a cache that holds "
                f"{self.spec!r} states has none to share. Leave it out of the plan, or use a softmax "
                "patch (softmax1, logn) there."
            )
        if self.linear and site.source.updates and site.source.slot is None:
            raise UnsupportedModelError(
                f"{self.where} chooses its cache layer in a way that cannot be followed"
            )
        grows = site.source.updates and getattr(
            site.module, "is_causal", True
        )  # marian's encoder shares the class
        if self.linear and grows and site.layer_idx is None and site.source.slot != "argument":
            raise UnsupportedModelError(
                f"{self.where} has no layer_idx, so its place in the cache cannot be found"
            )

    def forward(
        self,
        layer: StateLayer | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        dropout: float,
        causal: bool,
        extras: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """One attention call, as `seam.attention`: `[B, N, H, Dv]`, and the weights where asked for."""
        if extras.get("cache") is not None:
            raise UnsupportedCallError(f"{self.where}: a paged cache")
        visibility = read_visibility(mask, query.shape[2], key.shape[2], causal)
        if not self.keep_window:
            visibility = visibility.without_window()
        if (
            self.drops_window and not self.linear
        ):  # a static layer in place of a window is longer than the mask
            key, value = key[:, :, : visibility.keys], value[:, :, : visibility.keys]
        if extras.get("indices") is not None:
            visibility = visibility.selected(extras["indices"], key.shape[2])
        if self.modifiers:
            count = visibility.count(query.device)
            for name in self.modifiers:
                query = self.get_submodule(name)(query, count)
        if isinstance(self.attention, LinearAttention):
            self._refuse_call(dropout, extras)
            borders = extras.get("cu_seq_lens_q")
            output = recurrent.attend(self.attention, query, key, value, visibility, layer, borders)
            return output.transpose(1, 2).contiguous(), None
        output, weights = self._scores(query, key, value, visibility, scaling, dropout, extras)
        return output.transpose(1, 2).contiguous(), weights

    def _refuse_call(self, dropout: float, extras: dict[str, Any]) -> None:
        for keyword in ("position_bias", "softcap", "s_aux", "sinks", "indices", "block_indices"):
            if extras.get(keyword) is not None:
                raise UnsupportedCallError(f"{self.where}: {self.spec!r} cannot express {keyword!r}")
        if dropout:
            raise UnsupportedCallError(
                f"{self.where}: attention dropout of {dropout} in training, and {self.spec!r} has no "
                "weights to drop. Load the model with it off, e.g. from_pretrained(..., "
                "attention_dropout=0.0) (attn_pdrop for GPT-2); finetune has --no-dropout."
            )
        if extras.get("output_attentions"):
            raise UnsupportedCallError(
                f"{self.where}: output_attentions=True, and {self.spec!r} has no attention weights"
            )

    def _scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        scaling: float | None,
        dropout: float,
        extras: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        attention = self.attention
        assert isinstance(attention, ScoreAttention)
        sink = attention(query)
        own = extras.get("s_aux") if extras.get("sinks") is None else extras["sinks"]
        if own is not None:
            own = own.to(torch.promote_types(own.dtype, torch.float32))
            sink = own if sink is None else torch.logaddexp(own, sink.to(own.dtype))
        bias = visibility.bias
        if extras.get("position_bias") is not None:
            given = extras["position_bias"]
            bias = given if bias is None else bias + given
        if bias is not None:
            bias = bias[..., : key.shape[2]]
        softcap = extras.get("softcap")
        borders = extras.get("cu_seq_lens_q")
        quadratic = type(attention).weights is not ScoreAttention.weights
        causal = visibility.plain and visibility.causal and query.shape[2] > 1 and borders is None
        mask: Tensor | None = None
        if not visibility.plain or (causal and (bias is not None or quadratic)) or borders is not None:
            mask = visibility.mask(query.device)[..., : key.shape[2]]
            causal = False
        if borders is not None:
            index = torch.bucketize(
                torch.arange(query.shape[2], device=query.device), borders[1:].long(), right=True
            )
            same = index[:, None] == index[None]
            mask = same if mask is None else mask & same
        if not (quadratic or softcap is not None or extras.get("output_attentions")):
            output = softmax_attention(
                query,
                key,
                value,
                mask=mask,
                bias=bias,
                is_causal=causal,
                scaling=scaling,
                sink=sink,
                dropout=dropout,
            )
            return output, None
        if causal:
            mask = visibility.mask(query.device)
        weights = attention.weights(scores_of(query, key, scaling, bias, softcap), mask, sink)
        dropped = nn.functional.dropout(weights, dropout) if dropout else weights
        values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        return (dropped.to(values.dtype) @ values), weights.to(query.dtype)

    def extra_repr(self) -> str:
        """Composition in `print(model)`."""
        return self.spec
