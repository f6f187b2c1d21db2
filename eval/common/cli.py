"""Texts of the command line that several evaluation commands read, and types for argparse."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
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


def checked(parse: Callable[[str], Any], keep: bool = False) -> Callable[[str], Any]:
    """A parser of ours as a type of argparse; with `keep` the text stays what it is."""

    def convert(text: str) -> Any:
        try:
            value = parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text if keep else value

    return convert


def whole(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def wholes(text: str) -> list[int]:
    """Such numbers by comma, each once, in order."""
    return sorted({whole(part) for part in text.split(",")})


def doubling(text: str) -> list[int]:
    """`512,...,4096` -> [512, 1024, 2048, 4096]."""
    parts = text.split(",")
    lengths: list[int] = []
    for index, part in enumerate(parts):
        if part.strip() in ("...", "…"):
            if not lengths or index + 1 == len(parts) or lengths[-1] < 1:
                raise argparse.ArgumentTypeError(
                    f"'...' stands between two lengths, as in 512,...,8192: {text!r}"
                )
            while lengths[-1] * 2 < whole(parts[index + 1]):
                lengths.append(lengths[-1] * 2)
        else:
            lengths.append(whole(part))
    return lengths
