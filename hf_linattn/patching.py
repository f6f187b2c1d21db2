"""patch_model and unpatch_model: everything is checked first, then installed; a failure leaves the model as it was."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_linattn.cache import install, self_attention_cache
from hf_linattn.configs import OwnConfigs
from hf_linattn.errors import NotPatchedError, OptionError, PlanError, UnsupportedModelError
from hf_linattn.patched import PatchedAttention
from hf_linattn.plan import Plan, resolve, sites_of
from hf_linattn.registry import Recipe
from hf_linattn.seam import KEPT, NAME, check_kept, find_state
from hf_linattn.sites import Site

Model = TypeVar("Model", bound=nn.Module)
Sliding = Literal["keep", "global", "refuse"]
FORMAT = 1
RECORD = "_linattn"
PREPARE_CACHE = "_prepare_cache_for_generation"


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
    state_layers: list[tuple[int, str]] = field(default_factory=list)
    options: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def _children(
    sites: list[Site], recipes: dict[str, Recipe], sliding: Sliding
) -> tuple[dict[str, PatchedAttention], dict[str, str]]:
    """Build the children of all chosen sites, none of them attached yet; and why others of the plan stay."""
    children: dict[str, PatchedAttention] = {}
    notes: dict[str, str] = {}
    for site in sites:
        recipe = recipes.get(site.name)
        if recipe is None or all(part.identity for part in recipe.parts):
            continue
        linear = any(part.linear for part in recipe.parts)
        if site.window is not None and sliding == "refuse":
            raise UnsupportedModelError(f"{site.name} has a {site.window} window, and sliding='refuse' was asked for")
        if site.window is not None and sliding == "keep" and linear:
            notes[site.name] = f"{site.window} window kept"
            continue
        child = PatchedAttention(recipe, site, keep_window=sliding != "global")
        parameter = next(site.module.parameters(), None)
        if parameter is not None and parameter.is_floating_point():
            child.to(device=parameter.device, dtype=parameter.dtype)
        children[site.name] = child.train(site.module.training)
    return children, notes


def entry_of(recipes: dict[str, Recipe], sliding: Sliding) -> dict[str, Any]:
    """The `linattn` entry of config.json."""
    groups: list[dict[str, Any]] = []
    for name, recipe in recipes.items():
        for group in groups:
            if group["patch"] == recipe.spec and group["options"] == recipe.options:
                group["modules"].append(name)
                break
        else:
            groups.append({"patch": recipe.spec, "options": recipe.options, "modules": [name]})
    return {"format": FORMAT, "version": package_version(), "sliding": sliding, "patches": groups}


def _check_arguments(model: Any, sliding: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"patch_model takes a model, got {type(model).__name__}")
    if sliding not in ("keep", "global", "refuse"):
        raise OptionError(f"sliding must be 'keep', 'global' or 'refuse', got {sliding!r}")
    if not isinstance(getattr(model, "config", None), object) or not hasattr(model, "config"):
        raise UnsupportedModelError(f"{type(model).__name__} has no config: patch the transformers model itself")


def patch_model(
    model: Model,
    patch: Plan = "elu1",
    *,
    options: dict[str, Any] | None = None,
    sliding: Sliding = "keep",
) -> Model:
    """Replace the attention of a pretrained model, in place. A patched model gets the new patch instead of the old.

    Args:
        model: any transformers model whose attention goes through the attention interface.
        patch: "elu1"; a composition "softmax1+logn"; a plan per layer {"0-11": "elu1", "12-23": "softmax"} whose keys are
            indices, ranges or patterns of module names and whose values may be (name, options); or a callable
            (name, module) -> patch or None.
        options: of the patches, e.g. {"train_length": 4096}.
        sliding: layers with a sliding or chunked window under a linear patch: "keep" leaves them as they are (they are
            linear already), "global" patches them and drops the window, "refuse" raises. Patches of scores honour the
            window, unless "global".

    Returns:
        The model.

    Raises:
        LinattnError: one of its kinds, before anything was touched.
    """
    _check_arguments(model, sliding)
    old = model.__dict__.get(RECORD)
    sites = sites_of(model)
    recipes = resolve(patch, sites, options)
    children, notes = _children(sites, recipes, sliding)
    active = any(not part.identity for recipe in recipes.values() for part in recipe.parts)
    if active and not children:
        raise PlanError(
            f"{type(model).__name__}: every attention layer that the plan names has a window and keeps it. Pass "
            "sliding='global' to drop the windows."
        )
    _check_windows(sites, children, sliding)
    if children:
        for site in sites:
            if site.name not in children:
                kept = _own_implementation(site, old)
                check_kept(site.module, site.name, kept)
    if old is not None:
        unpatch_model(model)
    _install(model, sites, children, recipes, notes, sliding)
    return model


def _own_implementation(site: Site, old: Record | None) -> str:
    if old is not None and old.configs is not None:
        for original, copied in old.configs.pairs.values():
            if site.module.config is copied:
                return original._attn_implementation or "eager"
    return site.module.config._attn_implementation or "eager"  # type: ignore[union-attr]


def _check_windows(sites: list[Site], children: dict[str, PatchedAttention], sliding: Sliding) -> None:
    for site in sites:
        if site.window is not None and sliding == "global" and site.name in children and not site.source.updates:
            continue
        child = children.get(site.name)
        if child is not None and child.linear and site.source.updates and site.layer_idx is None:
            if site.source.slot == "argument":
                continue
            raise UnsupportedModelError(f"{site.name} has no layer_idx, so its place in the cache cannot be found")


def _install(
    model: nn.Module,
    sites: list[Site],
    children: dict[str, PatchedAttention],
    recipes: dict[str, Recipe],
    notes: dict[str, str],
    sliding: Sliding,
) -> None:
    record = Record(options={name: recipe.options for name, recipe in recipes.items()}, notes=notes)
    if children:
        record.configs = OwnConfigs(model)
        for site in sites:
            if site.name in children:
                site.module.add_module(NAME, children[site.name])
                record.children.append(site.module)
                record.hooks.append(site.module.register_forward_pre_hook(find_state, with_kwargs=True))
                if children[site.name].linear and _holds_state(site):
                    assert site.layer_idx is not None
                    record.state_layers.append((site.layer_idx, site.name))
            else:
                kept = record.configs.implementation(site.module.config)  # type: ignore[arg-type]
                setattr(site.module, KEPT, kept)
                record.kept.append(site.module)
        record.configs.use_copies(entry_of(recipes, sliding), model.config)  # type: ignore[arg-type]
        if hasattr(model, PREPARE_CACHE) and record.state_layers:
            model.__dict__[PREPARE_CACHE] = functools.partial(_prepare_cache, model)
    model.__dict__[RECORD] = record


def _holds_state(site: Site) -> bool:
    cross = "Cross" in type(site.module).__name__
    causal = bool(getattr(site.module, "is_causal", False))
    return causal and not cross and site.source.slot == "self" and site.layer_idx is not None


def _prepare_cache(model: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Stands before the model's own method: state layers exist before generate() asks the cache to record its past."""
    output = getattr(type(model), PREPARE_CACHE)(model, generation_config, model_kwargs, *args, **kwargs)
    cache = self_attention_cache(model_kwargs.get("past_key_values"))
    if cache is not None:
        for index, name in model.__dict__[RECORD].state_layers:
            install(cache, index, name)
        if generation_config.is_assistant:
            cache.activate_past_recording()
    return output


def unpatch_model(model: Model) -> Model:
    """Take the patch off: bit-identical logits, the same state_dict keys, the same config, no hook left.

    Raises:
        NotPatchedError: the model is not patched.
    """
    record: Record | None = model.__dict__.pop(RECORD, None)
    if record is None:
        raise NotPatchedError(f"{type(model).__name__} is not patched")
    model.__dict__.pop(PREPARE_CACHE, None)
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
    if RECORD in model.__dict__:
        raise NotPatchedError("patched() needs an unpatched model: call unpatch_model first, or use patch_model to replace")
    patch_model(model, patch, options=options, sliding=sliding)
    try:
        yield model
    finally:
        if RECORD in model.__dict__:
            unpatch_model(model)


def is_patched(model: nn.Module) -> bool:
    """Whether `patch_model` was called on this model and not undone."""
    return RECORD in model.__dict__


