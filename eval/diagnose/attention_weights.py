"""The attention weights that a model really uses, whatever computes them: patched or not.

Every attention here is linear in its values, o = W v. So its own function, called once more with one-hot
values, gives the weights W to the last bit of its arithmetic: masks, windows, biases, sinks and patches
included, no formula repeated.

    with watching(model, see):  # see(call) after every attention call
        model(input_ids, use_cache=False)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_linattn.attention.visibility import read_visibility
from hf_linattn.errors import LinattnError, UnsupportedCallError, UnsupportedModelError
from hf_linattn.patching.contexts import patched
from hf_linattn.patching.interface import NAME
from hf_linattn.patching.patch import is_patched
from hf_linattn.patching.plan import sites_of, transformers_model

from ..common.formatting import NOT_FINITE

OTHER_LAYOUTS = ("flash", "flex", "paged", "/")
"""In the names of implementations whose kernels read other masks, or take no values as wide as the text."""


@dataclass(frozen=True)
class Call:
    """One attention call of one layer.

    Attributes:
        name: dotted name of the attention module.
        module: the module.
        query: `[B, H, N, D]`, after rotary embedding and norms, as the attention gets it.
        key: `[B, Hkv, S, D]`.
        weights: W `[B, H, N, S]` with o = W v; float32, or float64 in float64 models.
        visible: boolean `[B, H, N, S]`, the keys that each query may see.
        scaling: factor of the scores.
    """

    name: str
    module: nn.Module
    query: Tensor
    key: Tensor
    weights: Tensor
    visible: Tensor
    scaling: float


@contextmanager
def watching(model: nn.Module, see: Callable[[Call], None]) -> Iterator[None]:
    """While this lasts, every attention call of the model's own modules is also handed to `see`.

    The functions behind the model's attention implementations are exchanged and put back; the model, its
    config and its outputs stay as they are. Run it without a cache: a second call would write it twice.

    Raises:
        UnsupportedModelError: no attention goes through transformers' interface, or it does through a kernel
            that cannot be asked for its weights.
        UnsupportedCallError: while running, an attention that is not linear in its values, or reads them.
    """
    with _routed(model), _exchanged(model, see):
        yield


@contextmanager
def _routed(model: nn.Module) -> Iterator[None]:
    """Have modules with attention code of their own compute the same softmax by the interface."""
    inside = transformers_model(model)
    own = [site for site in sites_of(inside) if site.adapted and NAME not in site.module._modules]
    if not own:
        yield
    elif is_patched(inside):
        raise UnsupportedModelError(
            f"{own[0].name} ({type(own[0].module).__name__}) computes with code of its own beside patched "
            "layers, and cannot be asked for its weights: patch all layers, or none"
        )
    else:
        with patched(model, {site.name: "temperature" for site in own}):  # whose factor starts at 1
            yield


@contextmanager
def _exchanged(model: nn.Module, see: Callable[[Call], None]) -> Iterator[None]:
    """Hand every attention call to `see`."""
    sites = sites_of(transformers_model(model))
    implementations = {_implementation(site.module): site.name for site in sites}
    for implementation, name in implementations.items():
        if any(part in implementation for part in OTHER_LAYOUTS):
            raise UnsupportedModelError(
                f"{name} computes its attention with {implementation!r}, which cannot be asked for its "
                "weights: load the model with attn_implementation='sdpa' (or 'eager')"
            )
    watcher = _Watcher({id(site.module): site.name for site in sites}, see)
    # some families have an interface of their own, in the file of their attention
    candidates = [ALL_ATTENTION_FUNCTIONS, *(x for site in sites for x in _globals(site.module).values())]
    interfaces = {id(x): x for x in candidates if isinstance(x, AttentionInterface)}.values()
    local = [dict(interface._local_mapping) for interface in interfaces]
    try:
        for interface in interfaces:
            for implementation in implementations:
                interface[implementation] = partial(watcher.attention, interface.get(implementation))
        yield
    finally:
        for interface, mapping in zip(interfaces, local, strict=True):
            interface._local_mapping.clear()
            interface._local_mapping.update(mapping)


class _Watcher:
    """Calls attention functions in the model's place, and once more for their weights."""

    def __init__(self, names: dict[int, str], see: Callable[[Call], None]) -> None:
        self.names, self.see, self.busy = names, see, False

    def attention(
        self,
        original: Callable[..., Any] | None,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call the original function, or the eager one of the module's file where there is none."""
        function = original or _globals(module).get("eager_attention_forward")
        if function is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} has no eager attention of its own: load the model with "
                "attn_implementation='sdpa'"
            )
        function = partial(function, module)
        # a kept layer of a patched model calls its own function from inside ours: seen once is enough
        if self.busy or id(module) not in self.names:
            return function(query, key, value, mask, *args, **kwargs)
        self.busy = True
        try:
            result = function(query, key, value, mask, *args, **kwargs)
            name = self.names[id(module)]
            self.see(_ask(function, name, module, (query, key, value, mask), args, kwargs, result[0]))
        finally:
            self.busy = False
        return result


def _implementation(module: Any) -> str:
    return str(module.config._attn_implementation)


def _globals(module: nn.Module) -> dict[str, Any]:
    """Return what the module's forward sees by name."""
    forward: Any = inspect.unwrap(type(module).forward)
    return dict(forward.__globals__)


def _ask(
    function: Callable[..., Any],
    name: str,
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Call:
    """Compute the weights of a call from one-hot values."""

    def wide(x: Any) -> Any:
        half = isinstance(x, Tensor) and x.is_floating_point() and x.element_size() < 4
        return x.float() if half else x

    query, key, value, mask = tensors
    query, key = wide(query), wide(key)
    keys = key.shape[2]
    one_hot = torch.eye(keys, dtype=query.dtype, device=value.device).expand(*value.shape[:2], keys, keys)
    extras = {keyword: wide(extra) for keyword, extra in kwargs.items()}
    try:
        weights = function(query, key, one_hot, wide(mask), *args, **extras)[0].transpose(1, 2)
    except (LinattnError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise UnsupportedCallError(
            f"{name} ({type(module).__name__}): its attention takes no other values than its own ({error}), "
            "as gates made from the values do; so it has no matrix of weights that could be asked for"
        ) from error
    visible = _visible(module, query, mask, keys, kwargs) | (weights != 0)
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    call = Call(name, module, query, key, weights, visible, scaling)
    groups = query.shape[1] // value.shape[1]
    _check_linear(call, value.repeat_interleave(groups, 1), output.transpose(1, 2))
    return call


def _visible(
    module: nn.Module, query: Tensor, mask: Tensor | None, keys: int, kwargs: dict[str, Any]
) -> Tensor:
    """Read boolean `[B, 1 or H, N, S]` from the mask of a call; without one, causal modules see no future."""
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    visibility = read_visibility(mask, query.shape[2], keys, bool(causal))
    if kwargs.get("indices") is not None:
        visibility = visibility.selected(kwargs["indices"], keys)
    return visibility.mask(query.device)[..., :keys]


def _check_linear(call: Call, value: Tensor, output: Tensor) -> None:
    """Check that W v is the output, up to the rounding of its dtype, where a query sees anything."""
    want = call.weights @ value.to(call.weights.dtype)
    size = float((call.weights.abs() @ value.abs().to(call.weights.dtype)).amax())
    seen = call.visible.any(-1, keepdim=True)
    error = float((want - output.to(want.dtype)).masked_fill(~seen, 0).abs().amax())
    if not math.isfinite(size + error):
        raise UnsupportedCallError(f"{call.name} ({type(call.module).__name__}) is not finite: {NOT_FINITE}")
    if not error <= torch.finfo(output.dtype).eps ** 0.5 * size:
        raise UnsupportedCallError(
            f"{call.name} ({type(call.module).__name__}): its attention is not linear in its values (one-hot "
            f"values give an output that is off by {error:.2g}, values of size {size:.2g}), so it has no "
            "matrix of weights to look at"
        )
