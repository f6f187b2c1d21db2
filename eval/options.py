"""Texts of the command line that several evaluation commands read."""

from __future__ import annotations

import json
from typing import Any

from hf_linattn.errors import OptionError

ROPE_SCALINGS = ("linear", "dynamic", "yarn")


def parse_rope_scaling(text: str) -> tuple[str, float]:
    """`yarn:4` -> ("yarn", 4.0).

    Raises:
        OptionError: the kind is unknown, or the factor is no number of at least 1.
    """
    kind, _, number = text.partition(":")
    if kind not in ROPE_SCALINGS:
        raise OptionError(f"unknown RoPE scaling {kind!r}; known: {', '.join(ROPE_SCALINGS)}, as KIND:FACTOR")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise OptionError(f"RoPE scaling {text!r}: the factor must be a number of at least 1, as in {kind}:4")
    return kind, factor


def parse_options(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        OptionError: it is something else.
    """
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"options must be JSON, as in '{{\"train_length\": 512}}': {error}") from error
    if not isinstance(options, dict):
        raise OptionError(f"options must be a JSON object, as in '{{\"train_length\": 512}}', got {text}")
    return options
