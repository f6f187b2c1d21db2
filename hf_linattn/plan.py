"""Which attention module gets which patch: read a name, a dict or a callable, and check it against the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hf_linattn.errors import OptionError, PlanError, UnsupportedModelError
from hf_linattn.registry import Recipe, find, parse
from hf_linattn.sites import Site, attention_classes, find_sites

Plan = str | dict[Any, Any] | Callable[[str, nn.Module], Any]
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def sites_of(model: nn.Module) -> list[Site]:
    """Every site of the model.

    Raises:
        UnsupportedModelError: no module routes through transformers' attention interface.
    """
    sites = find_sites(model)
    if not sites:
        classes = attention_classes(model)
        who = f"its attention ({', '.join(classes)}) computes softmax in its own forward" if classes else "it has none"
        raise UnsupportedModelError(
            f"{type(model).__name__}: no attention module goes through transformers' attention interface; {who}. Such "
            "models (bloom, falcon, gptj, mpt, state-space families) cannot be patched."
        )
    return sites


def _matches(key: Any, site: Site) -> bool:
    """Whether one key of a plan means this site: an index, a range "0-3,7", or a pattern of module names."""
    if isinstance(key, int) and not isinstance(key, bool):
        return site.layer_idx == key
    if isinstance(key, tuple | range | list):
        return any(_matches(part, site) for part in key)
    if not isinstance(key, str) or not key:
        raise PlanError(f"a plan's key is a layer index, a range such as '0-3,8', or a pattern of names, got {key!r}")
    parts = key.replace(" ", "").split(",")
    if all(RANGE.fullmatch(part) for part in parts):
        for part in parts:
            first, last = RANGE.fullmatch(part).groups()  # type: ignore[union-attr]
            if last is not None and int(last) < int(first):
                raise PlanError(f"the range {part!r} ends before it begins")
            if site.layer_idx is not None and int(first) <= site.layer_idx <= int(last or first):
                return True
        return False
    return fnmatchcase(site.name, key) or fnmatchcase(site.name, f"*.{key}") or fnmatchcase(site.name, f"{key}.*")


def _recipe(spec: Any, options: dict[str, Any]) -> Recipe:
    """One entry of a plan: a name, or (name, options)."""
    if isinstance(spec, tuple | list) and len(spec) == 2 and isinstance(spec[1], dict):
        return parse(spec[0], {**options, **spec[1]})
    return parse(spec, options)


def _accepted(spec: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Those of the shared options that this entry of a plan has a part for."""
    from hf_linattn.registry import signature

    name = spec[0] if isinstance(spec, tuple | list) else spec
    if not isinstance(name, str):
        return {}
    names = [part.strip() for part in name.split("+")]
    return {k: v for k, v in options.items() if k in names or any(k in signature(find(part)) for part in names)}


def _from_dict(plan: dict[Any, Any], sites: list[Site], options: dict[str, Any]) -> dict[str, Recipe]:
    if not plan:
        raise PlanError("the plan is empty")
    recipes = {i: _recipe(spec, _accepted(spec, options)) for i, spec in enumerate(plan.values())}
    used = {key for spec in plan.values() for key in _accepted(spec, options)}
    if strange := [key for key in options if key not in used]:
        raise OptionError(f"no patch of the plan has an option {strange[0]!r}")
    chosen: dict[str, Recipe] = {}
    owner: dict[str, Any] = {}
    for (key, _), recipe in zip(plan.items(), recipes.values(), strict=True):
        matching = [site for site in sites if _matches(key, site)]
        if not matching:
            names = ", ".join(f"{site.name} (layer {site.layer_idx})" for site in sites[:3])
            more = f" and {len(sites) - 3} more" if len(sites) > 3 else ""
            raise PlanError(f"the plan's key {key!r} matches no attention module; there are {names}{more}")
        for site in matching:
            if site.name in chosen:
                raise PlanError(f"the plan's keys {owner[site.name]!r} and {key!r} overlap at {site.name}")
            chosen[site.name], owner[site.name] = recipe, key
    return chosen


def resolve(plan: Plan, sites: list[Site], options: dict[str, Any] | None) -> dict[str, Recipe]:
    """Module name -> recipe, for the modules that the plan names.

    Args:
        plan: a patch for every module; or key -> patch, keys being layer indices, ranges "0-3,8" or patterns of module
            names, patches a name or (name, options); or a callable (name, module) -> patch or None.
        sites: the model's attention modules.
        options: for the patches; see `registry.parse`.

    Raises:
        PlanError, UnknownPatchError, OptionError: before anything is touched.
    """
    if options is not None and not isinstance(options, dict):
        raise OptionError(f"options must be a dict, got {options!r}")
    if isinstance(plan, str):
        recipe = parse(plan, options)
        return {site.name: recipe for site in sites}
    if isinstance(plan, dict):
        return _from_dict(plan, sites, options or {})
    if not callable(plan):
        raise PlanError(f"a plan is a patch's name, a dict or a callable, got {plan!r}")
    answers = {site.name: plan(site.name, site.module) for site in sites}
    chosen = {name: _recipe(spec, _accepted(spec, options or {})) for name, spec in answers.items() if spec is not None}
    if not chosen:
        raise PlanError("the plan's callable chose no attention module")
    used = {key for spec in answers.values() if spec is not None for key in _accepted(spec, options or {})}
    if strange := [key for key in options or {} if key not in used]:
        raise OptionError(f"no patch of the plan has an option {strange[0]!r}")
    return chosen
