"""A dataclass as the options of a command: each field is `--its-name`, checked alike from both sides."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from hf_linattn.errors import OptionError


def option(default: Any, text: str, **extra: Any) -> Any:
    """A field with a default; `extra` may hold choices, bounds, metavar and how the text is parsed."""
    return dataclasses.field(default=default, metadata={"help": text, **extra})


def flag_of(name: str) -> str:
    """`--eval-data` for `eval_data`."""
    return "--" + name.replace("_", "-")


def check_values(arguments: Any) -> None:
    """Hold every field against its minimum, maximum and choices.

    Raises:
        OptionError: naming the option and what it may be.
    """
    for item in dataclasses.fields(arguments):
        value, minimum = getattr(arguments, item.name), item.metadata.get("minimum")
        if minimum is not None and value is not None and not minimum <= value < math.inf:
            raise OptionError(f"{flag_of(item.name)} must be at least {minimum}, not {value}")
        maximum = item.metadata.get("maximum")
        if maximum is not None and value is not None and value > maximum:
            raise OptionError(f"{flag_of(item.name)} must be at most {maximum}, not {value}")
        choices = item.metadata.get("choices")
        if choices and value is not None and value not in choices:
            raise OptionError(f"{flag_of(item.name)} must be one of {', '.join(choices)}, not {value!r}")


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """One option per field of the dataclass."""
    for item in dataclasses.fields(cls):
        flag, extra = flag_of(item.name), dict(item.metadata)
        extra.pop("minimum", None)
        extra.pop("maximum", None)
        required, parse = item.default is dataclasses.MISSING, extra.pop("parse", None)
        if item.default is False:
            parser.add_argument(flag, action="store_true", help=extra["help"])
            continue
        kinds: dict[str, Callable[[str], Any]] = {
            "int": int,
            "float": float,
            "patch": _patch,
            "json": _json_object,
        }
        kind = kinds.get(parse or str(item.type).removesuffix(" | None"), str)
        if not required and item.default is not None:
            extra["help"] += " (default: %(default)s)"
        parser.add_argument(
            flag, type=kind, required=required, default=None if required else item.default, **extra
        )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {text} ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"name": 1}}, not {text}')
    return value


def _patch(text: str) -> str | dict[str, Any]:
    return _json_object(text) if text.lstrip().startswith("{") else text


def differences(cls: Any, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Settings that a resumed run gives otherwise, in words, as JSON holds them.

    What an older version of this package did not know counts as its default.

    Args:
        cls: dataclass of the options.
        before: what the run began with.
        now: what it is given, all of which must be the same.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(cls)}
    known = {**defaults, **before}
    return [
        f"{name} ({known.get(name)!r} then, {value!r} now)"
        for name, value in json.loads(json.dumps(now)).items()
        if known.get(name) != value
    ]
