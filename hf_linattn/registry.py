"""Patches by name: `@register`, discovery in this package and in others, options, composition."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import reprlib
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from hf_linattn.attention import Attention, Modifier, Patch
from hf_linattn.errors import OptionError, RegistrationError, UnknownPatchError

PatchType = TypeVar("PatchType", bound=type[Patch])
KINDS = (Attention, Modifier)
PLAIN = (bool, int, float, str, list, dict, type(None))
RENAMED_IN_0_3 = {
    "both_ways": "bidirectional",
    "counts": "needs_visible_count",
    "expresses": "supports",
    "fades": "has_decay",
    "host": "wrap",
    "hosts": "wraps",
    "left_out": "query_log_scale",
    "packs": "supports_packing",
    "summed": "sum_normalised",
    "turns": "needs_rope",
    "why": "direction_reason",
}
"""Attributes that patches define: name before 0.3.0 -> name now. Set under an old one, it does nothing."""
REFUSED = {
    "diff": "differential attention (arXiv:2410.05258) takes the difference of two softmaxes, and so two "
    "query and two key projections per head that a pretrained model does not have. Models of type diffllama "
    "have them; softmax1 and logn patch both of their softmaxes.",
    "softpick": "the rectified softmax (arXiv:2504.20966) was trained from the start only, and no conversion "
    "of a pretrained model is known. entmax15 has weights of exactly 0; softmax1 and output_gate take away "
    "the need for an attention sink.",
}
"""Names that people look for and that can be no patches, and why."""
_PATCHES: dict[str, type[Patch]] = {}


def register(name: str) -> Callable[[PatchType], PatchType]:
    """Make a class known as the patch `name`: a decorator.

    Args:
        name: letters, digits and "_"; what `patch_model` takes and config.json holds.

    Raises:
        RegistrationError: the name is taken by another class or holds characters that compositions and plans
            use; the class is not a patch, or defines an attribute by its name before 0.3.0.
    """
    if not isinstance(name, str) or not name.replace("_", "").isalnum():
        raise RegistrationError(f"a patch's name holds letters, digits and '_' only, got {name!r}")

    def decorate(cls: PatchType) -> PatchType:
        if not (isinstance(cls, type) and issubclass(cls, KINDS)):
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise RegistrationError(f"{name!r}: a patch is a class derived from one of {kinds}, got {cls!r}")
        for old, new in RENAMED_IN_0_3.items():
            if old in vars(cls):
                raise RegistrationError(
                    f"{name!r}: {cls.__qualname__} defines {old!r}, which is called {new!r} since version "
                    "0.3.0: rename it"
                )
        other = _PATCHES.get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RegistrationError(
                f"two patches want the name {name!r}: {other.__qualname__} of {other.__module__} and "
                f"{cls.__qualname__} of {cls.__module__}"
            )
        cls.name = name
        _PATCHES[name] = cls
        return cls

    return decorate


@lru_cache(maxsize=1)
def _discover() -> None:
    package = importlib.import_module("hf_linattn.patches")
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if not info.name.rpartition(".")[2].startswith("_"):  # helpers of patches
            importlib.import_module(info.name)
    for entry in entry_points(group="hf_linattn.patches"):
        try:
            entry.load()
        except (ImportError, AttributeError) as error:
            raise RegistrationError(f"the installed patch {entry.name!r} ({entry.value}): {error}") from error


def patches() -> dict[str, type[Patch]]:
    """List every registered patch by name, sorted."""
    _discover()
    return dict(sorted(_PATCHES.items()))


def available_patches() -> dict[str, str]:
    """List every patch that `patch_model` takes: name -> one-line summary."""
    return {name: (inspect.getdoc(cls) or "").partition("\n")[0] for name, cls in patches().items()}


def _hint(name: Any, known: typing.Iterable[str]) -> str:
    near = get_close_matches(str(name).lower(), list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def find(name: str) -> type[Patch]:
    """Look up the patch of this name.

    Raises:
        UnknownPatchError: with the nearest name and the list.
    """
    known = patches()
    if name not in known and name in REFUSED:
        raise UnknownPatchError(f"there is no patch {name!r}: {REFUSED[name]}")
    if name not in known:
        hint = _hint(name, known)
        raise UnknownPatchError(f"unknown patch {name!r}.{hint} Registered: {', '.join(known)}.")
    return known[name]


def signature(cls: type[Patch]) -> dict[str, inspect.Parameter]:
    """List the options of a patch: the keyword-only parameters of its constructor."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: p for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}


def _fits(value: Any, annotation: Any) -> bool:
    """Tell whether an option's value is of the type that its annotation names."""
    origin = typing.get_origin(annotation)
    if annotation is Any:
        return isinstance(value, PLAIN)  # what config.json can hold
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(annotation))
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in typing.get_args(annotation))
    if annotation is None or annotation is type(None):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if origin in (list, dict):
        return type(value) is origin
    if origin is Callable:
        return callable(value)
    return type(value) is annotation and isinstance(value, PLAIN)


def _spelled(annotation: Any) -> str:
    """Spell a type as users read it: `float, 'learned' or None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Literal):
        parts = [
            repr(part) if isinstance(part, str) else _spelled(part) for part in typing.get_args(annotation)
        ]
        return " or ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
    if annotation is type(None):
        return "None"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def check_options(cls: type[Patch], options: dict[str, Any]) -> None:
    """Check names and types of options against the constructor; ranges are the constructor's own business.

    Raises:
        OptionError: naming the option, what came and what was expected.
    """
    known = signature(cls)
    hints = typing.get_type_hints(cls.__init__) if options else {}
    for name, value in options.items():
        if name not in known:
            takes = f"It takes {', '.join(known)}." if known else "It takes no options."
            raise OptionError(f"{cls.name!r} has no option {name!r}.{_hint(name, known)} {takes}")
        annotation = hints.get(name, Any)
        if not _fits(value, annotation):
            raise OptionError(
                f"option {name!r} of {cls.name!r} must be {_spelled(annotation)}, got {reprlib.repr(value)}"
            )


def option_value(text: str) -> Any:
    """Read an option's value as it is written in a text: JSON, or else a string.

    >>> option_value("16"), option_value("hedgehog")
    (16, 'hedgehog')
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _dotted_name(value: Any) -> str:
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}"


@dataclass(frozen=True)
class Recipe:
    """What one attention module gets: modifiers and one attention at most, or two where one holds the other.

    Attributes:
        spec: names joined by `+`.
        options: part -> {option: value}.
    """

    spec: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def parts(self) -> list[type[Patch]]:
        """The classes in the order in which they were named."""
        return [find(name) for name in self.spec.split("+")]

    @property
    def spelled_out(self) -> str:
        """The spec and all options, those that were left out too: equal where the same is computed."""
        options = {
            cls.name: {name: each.default for name, each in signature(cls).items()}
            | self.options.get(cls.name, {})
            for cls in self.parts
        }
        return f"{self.spec} {json.dumps(options, sort_keys=True, default=repr)}"

    @property
    def unsaved(self) -> dict[str, str]:
        """What config.json cannot hold, functions and modules: "part.option" -> what is there."""
        return {
            f"{part}.{option}": _dotted_name(value)
            for part, values in self.options.items()
            for option, value in values.items()
            if not isinstance(value, PLAIN)
        }

    @property
    def plain(self) -> dict[str, dict[str, Any]]:
        """Options as config.json and tables show them, functions and modules by their dotted names."""
        names = self.unsaved
        return {
            part: {option: names.get(f"{part}.{option}", value) for option, value in values.items()}
            for part, values in self.options.items()
        }

    @property
    def identity(self) -> bool:
        """Whether the module keeps its own attention."""
        return all(part.identity for part in self.parts)

    @property
    def windowed(self) -> bool:
        """Whether a window of the module stays in force."""
        return all(part.windowed for part in self.parts if issubclass(part, Attention))


def names_in(spec: Any) -> list[str]:
    """Split a composition into the names that `+` joins.

    Raises:
        OptionError: not a string, a name missing or named twice. UnknownPatchError: a name nobody registered.
    """
    if not isinstance(spec, str):
        raise OptionError(
            f"a patch is named by a string such as 'elu1' or 'softmax1+logn', got {reprlib.repr(spec)}"
        )
    names = [name.strip() for name in spec.split("+")]
    if not all(names):
        raise OptionError(f"{spec!r} lacks the name of a patch: write 'elu1' or 'softmax1+logn'")
    for name in names:
        find(name)
    if len(set(names)) < len(names):
        raise OptionError(f"{spec!r} names a patch twice")
    return names


def options_for(names: list[str], shared: dict[str, Any]) -> dict[str, Any]:
    """Choose those of shared options that one of these patches takes, or that name one of them."""
    taken = {option for name in names for option in signature(find(name))}
    return {key: value for key, value in shared.items() if key in taken or key in names}


def refuse_unused(specs: typing.Iterable[str], shared: dict[str, Any]) -> None:
    """Refuse shared options that no part of these compositions takes.

    Raises:
        UnknownPatchError: a name nobody registered.
        OptionError: such an option.
    """
    names = [name for spec in specs for name in names_in(spec)]
    known = {*names, *(option for name in names for option in signature(find(name)))}
    for option in shared:
        if option not in known:
            raise OptionError(
                f"none of {', '.join(dict.fromkeys(names))} has an option {option!r}.{_hint(option, known)}"
            )


def parse(spec: str, options: dict[str, Any] | None = None) -> Recipe:
    """Read `"softmax1+logn"` with options for any of its parts.

    Args:
        spec: names joined by `+`.
        options: option -> value, for the one part that has it; or part -> {option: value}.

    Raises:
        UnknownPatchError: a name nobody registered.
        OptionError: a name missing or named twice; two attentions that cannot be one; an option that no part
            has or several have, that is named twice, or of the wrong type.
    """
    names = names_in(spec)
    attentions = [name for name in names if not find(name).modifier]
    if len(attentions) > 1 and not _holds(attentions):
        wrapping = " or ".join(name for name, cls in patches().items() if getattr(cls, "wraps", False))
        raise OptionError(
            f"{spec!r} holds {len(attentions)} attentions ({', '.join(attentions)}): one at most, or "
            f"{wrapping} with a linear attention by feature map, such as 'window+elu1'"
        )
    if options is not None and not isinstance(options, dict):
        raise OptionError(f"options must be a dict, got {reprlib.repr(options)}")
    by_part: dict[str, dict[str, Any]] = {}
    for key, value in (options or {}).items():
        whole = key in names and isinstance(value, dict)
        part, values = (key, value) if whole else (_taker(spec, names, key), {key: value})
        of_part = by_part.setdefault(part, {})
        if twice := [option for option in values if option in of_part]:
            raise OptionError(f"option {twice[0]!r} of {part!r} is given twice")
        of_part.update(values)
    for name, values in by_part.items():
        check_options(find(name), values)
    return Recipe("+".join(names), by_part)


def _holds(attentions: list[str]) -> bool:
    """Tell whether one of two attentions takes in the other."""
    pair = [find(name) for name in attentions]
    wraps = [cls for cls in pair if getattr(cls, "wraps", False)]
    return len(pair) == 2 and len(wraps) == 1 and any(getattr(cls, "wrappable", False) for cls in pair)


def _taker(spec: str, names: list[str], option: Any) -> str:
    """Find the one part of a composition that an option is for."""
    takers = [name for name in names if option in signature(find(name))]
    if len(takers) > 1:
        example = f"{{{takers[0]!r}: {{{option!r}: ...}}}}"
        raise OptionError(f"option {option!r} fits {' and '.join(takers)}: say which, {example}")
    if not takers:
        takes = sorted({known for name in names for known in signature(find(name))})
        one = "has no" if len(names) == 1 else "has no part with an"
        hint = _hint(option, takes)
        raise OptionError(f"{spec!r} {one} option {option!r}.{hint} Options: {', '.join(takes) or 'none'}.")
    return takers[0]
