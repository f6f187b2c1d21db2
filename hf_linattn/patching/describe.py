"""Describe a model: which attention each of its modules has, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_linattn.attention.site import AttentionSite
from hf_linattn.ops.dispatch import kernels
from hf_linattn.patching.discovery import counted, unrouted
from hf_linattn.patching.installation import Installation, installation_of
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.plan import sites_of, transformers_model

TOWER = "for images or sounds"


@dataclass(frozen=True)
class ModuleDescription:
    """One attention module of a model.

    Attributes:
        module: dotted name.
        layer: its index among the layers, None where it has none.
        patch: composition, "softmax" for the model's own attention.
        options: by part of the composition.
        parameters: number of parameters added.
        linear: the state is of constant size.
        in_kernels: kernels can compute it; else torch operations do.
        time: of prefill in the number of tokens n, such as "O(n)".
        window: "sliding", "chunked" or None, as in force.
        state_bytes: bytes of the state per sequence if constant; None where it grows or is not known.
        bytes_per_token: growth of the ordinary cache per token; None where it is constant or not known.
        tower: it reads or writes images or sounds, in a model that writes text.
        note: what became of its window, what it is for, or what its attention says of it; "" for nothing.
    """

    module: str
    layer: int | None
    patch: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: int = 0
    linear: bool = False
    in_kernels: bool = False
    time: str = "O(n^2)"
    window: str | None = None
    state_bytes: int | None = None
    bytes_per_token: int | None = None
    tower: bool = False
    note: str = ""

    @property
    def keeps_nothing(self) -> bool:
        """Whether it reads images or sounds at once, and has neither keys nor a state to keep."""
        return self.tower and self.bytes_per_token is None and self.state_bytes is None


@dataclass(frozen=True)
class Description:
    """What `describe` gives: one row per attention module; prints as a table.

    Attributes:
        unrouted: dotted name -> class of attention modules that no patch reaches: their code is their own.
        kernels: who computes linear attention on the model's device, and why; "" where nothing is known.
    """

    model: str
    rows: tuple[ModuleDescription, ...]
    unrouted: dict[str, str] = field(default_factory=dict)
    kernels: str = ""

    def __iter__(self) -> Iterator[ModuleDescription]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def parameters(self) -> int:
        """Count the parameters added, all modules together."""
        return sum(row.parameters for row in self.rows)

    @property
    def state_bytes(self) -> int:
        """Sum the bytes of all constant states, per sequence."""
        return sum(row.state_bytes or 0 for row in self.rows)

    def __str__(self) -> str:
        head = ("module", "patch", "options", "parameters", "time", "state per sequence")
        lines = [head, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        pairs = [zip(line, widths, strict=True) for line in lines]
        out = [f"out of reach, with attention code of their own: {counted(self.unrouted)}"]
        named = self.kernels and any(row.in_kernels for row in self.rows)
        by = [f"computed by {self.kernels}"] if named else []
        table = ["  ".join(c.ljust(w) for c, w in pair).rstrip() for pair in pairs]
        return "\n".join([self.model, *table, *(out if self.unrouted else []), *by])


def _cells(row: ModuleDescription) -> tuple[str, ...]:
    if row.keeps_nothing:
        state = "none"
    elif row.linear:
        state = "?" if row.state_bytes is None else f"{row.state_bytes:,} B"
    else:
        state = "grows" if row.bytes_per_token is None else f"{row.bytes_per_token:,} B per token"
        state += " up to the window" if row.window else ""
    patch = f"{row.patch} ({row.note})" if row.note else row.patch
    options = " ".join(f"{k}={v}" for part in row.options.values() for k, v in part.items())
    return row.module, patch, options, f"{row.parameters:,}", row.time, state


def _bytes_per_token(site: AttentionSite, gates: bool = False) -> int | None:
    """Count the bytes of one token's keys and values in an ordinary cache, in the module's dtype."""
    if site.kv_heads is None or site.head_dim is None or site.value_dim is None:
        return None
    parameter = next(site.module.parameters(), None)
    size = 4 if parameter is None else parameter.element_size()
    of_gates = 4 * (site.heads or 0) if gates else 0  # float32
    return (site.head_dim + site.value_dim) * site.kv_heads * size + of_gates


def _state_bytes(site: AttentionSite, attention: Any) -> int | None:
    """Count the bytes of one sequence's state."""
    parameter = next(site.module.parameters(), None)
    size: int | None = attention.state_bytes(site, 4 if parameter is None else parameter.element_size())
    return size


def _describe_module(site: AttentionSite, installation: Installation | None) -> ModuleDescription:
    child: Any = site.module._modules.get(NAME)
    note = "" if installation is None else installation.notes.get(site.name, "")
    note = note or (TOWER if site.tower else "")
    cached = site.forward_info.updates or not site.tower  # what says the text aloud has a cache too
    if child is None:
        growth = _bytes_per_token(site) if cached else None
        time = "O(n window)" if site.window else "O(n^2)"
        return ModuleDescription(
            site.name,
            site.layer_idx,
            "softmax",
            time=time,
            window=site.window,
            bytes_per_token=growth,
            tower=site.tower,
            note=note,
        )
    window = site.window if child.keep_window else None
    note = "; ".join(filter(None, (note, child.attention.note)))
    keeps_state = child.keeps_state and cached
    return ModuleDescription(
        module=site.name,
        layer=site.layer_idx,
        patch=child.spec,
        options={} if installation is None else installation.options.get(site.name, {}),
        parameters=sum(p.numel() for p in child.parameters()),
        linear=child.keeps_state,
        in_kernels=child.keeps_state and child.attention.in_kernels,
        time="O(n window)" if window and not child.keeps_state else child.attention.time,
        window=window,
        state_bytes=_state_bytes(site, child.attention) if keeps_state else None,
        bytes_per_token=None if keeps_state or not cached else _bytes_per_token(site, child.keeps_gates),
        tower=site.tower,
        note=note,
    )


def describe(model: nn.Module) -> Description:
    """List what every attention module of a model does: patch, options, parameters added, cost and state.

    Args:
        model: a transformers model, patched or not, or its wrapper.

    Returns:
        One `ModuleDescription` per module, in the order of the model; `print` shows a table.

    Raises:
        UnsupportedModelError: no attention module routes through transformers' interface.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import describe, patch_model
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> print(describe(patch_model(model, {"0-2": "elu1"})))
        LlamaForCausalLM
        module                    patch    options  parameters  time    state per sequence
        model.layers.0.self_attn  elu1              0           O(n)    16,896 B
        model.layers.1.self_attn  elu1              0           O(n)    16,896 B
        model.layers.2.self_attn  elu1              0           O(n)    16,896 B
        model.layers.3.self_attn  softmax           0           O(n^2)  512 B per token
        model.layers.4.self_attn  softmax           0           O(n^2)  512 B per token
        model.layers.5.self_attn  softmax           0           O(n^2)  512 B per token
        computed by ...
        >>> describe(model).state_bytes
        50688
    """
    inside = transformers_model(model)
    installation = installation_of(inside)
    sites = sites_of(inside)
    rows = tuple(_describe_module(site, installation) for site in sites)
    parameter = next(inside.parameters(), None)
    by = "" if parameter is None else kernels().get(parameter.device.type, "")
    return Description(type(inside).__name__, rows, unrouted(inside, sites), by)


def is_linear(model: nn.Module) -> bool:
    """Tell whether every attention layer's state is of constant size: all linear, or limited to a window.

    Modules that read images or sounds at once keep none. Those that say a text aloud count too.

    Example:
        >>> from transformers import AutoModelForCausalLM
        >>> from hf_linattn import is_linear, patch_model
        >>> model = AutoModelForCausalLM.from_pretrained("examples/base")
        >>> is_linear(model), is_linear(patch_model(model, "elu1"))
        (False, True)
    """
    return all(row.linear or row.window is not None or row.keeps_nothing for row in describe(model))
