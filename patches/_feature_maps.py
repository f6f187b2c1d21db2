"""Feature maps by the name of the patch that they come from, for attentions that take one as an option."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, LinearAttention
from hf_linattn.errors import OptionError
from hf_linattn.ops.types import SoftmaxMap
from hf_linattn.registry import check_options, option_value, patches

BEYOND_MAPS = ("log_decay", "mapped", "sums", "causal", "bidirectional", "absorb", "attend")
"""What a patch that is made of feature maps alone leaves as it is."""


def feature_maps() -> dict[str, type[LinearAttention]]:
    """List the registered linear patches that are made of feature maps alone, by name."""
    return {
        name: cls
        for name, cls in patches().items()
        if issubclass(cls, LinearAttention)
        and all(getattr(cls, part) is getattr(LinearAttention, part) for part in BEYOND_MAPS)
    }


def named_map(option: str, name: str, site: AttentionSite, signed: bool = False) -> LinearAttention:
    """Build the patch of this name, whose maps are to be used.

    Args:
        option: the option that names it, for the error.
        name: a linear patch made of feature maps alone, which divides by its sum; with options of its own as
            in "taylor2(features=32)", else with its defaults.
        site: the module that it is for.
        signed: also one that does not, because its features can be negative.

    Raises:
        OptionError: no such patch, or it makes other demands.
    """
    fitting = {known: cls for known, cls in feature_maps().items() if signed or cls.sum_normalised}
    called = re.fullmatch(r"(\w+)(?:\((.*)\))?", name)
    if called is None or called[1] not in fitting:
        raise OptionError(
            f"{option}={name!r} is no linear patch made of a feature map alone; there are "
            f"{', '.join(fitting)}, with options as in 'taylor2(features=32)'"
        )
    options = dict(_option(option, name, text) for text in (called[2] or "").split(",") if text.strip())
    check_options(fitting[called[1]], options)
    return fitting[called[1]](site, **options)


def _option(option: str, name: str, text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key.strip() and equals and value.strip()):
        raise OptionError(f"{option}={name!r}: {text.strip()!r} is no OPTION=VALUE")
    return key.strip(), option_value(value.strip())


def input_projections(site: AttentionSite) -> nn.ParameterDict:
    """Build a learned layer for queries, W_q `[H, D, D]`, and one for keys, W_k `[Hkv, D, D]`: the identity.

    Raises:
        OptionError: its sizes cannot be told.
    """
    sizes = ("head_dim", "heads", "kv_heads")
    head_dim, heads, kv_heads = site.require(*sizes, reason="so nothing can be learned in front")
    sides = (("query_map", heads), ("key_map", kv_heads))
    return nn.ParameterDict(
        [(side, nn.Parameter(torch.eye(head_dim).repeat(count, 1, 1))) for side, count in sides]
    )


def project(learned: nn.ParameterDict, side: str, x: Tensor) -> Tensor:
    """Project queries or keys `[B, H, N, D]` to W x; return x itself where nothing is learned."""
    return torch.einsum("bhnd,hfd->bhnf", x, learned[side].to(x)) if side in learned else x


def clamp_floor(x: Tensor, least: float) -> Tensor:
    """Hold above `least`, as `clamp_min` does, whose backward takes ten times as long on a CPU."""
    return F.threshold(x, least, least)


class NamedMapAttention(LinearAttention):
    """Linear attention over the map of another patch, with a learned layer in front of it where wanted."""

    def use_map(self, name: str, front: bool, site: AttentionSite) -> None:
        """Use the map of the patch of this name.

        Raises:
            OptionError: there is no such map, or nothing can be learned in front of it.
        """
        self.map = named_map("feature_map", name, site, signed=not self.sum_normalised)
        self.features = self.map.features
        self.fronts = input_projections(site) if front else nn.ParameterDict()
        if not front and self._adds_nothing():
            self.fused, self.eps = self.map.fused, self.map.eps

    def _adds_nothing(self) -> bool:
        """Tell whether the maps are those of the patch; a class derived from this one may have others."""
        own, named = type(self), NamedMapAttention
        return (own.query_map, own.key_map, own.mapped) == (named.query_map, named.key_map, named.mapped)

    def query_map(self, query: Tensor) -> Tensor:
        """Map queries by phi_q."""
        return self.map.query_map(project(self.fronts, "query_map", query))

    def key_map(self, key: Tensor) -> Tensor:
        """Map keys by phi_k."""
        return self.map.key_map(project(self.fronts, "key_map", key))

    def softmax_map(self) -> SoftmaxMap | None:
        """Return the weights of the maps, where the patch has such and nothing is added."""
        return None if len(self.fronts) or not self._adds_nothing() else self.map.softmax_map()

    def query_log_scale(self, query: Tensor) -> Tensor | None:
        """Return the logarithm of what the map of the query divided by."""
        return self.map.query_log_scale(project(self.fronts, "query_map", query))
