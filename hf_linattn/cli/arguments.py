"""Options of commands: a dataclass whose fields are `--its-names`, and types for argparse."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_linattn.errors import OptionError

MOST_SEED = 2**32 - 1


def option(default: Any, text: str, **extra: Any) -> Any:
    """Declare a field of a dataclass of options.

    Args:
        default: its default.
        text: its help.
        **extra: choices, minimum, maximum, metavar, `parse`: "patch", "json" or a function, how the text is
            read, and `formerly`: its value in runs of versions that did not know it, where that is not the
            default.
    """
    return dataclasses.field(default=default, metadata={"help": text, **extra})


def flag_of(name: str) -> str:
    """Name the option of a field: `--eval-data` for `eval_data`."""
    return "--" + name.replace("_", "-")


def check_values(arguments: Any) -> None:
    """Check every field against its minimum, maximum and choices.

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


def add_options(
    parser: argparse.ArgumentParser, cls: type, groups: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Give a parser one option per field of the dataclass.

    Args:
        parser: of a command.
        cls: the dataclass.
        groups: title -> fields below it in `--help`; the one without any gets all others.
    """
    items = {item.name: item for item in dataclasses.fields(cls)}
    if groups is None:
        for item in items.values():
            _add_option(parser, item)
        return
    placed = {name for names in groups.values() for name in names}
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in names or [name for name in items if name not in placed]:
            _add_option(group, items[name])


def _add_option(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, item: dataclasses.Field[Any]
) -> None:
    flag, extra = flag_of(item.name), dict(item.metadata)
    for ours in ("minimum", "maximum", "formerly"):
        extra.pop(ours, None)
    required, parse = item.default is dataclasses.MISSING, extra.pop("parse", None)
    if item.default is False:
        parser.add_argument(flag, action="store_true", help=extra["help"])
        return
    kinds: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "patch": argparse_type(_patch),
        "json": argparse_type(json_object),
    }
    kind: Callable[[str], Any]
    if callable(parse):
        kind = argparse_type(parse)
    else:
        kind = kinds.get(parse or str(item.type).removesuffix(" | None"), str)
    if not required and item.default is not None:
        extra["help"] += " (default: %(default)s)"
    default = None if required else item.default
    parser.add_argument(flag, type=kind, required=required, default=default, **extra)


def _patch(text: str) -> str | dict[str, Any]:
    return json_object(text) if text.lstrip().startswith("{") else text


def argparse_type(parse: Callable[[str], Any], *, keep_text: bool = False) -> Callable[[str], Any]:
    """Turn a function that raises OptionError into a type of argparse, which shows the message.

    Args:
        parse: reads the text.
        keep_text: only check the text, and leave it what it is.
    """

    def convert(text: str) -> Any:
        try:
            value = parse(text)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text if keep_text else value

    return convert


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object: `{"train_length": 512}`.

    Raises:
        OptionError: it is something else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(f"not JSON: {text} ({error})") from error
    if not isinstance(value, dict):
        raise OptionError(f'expected a JSON object such as {{"name": 1}}, not {text}')
    return value


def positive_int(text: str) -> int:
    """Read a whole number of at least 1, as a type of argparse."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def positive_ints(text: str) -> list[int]:
    """Read whole numbers of at least 1 by comma, each once, in order, as a type of argparse."""
    return sorted({positive_int(part) for part in text.split(",")})


def seed(text: str) -> int:
    """Read a seed, as a type of argparse: NumPy takes those of 32 bits."""
    if not text.strip().isdecimal() or int(text) > MOST_SEED:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {MOST_SEED}, got {text!r}")
    return int(text)


def positive_number(text: str) -> float:
    """Read a finite number above 0, as a type of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def differences(cls: Any, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the settings that differ when a run is resumed, as text, compared as JSON holds them.

    What an older version of this package did not know counts as its default, or `formerly`.

    Args:
        cls: dataclass of the options.
        before: what the run began with.
        now: what it is resumed with, all of which must be the same.
    """
    defaults = {item.name: item.metadata.get("formerly", item.default) for item in dataclasses.fields(cls)}
    known = {**defaults, **before}
    return [
        f"{name} ({known.get(name)!r} then, {value!r} now)"
        for name, value in json.loads(json.dumps(now)).items()
        if known.get(name) != value
    ]
