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
    ...+logn    the same with f_i q_i for q_i,  f_i = log(n_i) / log(train_length), or kappa log(n_i);
                with clip max(f_i, 1)
    logn        softmax+logn
    o_i         sum_V(i) w_ij v_j, and 0 where V(i) is empty

What models add to their scores, in this order: softcap c gives c tanh(s_ij / c); a position bias or an
additive mask b gives s_ij + b_ij; a sink t of the head (s_aux), or of head and query (sinks), adds exp(t)
to the denominator; indices leave those keys alone visible. elu1 has no scores: there it raises.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

PATCHES = ("softmax", "softmax1", "logn", "softmax1+logn", "elu1", "elu1+logn")


@dataclass
class Run:
    """One use of the oracle: its options, and what it saw.

    Attributes:
        where: None for every module, or module -> whether it gets the patch; the others get softmax.
        windows: False drops sliding and chunked windows: plain masks are put in their place.
        calls: the attention modules in the order in which they called.
    """

    train_length: int = 512
    kappa: float | None = None
    clip: bool = False
    where: Callable[[nn.Module], bool] | None = None
    windows: bool = True
    calls: list[nn.Module] = field(default_factory=list)


_RUNS: list[Run] = []


def elu_plus_one(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1, as exp(x) below 0: the sum would round to 0 there."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


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


def log_n_factor(visible: Tensor, run: Run) -> Tensor:
    """f_i, `[B, 1 or H, N, 1]`."""
    n = visible.sum(-1, keepdim=True).double().clamp(min=1)
    factor = n.log() / math.log(run.train_length) if run.kappa is None else run.kappa * n.log()
    return factor.clamp(min=1) if run.clip else factor


def weights_of_scores(
    scores: Tensor,
    visible: Tensor,
    denominator: float,
    softcap: float | None,
    bias: Tensor | None,
    sink: Tensor | None,
) -> Tensor:
    """exp(s) / (denominator + exp(sink) + sum exp(s)); the denominator's constant is 0 or 1."""
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.double()[..., : scores.shape[-1]]
    # numerator and denominator times exp(-top): no overflow, and nothing changes
    top = scores.masked_fill(~visible, -1e30).amax(-1, keepdim=True)
    if denominator:
        top = top.clamp(min=0)
    if sink is not None:
        sink = sink.double().reshape(1, -1, 1, 1) if sink.ndim == 1 else sink.double()
        top = torch.maximum(top, sink)
    weights = torch.where(visible, (scores.masked_fill(~visible, -1e30) - top).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if denominator:
        total = total + denominator * (-top).exp()
    if sink is not None:
        total = total + (sink - top).exp()
    return torch.where(total > 0, weights / total, 0.0)


def weights_of_features(query: Tensor, key: Tensor, visible: Tensor) -> Tensor:
    """phi(q) . phi(k) over its sum."""
    weights = torch.where(visible, elu_plus_one(query) @ elu_plus_one(key).mT, 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)


def _oracle(patch: str) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        run = _RUNS[-1]
        run.calls.append(module)
        kind = patch if run.where is None or run.where(module) else "softmax"
        if kwargs.get("block_indices") is not None:
            raise NotImplementedError("the oracle does not know blocks that an indexer selects")
        sink = s_aux if kwargs.get("sinks") is None else kwargs["sinks"]
        visible = visible_keys(module, query, key, attention_mask, is_causal)
        if kwargs.get("indices") is not None:
            visible = visible & selected_keys(kwargs["indices"], key.shape[2])
        bias = position_bias
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            bias = attention_mask if bias is None else attention_mask + bias
            bias = bias.masked_fill(bias < torch.finfo(bias.dtype).min / 2, 0)
        heads = query.shape[1]
        q = query.double()
        k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
        if "logn" in kind.split("+"):
            q = q * log_n_factor(visible, run)
        if "elu1" in kind.split("+"):
            if bias is not None and bool((bias != 0).any()):
                raise NotImplementedError("elu1 has no scores to add a bias to")
            if softcap is not None or sink is not None:
                raise NotImplementedError("elu1 has no scores to cap, and no sinks")
            weights = weights_of_features(q, k, visible)
        else:
            scores = q @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
            one = 1.0 if "softmax1" in kind.split("+") else 0.0
            weights = weights_of_scores(scores, visible, one, softcap, bias, sink)
        return (weights @ v).to(query.dtype).transpose(1, 2).contiguous(), None

    return attention


def _full_mask(*args: Any, **kwargs: Any) -> Tensor:
    """transformers' own boolean mask, without its shortcuts."""
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    if _RUNS and not _RUNS[-1].windows and kwargs.get("local_size") is not None:
        zero = torch.tensor(0)
        forward = bool(kwargs["mask_function"](zero, zero, zero, zero + 1))  # query 0 sees key 1
        kwargs["mask_function"] = bidirectional_mask_function if forward else causal_mask_function
        kwargs["local_size"] = None
    return sdpa_mask(*args, **kwargs)


def _name(patch: str) -> str:
    return "oracle_" + patch.replace("+", "_")


for _patch in PATCHES:
    AttentionInterface.register(_name(_patch), _oracle(_patch))
    AttentionMaskInterface.register(_name(_patch), _full_mask)


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


@contextlib.contextmanager
def as_oracle(model: nn.Module, patch: str, **options: Any) -> Iterator[Run]:
    """Let an unpatched model compute its attention by the oracle; options are the fields of `Run`."""
    if "_linattn" in model.__dict__:
        raise RuntimeError("the oracle is for unpatched models")
    run = Run(**options)
    before = [(config, config._attn_implementation_internal) for config in configs_of(model)]
    _RUNS.append(run)
    try:
        for config, _ in before:
            config._attn_implementation_internal = _name(patch)
        yield run
    finally:
        _RUNS.remove(run)
        for config, implementation in before:
            config._attn_implementation_internal = implementation
