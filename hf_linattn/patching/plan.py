"""Resolve which attention module gets which patch: by a name, a dict or a callable."""

from __future__ import annotations

import inspect
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_linattn.attention.site import AttentionSite
from hf_linattn.errors import OptionError, PlanError, UnsupportedModelError
from hf_linattn.patching.discovery import counted, find_sites, is_beside_text, unrouted
from hf_linattn.registry import Recipe, names_in, options_for, parse

Plan = str | dict[Any, Any] | Callable[[str, nn.Module], Any]
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def _outermost(module: nn.Module) -> Iterator[PreTrainedModel]:
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def transformers_model(model: Any) -> PreTrainedModel:
    """Return the model itself, or the one transformers model inside a wrapper (peft, torch.compile, ...).

    Raises:
        UnsupportedModelError: there is none, or more than one.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a transformers model, got {reprlib.repr(model)}")
    inside = list({id(part): part for part in _outermost(model)}.values())
    if len(inside) != 1:
        held = ", ".join(type(part).__name__ for part in inside) or "none"
        raise UnsupportedModelError(
            f"expected a transformers model or a wrapper of one; {type(model).__name__} holds {held}"
        )
    return inside[0]


def sites_of(model: nn.Module) -> list[AttentionSite]:
    """List every attention module of a model that can be patched.

    Raises:
        UnsupportedModelError: no module routes through transformers' attention interface.
    """
    sites = find_sites(model)
    if not sites:
        own = counted(unrouted(model, sites))
        why = f"no adapter knows {own}" if own else "it has none"
        raise UnsupportedModelError(
            f"{type(model).__name__}: no attention module goes through transformers' attention interface; "
            f"{why}"
        )
    return sites


def _in_decoder(model: Any, names: Collection[str]) -> bool:
    """Tell whether one of these is in a model's text decoder: an encoder-decoder says which part that is."""
    inside = set(model.get_decoder().modules() if model.config.is_encoder_decoder else model.modules())
    return any(model.get_submodule(name) in inside for name in names)


def report_unrouted(model: Any, sites: list[AttentionSite]) -> None:
    """Warn of attention modules that a plan for all modules does not reach.

    Raises:
        UnsupportedModelError: the text decoder is out of reach as a whole.
    """
    text = [site for site in sites if not site.tower]
    left = {name: cls for name, cls in unrouted(model, sites).items() if not is_beside_text(model, name)}
    if not left and text:
        return
    what = f"whose attention code is their own, out of a patch's reach: {counted(left)}"
    out_of_reach = not left or _in_decoder(model, left)
    writes = model.can_generate() or not text  # towers alone
    if writes and all(site.causal is False for site in text) and out_of_reach:
        has = f"has modules {what}" if left else "has no attention module"
        raise UnsupportedModelError(
            f"{type(model).__name__}: its text decoder {has}. To patch the others alone, "
            f"name them, e.g. patch_model(model, {{{sites[0].name!r}: ...}})"
        )
    warnings.warn(f"{type(model).__name__}: modules stay as they are {what}", stacklevel=3)


def _parts(key: Any) -> list[Any]:
    """Split a plan's key into alternatives: a tuple's members, the ranges of "0-3,8", or the key itself."""
    if isinstance(key, tuple | range | frozenset):
        return [part for member in key for part in _parts(member)]
    if isinstance(key, Integral) and key is not True and key is not False:
        return [int(key)]
    if not isinstance(key, str) or not key.strip():
        raise PlanError(
            f"a plan's key is a layer index, a range such as '0-3,8', or a pattern of names, got {key!r}"
        )
    parts = [part.strip() for part in key.replace(" ", "").split(",")]
    ranges = [RANGE.fullmatch(part) for part in parts]
    if not all(ranges):
        return [key.strip()]
    return [range(int(m[1]), int(m[2] or m[1]) + 1) for m in ranges if m is not None]


def _matching(key: Any, sites: list[AttentionSite]) -> list[AttentionSite]:
    """List the sites that a plan's key means, each once; every alternative must mean one."""
    parts = _parts(key)
    matches = [[site for site in sites if _matches(part, site)] for part in parts]
    if not matches or not all(matches):
        names = ", ".join(f"{site.name} (layer {site.layer_idx})" for site in sites[:3])
        more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
        raise PlanError(f"the plan's key {key!r} matches no attention module; there are {names}{more}")
    last = max((part[-1] for part in parts if isinstance(part, range)), default=0)
    if last >= (layers := _layers(sites)):
        raise PlanError(
            f"the plan's key {key!r} reaches to layer {last}; there are {layers} layers, from 0 on"
        )
    return list({site.name: site for part in matches for site in part}.values())


def _layers(sites: list[AttentionSite]) -> int:
    """Count the layers of the text: some may have no attention."""
    counts = [1]
    for site in sites:
        if not site.tower:
            config = getattr(site.module, "config", None)
            counts += [1 + (site.layer_idx or 0), getattr(config, "num_hidden_layers", None) or 0]
    return max(counts)


def _matches(part: Any, site: AttentionSite) -> bool:
    if isinstance(part, int | range):
        layers = [part] if isinstance(part, int) else part
        return site.layer_idx in layers and not site.tower  # which counts its own layers
    return any(fnmatchcase(site.name, pattern) for pattern in (part, f"*.{part}", f"{part}.*"))


def _by_key(plan: dict[Any, Any], sites: list[AttentionSite]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    owner: dict[str, Any] = {}
    for key, spec in plan.items():
        for site in _matching(key, sites):
            if site.name in chosen:
                raise PlanError(f"the plan's keys {owner[site.name]!r} and {key!r} overlap at {site.name}")
            chosen[site.name], owner[site.name] = spec, key
    if not chosen:
        raise PlanError("the plan is empty")
    return chosen


def _by_callable(plan: Callable[[str, nn.Module], Any], sites: list[AttentionSite]) -> dict[str, Any]:
    try:
        inspect.signature(plan).bind("name", None)
    except TypeError:
        raise PlanError(
            f"a callable as a plan must take (name, module) of an attention module, and "
            f"{getattr(plan, '__qualname__', reprlib.repr(plan))} does not"
        ) from None
    except ValueError:  # a builtin without a signature: the call itself will tell
        pass
    answers = {site.name: plan(site.name, site.module) for site in sites}
    chosen = {name: spec for name, spec in answers.items() if spec is not None}
    if not chosen:
        raise PlanError("the plan's callable chose no attention module")
    return chosen


def resolve(plan: Plan, sites: list[AttentionSite], options: dict[str, Any] | None) -> dict[str, Recipe]:
    """Resolve a plan: module name -> recipe, for the modules that it names.

    Args:
        plan: a patch for every module of the text; or key -> patch, keys being layer indices, ranges
            "0-3,8" or patterns of module names, patches a name or (name, options); or a callable
            (name, module) -> patch or None.
        sites: the model's attention modules.
        options: for the patches; see `registry.parse`.

    Raises:
        PlanError, UnknownPatchError, OptionError: before anything is touched.
    """
    if options is not None and not isinstance(options, dict):
        raise OptionError(f"options must be a dict, got {options!r}")
    if isinstance(plan, str):
        recipe = parse(plan, options)
        text = [site for site in sites if not site.tower]
        return {site.name: recipe for site in text or sites}
    if isinstance(plan, dict):
        chosen = _by_key(plan, sites)
    elif callable(plan) and not isinstance(plan, type):
        chosen = _by_callable(plan, sites)
    else:
        raise PlanError(f"a plan is a patch's name, a dict or a callable, got {reprlib.repr(plan)}")
    return _with_options(chosen, options or {})


def _with_options(chosen: dict[str, Any], shared: dict[str, Any]) -> dict[str, Recipe]:
    """Give each patch its own options and those of the shared ones that it has a part for."""
    recipes: dict[str, Recipe] = {}
    used: set[Any] = set()
    for name, value in chosen.items():
        pair = isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], dict)
        spec, own = value if pair else (value, {})
        accepted = options_for(names_in(spec), shared)
        used |= accepted.keys()
        recipes[name] = parse(spec, {**accepted, **own})
    if strange := [key for key in shared if key not in used]:
        raise OptionError(f"no patch of the plan has an option {strange[0]!r}")
    return recipes
