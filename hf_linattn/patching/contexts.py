"""A patched model with its own attention back for a while: the teacher inside the student."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hf_linattn.errors import NotPatchedError, PlanError
from hf_linattn.patching.interface import NAME, check_kept
from hf_linattn.patching.patch import RECORD
from hf_linattn.patching.plan import sites_of, transformers_model


@contextmanager
def bypassed(model: nn.Module, modules: Collection[str] | None = None) -> Iterator[None]:
    """While this lasts, patched modules compute with the attention that they had before.

    The weights are those of the patched model; nothing is copied, and other modules stay patched. Caches that
    were begun on one side cannot be continued on the other.

    Args:
        model: a patched model, or its wrapper.
        modules: names of attention modules, or patterns of them; None for all.

    Raises:
        NotPatchedError: the model is not patched.
        PlanError: a name that fits no patched module.
        UnsupportedModelError: a module that had neither 'sdpa' nor 'eager' before.
    """
    inside = transformers_model(model)
    record = inside.__dict__.get(RECORD)
    if record is None:
        raise NotPatchedError(f"{type(inside).__name__} is not patched: there is nothing to bypass")
    sites = [site for site in sites_of(inside) if NAME in site.module._modules]
    chosen = []
    for pattern in ["*"] if modules is None else modules:
        found = [site for site in sites if fnmatchcase(site.name, pattern)]
        if not found and modules is not None:
            names = ", ".join(site.name for site in sites)
            raise PlanError(f"{pattern!r} is no patched module of this model; there are {names}")
        chosen += found
    own = {}
    for site in chosen:
        config: Any = site.module.config
        own[site.name] = record.configs.original(config)._attn_implementation or "eager"
        check_kept(site, own[site.name])
    children: list[Any] = [site.module._modules[NAME] for site in chosen]
    before = [child.bypass for child in children]
    try:
        for site, child in zip(chosen, children, strict=True):
            child.bypass = own[site.name]
        yield
    finally:
        for child, earlier in zip(children, before, strict=True):
            child.bypass = earlier
