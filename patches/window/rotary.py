"""Rotating queries to other positions with a model's own rotary embedding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_linattn.attention import upcast
from hf_linattn.attention.site import ROTARY_ARGUMENT, AttentionSite
from hf_linattn.errors import OptionError

APPLY = "apply_rotary_pos_emb"
MOVING = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the text: a turn by them is no turn."""

_turns: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Tensor, Tensor]] = WeakKeyDictionary()
"""Rotary embedding -> what its last turn was of, its cosines and sines."""

_tables: WeakKeyDictionary[Any, tuple[tuple[Any, ...], Tensor, Tensor, Tensor]] = WeakKeyDictionary()
"""The same for many tokens: also their steps."""
MOST_KEPT = 1 << 16
"""Tokens of a table that is kept for the next layer: some tens of megabytes."""


class Rotary:
    """The rotary embedding of one attention module.

    Args:
        site: where.

    Raises:
        OptionError: there is none, or it is of a kind that cannot be turned.
    """

    def __init__(self, site: AttentionSite) -> None:
        apply = inspect.unwrap(type(site.module).forward).__globals__.get(APPLY)
        module: Any = site.rotary
        kind = getattr(module, "rope_type", "default")
        latent = hasattr(site.module, "qk_rope_head_dim")  # turned and fixed features change places
        if module is None or apply is None or kind in MOVING or latent:
            what = f"its rotary embedding is of the kind {kind!r}" if kind in MOVING else "none could be read"
            raise OptionError(
                f"{site.name}: positions inside the cache need a rotary embedding that can be turned, and "
                f"{what}. Give positions='text'"
            )
        self.module, self.apply = (module,), apply  # in a tuple: no submodule of ours
        self._by_halves: bool | None = None

    def back(self, query: Tensor, steps: Tensor) -> Tensor:
        """Rotate queries to where they would be so many positions earlier.

        Args:
            query: `[B, H, N, D]`, rotated.
            steps: tokens, `[B or 1, N]`.
        """
        cos, sin = self._angles(query, steps.expand(query.shape[0], -1))
        apply: Callable[..., tuple[Tensor, Tensor]] = self.apply
        size = cos.shape[-1]
        part, rest = query[..., :size], query[..., size:]
        turned = apply(part, part, cos, sin)[0]
        return turned if not rest.shape[-1] else torch.cat([turned, rest], -1)

    def _angles(self, query: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        module: Any = self.module[0]
        cos, sin = module(query, steps)
        factor = float(getattr(module, "attention_scaling", 1.0))
        return cos / factor, -sin / factor

    def turn(self, query: Tensor, steps: list[int]) -> tuple[Tensor, Tensor] | None:
        """Return what kernels turn a query by in place of `back`: cosines and sines, `[B or 1, R]`, float32.

        Layers that share an embedding share them: they are computed once for each number of tokens.

        Args:
            query: `[B, H, 1, D]`.
            steps: tokens, of each row or of all.

        Returns:
            None where the embedding turns features otherwise than the first half into the second one.
        """
        module: Any = self.module[0]
        frequencies = _frequencies(module)
        if frequencies is None:
            return None
        about = (
            *steps,
            frequencies.data_ptr(),
            frequencies._version,
            getattr(module, "attention_scaling", 1.0),
        )
        known = _turns.get(module)
        if known is None or known[0] != about:
            places = torch.tensor(steps, device=query.device)[:, None]
            cos, sin = (x[:, 0].float().contiguous() for x in self._angles(upcast(query), places))
            known = _turns[module] = about, cos, sin
        _, cos, sin = known
        if self._by_halves is None:
            self._by_halves = self._turns_halves(cos[:1], sin[:1])
        return (cos, sin) if self._by_halves else None

    def turns(self, query: Tensor, steps: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what kernels turn many queries by in place of `back`: `[B or 1, N, R]` each, as `turn`.

        Args:
            query: `[B, H, N, D]`.
            steps: tokens, `[B, N]`, not all 0.
        """
        module: Any = self.module[0]
        frequencies = _frequencies(module)
        if frequencies is None:
            return None
        if len(steps) > 1 and torch.equal(steps[1:], steps[:1].expand(len(steps) - 1, -1)):
            steps = steps[:1]
        about = frequencies.data_ptr(), frequencies._version, getattr(module, "attention_scaling", 1.0)
        known = _tables.get(module)
        if known is None or known[0] != about or not torch.equal(known[1], steps):
            cos, sin = (x.float().contiguous() for x in self._angles(upcast(query[:, :, :1]), steps))
            known = about, steps, cos, sin
            if steps.numel() <= MOST_KEPT:
                _tables[module] = known
        _, _, cos, sin = known
        if self._by_halves is None:
            at = int(steps[0].argmax())
            self._by_halves = self._turns_halves(cos[:1, at], sin[:1, at])
        return (cos, sin) if self._by_halves else None

    def _turns_halves(self, cos: Tensor, sin: Tensor) -> bool:
        probe = torch.arange(1.0, 1 + cos.shape[-1], device=cos.device).view(1, 1, 1, -1)
        found: Tensor = self.apply(probe, probe, cos[:, None], sin[:, None])[0]
        first, second = probe.chunk(2, -1)
        return torch.allclose(found, probe * cos + torch.cat([-second, first], -1) * sin, rtol=1e-5)


def _frequencies(module: Any) -> Tensor | None:
    """Find the frequencies of an embedding, a buffer, faster than by its attributes."""
    found: Tensor | None = module._buffers.get("inv_freq")
    return getattr(module, "inv_freq", None) if found is None else found


def is_rotated(site: AttentionSite) -> bool:
    """Tell whether the module is given a rotary embedding."""
    return ROTARY_ARGUMENT in site.forward_info.parameters
