"""Attention modules that route through transformers' attention interface, read from their own source.

An attention module is recognised by what its `forward` does: it calls `attention_interface(self, q, k, v,
...)`. The keywords of that call say what the module adds to softmax(qk)v; where it stores its keys says
which cache layer is its.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import MODEL_FOR_MULTIMODAL_LM_MAPPING, PreTrainedConfig

from hf_linattn.attention.site import (
    CACHE_ARGUMENTS,
    EXTRAS,
    HIDDEN_ARGUMENT,
    ROTARY_ARGUMENT,
    AttentionSite,
    Extra,
    ForwardInfo,
    ModuleView,
    Rotation,
)
from hf_linattn.patching.adapters import REASONS, adapter_of, attributes_of

ROTATES = re.compile(r"^apply_rotary\w*|(?<=^family\(self, ')apply_rotary\w*")
"""Calls of a rotary embedding, an adapter's among them."""
BESIDE = ("vision_config", "codec_config", "audio_encoder_config")
"""Parts for images or sounds in a config that is the text's itself."""


MERGED_MASK = "merged_attention_mask"
"""The argument by which T5Gemma 2 hands on one mask for a text's own keys and the encoder's, side by side."""


def _is_interface_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and "attention_interface" in node.func.id
    )


def _calls_on_a_path(node: ast.AST) -> int:
    """Count interface calls on the longest path: branches are alternatives, a comprehension counts once."""
    if isinstance(node, ast.If):
        return max(sum(map(_calls_on_a_path, node.body)), sum(map(_calls_on_a_path, node.orelse)))
    here = 1 if _is_interface_call(node) else 0
    return here + sum(map(_calls_on_a_path, ast.iter_child_nodes(node)))


def _slot(tree: ast.AST, parameters: tuple[str, ...]) -> tuple[str | None, bool]:
    updates = [
        node.args[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "update"
        and len(node.args) > 2
        and "cross" not in ast.unparse(node.func.value)
    ]
    slots = set()
    for argument in updates:
        text = ast.unparse(argument)
        if text == "self.layer_idx":
            slots.add("self")
        elif text == "layer_idx" and text in parameters:
            slots.add("argument")
        elif text.startswith("self.layer_idx + ") and text.removeprefix("self.layer_idx + ") in parameters:
            slots.add(text.removeprefix("self.layer_idx + "))
        else:
            slots.add("")
    slot = slots.pop() if len(slots) == 1 else None
    return slot or None, bool(updates)


def _assignments(tree: ast.AST, name: str) -> list[tuple[ast.expr, tuple[str, ...]]]:
    """List what is assigned to a local name, each with the attributes whose `is not None` surrounds it."""
    assignments: list[tuple[ast.expr, tuple[str, ...]]] = []

    def visit(node: ast.AST, guards: tuple[str, ...]) -> None:
        if isinstance(node, ast.Assign):
            names = [
                part for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)
            ]
            if any(part.id == name for part in names):
                assignments.append((node.value, guards))
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            inner = test.removeprefix("self.").removesuffix(" is not None")
            known = test == f"self.{inner} is not None" and inner.isidentifier()
            for part in node.body:
                visit(part, (*guards, inner) if known else guards)
            for part in node.orelse:
                visit(part, guards)
            return
        for child in ast.iter_child_nodes(node):
            visit(child, guards)

    visit(tree, ())
    return assignments


def _makes(value: ast.expr) -> bool:
    """Tell whether an expression computes a mask, instead of choosing one or cutting it to size."""
    return any(
        isinstance(node, ast.BinOp)
        or (isinstance(node, ast.Call) and not ast.unparse(node.func).endswith(".get"))
        for node in ast.walk(value)
    )


def _extras(tree: ast.AST) -> tuple[Extra, ...]:
    extras: dict[str, Extra] = {}
    for call in filter(_is_interface_call, ast.walk(tree)):
        assert isinstance(call, ast.Call)
        values = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in EXTRAS}
        mask = values.pop("attention_mask", call.args[4] if len(call.args) > 4 else None)
        for keyword, value in values.items():
            text = ast.unparse(value)
            value_guards = [guards for new, guards in _assignments(tree, text) if ast.unparse(new) != "None"]
            extras[str(keyword)] = Extra(str(keyword), text, tuple(value_guards))
        if isinstance(mask, ast.Name):
            mask_guards = [guards for new, guards in _assignments(tree, mask.id) if _makes(new)]
            if mask_guards or mask.id == MERGED_MASK:
                extras["attention_mask"] = Extra("attention_mask", mask.id, tuple(mask_guards))
    return tuple(extras.values())


def _sharing(tree: ast.AST, parameters: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the attributes that decide about a dict of keys and values that a model's layers pass on.

    Returns:
        Those that make a layer take them, and those that make it give its own.
    """

    def entries(node: ast.AST) -> list[ast.Subscript]:
        return [
            part
            for part in ast.walk(node)
            if isinstance(part, ast.Subscript)
            and isinstance(part.value, ast.Name)
            and part.value.id in parameters
        ]

    passed_on = {ast.unparse(part.value) for part in entries(tree) if isinstance(part.ctx, ast.Store)}
    takes: list[str] = []
    gives: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Attribute):
            inside = [part for child in node.body for part in entries(child)]
            shared = [part.ctx for part in inside if ast.unparse(part.value) in passed_on]
            if shared:
                kinds = gives if any(isinstance(ctx, ast.Store) for ctx in shared) else takes
                kinds.append(node.test.attr)
    return tuple(takes), tuple(gives)


def _rotations(tree: ast.AST) -> tuple[Rotation, ...]:
    """List the calls of `apply_rotary...`, and what decides about them."""
    found: list[Rotation] = []

    def visit(node: ast.AST, conditions: tuple[str, ...], after: list[ast.stmt]) -> None:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            blocks = ((node.body, (*conditions, test)), (node.orelse, (*conditions, f"not ({test})")))
            for block, inner in blocks:
                for i, part in enumerate(block):
                    visit(part, inner, block[i + 1 :] + after)
            return
        if isinstance(node, ast.FunctionDef):
            for i, part in enumerate(node.body):
                visit(part, conditions, node.body[i + 1 :] + after)
            return
        if isinstance(node, ast.Call) and node.args and (name := ROTATES.search(ast.unparse(node.func))):
            tensor = ast.unparse(node.args[0])
            found.append(Rotation(name[0], tensor, conditions, _applied(after, tensor)))
        for child in ast.iter_child_nodes(node):
            visit(child, conditions, after)

    visit(tree, (), [])
    return tuple(found)


def _applied(statements: list[ast.stmt], tensor: str) -> tuple[str, ...]:
    """List what of a module is called with a local name in these statements."""
    calls = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call))
    return tuple(
        name
        for call in calls
        if (name := ast.unparse(call.func)).startswith("self.")
        and any(ast.unparse(argument) == tensor for argument in call.args)
    )


def _past_argument(tree: ast.AST, parameters: tuple[str, ...]) -> str | None:
    """Name the argument in which dory's layers get the keys of the past, a dict by their index."""
    calls = re.findall(r"\b(\w+)\.get\(self\.layer_idx\)", ast.unparse(tree))
    return next((name for name in calls if name in parameters), None)


def _sine_first(tree: ast.AST) -> bool:
    """Tell whether the rotary embedding is taken apart as (sin, cos)."""
    return any(
        isinstance(node, ast.Assign)
        and ast.unparse(node.value) == ROTARY_ARGUMENT
        and ast.unparse(node.targets[0]).lstrip("(").startswith("sin")
        for node in ast.walk(tree)
    )


def read_source(cls: type[nn.Module]) -> ForwardInfo | None:
    """Read what a class's forward says; None if it does not call the attention interface."""
    return read_forward(inspect.unwrap(cls.forward))


@cache
def _source(forward: Callable[..., Any]) -> str:
    return textwrap.dedent(inspect.getsource(forward))


@cache
def read_forward(forward: Callable[..., Any]) -> ForwardInfo | None:
    """Read what a forward says; None if it does not call the attention interface."""
    try:
        tree = ast.parse(_source(forward))
    except (OSError, TypeError, SyntaxError):
        return None
    text = ast.unparse(tree)
    if "ALL_ATTENTION_FUNCTIONS" not in text and not any(map(_is_interface_call, ast.walk(tree))):
        return None
    parameters = tuple(inspect.signature(forward).parameters)[1:]
    slot, updates = _slot(tree, parameters)
    position = next((parameters.index(name) for name in CACHE_ARGUMENTS if name in parameters), None)
    calls = sum(map(_calls_on_a_path, ast.iter_child_nodes(tree)))
    takes, gives = _sharing(tree, parameters)
    return ForwardInfo(
        calls=max(1, calls),
        extras=_extras(tree),
        slot=slot,
        updates=updates,
        cache_position=position,
        parameters=parameters,
        takes=takes,
        gives=gives,
        rotations=_rotations(tree),
        past_argument=_past_argument(tree, parameters),
        sine_first=_sine_first(tree),
    )


def _layer_type(module: Any) -> str | None:
    """Read what the config calls a layer's kind of attention."""
    types, index = getattr(getattr(module, "config", None), "layer_types", None), _first(module, "layer_idx")
    return str(types[index]) if types and index is not None and index < len(types) else None


def window_of(module: Any) -> str | None:
    """Tell whether, and how, a layer is windowed; many modules leave that to the config (mistral)."""
    config = getattr(module, "config", None)
    kind = _layer_type(module)
    if kind is not None:
        return "chunked" if "chunked" in kind else "sliding" if "sliding" in kind else None
    if hasattr(module, "sliding_window"):
        return "sliding" if module.sliding_window not in (None, -1, (-1, -1)) else None
    if getattr(config, "attention_chunk_size", None):
        return "chunked"
    return "sliding" if getattr(config, "sliding_window", None) else None


def _first(owner: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def beside_mask_readers(model: nn.Module, sites: Collection[AttentionSite]) -> list[AttentionSite]:
    """List the sites that share their masks with a module that computes with them, by what kind they are.

    So do the convolutions of LASR and Parakeet, which hide padded frames: the sites are those of their layer.
    """
    names = {site.name for site in sites}
    inside = tuple(f"{name}." for name in names)
    found: dict[str, AttentionSite] = {}
    for name, module in model.named_modules():
        if name in names or name.startswith(inside) or not _asks_for_mask_kind(type(module).forward):
            continue
        while name and not any(site.name.startswith(f"{name}.") for site in sites):
            name = name.rpartition(".")[0]
        found |= {site.name: site for site in sites if not name or site.name.startswith(f"{name}.")}
    return list(found.values())


def configs_of_unreached(model: nn.Module, sites: list[AttentionSite]) -> list[Any]:
    """List the configs by which masks are made for attention modules that no plan reaches.

    Big Bird's has none of transformers' masks until a short text comes, which it reads in full.
    """
    modules = dict(model.named_modules())
    found = []
    for name in unrouted(model, sites):
        arguments = inspect.signature(inspect.unwrap(type(modules[name]).forward)).parameters
        if isinstance(modules[name], nn.MultiheadAttention) or not any("mask" in x for x in arguments):
            continue
        while name and not isinstance(modules[name].__dict__.get("config"), PreTrainedConfig):
            name = name.rpartition(".")[0]
        found.append(modules[name].config)
    return found


def _asks_for_mask_kind(forward: Callable[..., Any]) -> bool:
    forward = inspect.unwrap(forward)
    names = forward.__code__.co_varnames if inspect.isfunction(forward) else ()
    try:  # reading a source takes a millisecond, and a model has dozens of classes
        return "attention_mask" in names and "attention_mask.dtype" in _source(forward)
    except (OSError, TypeError):
        return False


def _hidden_size(module: nn.Module, source: ForwardInfo) -> int | None:
    """Read the width of the hidden state off the first projection."""
    if source.parameters[:1] != (HIDDEN_ARGUMENT,):
        return None
    inside = (*module.children(), *module.modules())  # moshi's projections hold a layer each
    sizes = (_first(part, "in_features", "nx") for part in inside)
    return next((size for size in sizes if size is not None), None)


def _rotaries(model: nn.Module) -> dict[str, list[nn.Module]]:
    """Find the modules that make cosines and sines, by the names of the modules that they are in."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        tensors = (*module.named_buffers(recurse=False), ("inv_freq", getattr(module, "inv_freq", None)))
        if any(key.endswith("inv_freq") and isinstance(value, Tensor) for key, value in tensors):
            found.setdefault(name.rpartition(".")[0], []).append(module)
    return found


def _rotary(name: str, module: Any, rotaries: dict[str, list[nn.Module]]) -> nn.Module | None:
    """Choose the one that serves an attention module: alone in the nearest module around both."""
    thetas = getattr(getattr(module, "config", None), "layer_rope_theta", None)
    if thetas and not thetas[_first(module, "layer_idx") or 0]:
        return None  # a layer without
    around = [owner for owner in rotaries if not owner or f"{name}.".startswith(f"{owner}.")]
    nearest = rotaries[max(around, key=len)] if around else []
    return nearest[0] if len(nearest) == 1 else None


def _site(
    name: str,
    module: nn.Module,
    source: ForwardInfo,
    rotaries: dict[str, list[nn.Module]],
    attributes: dict[str, Any] | None = None,
) -> AttentionSite:
    seen: Any = ModuleView(module, attributes or {})
    config = getattr(seen, "config", None)
    heads = _first(seen, "num_heads", "num_attention_heads", "n_heads", "n_head")
    heads = heads or _first(config, "num_attention_heads", "n_head", "n_heads", "encoder_attention_heads")
    head_dim = _first(
        seen, "qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size"
    )
    value_dim = _first(seen, "v_head_dim") or head_dim
    if head_dim is not None and hasattr(seen, "q_pos_sine_proj"):
        head_dim *= 2  # conditional DETR puts a place of that size beside each query and key
    groups = _first(seen, "num_key_value_groups")
    # jetmoe says 1, as its keys come in repeated
    kv_heads = None if groups == 1 else _first(seen, "num_key_value_heads", "num_kv_heads")
    if kv_heads is None and heads is not None:
        latent = hasattr(seen, "kv_lora_rank")  # keys of latent attention come in expanded to every head
        kv_heads = heads if latent or not groups else heads // groups
    index = _first(seen, "layer_idx")
    positions = _first(config, "max_position_embeddings", "n_positions", "max_target_positions")
    causal = getattr(seen, "is_causal", None)
    return AttentionSite(
        name=name,
        module=module,
        forward_info=source,
        layer_idx=index,
        window=window_of(seen),
        head_dim=head_dim,
        value_dim=value_dim,
        heads=heads,
        kv_heads=kv_heads,
        max_positions=positions,
        causal=causal if isinstance(causal, bool) else None,
        rotary=_rotary(name, seen, rotaries) if ROTARY_ARGUMENT in source.parameters else None,
        layer_type=_layer_type(seen),
        adapted=attributes is not None,
        attributes=attributes or {},
        hidden_size=_hidden_size(module, source),
    )


def find_sites(model: Any) -> list[AttentionSite]:
    """List every attention module that routes through the interface, in the order of the model.

    By itself, or by its adapter while it is patched.
    """
    sites = []
    rotaries = _rotaries(model)
    for name, module in model.named_modules():
        adapter = adapter_of(module)
        if adapter is not None:
            source = read_forward(adapter.forward)
            assert source is not None, f"the adapter of {type(module).__name__} calls no attention interface"
            sites.append(_site(name, module, source, rotaries, attributes_of(model, name)))
            continue
        source = read_source(type(module))
        if source is not None and getattr(module, "config", None) is not None:
            sites.append(_site(name, module, source, rotaries))
    if any(site.takes for site in sites):  # gemma 4 gives since 5.24, even where none takes
        sites = [replace(site, taken=True) for site in sites]
    towers = {site.name for site in sites if writes_text(model) and is_beside_text(model, site.name)}
    if not towers:
        return sites
    return [replace(site, tower=site.name in towers, beside_tower=site.name not in towers) for site in sites]


def writes_text(model: Any) -> bool:
    """Tell whether a model is of a kind that writes text, with or without the head that does."""
    return model.can_generate() or type(model.config) in MODEL_FOR_MULTIMODAL_LM_MAPPING


def is_text_alone(config: Any) -> bool:
    """Tell whether a model's config has no part for images or sounds."""
    return config.get_text_config(decoder=True) is config and not any(hasattr(config, x) for x in BESIDE)


def is_beside_text(model: Any, name: str) -> bool:
    """Tell whether a module is in a part for images or sounds: its config is not the text's.

    Args:
        model: a transformers model; an encoder-decoder has no such part.
        name: of a module in it, dotted.
    """
    whole = model.config
    if whole.is_encoder_decoder or is_text_alone(whole):
        return False
    around: list[Any] = [model]
    for part in name.split("."):
        around.append(getattr(around[-1], part))
    configs = (getattr(module, "config", None) for module in reversed(around))
    nearest = next(config for config in configs if config is not None)
    return type(nearest) not in (type(whole), type(whole.get_text_config(decoder=True)))


@cache
def _weighs(cls: Any) -> bool:
    """Tell whether a class is called attention and weighs values by softmax (a linear attention does not)."""
    if "Attention" not in cls.__name__ or issubclass(cls, nn.MultiheadAttention):
        return "Attention" in cls.__name__
    try:
        source = inspect.getsource(cls).lower()  # nn.Softmax too
    except (OSError, TypeError):
        return True
    words = "softmax", "logsumexp", "scaled_dot_product_attention", "multi_head_attention", "_flash_attention"
    return any(word in source for word in words)


def unrouted(model: nn.Module, sites: list[AttentionSite]) -> dict[str, str]:
    """List attention modules that keep attention code of their own: dotted name -> name of the class.

    Only the innermost ones, and none that holds or belongs to one of the sites.
    """
    classes: list[tuple[str, Any]] = [(name, type(module)) for name, module in model.named_modules()]
    found = {name: cls.__name__ for name, cls in classes if _weighs(cls)}
    names = [f"{name}." for name in (*found, *(site.name for site in sites))]
    return {
        name: cls
        for name, cls in found.items()
        if not any(other.startswith(f"{name}.") for other in names if other != f"{name}.")
        and not any(f"{name}.".startswith(f"{site.name}.") for site in sites)
    }


def counted(modules: dict[str, str]) -> str:
    """Write classes with the number of their modules, and why no adapter serves them where that is known."""
    count = sorted(Counter(modules.values()).items())
    reasons = {cls: f": {REASONS[cls]}" if cls in REASONS else "" for cls, _ in count}
    return ", ".join(f"{cls} ({number}{reasons[cls]})" for cls, number in count)
