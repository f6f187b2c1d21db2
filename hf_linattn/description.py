"""What is where in a model: `describe`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_linattn.patched import PatchedAttention
from hf_linattn.plan import sites_of
from hf_linattn.seam import NAME
from hf_linattn.sites import Site


@dataclass(frozen=True)
class Row:
    """One attention module.

    Attributes:
        module: dotted name; layer: its index or None.
        patch: composition, "softmax" for the model's own attention; note: why it stayed, if it did.
        options: by part of the composition.
        parameters: number of parameters added.
        linear: time linear and state constant in the number of tokens.
        window: "sliding", "chunked" or None, as in force.
        state_bytes: bytes of the state per sequence, where it is constant; None where it grows or is not known.
        bytes_per_token: growth of the ordinary cache per token, float32 count of the model's dtype; None if constant.
    """

    module: str
    layer: int | None
    patch: str
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: int = 0
    linear: bool = False
    window: str | None = None
    state_bytes: int | None = None
    bytes_per_token: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Description:
    """Rows of `describe`; prints as a table."""

    model: str
    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def parameters(self) -> int:
        """Parameters added, all modules together."""
        return sum(row.parameters for row in self.rows)

    @property
    def state_bytes(self) -> int:
        """Bytes of all constant states per sequence."""
        return sum(row.state_bytes or 0 for row in self.rows)

    def __str__(self) -> str:
        head = ("module", "patch", "options", "parameters", "time", "state per sequence")
        lines = [head]
        for row in self.rows:
            options = " ".join(f"{k}={v}" for part in row.options.values() for k, v in part.items())
            if row.linear:
                cost, state = "O(n)", "?" if row.state_bytes is None else f"{row.state_bytes:,} B"
            else:
                cost = "O(n window)" if row.window else "O(n^2)"
                state = "grows" if row.bytes_per_token is None else f"{row.bytes_per_token:,} B per token"
                state += " up to the window" if row.window else ""
            patch = row.patch + (f" ({row.note})" if row.note else "")
            lines.append((row.module, patch, options, f"{row.parameters:,}", cost, state))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([self.model, *table])


def _row(site: Site, child: PatchedAttention | None, own: dict[str, Any] | None) -> Row:
    width = None
    if site.kv_heads is not None and site.head_dim is not None and site.value_dim is not None:
        parameter = next(site.module.parameters(), None)
        size = 4 if parameter is None else parameter.element_size()
        width = (site.head_dim + site.value_dim) * site.kv_heads * size
    if child is None:
        kept = own is not None and own["kept"].get(site.name, "")
        return Row(site.name, site.layer_idx, "softmax", window=site.window, bytes_per_token=width, note=kept or "")
    parameters = sum(p.numel() for p in child.parameters())
    window = site.window if child.keep_window else None
    options = own["options"].get(site.name, {}) if own is not None else {}
    if not child.linear:
        return Row(site.name, site.layer_idx, child.spec, options, parameters, False, window, None, width)
    state = None
    if width is not None and site.kv_heads and site.head_dim and site.value_dim:
        features = getattr(child.attention, "features", site.head_dim)
        state = 4 * site.kv_heads * features * (site.value_dim + 1)
    return Row(site.name, site.layer_idx, child.spec, options, parameters, True, window, state, None)


def describe(model: nn.Module) -> Description:
    """What every attention module of a model does: patch, options, parameters added, cost and state.

    Raises:
        UnsupportedModelError: no attention module routes through transformers' interface.
    """
    record = model.__dict__.get("_linattn")
    own = None if record is None else {"options": record.options, "kept": record.notes}
    rows = (_row(site, site.module._modules.get(NAME), own) for site in sites_of(model))  # type: ignore[arg-type]
    return Description(type(model).__name__, tuple(rows))


def is_linear(model: nn.Module) -> bool:
    """Whether every attention layer's state is of constant size: all linear, or limited to a window."""
    return all(row.linear or row.window is not None for row in describe(model))
