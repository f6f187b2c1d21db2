"""Many patches of one model side by side: the entries of `--compare`.

softmax, window:size=256, softmax1+logn:train_length=1024, softmax@yarn:8
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hf_linattn import describe, is_linear, is_patched, patch_model, unpatch_model
from hf_linattn.errors import LinattnError, OptionError, UnsupportedModelError

from .cli import parse_rope_scaling
from .models import UNPATCHED, Curve, load_model, scaled_rotaries

FORM = "PATCH[:OPTION=VALUE...][@KIND:FACTOR]"
PROBE = 8
"""Tokens that every entry reads before anything is measured."""


def parse_entries(text: str) -> list[str]:
    """`softmax, logn:kappa=0.2` -> ["softmax", "logn:kappa=0.2"], each of them readable by `parse_entry`.

    Raises:
        OptionError: an entry cannot be read.
    """
    entries = [entry.strip() for entry in _split(text, ",")]
    for entry in entries:
        parse_entry(entry)
    return entries


def parse_entry(text: str) -> tuple[str, dict[str, Any], str | None]:
    """`PATCH[:OPTION=VALUE...][@KIND:FACTOR]` -> patch, its options, RoPE scaling or None.

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
        place[option] = _value(value)
    if at:
        parse_rope_scaling(rope_scaling)
    return patch, options, rope_scaling if at else None


def _split(text: str, mark: str) -> list[str]:
    """The parts between the marks that stand outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == mark and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def entry_curves(entries: Sequence[str], source: str) -> list[Curve]:
    """One curve per entry, all of the same weights.

    Raises:
        OptionError: two entries are the same.
    """
    curves: list[Curve] = []
    for entry in entries:
        patch, options, rope_scaling = parse_entry(entry)
        for other in curves:
            if (other.patch, other.options, other.rope_scaling) == (patch, options, rope_scaling):
                raise OptionError(f"--compare has {other.label!r} twice")
        curves.append(Curve(entry, source, patch, options, rope_scaling))
    return curves


def is_reference(curve: Curve) -> bool:
    """Whether the curve is there for others to be compared with: the model's own attention, as it came."""
    return curve.patch in (UNPATCHED, "softmax") and curve.rope_scaling is None


@contextmanager
def named(label: str) -> Iterator[None]:
    """Put the name of a curve before the errors of this package."""
    try:
        yield
    except LinattnError as error:
        raise type(error)(f"{label}: {error}") from error


@torch.no_grad()
def check_entries(
    curves: Sequence[Curve], *, dtype: str = "auto", device: torch.device | str = "cpu", stream: bool = False
) -> None:
    """Put every entry on the model, let it read a few tokens, and take it off again.

    Args:
        curves: of one model.
        dtype: as for `load_model`.
        device: where the model goes.
        stream: whether every entry must have a constant state.

    Raises:
        OptionError: the model has a patch with weights of its own, which the entries would lose.
        LinattnError: an entry does not suit the model; the message begins with the entry.
    """
    model: Any = load_model(Curve("", curves[0].source), dtype=dtype, device=device).eval()
    if is_patched(model):
        if describe(model).parameters:
            raise OptionError(
                f"{curves[0].source} has a patch with weights of its own, which --compare would leave out: "
                "measure it by itself, or as --baseline of the model it comes from"
            )
        unpatch_model(model)
    probe = torch.zeros(1, PROBE, dtype=torch.long, device=device)
    for curve in curves:
        with named(curve.label):
            if curve.rope_scaling is not None:
                scaled_rotaries(model, curve.rope_scaling)
            patch_model(model, curve.patch or "softmax", options=curve.options)
            # what a patch refuses in a call shows only in a call
            model(input_ids=probe, use_cache=stream)
            if stream:
                refuse_growing_cache(model)
            unpatch_model(model)


def refuse_growing_cache(model: torch.nn.Module) -> None:
    """Raise unless every layer has a constant state, as a stream needs it.

    Raises:
        UnsupportedModelError: a layer's cache grows with the document.
    """
    if not is_linear(model):
        raise UnsupportedModelError(
            "--stream needs attention with a constant state in every layer, and this model has layers whose "
            "cache grows with the document; try a linear patch, such as elu1"
        )
