"""Many patches of one model side by side: the model specs of `--compare`.

softmax, window:size=256, softmax1+logn:train_length=1024, softmax@yarn:8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_linattn import describe, is_linear, is_patched, patch_model, unpatch_model
from hf_linattn.errors import LinattnError, OptionError, UnsupportedModelError
from hf_linattn.registry import option_value

from .cli import argparse_type, parse_rope_scaling
from .models import UNPATCHED, ModelSpec, load_model, scaled_rotaries, set_seed

FORM = "PATCH[:OPTION=VALUE...][@KIND:FACTOR]"
PROBE = 8
"""Tokens that every spec reads before anything is measured."""


def parse_specs(text: str) -> list[str]:
    """Cut entries apart: `softmax, logn:kappa=0.2` -> ["softmax", "logn:kappa=0.2"].

    Raises:
        OptionError: an entry cannot be read.
    """
    entries = [entry.strip() for entry in _split(text, ",")]
    for entry in entries:
        parse_spec(entry)
    return entries


def add_compare_argument(
    parser: argparse.ArgumentParser, what: str, *more: str, dest: str | None = None
) -> None:
    """Add --compare, and the names in `more` for the same."""
    parser.add_argument(
        *("--compare", *more),
        dest=dest,
        type=argparse_type(parse_specs),
        action="extend",
        metavar="ENTRIES",
        help=f"{what}, by comma: a patch or composition ('softmax' is the model's own attention), its "
        f"options, and @KIND:FACTOR for scaled RoPE, as {FORM}; repeatable",
    )


def parse_spec(text: str) -> tuple[str, dict[str, Any], str | None]:
    """Parse `PATCH[:OPTION=VALUE...][@KIND:FACTOR]` into the patch, its options, RoPE scaling or None.

    A value is JSON, or else a string. An option that several parts of a composition have is written
    PART.OPTION, as in `softmax1+logn:logn.kappa=0.2`.

    Raises:
        OptionError: the text has another form, or an option comes twice.
    """
    body, at, rope_scaling = text.partition("@")
    patch, *pairs = _split(body, ":")
    if not patch.strip():
        raise OptionError(
            f"{text!r} names no patch: an entry is {FORM}; the model's own attention is 'softmax'"
        )
    if patch == UNPATCHED:
        raise OptionError(f"{text!r}: the model's own attention is called 'softmax' here")
    if "=" in patch:
        raise OptionError(f"{text!r} is no patch: an entry is {FORM}, options behind colons, not commas")
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            hint = f" RoPE is scaled by {patch}@{pair}." if not equals else ""
            raise OptionError(f"{text!r}: {pair!r} is no OPTION=VALUE; an entry is {FORM}.{hint}")
        part, dot, option = name.rpartition(".")
        place = options.setdefault(part, {}) if dot else options
        if option in place:
            raise OptionError(f"{text!r} gives {name!r} twice")
        place[option] = option_value(value)
    if at:
        parse_rope_scaling(rope_scaling)
    return patch, options, rope_scaling if at else None


def _split(text: str, mark: str) -> list[str]:
    """Cut a text at the marks that stand outside brackets."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def specs_of(entries: Sequence[str], source: str) -> list[ModelSpec]:
    """Make a model spec of each entry of --compare, all of the same weights.

    Raises:
        OptionError: two entries are the same.
    """
    parsed = [parse_spec(entry) for entry in entries]
    for index, parts in enumerate(parsed):
        if parts in parsed[:index]:
            raise OptionError(f"--compare has {entries[parsed.index(parts)]!r} twice")
    return [ModelSpec(entry, source, *parts) for entry, parts in zip(entries, parsed, strict=True)]


def is_reference(spec: ModelSpec) -> bool:
    """Tell whether others are compared with this spec: the model's own attention, not scaled."""
    return spec.patch in (UNPATCHED, "softmax") and spec.rope_scaling is None


@contextmanager
def error_prefix(label: str) -> Iterator[None]:
    """Put the label of a model before the errors of this package."""
    try:
        yield
    except LinattnError as error:
        raise type(error)(f"{label}: {error}") from error


class ModelLoader:
    """Gives the models of many specs, one after the other; those of --compare from weights loaded once.

    What a patch computes is to the last bit what it computes on weights loaded for it alone: unpatching is
    exact, and random parameters are drawn from the state that the random numbers have behind the loading.

    Args:
        compared: specs of --compare, all of one model; each is tried on a few tokens here.
        dtype: as for `load_model`.
        device: where the models are used.
        seed: of random parameters.
        stream: whether every compared one must have a constant state.

    Raises:
        OptionError: the model has a patch with weights of its own, which the compared specs would lose.
        LinattnError: a compared spec does not suit the model; the message begins with its label.
    """

    def __init__(
        self,
        compared: Sequence[ModelSpec],
        *,
        dtype: str = "auto",
        device: torch.device | str = "cpu",
        seed: int = 0,
        stream: bool = False,
    ) -> None:
        self.dtype, self.device, self.seed = dtype, device, seed
        self._source = compared[0].source if compared else None
        self._shared: tuple[Any, torch.Tensor] | None = None
        probe = torch.zeros(1, PROBE, dtype=torch.long, device=device)
        for spec in compared:
            self._weights()  # its errors are of no spec
            with error_prefix(spec.label), self.use(spec) as model, torch.no_grad():
                # what a patch refuses in a call shows only in a call
                model(input_ids=probe, use_cache=stream)
                if stream:
                    refuse_growing_cache(model)

    @contextmanager
    def use(self, spec: ModelSpec) -> Iterator[nn.Module]:
        """Give the model of a spec; one with a patch of its own on shared weights, and without it afterwards.

        Raises:
            LinattnError: the model cannot be had, or the patch does not suit it.
        """
        if spec.source != self._source or spec.patch is None:
            self._shared = None  # two models may be too much
            yield self.load(spec)
            return
        model, random_state = self._weights()
        set_seed(self.seed)
        torch.set_rng_state(random_state)
        model = model.to("cpu")  # random parameters are drawn there, as on a model just loaded
        rotaries = {} if spec.rope_scaling is None else scaled_rotaries(model, spec.rope_scaling)
        before = {name: model.get_submodule(name) for name in rotaries}
        try:
            for name, module in rotaries.items():
                model.set_submodule(name, module)
            if spec.patch != UNPATCHED:
                patch_model(model, spec.patch, options=spec.options)
            yield model.to(self.device)
        finally:
            if is_patched(model):
                unpatch_model(model)
            for name, module in before.items():
                model.set_submodule(name, module)

    def load(self, spec: ModelSpec) -> nn.Module:
        """Load the model of a spec, to stay.

        Raises:
            LinattnError: see `use`.
        """
        set_seed(self.seed)
        return load_model(spec, dtype=self.dtype, device=self.device)

    def _weights(self) -> tuple[Any, torch.Tensor]:
        """Load the compared model without a patch; the state of the random numbers behind that comes too."""
        if self._shared is None:
            set_seed(self.seed)
            model: Any = load_model(ModelSpec("", str(self._source)), dtype=self.dtype).eval()
            self._shared = model, torch.get_rng_state()
            if is_patched(model):
                if describe(model).parameters:
                    raise OptionError(
                        f"{self._source} has a patch with weights of its own, which --compare would leave "
                        "out: measure it by itself, or as --baseline of the model it comes from"
                    )
                unpatch_model(model)
        return self._shared


def refuse_growing_cache(model: nn.Module) -> None:
    """Raise unless every layer has a constant state, as a stream needs it.

    Raises:
        UnsupportedModelError: a layer's cache grows with the document.
    """
    if not is_linear(model):
        raise UnsupportedModelError(
            "--stream needs attention with a constant state in every layer, and this model has layers whose "
            "cache grows with the document; try a linear patch, such as elu1"
        )
