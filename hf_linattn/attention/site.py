"""One attention module of a model: where it is, its sizes, and what its source says."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from hf_linattn.errors import OptionError

CACHE_ARGUMENTS = ("cache", "past_key_values", "layer_past")
"""The arguments by which models hand on a cache: since 5.24, before that, and bloom's own."""


ROTARY_ARGUMENT = "position_embeddings"
"""The argument by which models hand cosines and sines to their attention modules."""

HIDDEN_ARGUMENT = "hidden_states"
"""The argument, the first one, by which models hand their attention modules the input."""


EXTRAS = {
    "position_bias": "adds a position bias to the scores",
    "softcap": "caps its scores with tanh",
    "s_aux": "has attention sinks of its own",
    "sinks": "has attention sinks of its own",
    "indices": "sees only the keys that an indexer selects",
    "block_indices": "sees only the blocks that an indexer selects",
    "attention_mask": "makes a mask of its own from its inputs",
}
"""Keywords of the interface call that change the mathematics, and what each does."""


SIZES = {
    "heads": "the number of its heads",
    "kv_heads": "the number of its key heads",
    "head_dim": "its head_dim",
    "value_dim": "the size of its values",
    "hidden_size": "the width of the hidden state that it gets",
}
"""Sizes of a `AttentionSite`, and what they are called."""


@dataclass(frozen=True)
class Extra:
    """A keyword of `EXTRAS` in an interface call.

    Attributes:
        keyword: its name.
        text: the expression passed.
        guards: where the expression is a local name: for each of its assignments, the attributes of the
            module that must not be None for it to happen.
    """

    keyword: str
    text: str
    guards: tuple[tuple[str, ...], ...] = ()

    def in_force(self, module: Any) -> bool:
        """Tell whether this module, or its view, passes anything but None."""
        attribute = self.text.removeprefix("self.")
        if self.text == "None":
            return False
        if self.text.startswith("self.") and attribute.isidentifier():
            return getattr(module, attribute, None) is not None
        fulfilled = [
            all(getattr(module, name, None) is not None for name in guards) for guards in self.guards
        ]
        return not fulfilled or any(fulfilled)


@dataclass(frozen=True)
class Rotation:
    """A call in a forward that turns queries, keys or both by a rotary embedding.

    Attributes:
        function: its name.
        tensor: the first tensor that is turned, as text.
        conditions: of the `if` around it, as text; all of them must hold.
        then: what is applied to that tensor afterwards, such as "self.q_norm".
    """

    function: str
    tensor: str
    conditions: tuple[str, ...] = ()
    then: tuple[str, ...] = ()


@dataclass(frozen=True)
class ForwardInfo:
    """What the source of an attention class says.

    Attributes:
        calls: number of calls of the interface on one path through `forward`.
        extras: what the call changes in softmax(qk)v.
        slot: how the cache layer is chosen: "self" for self.layer_idx, "argument" for forward's layer_idx, a
            name for self.layer_idx plus that argument, None where that is unknown or there is no cache.
        updates: whether a cache is written at all.
        cache_position: index of the cache among forward's positional arguments, None if keyword only.
        parameters: names of forward's parameters, without self.
        takes, gives: attributes of the module that make it take keys and values from another layer, or
            give others its own.
        rotations: of queries and keys, of which some layers may make none.
        past_argument: the argument in which some calls get keys of the past, instead of the cache's.
        sine_first: it takes the rotary embedding as (sin, cos), as gptj does.
    """

    calls: int
    extras: tuple[Extra, ...]
    slot: str | None
    updates: bool
    cache_position: int | None
    parameters: tuple[str, ...]
    takes: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    rotations: tuple[Rotation, ...] = ()
    past_argument: str | None = None
    sine_first: bool = False


class ModuleView:
    """An attention module with attributes that it has only while it is patched."""

    def __init__(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        self._module, self._attributes = module, attributes

    def __getattr__(self, name: str) -> Any:
        return self._attributes[name] if name in self._attributes else getattr(self._module, name)


@dataclass(frozen=True)
class AttentionSite:
    """One attention module of a model.

    Attributes:
        name: dotted name in the model.
        module: the attention module.
        forward_info: what its class's source says.
        layer_idx: its index among the layers, None where it has none.
        window: "sliding" or "chunked" for a limited window, else None.
        head_dim, value_dim, heads, kv_heads: sizes; None where unknown.
        hidden_size: width of the hidden state that its projections read; None where it gets none first.
        max_positions: the config's max_position_embeddings, in tokens.
        causal: whether the module attends to the past alone; None where only its calls tell.
        rotary: the one rotary embedding whose output the module takes; None where it gets none, or where
            that cannot be told.
        layer_type: of the config's `layer_types`, where it has them.
        tower: it reads or writes images or sounds, in a model that writes text.
        beside_tower: its model has such modules, and this is none of them.
        adapted: the module keeps attention code of its own, and an adapter makes it call the interface.
        attributes: what the adapter gives the module beside that.
        taken: some module of the model takes keys and values from another layer.
    """

    name: str
    module: nn.Module
    forward_info: ForwardInfo
    layer_idx: int | None
    window: str | None
    head_dim: int | None
    value_dim: int | None
    heads: int | None
    kv_heads: int | None
    max_positions: int | None
    causal: bool | None
    rotary: nn.Module | None = None
    layer_type: str | None = None
    hidden_size: int | None = None
    tower: bool = False
    beside_tower: bool = False
    adapted: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    taken: bool = False

    @property
    def view(self) -> ModuleView:
        """The module with what its adapter gives it, patched or not."""
        return ModuleView(self.module, self.attributes)

    def require(self, *sizes: str, reason: str) -> list[int]:
        """Return sizes of the module, as a patch needs them.

        Args:
            sizes: names out of `SIZES`.
            reason: what they are needed for, as the end of the error's sentence.

        Raises:
            OptionError: one of them cannot be told.
        """
        for size in sizes:
            if getattr(self, size) is None:
                raise OptionError(f"{self.name}: {SIZES[size]} cannot be told, {reason}")
        return [getattr(self, size) for size in sizes]

    def generator(self, seed: int | None = None) -> torch.Generator:
        """Return random numbers of this module's own, the same whenever a model is patched.

        Args:
            seed: from 0 to 2^31 - 1; None for that of torch.

        Raises:
            OptionError: a seed out of range.
        """
        if seed is None:
            seed = torch.initial_seed()
        elif not 0 <= seed < 2**31:
            raise OptionError(f"seed must be from 0 to 2^31 - 1, got {seed}")
        return torch.Generator().manual_seed(seed ^ zlib.crc32(self.name.encode()))

    @cached_property
    def extras(self) -> dict[str, str]:
        """Keyword -> what the module does with it, for those in force when first asked."""
        return {
            extra.keyword: EXTRAS[extra.keyword]
            for extra in self.forward_info.extras
            if extra.in_force(self.view)
        }

    @cached_property
    def rotated_by(self) -> str | None:
        """Name of the function that turns its queries; None for none, and where weights follow the turn."""
        # the texts are the source's own, which run at every call
        names = {"self": self.view, ROTARY_ARGUMENT: self.rotary}

        def value(text: str) -> Any:
            return eval(text, {"__builtins__": {}}, names)

        try:
            found = [x for x in self.forward_info.rotations if all(map(value, x.conditions))]
            queries = [x for x in found if x.tensor.startswith("q")]
            turned_alone = all(x.tensor.startswith(("q", "k")) for x in found) and len(queries) == 1
            if turned_alone and not any(list(value(name).parameters()) for name in queries[0].then):
                return queries[0].function
        except (AttributeError, NameError, TypeError):
            pass  # it depends on more than the module
        return None

    @cached_property
    def takes(self) -> bool:
        """Whether it takes keys and values from another layer."""
        return any(getattr(self.view, name, False) for name in self.forward_info.takes)

    @cached_property
    def shares(self) -> bool:
        """Whether it takes keys and values from another layer, or gives it its own."""
        gives = any(getattr(self.view, name, False) for name in self.forward_info.gives)
        return self.takes or (gives and self.taken)
