"""The oracle of the tests: quadratic float64 attention, from the formulas, no line shared with the package.

Used on an *unpatched* model, as attention implementations of its own:

    with as_oracle(model, "softmax1+logn", train_length=64) as seen:
        want = model(**batch).logits
    assert seen.calls  # one attention module per call

Visible keys come from transformers' own boolean mask, which is always made in full, never skipped. For
query i with visible keys V(i), n_i = |V(i)| and s_ij = scaling q_i . k_j (key heads repeated to the query's):

    softmax     w_ij = exp(s_ij) / sum_V(i) exp(s_ij)
    softmax1    w_ij = exp(s_ij) / (1 + sum_V(i) exp(s_ij))
    elu1        w_ij = phi(q_i) . phi(k_j) / sum_V(i) phi(q_i) . phi(k_j),  phi(x) = elu(x) + 1, no scaling
    logn        f_i q_i for q_i,  f_i = log(n_i) / log(train_length), or kappa log(n_i); with clip max(f_i, 1)
    o_i         sum_V(i) w_ij v_j, and 0 where V(i) is empty

The other patches: one function each in `formulas_*.py`, by `@formula("name")` and `@modifier("name")`.

What models add to their scores, in this order: softcap c gives c tanh(s_ij / c); a position bias or an
additive mask b gives s_ij + b_ij; a sink t of the head (s_aux), or of head and query (sinks), adds exp(t)
to the denominator; indices leave those keys alone visible. elu1 has no scores: there it raises.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from hf_linattn.patching.adapters import adapt, adapter_of, attributes_of


@dataclass
class Run:
    """One use of the oracle: its options, and what it saw.

    Attributes:
        options: of the patch's parts, shared among them by name.
        where: None for every module, or module -> whether it gets the patch; the others get softmax.
        windows: False drops sliding and chunked windows: plain masks are put in their place.
        learned: parameters and buffers of the patch, module -> name -> tensor.
        calls: the attention modules in the order in which they called.
        shared: what the layers of a forward hand on.
        hidden: the input of the module that runs.
    """

    options: dict[str, Any]
    where: Callable[[nn.Module], bool] | None = None
    windows: bool = True
    learned: dict[nn.Module, dict[str, Tensor]] = field(default_factory=dict)
    calls: list[nn.Module] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None


@dataclass
class Inputs:
    """What a formula sees; everything in float64, key heads repeated to the query's.

    Attributes:
        query, key, value: `[B, H, N, D]`, `[B, H, S, D]`, `[B, H, S, Dv]`.
        visible: V(i) as a boolean `[B, 1 or H, N, S]`.
        scaling: of the scores; modifiers change it.
        kv_heads: number of key heads before they were repeated.
        causal: what the module is.
        options: given ones alone; `learned`: parameters and buffers of `linattn`, by their names there.
        factor: of the scores, of position patches.
        bias, softcap, sink: what the model adds to its scores, and position patches to the bias.
        parts: the names in the composition.
        first: no other module called before it in this forward.
        shared: what the layers of a forward hand on.
        hidden: the module's input `[B, N, C]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor
    scaling: float
    kv_heads: int
    causal: bool
    options: dict[str, Any]
    learned: dict[str, Tensor]
    bias: Tensor | None = None
    factor: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    parts: tuple[str, ...] = ()
    first: bool = True
    shared: dict[str, Any] = field(default_factory=dict)
    hidden: Tensor | None = None

    def scores(self) -> Tensor:
        """s_ij `[B, H, N, S]`, capped and biased; whatever is there where the key is not visible."""
        return self.finish(self.query @ self.key.mT * self.scaling)

    def finish(self, scores: Tensor) -> Tensor:
        """Stretch, cap and bias."""
        if self.factor is not None:
            scores = scores * self.factor
        if self.softcap is not None:
            scores = self.softcap * (scores / self.softcap).tanh()
        return scores if self.bias is None else scores + self.bias.double()[..., : scores.shape[-1]]

    def parameter(self, name: str) -> Tensor:
        """A parameter or buffer of the patch."""
        return self.learned[name].double()

    def per_head(self, x: Tensor) -> Tensor:
        """`[Hkv, ...]` -> `[H, ...]`."""
        return x.repeat_interleave(self.query.shape[1] // self.kv_heads, 0)

    def ranks(self) -> tuple[Tensor, Tensor]:
        """Place of each query `[B, N]` and key `[B, S]` among the visible tokens; without a window."""
        seen = self.visible[:, 0]
        if self.causal:
            query = seen.sum(-1) - 1
            queries, keys = seen.shape[1:]
            if queries == keys:
                return query, query
            return query, seen.any(1).cumsum(-1) - 1
        valid = seen.any(1)
        rank = valid.cumsum(-1) - 1
        return rank, rank


@dataclass(frozen=True)
class Case:
    """A patch as the suites run it.

    Attributes:
        spec, options: for `patch_model`.
        half: largest relative error in half precision; more where a threshold decides what is seen.
        smooth: has a gradient that can be compared (no threshold that rounding moves).
    """

    spec: str
    options: dict[str, Any] = field(default_factory=dict)
    half: float = 0.05
    smooth: bool = True


FORMULAS: dict[str, Callable[[Inputs], Tensor]] = {}
MODIFIERS: dict[str, Callable[[Inputs], None]] = {}
OUTPUTS: dict[str, Callable[[Inputs, Tensor], Tensor]] = {}
STILL: set[str] = set()
"""Modifiers under which the model's rotary embedding turns nothing."""


def formula(name: str, scores: bool = True, windowed: bool = False) -> Callable[[Any], Any]:
    """Register the output `[B, H, N, Dv]` of an attention; "a+b" for one that holds another.

    Without scores there is nothing to cap or bias, and no sink: it raises where a model does so. A window of
    scores can be capped, and takes sinks.
    """

    def decorate(function: Callable[[Inputs], Tensor]) -> Callable[[Inputs], Tensor]:
        def checked(x: Inputs) -> Tensor:
            biased = x.bias is not None and bool((x.bias != 0).any())
            extra = x.softcap is not None or x.sink is not None
            if not scores and (biased or (extra and not windowed)):
                raise NotImplementedError(f"{name} has no scores to cap or bias, and no sinks")
            return function(x)

        FORMULAS[name] = checked
        return function

    return decorate


def modifier(name: str, rope: bool = True) -> Callable[[Any], Any]:
    """Register a function that changes the inputs in place; `rope=False`: of a model that turns nothing."""

    def decorate(function: Callable[[Inputs], None]) -> Callable[[Inputs], None]:
        MODIFIERS[name] = function
        STILL.update(() if rope else (name,))
        return function

    return decorate


def output_modifier(name: str) -> Callable[[Any], Any]:
    """Register a function that makes another output `[B, H, N, Dv]` of an attention's."""

    def decorate(function: Callable[[Inputs, Tensor], Tensor]) -> Callable[[Inputs, Tensor], Tensor]:
        OUTPUTS[name] = function
        return function

    return decorate


def over_its_sum(weights: Tensor, visible: Tensor, sink: Tensor | None = None) -> Tensor:
    """Weights that are not negative, over their sum and exp(sink) of the head; 0 where nothing is visible."""
    weights = torch.where(visible, weights, 0.0)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.double().exp().reshape(1, -1, 1, 1)
    return torch.where(total > 0, weights / total, 0.0)


_RUNS: list[Run] = []


def elu_plus_one(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1, as exp(x) below 0: the sum would round to 0 there."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def hedgehog_weights(x: Inputs, prefix: str) -> Tensor:
    """(softmax(qW), softmax(-qW)) . (softmax(kW'), softmax(-kW')), with the parameters named `prefix`."""

    def phi(x: Tensor, weight: Tensor) -> Tensor:
        x = x @ weight.mT
        return torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)

    query = phi(x.query, x.parameter(prefix + "query_weight"))
    return query @ phi(x.key, x.per_head(x.parameter(prefix + "key_weight"))).mT


def fronted(x: Inputs, patch: str) -> tuple[Tensor, Tensor]:
    """Queries and keys through the learned layers in front of a map."""
    key = x.per_head(x.parameter(f"{patch}.fronts.key_map"))
    return x.query @ x.parameter(f"{patch}.fronts.query_map").mT, x.key @ key.mT


def visible_keys(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool | None
) -> Tensor:
    """Boolean `[B, 1 or H, N, S]`. Modules that make no mask say by `is_causal` what they see."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(keys - queries) if causal and queries > 1 else mask
    elif mask.dtype != torch.bool:
        mask = mask > torch.finfo(mask.dtype).min / 2
    return mask[..., :keys].expand(query.shape[0], -1, queries, keys)


def selected_keys(indices: Tensor, keys: int) -> Tensor:
    """Boolean `[B, 1, N, S]`: the keys that an indexer names for each query, `[B, N, top k]`."""
    return (indices.long()[..., None] == torch.arange(keys, device=indices.device)).any(-2)[:, None]


def softmax_weights(scores: Tensor, visible: Tensor, sink: Tensor | None = None) -> Tensor:
    """exp(s) / (exp(sink) + sum exp(s)); no sink is one of -inf."""
    scores = scores.masked_fill(~visible, -torch.inf)
    # numerator and denominator times exp(-top): no overflow, and nothing changes
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    if sink is not None:
        sink = sink.double().reshape(1, -1, 1, 1) if sink.ndim == 1 else sink.double()
        top = torch.maximum(top, sink)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    return torch.where(total > 0, weights / total, 0.0)


def _inputs(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, kwargs: dict[str, Any]
) -> Inputs:
    if kwargs.get("block_indices") is not None:
        raise NotImplementedError("the oracle does not know blocks that an indexer selects")
    is_causal = kwargs.get("is_causal")
    visible = visible_keys(module, query, key, attention_mask, is_causal)
    if kwargs.get("indices") is not None:
        visible = visible & selected_keys(kwargs["indices"], key.shape[2])
    if kwargs.get("window") is not None and _RUNS[-1].windows:
        own = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
        visible = visible & (torch.arange(key.shape[2]) > own - kwargs["window"])
    bias = kwargs.get("position_bias")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        bias = attention_mask if bias is None else attention_mask + bias
        bias = bias.masked_fill(bias < torch.finfo(bias.dtype).min / 2, 0)
    heads = query.shape[1]
    scaling = kwargs.get("scaling")
    return Inputs(
        query.double(),
        *(x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value)),
        visible,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        key.shape[1],
        getattr(module, "is_causal", True) if is_causal is None else is_causal,
        {},
        {},
        bias,
        None,
        kwargs.get("softcap"),
        kwargs.get("s_aux") if kwargs.get("sinks") is None else kwargs["sinks"],
    )


def _oracle(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, None]:
    run = _RUNS[-1]
    run.calls.append(module)
    x = _inputs(module, query, key, value, attention_mask, kwargs)
    name = module.config._attn_implementation.removeprefix("oracle_")
    names = tuple(name.split("+")) if run.where is None or run.where(module) else ("softmax",)
    x.first, x.shared = module is run.calls[0], run.shared
    x.parts, x.options, x.learned = names, run.options, run.learned.get(module, {})
    x.hidden = None if run.hidden is None else run.hidden.double()
    for part in names:
        if part in MODIFIERS:
            MODIFIERS[part](x)
    attention = "+".join(part for part in names if part not in MODIFIERS and part not in OUTPUTS)
    output = FORMULAS[attention or "softmax"](x)
    for part in names:
        if part in OUTPUTS:
            output = OUTPUTS[part](x, output)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def _full_mask(*args: Any, **kwargs: Any) -> Tensor:
    """transformers' own boolean mask, without its shortcuts."""
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    if _RUNS and not _RUNS[-1].windows and kwargs.get("local_size") is not None:
        zero = torch.tensor(0)
        forward = bool(kwargs["mask_function"](zero, zero, zero, zero + 1))  # query 0 sees key 1
        kwargs["mask_function"] = bidirectional_mask_function if forward else causal_mask_function
        kwargs["local_size"] = None
    if kwargs["config"].model_type in ("mpt", "gemma4_audio"):  # which compute with additive masks
        return eager_mask(*args, **kwargs)
    return sdpa_mask(*args, **kwargs)


def configs_of(model: nn.Module) -> list[PreTrainedConfig]:
    """Every config that a module of the model holds, and their sub-configs, once each."""
    found: dict[int, PreTrainedConfig] = {}

    def add(value: Any) -> None:
        if isinstance(value, PreTrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for key in value.sub_configs:
                add(getattr(value, key, None))

    for module in model.modules():
        for value in module.__dict__.values():
            add(value)
    return list(found.values())


def _still(module: nn.Module, args: Any, output: Any) -> tuple[Tensor, Tensor]:
    """Cosines of 1 and sines of 0, whatever the position."""
    return output[0] * 0 + 1, output[1] * 0


def _route(model: nn.Module) -> list[Callable[[], Any]]:
    """Let modules with code of their own call the interface; the suites hold softmax to that code."""
    undo: list[Callable[[], Any]] = []
    for name, module in model.named_modules():
        if adapter_of(module) is not None:
            new = {k: v for k, v in attributes_of(model, name).items() if k not in module.__dict__}
            module.__dict__.update(new)
            undo += [*(partial(module.__dict__.pop, key) for key in new), adapt(module)]
    return undo


def _note_hidden(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Keep the first argument of an attention module for its call."""
    first = args[0] if args else kwargs.get("hidden_states")
    _RUNS[-1].hidden = first if isinstance(first, Tensor) else None


@contextlib.contextmanager
def as_oracle(model: nn.Module, patch: str, **options: Any) -> Iterator[Run]:
    """Let an unpatched model compute its attention by the oracle; options are the patch's and `Run`'s."""
    if "_linattn" in model.__dict__:
        raise RuntimeError("the oracle is for unpatched models")
    own = {key: options.pop(key) for key in ("where", "windows", "learned") if key in options}
    run = Run(options, **own)
    name = "oracle_" + patch
    AttentionInterface.register(name, _oracle)
    AttentionMaskInterface.register(name, _full_mask)
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    rotary = [m for m in model.modules() if hasattr(m, "rope_type")] if STILL & set(patch.split("+")) else []
    hooks = [module.register_forward_hook(_still) for module in rotary]
    undo = _route(model)
    hooks += [
        module.register_forward_pre_hook(_note_hidden, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "config") and "attention" in type(module).__name__.lower()
    ]
    _RUNS.append(run)
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield run
    finally:
        for hook in hooks:
            hook.remove()
        _RUNS.remove(run)
        for step in reversed(undo):
            step()
        for config, implementation in before:
            config._attn_implementation_internal = implementation


for _module in ("first", "linear", "state", "heavy", "scores", "sparse", "output"):
    importlib.import_module("helpers.formulas." + _module)
