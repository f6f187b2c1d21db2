"""patch_model and unpatch_model: everything is checked first, then installed; a failure changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any, Literal, TypeVar, get_args

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_linattn.attention.masks import DENSE_MASKS, WHOLE_MASKS
from hf_linattn.attention.site import Site
from hf_linattn.errors import CheckpointError, NotPatchedError, OptionError, PlanError, UnsupportedModelError
from hf_linattn.patching.cache_layers import install, install_full, self_attention_cache
from hf_linattn.patching.config import OwnConfigs
from hf_linattn.patching.interface import KEPT, NAME, check_kept, find_state
from hf_linattn.patching.module import PatchedAttention
from hf_linattn.patching.plan import Plan, resolve, sites_of, transformers_model
from hf_linattn.registry import Recipe

Model = TypeVar("Model", bound=nn.Module)
Sliding = Literal["keep", "global", "refuse"]
FORMAT = 1
RECORD = "_linattn"
PREPARE_CACHE = "_prepare_cache_for_generation"
SAVES = ("save_pretrained", "push_to_hub")


def package_version() -> str:
    """Version of the installed distribution, "0" from a bare checkout."""
    try:
        return version("hf-linattn")
    except PackageNotFoundError:
        return "0"


@dataclass
class Record:
    """What patching did to a model, and what undoes it."""

    configs: OwnConfigs | None = None
    children: list[nn.Module] = field(default_factory=list)
    kept: list[nn.Module] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    savers: list[tuple[nn.Module, str, Any]] = field(default_factory=list)  # model, method, its own if any
    cache_layers: list[tuple[int, str, bool]] = field(default_factory=list)  # index, name, linear
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def _children(
    sites: list[Site], recipes: dict[str, Recipe], sliding: Sliding
) -> tuple[dict[str, PatchedAttention], dict[str, str]]:
    """The children of all chosen sites, none of them attached yet; and what becomes of their windows."""
    children: dict[str, PatchedAttention] = {}
    notes: dict[str, str] = {}
    for site in sites:
        recipe = recipes.get(site.name)
        if recipe is None or recipe.identity:
            continue
        if site.window is not None and sliding == "refuse":
            raise UnsupportedModelError(
                f"{site.name} has a {site.window} window, and sliding='refuse' was asked for"
            )
        if site.window is not None and (sliding == "global" or not recipe.windowed):
            notes[site.name] = f"{site.window} window {'dropped' if sliding == 'global' else 'kept'}"
        if sliding == "global" or site.name not in notes:
            children[site.name] = _child(recipe, site, keep_window=sliding != "global")
    if notes and not children:
        raise PlanError(
            f"every attention layer that the plan names ({', '.join(notes)}) has a window and keeps it. Pass "
            "sliding='global' to drop the windows."
        )
    return children, notes


def _child(recipe: Recipe, site: Site, *, keep_window: bool) -> PatchedAttention:
    child = PatchedAttention(recipe, site, keep_window=keep_window)
    parameter = next(site.module.parameters(), None)
    if parameter is not None:
        learned = any(True for _ in child.parameters())
        if (
            learned
            and parameter.is_meta
            and any(hasattr(module, "_hf_hook") for module in site.module.modules())
        ):
            raise UnsupportedModelError(
                f"{site.name} is offloaded, and {recipe.spec!r} adds weights to it: patch before offloading, "
                "or save the patched model and load it with hf_linattn.from_pretrained(device_map=...)"
            )
        child.to(device=parameter.device, dtype=parameter.dtype if parameter.is_floating_point() else None)
    return child.train(site.module.training)


def entry_of(recipes: dict[str, Recipe], sliding: Sliding) -> dict[str, Any]:
    """The `linattn` entry of config.json."""
    groups: list[dict[str, Any]] = []
    for name, recipe in recipes.items():
        for group in groups:
            if group["patch"] == recipe.spec and group["options"] == recipe.plain:
                group["modules"].append(name)
                break
        else:
            groups.append({"patch": recipe.spec, "options": recipe.plain, "modules": [name]})
    return {"format": FORMAT, "version": package_version(), "sliding": sliding, "patches": groups}


def _check_alone(model: nn.Module, inside: nn.Module, sites: list[Site]) -> None:
    """A model is patched as a whole, and before it is distributed."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(
            "patch the model before DistributedDataParallel wraps it: it must see every weight"
        )
    for name, module in inside.named_modules():
        if module is not inside and RECORD in module.__dict__:
            raise UnsupportedModelError(
                f"{name!r} of this model is patched by itself: call unpatch_model on it first"
            )
    if RECORD not in inside.__dict__ and any(NAME in site.module._modules for site in sites):
        raise UnsupportedModelError(
            f"{type(inside).__name__} is a part of a patched model: call patch_model on the whole model"
        )


def patch_model(
    model: Model,
    patch: Plan = "elu1",
    *,
    options: dict[str, Any] | None = None,
    sliding: Sliding = "keep",
) -> Model:
    """Replace the attention of a pretrained model, in place; a new patch replaces an old one.

    Args:
        model: any transformers model whose attention goes through the attention interface, or its wrapper.
            Give the whole model: a part that is patched by itself is lost when the whole is saved.
        patch: "elu1"; a composition "softmax1+logn"; a plan per layer {"0-11": "elu1", "12-23": "softmax"},
            whose keys are indices, ranges or patterns of module names and values may be (name, options);
            or a callable (name, module) -> patch or None.
        options: of the patches, e.g. {"train_length": 4096}.
        sliding: layers with a sliding or chunked window under a linear patch: "keep" leaves them as they are
            (linear already), "global" patches them and drops the window, "refuse" raises. Patches of scores
            honour the window, unless "global".

    Returns:
        The model.

    Raises:
        LinattnError: one of its kinds, before anything was touched.
    """
    if sliding not in get_args(Sliding):
        raise OptionError(f"sliding must be 'keep', 'global' or 'refuse', got {sliding!r}")
    inside = transformers_model(model)
    sites = sites_of(inside)
    _check_alone(model, inside, sites)
    recipes = resolve(patch, sites, options)
    children, notes = _children(sites, recipes, sliding)
    record: Record | None = inside.__dict__.get(RECORD)
    if children:
        for site in sites:
            if site.name not in children:
                check_kept(site, _own_implementation(site, record))
    if record is not None:
        unpatch_model(inside)
    _install(inside, sites, children, recipes, notes, sliding)
    return model


def _own_implementation(site: Site, record: Record | None) -> str:
    """The attention implementation that the module has, or had before it was patched."""
    config: Any = site.module.config
    if record is not None and record.configs is not None:
        config = record.configs.original(config)
    return config._attn_implementation or "eager"


def _install(
    model: Any,
    sites: list[Site],
    children: dict[str, PatchedAttention],
    recipes: dict[str, Recipe],
    notes: dict[str, str],
    sliding: Sliding,
) -> None:
    record = Record(options={name: recipe.plain for name, recipe in recipes.items()}, notes=notes)
    if children:
        record.configs = OwnConfigs(model)
    for site in sites if children else []:
        child = children.get(site.name)
        if child is None:
            setattr(site.module, KEPT, _own_implementation(site, None))
            record.kept.append(site.module)
            continue
        site.module.add_module(NAME, child)
        record.children.append(site.module)
        record.hooks.append(site.module.register_forward_pre_hook(find_state, with_kwargs=True))
        if (child.keeps_state or child.drops_window) and _has_own_slot(site):
            assert site.layer_idx is not None
            record.cache_layers.append((site.layer_idx, site.name, child.keeps_state))
    if record.configs is not None:
        record.configs.use_copies(entry_of(recipes, sliding), model.config, _flags(sites, children))
    if record.cache_layers and hasattr(model, PREPARE_CACHE):
        model.__dict__[PREPARE_CACHE] = functools.partial(_prepare_cache, model)
    unsaved = {key: what for name in children for key, what in recipes[name].unsaved.items()}
    savers = [part for part in model.modules() if isinstance(part, PreTrainedModel)] if unsaved else []
    for part, method in product(savers, SAVES):
        record.savers.append((part, method, part.__dict__.get(method)))
        part.__dict__[method] = functools.partial(_refuse_save, unsaved)
    model.__dict__[RECORD] = record


def _flags(sites: list[Site], children: dict[str, PatchedAttention]) -> tuple[str, ...]:
    """What the masks must be, beyond the compact form for the window of each layer."""
    dense = any("attention_mask" in site.extras() for site in sites)  # a module computes with the mask itself
    dropped = any(child.drops_window for child in children.values())
    kept = any(site.window is not None and site.name not in children for site in sites)
    return (DENSE_MASKS,) * dense + (WHOLE_MASKS,) * (dropped and kept)


def _has_own_slot(site: Site) -> bool:
    cross = "Cross" in type(site.module).__name__
    causal = bool(getattr(site.module, "is_causal", False))
    return causal and not cross and site.source.slot == "self" and site.layer_idx is not None


def _prepare_cache(
    model: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Stands before the model's own method: the layers exist before generate() asks the cache anything."""
    output = getattr(type(model), PREPARE_CACHE)(model, generation_config, model_kwargs, *args, **kwargs)
    cache = self_attention_cache(model_kwargs.get("past_key_values"))
    if cache is not None:
        for index, name, linear in model.__dict__[RECORD].cache_layers:
            if model.get_submodule(name)._modules[NAME].bypass is None:
                (install if linear else install_full)(cache, index, name)
        if generation_config.is_assistant:
            cache.activate_past_recording()
    return output


def _refuse_save(unsaved: dict[str, str], *args: Any, **kwargs: Any) -> None:
    """Stands before the model's own method: nothing is written that could not be loaded."""
    names = ", ".join(f"{option} ({what})" for option, what in unsaved.items())
    raise CheckpointError(
        f"nothing was saved: config.json cannot hold {names}. A checkpoint names patches and carries no "
        "code: register a patch of your own instead (docs/adding-an-attention.md), or save the weights "
        "alone, by torch.save(model.state_dict(), ...), and patch in code before they are loaded"
    )


def unpatch_model(model: Model) -> Model:
    """Take the patch off: bit-identical logits, the same state_dict keys, the same config, no hook left.

    Raises:
        NotPatchedError: the model is not patched.
    """
    inside = transformers_model(model)
    record: Record | None = inside.__dict__.pop(RECORD, None)
    if record is None:
        raise NotPatchedError(f"{type(inside).__name__} is not patched")
    inside.__dict__.pop(PREPARE_CACHE, None)
    for part, method, own in record.savers:
        part.__dict__.pop(method, None)
        if own is not None:
            part.__dict__[method] = own
    for hook in record.hooks:
        hook.remove()
    for module in record.children:
        module._modules.pop(NAME, None)
    for module in record.kept:
        delattr(module, KEPT)
    if record.configs is not None:
        record.configs.restore()
    return model


@contextmanager
def patched(
    model: Model, patch: Plan = "elu1", *, options: dict[str, Any] | None = None, sliding: Sliding = "keep"
) -> Iterator[Model]:
    """Patch inside a `with` block only; arguments as `patch_model`.

    Raises:
        NotPatchedError: the model is patched already, and leaving the block could not bring that patch back.
    """
    if is_patched(model):
        raise NotPatchedError(
            "patched() needs an unpatched model: call unpatch_model first, or use patch_model to replace"
        )
    patch_model(model, patch, options=options, sliding=sliding)
    try:
        yield model
    finally:
        if is_patched(model):
            unpatch_model(model)


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` was called on this model and not undone."""
    return RECORD in transformers_model(model).__dict__
