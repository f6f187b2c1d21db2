"""The one function registered with transformers, and the pre-hook that finds the state of each call."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.output_capturing import _active_collector

from hf_linattn.attention.cache import StateLayer
from hf_linattn.attention.masks import CAUSAL, WHOLE_MASKS, compact_mask, is_compact
from hf_linattn.attention.row_parts import with_earlier
from hf_linattn.attention.site import (
    CACHE_ARGUMENTS,
    HIDDEN_ARGUMENT,
    ROTARY_ARGUMENT,
    AttentionSite,
    ForwardInfo,
)
from hf_linattn.attention.visibility import Visibility, read_visibility
from hf_linattn.errors import NotPatchedError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patching.cache_layers import put_layer, refuse_rotated_keys, self_attention_cache
from hf_linattn.patching.module import NO_CONTEXT, USED, CallContext, PatchedAttention
from hf_linattn.patching.paged import PACKED, Group, paged_attention

NAME = "linattn"
"""Name of the attention implementation, of the child module, and of the entry in config.json."""
PATCH_PART = f".{NAME}."
"""In the name of every parameter that belongs to a patch."""
UNPATCHED_IMPL = "_linattn_kept"
"""Attribute of attention modules that keep their own implementation in a patched model: its name."""
SHARD = "_linattn_shard"
"""Attribute of such modules while rows are split over processes: the part that this one has."""
CROSS_ARGUMENTS = frozenset(("key_value_states", "encoder_hidden_states", "cross_attention_states"))
NATIVE_IMPLEMENTATIONS = ("sdpa", "eager")
EAGER = "eager_attention_forward"
"""Name of the function that computes a family's own attention with its weights."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Route one attention call to the module's patch, or to its own implementation: kept, or bypassed.

    Args:
        module: the attention module.
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        attention_mask: see `masks`.
        scaling: of the scores; None for D^-0.5.
        dropout: probability, on the weights.
        is_causal: of this call; None asks the module.
        **kwargs: what else the module passes.

    Returns:
        Output `[B, N, H, Dv]` and attention weights or None.

    Raises:
        NotPatchedError: a module that was never patched asks for this implementation.
    """
    child: Any = module._modules.get(NAME)
    kept = getattr(module, UNPATCHED_IMPL, None) if child is None else child.bypass
    if child is None and kept is None:
        raise NotPatchedError(
            f"{type(module).__name__} asks for the {NAME!r} attention but was not patched: load the "
            "folder with hf_linattn.from_pretrained, or call patch_model on this model."
        )
    if not kwargs.get("output_attentions") and _weights_are_collected():
        kwargs["output_attentions"] = True
    if PACKED in kwargs:
        keeps_state = kept is None and child.keeps_state
        hidden = None if child is None else getattr(child.calls, "context", NO_CONTEXT).hidden

        def compute(q: Tensor, k: Tensor, v: Tensor, group: Group, layer: StateLayer | None) -> Tensor:
            seen = group.visibility
            if kept is not None:
                return native_attention(
                    module, q, k, v, seen, kept, scaling=scaling, dropout=dropout, **kwargs
                )[0]
            context = CallContext(layer, hidden=None if hidden is None else hidden[0, group.queries])
            return child(context, q, k, v, seen, scaling, dropout, True, kwargs)[0]  # type: ignore[no-any-return]

        return paged_attention(module, query, key, value, kwargs, compute, keeps_state), None
    if kept is not None:
        if is_causal is not None:
            kwargs["is_causal"] = is_causal
        shard = module.__dict__.get(SHARD) if child is None else child.shard
        if shard is not None:
            seen = read_visibility(attention_mask, query.shape[2], key.shape[2], True)
            key, value, seen = with_earlier(key, value, seen, shard, type(module).__name__)
            return native_attention(
                module, query, key, value, seen, kept, scaling=scaling, dropout=dropout, **kwargs
            )
        return native_attention(
            module, query, key, value, attention_mask, kept, scaling=scaling, dropout=dropout, **kwargs
        )
    if not isinstance(child, PatchedAttention):
        _refuse_mixed_adapters(child)
    context: CallContext = getattr(child.calls, "context", NO_CONTEXT)
    if context.used:
        raise UnsupportedCallError(f"{type(module).__name__} calls its attention more than once per forward")
    if context.layer is not None or context.gates is not None:
        child.calls.context = USED
    causal = _looks_back(module, attention_mask, query.shape[2], is_causal) and not context.cross
    # never the module itself: offloading moves every argument of a call to the device
    return child(context, query, key, value, attention_mask, scaling, dropout, causal, kwargs)  # type: ignore[no-any-return]


def _weights_are_collected() -> bool:
    """Tell whether the running forward collects attention weights.

    Not each module is told: GPT-2's are not, and none is where the config asks for them.
    """
    if torch.compiler.is_compiling():
        return False
    collected = _active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def _refuse_mixed_adapters(wrapper: Any) -> None:
    """Refuse rows of several peft adapters that hold weights of the patch: one forward has those of one."""
    if any("adapter_names" in getattr(hook, "keywords", ()) for hook in wrapper._forward_pre_hooks.values()):
        raise UnsupportedCallError(
            f"{wrapper.where}: adapter_names gives the rows adapters of their own, and those hold weights of "
            "the patch (modules_to_save). Give rows of one adapter at a time, chosen by set_adapter"
        )


def _looks_back(module: nn.Module, mask: Tensor | None, queries: int, is_causal: bool | None) -> bool:
    """Tell whether a call is causal; moonshine says False wherever a mask shows it, and of one query."""
    if is_causal is False and mask is not None and is_compact(mask):
        return mask.dtype == CAUSAL
    if is_causal is not None and (queries > 1 or mask is not None):
        return is_causal
    if mask is not None and not hasattr(module, "is_causal") and is_compact(mask):  # as Splinter's
        return mask.dtype == CAUSAL
    return bool(getattr(module, "is_causal", True))


def native_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | Visibility | None,
    kept: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that stays as it was inside a patched model.

    Args:
        module: the attention module.
        query: `[B, H, N, D]`.
        key: `[B, Hkv, S, D]`.
        value: `[B, Hkv, S, Dv]`.
        mask: see `masks`; given to the implementation in the form that it reads.
        kept: its name, "sdpa" or "eager".
        **kwargs: what else the module passes.

    Returns:
        Output `[B, N, H, Dv]` and attention weights or None.
    """
    if kept == "sdpa" and kwargs.get("output_attentions") and EAGER in names_of(module):
        kept = "eager"  # which has weights: without them those of the next layers would take their places
    if isinstance(mask, Visibility) or is_compact(mask):
        visibility = read_visibility(mask, query.shape[2], key.shape[2], True)
        if visibility.plain and kept == "sdpa":
            mask = None
            if not kwargs.get("is_causal"):  # False, of moonshine, goes by the mask
                kwargs["is_causal"] = visibility.causal and query.shape[2] > 1
        else:
            mask = visibility.mask(query.device)
            whole = WHOLE_MASKS in module.config.__dict__  # then the keys of a window are the last ones
            mask = mask[..., -key.shape[2] :] if whole else mask[..., : key.shape[2]]
            mask = mask.expand(query.shape[0], *mask.shape[1:])
    if kwargs.get("indices") is not None:  # the model makes a mask of them for sdpa and eager by name only
        visibility = read_visibility(mask, query.shape[2], key.shape[2], True).selected(
            kwargs["indices"], key.shape[2]
        )
        mask = visibility.mask(query.device)
    if mask is not None and mask.dtype == torch.bool and kept == "eager":
        mask = additive_mask(mask, query.dtype)
    function = names_of(module)[EAGER] if kept == "eager" else ALL_ATTENTION_FUNCTIONS[kept]
    return function(module, query, key, value, mask, **kwargs)  # type: ignore[no-any-return]


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Write a boolean mask as transformers' eager attention adds it to scores of a dtype."""
    lowest = torch.finfo(dtype).min
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, lowest)


def names_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module's forward, under its decorators, sees by name."""
    forward: Any = inspect.unwrap(type(module).forward)
    return forward.__globals__  # type: ignore[no-any-return]


def check_native_impl(site: AttentionSite, kept: str) -> None:
    """Refuse implementations that read masks of a kind of their own, and modules that make masks by its name.

    Raises:
        UnsupportedModelError: naming the module and what to load instead.
    """
    if "block_indices" in (extras := site.extras):
        raise UnsupportedModelError(
            f"{site.name} {extras['block_indices']}, and does so under the names "
            f"{', '.join(NATIVE_IMPLEMENTATIONS)} only: its model cannot be patched in part"
        )
    known = kept in NATIVE_IMPLEMENTATIONS
    without = EAGER not in names_of(site.module)
    if not known or (kept == "eager" and not site.adapted and without):
        raise UnsupportedModelError(
            f"{site.name} keeps its own attention, {kept!r}, beside patched layers; that works for "
            f"{' and '.join(NATIVE_IMPLEMENTATIONS)}. Load the model with attn_implementation='sdpa' first."
        )


def bind_cache_layer(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a state layer into the cache at this module's place, and note it for the call: a forward pre-hook.

    Notes are kept by thread, so that several threads can use one model.

    Returns:
        The arguments, without the rotary embedding where a modifier switches that off.

    Raises:
        NotPatchedError: another attention implementation was set after patching.
    """
    child: Any = module._modules[NAME]
    implementation = _implementation(getattr(module, "config", None))
    if implementation != NAME:
        raise NotPatchedError(
            f"the attention implementation was set to {implementation!r} after patch_model, which would "
            "undo half of it: call unpatch_model first, or set it back to 'linattn'."
        )
    child.calls.context = NO_CONTEXT  # whatever a call before left behind
    if child.bypass is not None:
        return args, kwargs
    if child.drops_rope:
        args, kwargs = _without_rope(child, args, kwargs)
    cross = "Cross" in type(module).__name__ or (
        not CROSS_ARGUMENTS.isdisjoint(kwargs)
        and any(kwargs.get(name) is not None for name in CROSS_ARGUMENTS)
    )
    hidden = (args[0] if args else kwargs.get(HIDDEN_ARGUMENT)) if child.needs_hidden else None
    if cross or hidden is not None:
        child.calls.context = CallContext(cross=cross, hidden=hidden)
    if cross:
        return args, kwargs
    if not (child.keeps_state or child.keeps_gates or child.drops_window or child.drops_rope):
        return args, kwargs
    source = child.forward_info
    if not source.updates:
        return args, kwargs
    cache = _cache_of(source, args, kwargs)
    if cache is None:
        return args, kwargs
    if kwargs.get(source.past_argument) is not None:
        raise UnsupportedCallError(
            f"{child.where} reads the cache of another pass over the same layer, and a state has no keys to "
            "read: use softmax1 or logn there, or use_cache=False"
        )
    index = _layer_index(module, source, args, kwargs)
    where = f"{type(module).__name__} {index}"
    if child.drops_rope and not torch.compiler.is_compiling():  # which begins with an empty cache
        refuse_rotated_keys(self_attention_cache(cache), index, where)
    layer = put_layer(child, self_attention_cache(cache), index, where)
    if isinstance(layer, StateLayer):
        layer.expecting_update = True
        child.calls.context = CallContext(layer, hidden=hidden)
    elif layer is not None:
        child.calls.context = CallContext(hidden=hidden, gates=layer)
    return args, kwargs


def _cache_of(source: ForwardInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Find the cache among the arguments of a module; None where there is none, or a paged one."""
    if PACKED in kwargs:
        return None
    for name in CACHE_ARGUMENTS:
        if (cache := kwargs.get(name)) is not None:
            return cache
    position = source.cache_position
    return args[position] if position is not None and len(args) > position else None


def _layer_index(
    module: nn.Module, source: ForwardInfo, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Find the index of the cache layer that a module uses."""
    if source.slot == "argument":
        return kwargs["layer_idx"] if "layer_idx" in kwargs else args[source.parameters.index("layer_idx")]
    if source.slot in (None, "self"):
        return module.layer_idx
    return module.layer_idx + kwargs.get(source.slot, 0)


def _implementation(config: Any) -> Any:
    """Read the attention implementation that a config names.

    Past `__getattribute__` of configs, which takes as long as an operation.
    """
    if not torch.compiler.is_compiling():  # which cannot follow that
        try:
            return object.__getattribute__(config, "_attn_implementation_internal")
        except AttributeError:
            pass
    return getattr(config, "_attn_implementation", NAME)


def _without_rope(child: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Put cosines of 1 and sines of 0, no rotation, into a module's arguments."""
    place = child.forward_info.parameters.index(ROTARY_ARGUMENT)
    rotary: Any = kwargs.get(ROTARY_ARGUMENT, args[place] if place < len(args) else None)
    if rotary is None:  # a layer without positions
        return args, kwargs
    pair = isinstance(rotary, tuple | list) and len(rotary) == 2
    if not pair or any(not isinstance(x, Tensor) or x.is_complex() for x in rotary):
        raise UnsupportedCallError(
            f"{child.where}: rope=False knows rotary embeddings given as (cos, sin), not "
            f"{type(rotary).__name__}; leave rope=True"
        )
    sine = 0 if child.forward_info.sine_first else 1
    unrotated = tuple(torch.full_like(x, i != sine) for i, x in enumerate(rotary))
    if ROTARY_ARGUMENT in kwargs:
        return args, {**kwargs, ROTARY_ARGUMENT: unrotated}
    return (*args[:place], unrotated, *args[place + 1 :]), kwargs


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, compact_mask)
