"""Names of patches: `@register`, discovery in `hf_linattn.patches` and in other packages, options, composition."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

from hf_linattn.errors import OptionError, UnknownPatchError

if TYPE_CHECKING:
    from hf_linattn.attention import Patch

PatchType = TypeVar("PatchType", bound="type[Patch]")
_PATCHES: dict[str, type[Patch]] = {}


def register(name: str) -> Callable[[PatchType], PatchType]:
    """Class decorator: make a patch known as `name`.

    Raises:
        ValueError: the name is taken by another class, or holds characters that compositions and plans use.
    """
    if not name.replace("_", "").isalnum():
        raise ValueError(f"a patch's name holds letters, digits and '_' only: {name!r}")

    def decorate(cls: PatchType) -> PatchType:
        other = _PATCHES.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"two patches want the name {name!r}: {other.__module__} and {cls.__module__}")
        cls.name = name
        _PATCHES[name] = cls
        return cls

    return decorate


@lru_cache(maxsize=1)
def _discover() -> None:
    package = importlib.import_module("hf_linattn.patches")
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(info.name)
    for entry in entry_points(group="hf_linattn.patches"):
        entry.load()


def patches() -> dict[str, type[Patch]]:
    """Every registered patch by name, sorted."""
    _discover()
    return dict(sorted(_PATCHES.items()))


def available_patches() -> dict[str, str]:
    """Name -> one-line summary of every patch that `patch_model` takes."""
    return {name: (inspect.getdoc(cls) or "").partition("\n")[0] for name, cls in patches().items()}


def find(name: str) -> type[Patch]:
    """The patch of this name.

    Raises:
        UnknownPatchError: with the nearest name and the list.
    """
    known = patches()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownPatchError(f"unknown patch {name!r}.{hint} Registered: {', '.join(known)}.")
    return known[name]


def signature(cls: type[Patch]) -> dict[str, inspect.Parameter]:
    """Options of a patch: the keyword-only parameters of its constructor."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _fits(value: Any, annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in typing.get_args(annotation))
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is annotation


def check_options(cls: type[Patch], options: dict[str, Any]) -> None:
    """Names and types of options against the constructor; ranges are the constructor's own business.

    Raises:
        OptionError: naming the option, what came and what was expected.
    """
    known = signature(cls)
    hints = typing.get_type_hints(cls.__init__)
    for name, value in options.items():
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            takes = f"It takes {', '.join(known)}." if known else "It takes no options."
            raise OptionError(f"{cls.name!r} has no option {name!r}.{hint} {takes}")
        if not _fits(value, hints[name]):
            expected = str(hints[name]).replace("typing.", "")
            raise OptionError(f"option {name!r} of {cls.name!r} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class Recipe:
    """What one attention module gets: at most one attention and any number of modifiers, each with its options."""

    spec: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def parts(self) -> list[type[Patch]]:
        """The classes in the order in which they were named."""
        return [find(name) for name in self.spec.split("+")]

    def flat_options(self) -> dict[str, Any]:
        """All options in one dict, as `patch_model` takes them."""
        flat: dict[str, Any] = {}
        for part in self.options.values():
            flat.update(part)
        return flat


def parse(spec: str, options: dict[str, Any] | None = None) -> Recipe:
    """Read `"softmax1+logn"` with options for any of its parts.

    Args:
        spec: names joined by `+`.
        options: option -> value, given to the one part that has it; or part -> {option: value}.

    Raises:
        UnknownPatchError, OptionError: see there; also two attentions in one composition, or a part named twice.
    """
    if not isinstance(spec, str):
        raise OptionError(f"a patch is named by a string such as 'elu1' or 'softmax1+logn', got {spec!r}")
    names = [name.strip() for name in spec.split("+")]
    parts = {name: find(name) for name in names}
    if len(parts) < len(names):
        raise OptionError(f"{spec!r} names a patch twice")
    attentions = [name for name, cls in parts.items() if not cls.modifier]
    if len(attentions) > 1:
        raise OptionError(f"{spec!r} holds {len(attentions)} attentions ({', '.join(attentions)}): one at most")
    if options is not None and not isinstance(options, dict):
        raise OptionError(f"options must be a dict, got {options!r}")
    given: dict[str, dict[str, Any]] = {}
    for key, value in (options or {}).items():
        if key in parts and isinstance(value, dict):
            given.setdefault(key, {}).update(value)
            continue
        takers = [name for name, cls in parts.items() if key in signature(cls)]
        if len(takers) > 1:
            raise OptionError(f"option {key!r} fits {' and '.join(takers)}: say which, {{{takers[0]!r}: {{{key!r}: ...}}}}")
        given.setdefault(takers[0] if takers else names[0], {})[key] = value
    for name, values in given.items():
        if len(parts) > 1 and (strange := [k for k in values if k not in signature(parts[name])]):
            takes = sorted({k for cls in parts.values() for k in signature(cls)})
            raise OptionError(f"no part of {spec!r} has an option {strange[0]!r}; options: {', '.join(takes) or 'none'}")
        check_options(parts[name], values)
    return Recipe("+".join(names), given)
