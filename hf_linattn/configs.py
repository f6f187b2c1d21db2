"""Config objects of a patched model: copies of its own, so that other models with the same config never notice."""

from __future__ import annotations

import copy
import functools
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_linattn.seam import NAME

ABSENT = object()
GUARD = "load-this-folder-with-hf_linattn.from_pretrained.safetensors"
"""What config.json names as the weights' file: loaders that would drop the patch stop with this name in their error."""


class OwnConfigs:
    """Replace every config that a model's modules hold by copies, and put the originals back.

    Changes that users make to the copies meanwhile are carried over to the originals.
    """

    def __init__(self, model: nn.Module) -> None:
        memo: dict[int, Any] = {}
        self.places: list[tuple[nn.Module, str, PreTrainedConfig, PreTrainedConfig]] = []
        for module in model.modules():
            for key, value in list(module.__dict__.items()):
                if isinstance(value, PreTrainedConfig):
                    self.places.append((module, key, value, copy.deepcopy(value, memo)))
        self.pairs = {id(old): (old, new) for _, _, old, new in self.places}
        pending = list(self.pairs.values())
        while pending:
            old, _ = pending.pop()
            for key in getattr(old, "sub_configs", {}):
                sub = old.__dict__.get(key)
                if isinstance(sub, PreTrainedConfig) and id(sub) not in self.pairs:
                    self.pairs[id(sub)] = (sub, copy.deepcopy(sub, memo))
                    pending.append(self.pairs[id(sub)])
        self.before = {id(new): _snapshot(new) for _, new in self.pairs.values()}

    def implementation(self, config: PreTrainedConfig) -> str:
        """The attention implementation before patching, of an original config."""
        return config._attn_implementation or "eager"

    def use_copies(self, entry: dict[str, Any], root: PreTrainedConfig) -> None:
        """Put the copies in place, switched to this package's attention and marked with the entry."""
        for module, key, _, new in self.places:
            module.__dict__[key] = new
        for old, new in self.pairs.values():
            new._attn_implementation_internal = NAME
            mark(new, entry if old is root else {**{k: entry[k] for k in ("format", "version")}, "part": True})

    def restore(self) -> None:
        """Put the originals back."""
        for module, key, old, new in self.places:
            if module.__dict__.get(key) is new:
                module.__dict__[key] = old
        for old, new in self.pairs.values():
            unmark(new)
            before, after = self.before[id(new)], _snapshot(new)
            for key in before.keys() | after.keys():
                if _differ(before.get(key, ABSENT), after.get(key, ABSENT)):
                    if key in after:
                        old.__dict__[key] = after[key]
                    else:
                        old.__dict__.pop(key, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnConfigs:
        new = copy.copy(self)
        memo[id(self)] = new
        new.places = copy.deepcopy(self.places, memo)
        pairs = copy.deepcopy(list(self.pairs.values()), memo)
        new.before = {id(copied): self.before[id(own)] for (_, own), (_, copied) in zip(self.pairs.values(), pairs, strict=True)}
        new.pairs = {id(old): (old, copied) for old, copied in pairs}
        return new

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = list(self.pairs.values())
        return _rebuild, (self.places, pairs, [self.before[id(new)] for _, new in pairs])


def _rebuild(places: list[Any], pairs: list[Any], before: list[dict[str, Any]]) -> OwnConfigs:
    own = OwnConfigs.__new__(OwnConfigs)
    own.places = places
    own.pairs = {id(old): (old, new) for old, new in pairs}
    own.before = {id(new): values for (_, new), values in zip(pairs, before, strict=True)}
    return own


def _snapshot(config: PreTrainedConfig) -> dict[str, Any]:
    skipped = {"_attn_implementation_internal"}
    return {
        key: value if isinstance(value, PreTrainedConfig) else copy.deepcopy(value)
        for key, value in config.__dict__.items()
        if key not in skipped and not isinstance(value, PreTrainedConfig)
    }


def _differ(a: Any, b: Any) -> bool:
    if a is ABSENT or b is ABSENT:
        return a is not b
    return bool(a != b)


def _to_dict(config: PreTrainedConfig) -> dict[str, Any]:
    own = config.__dict__.pop("to_dict")
    try:
        output = config.to_dict()
    finally:
        config.__dict__["to_dict"] = own
    output["transformers_weights"] = GUARD
    return output


def mark(config: PreTrainedConfig, entry: dict[str, Any]) -> None:
    """Make a config say in config.json that its model is patched, so that no plain loader drops the patch in silence.

    `attn_implementation` stops loaders that do not know this package; `transformers_weights` those that are told to
    use another implementation. transformers deletes the second from any config that it saves, hence `to_dict`.
    """
    config.__dict__[NAME] = copy.deepcopy(entry)
    config.__dict__["attn_implementation"] = NAME
    config.__dict__["to_dict"] = functools.partial(_to_dict, config)


def unmark(config: PreTrainedConfig) -> None:
    """Take the marks off again."""
    for key in (NAME, "attn_implementation", "to_dict"):
        config.__dict__.pop(key, None)
