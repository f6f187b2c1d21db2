"""Rotating queries to other positions with a model's own rotary embedding."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_linattn.attention.site import ROTARY_ARGUMENT, AttentionSite
from hf_linattn.errors import OptionError

APPLY = "apply_rotary_pos_emb"
MOVING = ("dynamic", "longrope")
"""Kinds of RoPE whose frequencies depend on the length of the text: a turn by them is no turn."""


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

    def back(self, query: Tensor, steps: Tensor) -> Tensor:
        """Rotate queries to where they would be so many positions earlier.

        Args:
            query: `[B, H, N, D]`, rotated.
            steps: tokens, `[B or 1, N]`.
        """
        module: Any = self.module[0]
        cos, sin = module(query, steps.expand(query.shape[0], -1))
        factor = float(getattr(module, "attention_scaling", 1.0))
        apply: Callable[..., tuple[Tensor, Tensor]] = self.apply
        size = cos.shape[-1]
        part, rest = query[..., :size], query[..., size:]
        turned = apply(part, part, cos / factor, -sin / factor)[0]
        return turned if not rest.shape[-1] else torch.cat([turned, rest], -1)


def is_rotated(site: AttentionSite) -> bool:
    """Tell whether the module is given a rotary embedding."""
    return ROTARY_ARGUMENT in site.forward_info.parameters
