"""Put attention into a model and take it out: everything is resolved and checked, then installed."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from hf_linattn.attention.masks import ADDITIVE_MASKS, DENSE_MASKS, NO_CHUNKS, UNREAD_MASKS, WHOLE_MASKS
from hf_linattn.attention.site import AttentionSite
from hf_linattn.cli.main import package_versions
from hf_linattn.errors import NotPatchedError, OptionError, PlanError, UnsupportedModelError
from hf_linattn.patching.adapters import masks_of
from hf_linattn.patching.discovery import (
    beside_mask_readers,
    configs_of_unreached,
    is_beside_text,
    writes_text,
)
from hf_linattn.patching.heads import HeadShare, agree, shares_of
from hf_linattn.patching.installation import (
    Installation,
    installation_of,
    native_implementation,
    patched_part,
)
from hf_linattn.patching.interface import NAME, check_native_impl
from hf_linattn.patching.module import PatchedAttention
from hf_linattn.patching.plan import Plan, report_unrouted, resolve, sites_of, transformers_model
from hf_linattn.registry import Recipe, parse

Model = TypeVar("Model", bound=nn.Module)
Sliding = Literal["keep", "global", "refuse"]
FORMAT = 1


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
            Give the whole model: one with a part that is patched by itself is not saved as a whole.
        patch: "elu1"; a composition "softmax1+logn"; a plan per layer {"0-11": "elu1", "12-23": "softmax"},
            whose keys are indices, ranges or patterns of module names and values may be (name, options);
            or a callable (name, module) -> patch or None. A name alone is for the text: what reads images
            or sounds for a model that writes text keeps its softmax, unless a plan names it.
        options: of the patches, e.g. {"train_length": 4096}.
        sliding: layers with a sliding or chunked window under a linear patch: "keep" leaves them as they are
            (linear already), "global" patches them and drops the window, "refuse" raises. Patches of scores
            honour the window, unless "global".

    Returns:
        The model.

    Raises:
        LinattnError: one of its kinds, before anything was touched.

    Warns:
        UserWarning: a patch for all modules does not reach some, whose attention code is their own; or learns
            what the adapters of a model (peft) do not hold.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import describe, patch_model
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> model = patch_model(model, {"0-3": "elu1", "4": "softmax1+logn"}, options={"train_length": 512})
        >>> [row.patch for row in describe(model)]
        ['elu1', 'elu1', 'elu1', 'elu1', 'softmax1+logn', 'softmax']
    """
    if sliding not in get_args(Sliding):
        raise OptionError(f"sliding must be 'keep', 'global' or 'refuse', got {sliding!r}")
    inside = transformers_model(model)
    sites = sites_of(inside)
    _check_alone(model, inside, sites)
    earlier = installation_of(inside)
    dtype = next((p.dtype for p in inside.parameters() if p.is_floating_point()), None)
    checked = _check(sites, resolve(patch, sites, options), sliding, earlier, dtype)
    shares = _shares(inside, sites, checked.children, checked.recipes)
    if isinstance(patch, str) and checked.children:
        report_unrouted(inside, sites)
    learned = {child.spec for child in checked.children.values() if any(True for _ in child.parameters())}
    if learned and getattr(inside, "peft_config", None):
        warnings.warn(
            f"{type(inside).__name__} has adapters of peft already, which do not hold what "
            f"{', '.join(map(repr, sorted(learned)))} learns: save_pretrained of the adapters will leave it "
            "out. Patch first, then get_peft_model or PeftModel.from_pretrained, with "
            f"modules_to_save=[{NAME!r}] in the adapter's config",
            stacklevel=2,
        )
    if earlier is not None:
        earlier.undo()
    agree(inside, checked.children)
    for name, share in shares.items():
        share.install(checked.children[name])
    _install(inside, checked, sliding)
    return model


def share_heads(model: PreTrainedModel) -> None:
    """Let a patched model, whose weights were split as they were loaded, compute the heads of this process.

    Raises:
        UnsupportedModelError: a patch that cannot be shared out by heads.
    """
    installation = installation_of(model)
    assert installation is not None
    children: dict[str, Any] = {name: module._modules[NAME] for module, name in installation.attached.items()}
    recipes = {name: parse(child.spec, installation.options[name]) for name, child in children.items()}
    for name, share in _shares(model, sites_of(model), children, recipes).items():
        share.install(children[name])


def _shares(
    model: PreTrainedModel,
    sites: list[AttentionSite],
    children: dict[str, Any],
    recipes: dict[str, Recipe],
) -> dict[str, HeadShare]:
    def rebuilt(site: AttentionSite) -> PatchedAttention:
        return PatchedAttention(recipes[site.name], site, keep_window=children[site.name].keep_window)

    return shares_of(model, sites, children, rebuilt)


def unpatch_model(model: Model) -> Model:
    """Take the patch off: bit-identical logits, the same state_dict keys, the same config, no hook left.

    Args:
        model: a patched model, or its wrapper.

    Returns:
        The model.

    Raises:
        NotPatchedError: the model is not patched.
        UnsupportedModelError: layers were copied with their patch, which would stay in the copies.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import patch_model, unpatch_model
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> ids = torch.arange(20)[None]
        >>> before = model(ids).logits
        >>> model = unpatch_model(patch_model(model, "elu1"))
        >>> torch.equal(model(ids).logits, before)
        True
    """
    inside = transformers_model(model)
    installation = installation_of(inside)
    if installation is None:
        raise NotPatchedError(f"{type(inside).__name__} is not patched")
    installation.undo()
    return model


def is_patched(model: nn.Module) -> bool:
    """Tell whether `patch_model` was called on this model and not undone."""
    return installation_of(transformers_model(model)) is not None


def _check_alone(model: nn.Module, inside: nn.Module, sites: list[AttentionSite]) -> None:
    """Refuse parts of models and models with patched parts, and models that are distributed already."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(
            "patch the model before DistributedDataParallel wraps it: it must see every weight"
        )
    part = patched_part(inside)
    if part is not None:
        raise UnsupportedModelError(
            f"{part!r} of this model is patched by itself: call unpatch_model on it first"
        )
    if installation_of(inside) is None and any(NAME in site.module._modules for site in sites):
        raise UnsupportedModelError(
            f"{type(inside).__name__} is a part of a patched model: call patch_model on the whole model"
        )


@dataclass(frozen=True)
class _Checked:
    """Hold what a plan makes of a model, resolved and checked, nothing installed yet.

    Attributes:
        sites: the model's attention modules.
        recipes: dotted module name -> what the plan names for it.
        children: dotted module name -> the child to attach.
        native: dotted module name -> the implementation that a module without child keeps; empty where no
            child is attached.
        notes: dotted module name -> what becomes of its window.
    """

    sites: list[AttentionSite]
    recipes: dict[str, Recipe]
    children: dict[str, PatchedAttention]
    native: dict[str, str]
    notes: dict[str, str]


def _check(
    sites: list[AttentionSite],
    recipes: dict[str, Recipe],
    sliding: Sliding,
    earlier: Installation | None,
    dtype: torch.dtype | None,
) -> _Checked:
    """Build what will be attached, and refuse what cannot work, before anything is touched."""
    children, notes = _build_children(sites, recipes, sliding, dtype)
    native = {
        site.name: native_implementation(site, earlier)
        for site in (sites if children else [])
        if site.name not in children
    }
    for site in sites:
        if site.name in native:
            check_native_impl(site, native[site.name])
    return _Checked(sites, recipes, children, native, notes)


@torch.inference_mode(False)  # else its weights could never be trained
def _build_children(
    sites: list[AttentionSite], recipes: dict[str, Recipe], sliding: Sliding, dtype: torch.dtype | None
) -> tuple[dict[str, PatchedAttention], dict[str, str]]:
    """Build the children of all chosen sites, none attached yet, and say what becomes of their windows.

    They get the dtype of the module's weights, or `dtype` where those are integers (quantised).
    """
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
            children[site.name] = _build_child(recipe, site, dtype, keep_window=sliding != "global")
    if notes and not children:
        raise PlanError(
            f"every attention layer that the plan names ({', '.join(notes)}) has a window and keeps it. Pass "
            "sliding='global' (in commands --sliding global) to drop the windows."
        )
    return children, notes


def _build_child(
    recipe: Recipe, site: AttentionSite, dtype: torch.dtype | None, *, keep_window: bool
) -> PatchedAttention:
    child = PatchedAttention(recipe, site, keep_window=keep_window)
    own = list(site.module.parameters())
    # while a model is loaded, some modules make a few weights on the CPU
    parameter = next((weight for weight in own if weight.is_meta), own[0] if own else None)
    if parameter is not None:
        if (
            child.state_dict()
            and parameter.is_meta
            and any(hasattr(module, "_hf_hook") for module in site.module.modules())
        ):
            raise UnsupportedModelError(
                f"{site.name} is offloaded, and {recipe.spec!r} adds weights to it: patch before offloading, "
                "or save the patched model and load it with hf_linattn.from_pretrained(device_map=...)"
            )
        child.to(device=parameter.device, dtype=parameter.dtype if parameter.is_floating_point() else dtype)
    return child.train(site.module.training)


def _install(model: PreTrainedModel, checked: _Checked, sliding: Sliding) -> None:
    recipes, children = checked.recipes, checked.children
    options = {name: recipe.plain for name, recipe in recipes.items()}
    with Installation(model, options, checked.notes) as installation:
        if not children:
            return
        native = _native_configs(model, checked)
        routed = [site for site in checked.sites if not any(site.view.config is part for part in native)]
        entry, flags = _config_entry(recipes, sliding), _mask_flags(routed, children)
        installation.use_own_configs(entry, flags, native)
        pools = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
        # a tower pools by an attention of torch's, with the same masks
        for site in [*[site for site in routed if pools and site.tower], *beside_mask_readers(model, routed)]:
            site.view.config.__dict__[DENSE_MASKS] = True
        for config in configs_of_unreached(model, checked.sites):
            if config._attn_implementation == NAME:  # not that of a part with masks of its own
                config.__dict__[installation.flag_of_masks_before(config)] = True
        for site in checked.sites:
            installation.adapt(site)
            if site.name in children:
                installation.attach(site, children[site.name])
            else:
                installation.keep_native(site.module, checked.native[site.name])
        installation.prepare_caches()
        installation.drop_gguf_marks()
        installation.serve_batches()
        installation.refuse_saving(
            {key: what for name in children for key, what in recipes[name].unsaved.items()}
        )


def _config_entry(recipes: dict[str, Recipe], sliding: Sliding) -> dict[str, Any]:
    """Write the `linattn` entry of config.json."""
    version = package_versions(["hf-linattn"], missing="0")["hf-linattn"]  # a bare checkout has none
    groups: list[dict[str, Any]] = []
    for name, recipe in recipes.items():
        for group in groups:
            if group["patch"] == recipe.spec and group["options"] == recipe.plain:
                group["modules"].append(name)
                break
        else:
            groups.append({"patch": recipe.spec, "options": recipe.plain, "modules": [name]})
    return {"format": FORMAT, "version": version, "sliding": sliding, "patches": groups}


def _native_configs(model: PreTrainedModel, checked: _Checked) -> list[Any]:
    """List the configs of what is for images or sounds, and has no patch anywhere.

    Attention that is no site, as Gemma 4's for sounds, has masks of its own all the same.
    """
    if not writes_text(model):
        return []
    patched = [site.view.config for site in checked.sites if site.name in checked.children]
    text = [f"{site.name}." for site in checked.sites if not site.tower]
    return [
        module.config
        for name, module in model.named_modules()
        if name
        and "config" in module.__dict__
        and not any(site.startswith(f"{name}.") for site in text)
        and not any(module.config is other for other in patched)
        and is_beside_text(model, name)
    ]


def _mask_flags(sites: list[AttentionSite], children: dict[str, PatchedAttention]) -> tuple[str, ...]:
    """Name what masks must be, beyond the compact form for the window of each layer."""
    forms = {masks_of(site) for site in sites}
    dense = "boolean" in forms or any("attention_mask" in site.extras for site in sites)
    dropped = any(child.drops_window for child in children.values())
    kept = any(site.window is not None and site.name not in children for site in sites)
    chunks = any(site.window == "chunked" and site.name in children for site in sites)
    flags = {
        DENSE_MASKS: dense,  # a module, or the model around it, computes with the mask itself
        ADDITIVE_MASKS: "additive" in forms,
        WHOLE_MASKS: dropped and kept,
        UNREAD_MASKS: forms == {"compact"},
        NO_CHUNKS: chunks and dropped,
    }
    return tuple(flag for flag, wanted in flags.items() if wanted)
