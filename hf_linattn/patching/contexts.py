"""Change a model for a `with` block: patch it, let its own attention compute, use branches of hybrids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import nn

from hf_linattn.errors import NotPatchedError, OptionError, PlanError, UnsupportedModelError
from hf_linattn.patching.installation import installation_of, native_implementation
from hf_linattn.patching.interface import NAME, check_native_impl
from hf_linattn.patching.patch import Model, Sliding, patch_model
from hf_linattn.patching.plan import Plan, sites_of, transformers_model

Branches = Literal["both", "window", "rest", "linear", "none"]
"""What a hybrid computes with. W(i) are the tokens of query i's window, its sinks and salient ones.

both    the hybrid as it is
window  softmax over W(i) alone, as the patch "window"
rest    the linear attention as the hybrid uses it: over the tokens outside W(i), divided by a sum of its own;
        0 where there is nothing outside
linear  the linear attention over all tokens that query i sees, as if there were no window; what a linear
        attention that is trained alone computes
none    0
"""


@contextmanager
def patched(
    model: Model, patch: Plan = "elu1", *, options: dict[str, Any] | None = None, sliding: Sliding = "keep"
) -> Iterator[Model]:
    """Patch inside a `with` block only.

    Args:
        model: an unpatched model, or its wrapper.
        patch: what to put on, as in `patch_model`.
        options: of the patches.
        sliding: what becomes of windows, as in `patch_model`.

    Yields:
        The model.

    Raises:
        NotPatchedError: the model is patched already, and leaving the block could not bring that patch back.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import is_patched, patched
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> with patched(model, "elu1"):
        ...     is_patched(model)
        True
        >>> is_patched(model)
        False
    """
    inside = transformers_model(model)
    if installation_of(inside) is not None:
        raise NotPatchedError(
            "patched() needs an unpatched model: call unpatch_model first, or use patch_model to replace"
        )
    patch_model(model, patch, options=options, sliding=sliding)
    try:
        yield model
    finally:
        installation = installation_of(inside)
        if installation is not None:
            installation.undo()


@contextmanager
def bypassed(model: nn.Module, modules: Collection[str] | None = None) -> Iterator[None]:
    """Let patched modules compute with the attention that they had before, while this lasts.

    The weights are those of the patched model; nothing is copied, and other modules stay patched. Caches that
    were begun on one side cannot be continued on the other.

    Args:
        model: a patched model, or its wrapper.
        modules: names of attention modules, or patterns of them; None for all.

    Raises:
        NotPatchedError: the model is not patched.
        PlanError: a name that fits no patched module.
        UnsupportedModelError: a module that had neither 'sdpa' nor 'eager' before.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import bypassed, patch_model
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> ids = torch.arange(20)[None]
        >>> softmax = model(ids).logits
        >>> model = patch_model(model, "elu1")
        >>> with bypassed(model):
        ...     torch.equal(model(ids).logits, softmax)
        True
    """
    inside = transformers_model(model)
    installation = installation_of(inside)
    if installation is None:
        raise NotPatchedError(f"{type(inside).__name__} is not patched: there is nothing to bypass")
    sites = [site for site in sites_of(inside) if NAME in site.module._modules]
    chosen = []
    for pattern in ["*"] if modules is None else modules:
        matching = [site for site in sites if fnmatchcase(site.name, pattern)]
        if not matching and modules is not None:
            names = ", ".join(site.name for site in sites)
            raise PlanError(f"{pattern!r} is no patched module of this model; there are {names}")
        chosen += matching
    native = {site.name: native_implementation(site, installation) for site in chosen}
    for site in chosen:
        check_native_impl(site, native[site.name])
    children: list[Any] = [site.module._modules[NAME] for site in chosen]
    before = [child.bypass for child in children]
    try:
        for site, child in zip(chosen, children, strict=True):
            child.bypass = native[site.name]
        yield
    finally:
        for child, earlier in zip(children, before, strict=True):
            child.bypass = earlier


def hybrids(model: nn.Module) -> dict[str, nn.Module]:
    """List the attentions of a model that have two branches, by dotted name."""
    modules = model.named_modules()
    return {
        name: module for name, module in modules if getattr(module, "branches", None) in get_args(Branches)
    }


@contextmanager
def use_branches(model: nn.Module, branches: Branches) -> Iterator[None]:
    """Let all hybrids of a model compute with some of their branches alone, while this lasts.

    Nothing is copied or saved; weights of a branch that is not used get no gradient. A backward that runs
    forwards again (gradient checkpointing) belongs inside, or needs `as_in_first_run`. A cache belongs inside
    from its first token to its last: "linear" sums other tokens than the other branches do.

    Args:
        model: a patched model, or its wrapper, or a part of it.
        branches: "both", "window", "rest", "linear" or "none", see `Branches`.

    Raises:
        OptionError: there are no such branches.
        UnsupportedModelError: no attention of the model is a hybrid.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import patch_model, use_branches
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> ids = torch.arange(40)[None]
        >>> window = patch_model(model, "window", options={"size": 8})(ids).logits
        >>> hybrid = patch_model(model, "window+elu1", options={"size": 8})
        >>> with use_branches(hybrid, "window"):
        ...     torch.allclose(hybrid(ids).logits, window, atol=1e-4)
        True
    """
    known = get_args(Branches)
    if branches not in known:
        near = get_close_matches(str(branches), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise OptionError(f"unknown branches {branches!r}.{hint} There are {', '.join(known)}.")
    chosen = list(hybrids(model).values())
    if not chosen:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention with two branches: that is what a window with a linear "
            "attention is, as in patch_model(model, 'window+elu1')"
        )
    before = [module.branches for module in chosen]
    try:
        for module in chosen:
            module.branches = branches  # type: ignore[assignment]
        yield
    finally:
        for module, earlier in zip(chosen, before, strict=True):
            module.branches = earlier


def as_in_first_run(model: nn.Module) -> Callable[[], tuple[AbstractContextManager[None], ...]]:
    """Make the `context_fn` of `torch.utils.checkpoint.checkpoint` for the layers of a model.

    Forwards that a backward runs again then compute with the branches and the bypasses of their first run,
    whatever is in force by then.

    Args:
        model: a patched model, its patch complete, or its wrapper.
    """
    switched = [
        (module, name)
        for module in model.modules()
        for name in ("branches", "bypass")
        if hasattr(module, name)
    ]

    @contextmanager
    def setting(values: list[Any]) -> Iterator[None]:
        before = [getattr(module, name) for module, name in switched]
        try:
            for (module, name), value in zip(switched, values, strict=True):
                setattr(module, name, value)
            yield
        finally:
            for (module, name), value in zip(switched, before, strict=True):
                setattr(module, name, value)

    def contexts() -> tuple[AbstractContextManager[None], ...]:
        return nullcontext(), setting([getattr(module, name) for module, name in switched])

    return contexts
