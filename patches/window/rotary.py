"""Rotating queries to other positions with a model's own rotary embedding."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_linattn.attention import upcast
from hf_linattn.attention.masks import once
from hf_linattn.attention.site import ROTARY_ARGUMENT, AttentionSite
from hf_linattn.errors import OptionError
from hf_linattn.ops.eager.window import by_halves

APPLY = "apply_rotary_pos_emb"
INTERLEAVED = "apply_rotary_pos_emb_interleave"
"""As DeepSeek's: it reads pairs of neighbours, and writes the first half and the second one."""
MOVING = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the text: a turn by them is no turn."""

_turns: WeakKeyDictionary[Any, dict[str, tuple[tuple[Any, ...], Tensor, Tensor]]] = WeakKeyDictionary()
"""Rotary embedding -> type of layer -> what its last turn was of, its cosines and sines."""

_tables: WeakKeyDictionary[Any, dict[str, tuple[tuple[Any, ...], Tensor, Tensor, Tensor]]] = (
    WeakKeyDictionary()
)
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
        module: Any = site.rotary
        self.interleaved = site.rotated_by == INTERLEAVED
        apply = inspect.unwrap(type(site.module).forward).__globals__.get(site.rotated_by or "")
        # embeddings for several types of layers take the type, and have frequencies of each
        self.layer_type = "" if hasattr(module, "inv_freq") else f"{site.layer_type}"
        kind = getattr(module, "rope_type", "default")
        kind = kind.get(self.layer_type) if isinstance(kind, dict) else kind
        read = module is not None and site.rotated_by in (APPLY, INTERLEAVED) and apply is not None
        frequencies = _frequencies(module, self.layer_type) if read else None
        # tokens of an image share positions: a query's rank does not tell how far behind the sinks it is
        axes = site.beside_tower and getattr(module, "mrope_section", None) is not None
        if frequencies is None or kind in MOVING or axes:
            what = "none could be read"
            if axes:
                what = "its rotary embedding has places in images too"
            elif kind in MOVING:
                what = f"its rotary embedding is of the kind {kind!r}"
            raise OptionError(
                f"{site.name}: positions inside the cache need a rotary embedding that can be turned, and "
                f"{what}. Give positions='text'"
            )
        self.module, self.apply = (module,), apply  # in a tuple: no submodule of ours
        self.takes_two = "k" in inspect.signature(apply).parameters
        # latent attention turns the last features of a query
        self.first: int = getattr(site.view, "qk_nope_head_dim", 0)
        self.width = 2 * frequencies.shape[-1]
        self._by_halves: bool | None = self.interleaved or self._applies_halves() or None

    def back(self, query: Tensor, steps: Tensor) -> Tensor:
        """Rotate queries to where they would be so many positions earlier.

        Args:
            query: `[B, H, N, D]`, rotated.
            steps: tokens, `[B or 1, N]`.
        """
        cos, sin = self._shared_angles(query, steps)
        end = self.first + self.width
        part = query[..., self.first : end]
        turned = self._turned(part, cos, sin)
        if part.shape == query.shape:
            return turned
        return torch.cat([query[..., : self.first], turned, query[..., end:]], -1)

    def _shared_angles(self, query: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `_angles` once for all layers whose steps are the same tensor."""

        def make() -> tuple[Tensor, Tensor]:
            return self._angles(query, steps.expand(query.shape[0], -1))

        if steps.numel() > MOST_KEPT:
            return make()
        module = self.module[0]
        about = module, query.dtype, query.device, query.shape[0], _frequencies(module, self.layer_type)
        return once(steps, f"angles {self.layer_type}", about, make)

    def _angles(self, query: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._given(query, steps)
        factor = float(self._scaling())
        cos, sin = cos / factor, -sin / factor
        if cos.shape[-1] == self.width:
            return cos, sin
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)  # gpt-oss gives those of one half

    def _given(self, query: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the model's embedding gives at places `[B, N]`."""
        module: Any = self.module[0]
        cos, sin = module(query, places, self.layer_type) if self.layer_type else module(query, places)
        return cos, sin

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn by the angles of all features, `[..., N, R]`, as the model's own function does."""
        if self._halves(x):
            return by_halves(x, cos[:, None], sin[:, None])
        return self._applied(x, cos, sin)

    def _applied(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned: Tensor = self.apply(x, x, cos, sin)[0] if self.takes_two else self.apply(x, cos, sin)
        return turned

    def _halves(self, x: Tensor) -> bool:
        """Tell whether the first half of features turns into the second one."""
        if self._by_halves is None:
            place = torch.zeros(1, 1, dtype=torch.long, device=x.device)
            self._by_halves = self._given(x, place)[0].shape[-1] != self.width  # the function takes others
        return self._by_halves

    def _applies_halves(self) -> bool:
        about: Any = {"dtype": torch.float32, "device": "cpu"}  # where no device is waited for
        x = torch.arange(1, 1 + self.width, **about).view(1, 1, 1, -1)
        cos, sin = (
            torch.linspace(low, 0.9, self.width // 2, **about).repeat(2)[None, None] for low in (0.1, 0.3)
        )
        try:
            found = self._applied(x, cos, sin)
        except RuntimeError:  # it takes the angles of one half
            return False
        return torch.allclose(found, by_halves(x, cos[:, None], sin[:, None]), rtol=1e-5)

    def _scaling(self) -> float:
        name = f"{self.layer_type}_attention_scaling" if self.layer_type else "attention_scaling"
        return getattr(self.module[0], name, 1.0)

    def turn(self, query: Tensor, steps: list[int]) -> tuple[Tensor, Tensor] | None:
        """Return what kernels turn a query by in place of `back`: cosines and sines, `[B or 1, R]`, float32.

        Layers that share an embedding share them: they are computed once for each number of tokens.

        Args:
            query: `[B, H, 1, D]`.
            steps: tokens, of each row or of all.

        Returns:
            None where the embedding turns features otherwise than the first half of the first ones into
            the second one.
        """
        module: Any = self.module[0]
        frequencies = _frequencies(module, self.layer_type)
        if frequencies is None or self.first:
            return None
        about = *steps, *_written(frequencies), self._scaling()
        turns = _turns.setdefault(module, {})
        known = turns.get(self.layer_type)
        if known is None or known[0] != about:
            places = torch.tensor(steps, device=query.device)[:, None]
            cos, sin = (x[:, 0].float().contiguous() for x in self._angles(upcast(query), places))
            known = turns[self.layer_type] = about, cos, sin
        _, cos, sin = known
        return (cos, sin) if self._halves(query) else None

    def turns(self, query: Tensor, steps: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return what kernels turn many queries by in place of `back`: `[B or 1, N, R]` each, as `turn`.

        Args:
            query: `[B, H, N, D]`.
            steps: tokens, `[B, N]`, not all 0.
        """
        module: Any = self.module[0]
        frequencies = _frequencies(module, self.layer_type)
        if frequencies is None or self.first:
            return None
        if len(steps) > 1 and torch.equal(steps[1:], steps[:1].expand(len(steps) - 1, -1)):
            steps = steps[:1]
        # a table of inference mode cannot be kept for a backward
        inference = torch.is_inference_mode_enabled()
        about = *_written(frequencies), self._scaling(), inference
        tables = _tables.setdefault(module, {})
        known = tables.get(self.layer_type)
        if known is None or known[0] != about or not torch.equal(known[1], steps):
            cos, sin = (x.float().contiguous() for x in self._angles(upcast(query[:, :, :1]), steps))
            known = about, steps, cos, sin
            if steps.numel() <= MOST_KEPT:
                tables[self.layer_type] = known
        _, _, cos, sin = known
        return (cos, sin) if self._halves(query) else None


def _written(frequencies: Tensor) -> tuple[int, int]:
    """Tell which tensor these are, and how often it was written to, which inference mode does not count."""
    return frequencies.data_ptr(), 0 if frequencies.is_inference() else frequencies._version


def _frequencies(module: Any, layer_type: str) -> Tensor | None:
    """Find the frequencies of an embedding, a buffer, faster than by its attributes."""
    name = f"{layer_type}_inv_freq" if layer_type else "inv_freq"
    found: Tensor | None = module._buffers.get(name)
    return getattr(module, name, None) if found is None else found


def rotary_of(site: AttentionSite, positions: str) -> Rotary | None:
    """Find the rotary embedding by which sinks are moved; None where they stay where the text has them.

    Args:
        site: where.
        positions: of the option of the window.

    Raises:
        OptionError: positions inside the cache where there is none that can be turned.
    """
    if positions == "text" or (positions == "auto" and ROTARY_ARGUMENT not in site.forward_info.parameters):
        return None
    try:
        return Rotary(site)
    except OptionError:
        if positions == "cache":
            raise
        return None


def sinks_turned_by(site: AttentionSite, sinks: int, positions: str) -> tuple[Rotary | None, str]:
    """Find what moves so many sinks, as `rotary_of`; and what `describe` says where they stay unasked."""
    rotary = rotary_of(site, positions) if sinks else None
    stay = sinks and positions == "auto" and rotary is None
    return rotary, "sinks at the text's positions" if stay else ""
