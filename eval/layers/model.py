"""The model behind `eval.layers`: its layers, and other attentions in some while the rest keep their maps."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_linattn import describe, is_patched, patch_model, unpatch_model
from hf_linattn.errors import CheckpointError, NotPatchedError, PlanError
from hf_linattn.patching.causality import require_causal
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.plan import transformers_model

from ..common.models import UNPATCHED, ModelSpec, load_model

OWN = "softmax"
Spec = tuple[str, dict[str, Any]]
"""A patch and its options, by part."""


@dataclass(frozen=True)
class Layer:
    """One attention module that has a linear form, and would have its own attention back.

    Attributes:
        number: index of its layer; its place among the patched modules where indices do not tell them apart.
        key: of a plan: the index as text, or the module's name.
        module: dotted name.
        patch, options: the linear form, options by part.
        state_bytes: of the linear form, per sequence; None where it grows.
        bytes_per_token: of the layer's own attention; window: of that attention, None for all tokens.
    """

    number: int
    key: str
    module: str
    patch: str
    options: dict[str, Any] = field(default_factory=dict)
    state_bytes: int | None = None
    bytes_per_token: int | None = None
    window: str | None = None


def layers_of(model: nn.Module) -> list[Layer]:
    """List the patched attention modules of a causal model that is patched in every layer.

    Layers that keep a window of the model may stay as they are: their state is constant already.

    Raises:
        NotPatchedError: there is no patch.
        PlanError: the patch leaves out a layer that sees all tokens.
        UnsupportedModelError: an encoder, or an encoder-decoder.
    """
    inside = transformers_model(model)
    if not is_patched(inside):
        raise NotPatchedError(
            f"{type(inside).__name__} is not patched: which layers stay softmax is asked of a model that has "
            "a linear form in every layer, its maps trained against the original's attention"
        )
    require_causal(model)
    rows = [row for row in describe(model) if not row.tower]
    unpatched = [row.module for row in rows if row.patch == OWN and row.window is None]
    if unpatched:
        raise PlanError(
            f"the patch covers a part of the layers only: {', '.join(unpatched)} keep their own attention. "
            "Patch every layer, train the maps, and rank then"
        )
    with _replaced(model, {row.module: None for row in rows}):
        own = {row.module: row for row in describe(model)}
    counts = Counter(row.layer for row in rows)
    by_index = None not in counts and max(counts.values()) == 1
    return [
        Layer(
            number=row.layer if by_index and row.layer is not None else place,
            key=str(row.layer) if by_index else row.module,
            module=row.module,
            patch=row.patch,
            options=row.options,
            state_bytes=row.state_bytes,
            bytes_per_token=own[row.module].bytes_per_token,
            window=own[row.module].window,
        )
        for place, row in enumerate(row for row in rows if row.patch != OWN)
    ]


def sliding_of(model: nn.Module) -> str:
    """Tell how the model was patched: "keep", "global" or "refuse"."""
    return str(transformers_model(model).config.linattn["sliding"])


@contextmanager
def _replaced(model: nn.Module, attentions: Mapping[str, Spec | None]) -> Iterator[None]:
    """Do what `put` does, for a while; the model is left unchanged."""
    before, children, sliding = _plan(model), _children(model), sliding_of(model)
    put(model, attentions)
    try:
        yield
    finally:
        if is_patched(model):
            unpatch_model(model)
        _install(model, before, children, sliding)


def put(model: nn.Module, attentions: Mapping[str, Spec | None]) -> None:
    """Put other attentions into the named modules, None for the module's own; all others keep their maps.

    Raises:
        LinattnError: an attention does not suit its module; nothing was touched.
    """
    plan, children = _plan(model), _children(model)
    kept = {name: child for name, child in children.items() if name not in attentions}
    specs = {**plan, **attentions}
    _install(model, {name: spec for name, spec in specs.items() if spec is not None}, kept, sliding_of(model))


def _plan(model: nn.Module) -> dict[str, Spec]:
    return {row.module: (row.patch, row.options) for row in describe(model) if row.patch != OWN}


def _children(model: nn.Module) -> dict[str, nn.Module]:
    inside = transformers_model(model)
    return {name: inside.get_submodule(f"{name}.{NAME}") for name in _plan(model)}


def _install(
    model: nn.Module, plan: Mapping[str, Spec], children: Mapping[str, nn.Module], sliding: Any
) -> None:
    if not plan:
        unpatch_model(model)
        return
    patch_model(model, lambda name, _: plan.get(name), sliding=sliding)
    inside = transformers_model(model)
    for name, child in children.items():
        inside.get_submodule(name).add_module(NAME, child)  # the one with the learned maps, not a fresh one


@contextmanager
def with_own(
    model: nn.Module, layers: Sequence[Layer], own: Collection[int], kept: Spec
) -> Iterator[list[str]]:
    """Give the layers `own` the attention `kept` in place of their linear form, for a while.

    Args:
        model: patched in every layer.
        layers: of `layers_of`.
        own: numbers of the layers.
        kept: their attention.

    Yields the modules to bypass in every forward pass: their own attention needs no other module.

    Raises:
        LinattnError: `kept` does not suit a layer.
    """
    names = [layer.module for layer in layers if layer.number in own]
    if kept[0] == OWN or not names:
        yield names
        return
    with _replaced(model, dict.fromkeys(names, kept)):
        yield []


def check_original(model: nn.Module, source: str, dtype: str = "auto") -> None:
    """Compare all weights that are not the patch's with those of the original.

    Raises:
        CheckpointError: they differ.
    """
    original = load_model(ModelSpec("", source, UNPATCHED), dtype=dtype)
    theirs = original.state_dict()
    ours = {name: x for name, x in model.state_dict().items() if NAME not in name.split(".")}
    strange = sorted(theirs.keys() ^ ours.keys())
    if strange:
        raise CheckpointError(f"{source} is not the original of this model: {strange[0]!r} is in one only")
    for name, weight in ours.items():
        other = theirs[name].to(weight)
        # NaN is equal to NaN here: that the model computes none is said where it is measured
        if weight.shape != other.shape or not (
            torch.equal(weight, other) or torch.allclose(weight, other, rtol=0, atol=0, equal_nan=True)
        ):
            raise CheckpointError(
                f"the model was fine-tuned: {name!r} differs from {source}, so bypassed layers are not the "
                "original's. Rank the layers of a model in which the patch's parameters alone were trained"
            )


def fingerprint(model: nn.Module) -> str:
    """Hash the patch's weights: rows of other weights must not stand in one table."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if NAME in name.split("."):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
