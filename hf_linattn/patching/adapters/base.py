"""What all adapters share: their registry, the forward that a patched model's module gets, and its undo."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_linattn.attention.masks import is_compact
from hf_linattn.attention.site import CACHE_ARGUMENTS, AttentionSite
from hf_linattn.attention.visibility import read_visibility
from hf_linattn.patching.interface import NAME, UNPATCHED_IMPL, additive_mask, names_of

Masks = Literal["compact", "boolean", "additive"]
Attributes = Callable[[Any, Any, str], dict[str, Any]]
SLOTS = ("_old_forward", "forward")
"""Where an instance keeps a forward of its own; accelerate's hooks move the module's own to the first."""


@dataclass(frozen=True)
class Adapter:
    """How modules of a class are made to call the attention interface.

    Attributes:
        forward: stands in for the module's own.
        attributes: (module, config, dotted name) -> what this package asks of attention modules, and these
            lack: is_causal, layer_idx, sliding_window.
        masks: (config) -> what the model around makes of the mask: it hands it on ("compact"), computes with
            a boolean one, or with an additive one.
    """

    forward: Callable[..., Any]
    attributes: Attributes
    masks: Callable[[Any], Masks]


ADAPTERS: dict[str, Adapter] = {}
"""Folder of the family in transformers and name of the class, "bloom.BloomAttention" -> adapter."""


def adapts(
    *classes: str,
    attributes: Attributes = lambda module, config, name: {},
    masks: Callable[[Any], Masks] = lambda config: "compact",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a forward for classes, each named as in `ADAPTERS`; see `Adapter` for the rest."""

    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        ADAPTERS.update(dict.fromkeys(classes, Adapter(forward, attributes, masks)))
        return forward

    return register


def adapter_of(module: nn.Module) -> Adapter | None:
    """Find the adapter of a module.

    None for one that needs none, as gptj's since 5.24, and for one whose forward somebody replaced.
    """
    cls: Any = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
    path = cls.__module__.split(".")
    if path[:2] != ["transformers", "models"]:
        return None
    adapter = ADAPTERS.get(f"{path[2]}.{cls.__name__}")
    if adapter is None or "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(cls.forward).__code__.co_names:
        return None
    own = next((module.__dict__[slot] for slot in SLOTS if slot in module.__dict__), None)
    known = own is None or getattr(own, "func", None) is _forward
    return adapter if known or getattr(own, "__func__", None) is cls.forward else None


def attributes_of(model: nn.Module, name: str) -> dict[str, Any]:
    """List what an adapted module lacks: attributes of its class, and the config of the model around it."""
    path = name.split(".")
    around = [model.get_submodule(".".join(path[:count])) for count in range(len(path), -1, -1)]
    configs = (module.__dict__.get("config") for module in around)
    config = next(config for config in configs if isinstance(config, PreTrainedConfig))
    adapter = adapter_of(around[0])
    assert adapter is not None
    return {"config": config, "is_causal": True, **adapter.attributes(around[0], config, name)}


def masks_of(site: AttentionSite) -> Masks | None:
    """Tell what the model around a module makes of masks; None for a module that routes by itself."""
    adapter = adapter_of(site.module)
    return None if adapter is None else adapter.masks(site.view.config)


def adapt(module: nn.Module) -> Callable[[], None]:
    """Make a module call the attention interface.

    Returns:
        The undo.
    """
    slot = next((slot for slot in SLOTS if slot in module.__dict__), "forward")
    module.__dict__[slot] = functools.partial(_forward, module)
    return functools.partial(_restore, module)


def _restore(module: nn.Module) -> None:
    for slot in SLOTS:  # hooks may have come or gone since
        if getattr(module.__dict__.get(slot), "func", None) is _forward:
            del module.__dict__[slot]
            if slot != "forward":
                module.__dict__[slot] = type(module).forward.__get__(module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the adapter's forward; the module's own where it is kept, or its patch is bypassed."""
    adapter = adapter_of(module)
    assert adapter is not None
    child: Any = module._modules.get(NAME)
    kept = module.__dict__.get(UNPATCHED_IMPL) if child is None else child.bypass
    if kept is None:
        caches = [kwargs.pop(name) for name in CACHE_ARGUMENTS if name in kwargs]
        if caches:  # under one name, whichever the transformers at hand has
            kwargs["cache"] = next((cache for cache in caches if cache is not None), None)
        return adapter.forward(module, *args, **kwargs)
    return _own_forward(module, adapter, kept, args, kwargs)


def _own_forward(
    module: nn.Module, adapter: Adapter, kept: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the module's own forward, with the mask and the config as they are in an unpatched model."""
    config: Any = copy.copy(module.config)
    config.__dict__["_attn_implementation_internal"] = kept  # what forward does may hang on it
    own = object.__new__(type(module))
    own.__dict__.update(module.__dict__, config=config)
    bound = inspect.signature(type(module).forward).bind(own, *args, **kwargs)
    mask, hidden = bound.arguments.get("attention_mask"), list(bound.arguments.values())[1]
    if (
        isinstance(mask, Tensor)
        and (is_compact(mask) or mask.dtype == torch.bool)
        and adapter.masks(config) == "compact"
    ):
        visible = read_visibility(mask, hidden.shape[1], mask.shape[-1], True).mask(mask.device)
        visible = visible.expand(hidden.shape[0], *visible.shape[1:])
        bound.arguments["attention_mask"] = (
            additive_mask(visible, hidden.dtype) if kept == "eager" else visible
        )
    return type(module).forward(*bound.args, **bound.kwargs)


def attention_interface(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Call the attention that the module's config names."""
    function = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    output: tuple[Tensor, Tensor | None] = function(module, *args, **kwargs)
    return output


def family(module: nn.Module, name: str) -> Any:
    """Look up a function in the file of a module's class, such as its rotary embedding."""
    return names_of(module)[name]


def dropout_of(module: Any, layer: nn.Dropout | float) -> float:
    """Return the probability of dropping weights that is in force."""
    probability = layer.p if isinstance(layer, nn.Dropout) else layer
    return float(probability) if module.training else 0.0


def index_of(name: str) -> int:
    """Read the index of a layer from a module's dotted name."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def heads_of(x: Tensor, size: int) -> Tensor:
    """Split the last dimension into heads: `[B, N, H * D]` -> `[B, H, N, D]`."""
    return x.view(*x.shape[:-1], -1, size).transpose(1, 2)


def relative_bias(bias: Tensor, mask: Tensor | None, queries: int) -> Tensor:
    """Count a bias per key from each query's own key on, so that the bias there is 0.

    Models with ALiBi add slope x position of the key, or of the key from the last one: for softmax that is as
    good as the distance, which ALiBi means. A sink, or any other function of the scores, needs the distance.

    Args:
        bias: `[B, H, 1, S]`.
        mask: of the call.
        queries: number N.

    Returns:
        `[B, H, N, S]`.
    """
    keys = bias.shape[-1]
    visibility = read_visibility(mask, queries, keys, True)
    if visibility.dense is None:
        first = keys - queries if visibility.relative is None else -visibility.relative[0]
        own = (torch.arange(queries, device=bias.device) + first).expand(bias.shape[0], -1)
    else:
        index = torch.arange(visibility.dense.shape[-1], device=bias.device)
        own = (visibility.dense * index).amax((1, 3))  # the last visible key
        bias = bias.expand(own.shape[0], -1, -1, -1)
    own = own[:, None].expand(-1, bias.shape[1], -1)
    return bias - bias[:, :, 0].gather(2, own)[..., None]


def visible_of(mask: Tensor | None) -> Tensor | None:
    """Take the bias out of an additive mask that a model added its own to: boolean `[B, 1, N, S]`."""
    if mask is None or not mask.is_floating_point():
        return mask
    return mask[:, :1] > torch.finfo(mask.dtype).min / 2
