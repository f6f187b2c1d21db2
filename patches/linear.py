"""linear: linear attention with a feature map of your own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.attention import AttentionSite, LinearAttention, upcast
from hf_linattn.errors import OptionError
from hf_linattn.registry import register

from ._feature_maps import feature_maps, input_projections, project


def exp(x: Tensor) -> Tensor:
    """Exponentiate x held below 30: above 88 it is infinite, and sums of products sooner."""
    return x.clamp(max=30).exp()


def identity(x: Tensor) -> Tensor:
    """Return the number itself."""
    return x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": exp,
    "identity": identity,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "square": torch.square,
}


@register("linear")
class Linear(LinearAttention):
    """Linear attention with your own similarity sim(q, k) = phi_q(q) . phi_k(k), from any two feature maps.

    o_i = sum_j sim(q_i, k_j) v_j / sum_j sim(q_i, k_j),  or over n_i, the number of keys that query i sees

    A map is one of:
        a function on numbers: "exp" (x held below 30), "identity", "relu", "sigmoid", "softplus", "square";
        another linear patch by its name, such as "elu1" or "hedgehog", with its default options: its map for
            queries or for keys, and its learned weights;
        a function of yours, from `[B, H, N, D]` (float32, or float64 in float64 models) to `[B, H, N, F]`;
        an nn.Module of yours, likewise: each attention module trains a copy, which runs in the dtype of its
            weights.
    Names are saved in config.json. Functions and modules cannot be: `save_pretrained` refuses, and says what
    to do instead. When a model is patched, the maps are tried out on random inputs.

    Options:
        feature_map: the map of queries and keys; default "elu1".
        query_map: another map for queries; default None.
        key_map: another map for keys; default None.
        normalise: "sum" (default), and maps must not be negative; or "n", Non-local's dot-product form, where
            features may have any sign.
        front: True puts a learned linear layer before each map, x -> W x with W_q `[H, D, D]` and W_k
            `[Hkv, D, D]`, the identity at the start; default False.

    Use: to try out a map before it becomes a patch of its own, and maps that differ for queries and keys;
        with `front`, to convert a model to a map that has nothing to train.

    Source: "Non-local Neural Networks", Wang et al. 2018, arXiv:1711.07971, equations 1 and 4 (over n);
        "Transformers are RNNs", Katharopoulos et al. 2020, arXiv:2006.16236, equation 4 (over the sum).
    """

    needs_visible_count = True
    default_for = "learned front"

    def __init__(
        self,
        site: AttentionSite,
        *,
        feature_map: str | Callable[[Tensor], Tensor] = "elu1",
        query_map: str | Callable[[Tensor], Tensor] | None = None,
        key_map: str | Callable[[Tensor], Tensor] | None = None,
        normalise: Literal["sum", "n"] = "sum",
        front: bool = False,
    ) -> None:
        super().__init__(site)
        self.fronts = input_projections(site) if front else nn.ParameterDict()
        self.normalise, self.sum_normalised = normalise, normalise == "sum"
        self.maps = nn.ModuleDict()
        self.functions: dict[str, Callable[[Tensor], Tensor]] = {}
        self.options = {"query_map": "query_map", "key_map": "key_map"}  # side -> option that gives its map
        for side, source in (("query_map", query_map), ("key_map", key_map)):
            if source is None:
                self.options[side], source = "feature_map", feature_map
            if self.options[side] not in (*self.maps, *self.functions):
                self._take(self.options[side], source, site)
        parameter = next(site.module.parameters(), None)
        if parameter is not None and not parameter.is_meta:
            self._try(site, parameter)
        else:
            self._read_sizes(site)

    def _take(self, option: str, source: Any, site: AttentionSite) -> None:
        if isinstance(source, str) and source in FUNCTIONS:
            self.functions[option] = FUNCTIONS[source]
        elif isinstance(source, str):
            self.maps[option] = _patch(option, source)(site)
        elif isinstance(source, nn.Module):
            self.maps[option] = copy.deepcopy(source)
        elif isinstance(source, type):
            raise OptionError(f"{option} is the class {source.__name__}: give an object of it")
        else:
            self.functions[option] = source

    def _read_sizes(self, site: AttentionSite) -> None:
        """Count features where nothing can be tried out, on the meta device: those of names are known."""
        sizes = set()
        for option in set(self.options.values()):
            source: Any = self.maps[option] if option in self.maps else self.functions[option]
            known = isinstance(source, LinearAttention) or source in FUNCTIONS.values()
            sizes.add((getattr(source, "features", None) or site.head_dim) if known else None)
        self.features = sizes.pop() if len(sizes) == 1 else None

    def _try(self, site: AttentionSite, parameter: Tensor) -> None:
        """Raise what a few random inputs show."""
        [head_dim] = site.require("head_dim", reason="so no map can be tried out")
        self.maps.to(parameter.device)
        generator = torch.Generator().manual_seed(0)
        sizes: dict[str, int] = {}
        for side, heads in (("query_map", site.heads), ("key_map", site.kv_heads)):
            shape = (3, heads or 1, 16, head_dim)
            x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            x = x * torch.tensor([0.1, 1.0, 5.0], device="cpu").view(3, 1, 1, 1)
            x = upcast(x.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32)))
            sizes[side] = self._tried(side, x)
        if sizes["query_map"] != sizes["key_map"]:
            raise OptionError(
                f"query_map makes {sizes['query_map']} features and key_map {sizes['key_map']}: they must be "
                "as many"
            )
        self.features = sizes["key_map"]

    @torch.no_grad()
    def _tried(self, side: str, x: Tensor) -> int:
        option = self.options[side]
        try:
            features = self._mapped(side, x)
        except Exception as error:
            raise OptionError(f"{option} fails on {list(x.shape)}: {error}") from error
        if not isinstance(features, Tensor) or features.shape[:-1] != x.shape[:-1]:
            got = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise OptionError(
                f"{option} must make [B, H, N, F] of [B, H, N, D]; {list(x.shape)} became {got}"
            )
        if not bool(features.isfinite().all()):
            raise OptionError(f"{option} gives values that are not finite for inputs of a size below 30")
        least = float(features.min())
        if self.normalise == "sum" and least < 0:
            raise OptionError(
                f"{option} gives negative features ({least:.3g}), so their sum is no denominator: pass "
                "normalise='n', or a map that is not negative"
            )
        return features.shape[-1]

    def query_map(self, query: Tensor) -> Tensor:
        """Map queries by phi_q."""
        return self._mapped("query_map", query)

    def key_map(self, key: Tensor) -> Tensor:
        """Map keys by phi_k."""
        return self._mapped("key_map", key)

    def query_log_scale(self, query: Tensor) -> Tensor | None:
        """Return the logarithm of what the map of the query divided by."""
        option = self.options["query_map"]
        source = self.maps[option] if option in self.maps else None  # noqa: SIM401 (ModuleDict has no get)
        if not isinstance(source, LinearAttention):
            return None
        return source.query_log_scale(project(self.fronts, "query_map", query))

    def _mapped(self, side: str, x: Tensor) -> Tensor:
        x = project(self.fronts, side, x)
        option = self.options[side]
        if option in self.functions:
            return self.functions[option](x)
        source = self.maps[option]
        if isinstance(source, LinearAttention):
            features: Tensor = getattr(source, side)(x)
            return features
        weight = next((p for p in source.parameters() if p.is_floating_point()), x)
        features = source(x.to(weight.dtype))
        return features.to(x.dtype)

    def denominator(self, total: Tensor, count: Tensor | None) -> Tensor:
        """The sum or n_i."""
        if self.normalise == "sum":
            return total
        assert count is not None
        return count.to(total.dtype).clamp_min(1).expand_as(total)

    def state_bytes(self, site: AttentionSite, size: int) -> int | None:
        """None where the number of features is not known, on the meta device."""
        return None if self.features is None else super().state_bytes(site, size)


def _patch(option: str, name: str) -> type[LinearAttention]:
    """Look up the registered patch of this name, if feature maps are all that it is made of."""
    fitting = {known: cls for known, cls in feature_maps().items() if cls is not Linear}
    if name not in fitting:
        raise OptionError(
            f"{option}={name!r} is neither a function ({', '.join(FUNCTIONS)}) nor a linear patch made of "
            f"feature maps alone ({', '.join(fitting)}). Give a function or module of your own itself, not "
            "its name"
        )
    return fitting[name]
