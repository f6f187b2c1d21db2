"""Configs of a patched model: copies of its own, so that other models with the same config never notice."""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from hf_linattn.attention.masks import FLAGS
from hf_linattn.patching.interface import NAME

ABSENT = object()
GUARD = "load-this-folder-with-hf_linattn.from_pretrained.safetensors"
"""The weights' file that config.json names: loaders that would drop the patch stop and name it."""


@dataclass
class Copy:
    """A config, the copy that a patched model uses instead, and the values of the copy before any change."""

    original: PreTrainedConfig
    copied: PreTrainedConfig
    before: dict[str, Any]


class OwnConfigs:
    """Replace every config that a model's modules hold by copies, and put the originals back.

    Changes that users make to the copies meanwhile are carried over to the originals.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copies: list[Copy] = []
        self.places: list[tuple[nn.Module, str, Copy]] = []
        memo: dict[int, Any] = {}
        for module in model.modules():
            for key, value in module.__dict__.items():
                if isinstance(value, PreTrainedConfig):
                    self.places.append((module, key, self._copy(value, memo)))

    def _copy(self, config: PreTrainedConfig, memo: dict[int, Any]) -> Copy:
        for known in self.copies:
            if known.original is config:
                return known
        copied = copy.deepcopy(config, memo)
        new = Copy(config, copied, _values(copied))
        self.copies.append(new)
        for key in config.sub_configs:
            sub = config.__dict__.get(key)
            if isinstance(sub, PreTrainedConfig):
                self._copy(sub, memo)
        return new

    def original(self, config: Any) -> Any:
        """Return the config that a copy stands for; any other config is its own."""
        return next((known.original for known in self.copies if known.copied is config), config)

    def use_copies(
        self,
        entry: dict[str, Any],
        root: Any,
        flags: tuple[str, ...] = (),
        native: Collection[PreTrainedConfig] = (),
    ) -> None:
        """Put the copies in place, switched to this package's attention and marked with the entry.

        Copies of other configs than `root` say that they describe a part, which cannot be loaded alone.

        Args:
            entry: of config.json.
            root: the model's own config.
            flags: what the copies ask of the mask function; see `masks.FLAGS`.
            native: configs of parts without a patch, which go on with their own attention and masks.
        """
        part = {"format": entry["format"], "version": entry["version"], "part": True}
        for module, key, known in self.places:
            module.__dict__[key] = known.copied
        for known in self.copies:
            mark(known.copied, entry if known.original is root else part)
            if not any(known.original is config for config in native):
                known.copied._attn_implementation_internal = NAME
                known.copied.__dict__.update(dict.fromkeys(flags, True))

    def restore(self) -> None:
        """Put the originals back."""
        for module, key, known in self.places:
            if module.__dict__.get(key) is known.copied:
                module.__dict__[key] = known.original
        for known in self.copies:
            unmark(known.copied)
            _carry_over(known.before, _values(known.copied), known.original)


def _values(config: PreTrainedConfig) -> dict[str, Any]:
    """Copy a config's own values; nested configs have copies of their own."""
    return {
        key: copy.deepcopy(value)
        for key, value in config.__dict__.items()
        if key != "_attn_implementation_internal" and not isinstance(value, PreTrainedConfig)
    }


def _carry_over(before: dict[str, Any], after: dict[str, Any], config: PreTrainedConfig) -> None:
    for key in before.keys() | after.keys():
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if new is ABSENT:
            config.__dict__.pop(key, None)
        elif old is ABSENT or old != new:
            config.__dict__[key] = new


def _to_dict(config: PreTrainedConfig) -> dict[str, Any]:
    own = config.__dict__.pop("to_dict")
    try:
        output = config.to_dict()
    finally:
        config.__dict__["to_dict"] = own
    output["transformers_weights"] = GUARD
    return {key: value for key, value in output.items() if key not in FLAGS}


def mark(config: PreTrainedConfig, entry: dict[str, Any]) -> None:
    """Mark a config, so that its config.json says that the model is patched and no plain loader drops that.

    `attn_implementation` stops loaders that do not know this package; `transformers_weights` those that are
    asked to use another implementation. transformers deletes the second when it saves, hence `to_dict`.
    """
    config.__dict__[NAME] = copy.deepcopy(entry)
    config.__dict__["attn_implementation"] = NAME
    config.__dict__["to_dict"] = functools.partial(_to_dict, config)


def unmark(config: PreTrainedConfig) -> None:
    """Take the marks off again."""
    for key in (NAME, "attn_implementation", "to_dict", *FLAGS):
        config.__dict__.pop(key, None)
