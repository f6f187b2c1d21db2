"""Losses over a vocabulary without `[B, N, V]`: the head is applied to the last hidden states in chunks.

    predictions = predict(model, input_ids, use_cache=False)  # logits, or what makes them
    token_losses(cross_entropy, predictions[:, :-1], input_ids[:, 1:])  # [B, N - 1]

A forward pre-hook of the head takes the hidden states and leaves it one token, so that everything before it,
and what distributes or wraps the model, runs as always. The backward makes the logits once more.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_linattn.ops.second_order import only_once
from hf_linattn.patching.plan import transformers_model

CHUNK = 2**24
"""Logits at a time. Where those of a batch are no more, the model makes them itself, as one tensor."""

MULTIPLIERS = ("logit_scale", "output_multiplier")
DIVISOR = "logits_scaling"
CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Entries of configs: logits * scale (Cohere), logits / scale (Granite), cap * tanh(logits / cap) (Gemma)."""

TRIED = 8
"""Tokens, at most, that a form is tried on."""
PROBE = 100.0
"""Largest of the logits that a form is tried on: beyond any cap."""


@dataclass(frozen=True)
class Finish:
    """What a model does to the logits that its output layer gives, in their dtype."""

    scale: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Scale and cap logits `[..., V]`."""
        if self.scale != 1:
            logits = logits * self.scale
        if self.divisor != 1:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class HeldPredictions:
    """Predictions of a model before its head: index them like logits `[B, N, V]`, over B and N.

    Attributes:
        states: what the head reads, `[B, N, D]` or a selection of it.
        weight, bias: of the head, `[V, D]` and `[V]`, in the dtype that it computes in.
        finish: what follows it.
    """

    states: Tensor
    weight: Tensor
    bias: Tensor | None
    finish: Finish

    def __getitem__(self, index: Any) -> HeldPredictions:
        """Select tokens."""
        return replace(self, states=self.states[index])

    def raw(self) -> Tensor:
        """Compute what the output layer gives, `[..., V]`."""
        return F.linear(self.states.to(self.weight.dtype), self.weight, self.bias)

    def logits(self) -> Tensor:
        """Compute the logits `[..., V]`."""
        return self.finish(self.raw())


Predictions = Tensor | HeldPredictions
"""What a model says of every token: logits `[B, N, V]`, or what they are made of."""


def predict(model: nn.Module, input_ids: Tensor, **keywords: Any) -> Predictions:
    """Run a model for a loss by `token_losses`.

    Args:
        model: one that gives logits, in whatever wraps it.
        input_ids: `[B, N]`.
        **keywords: of its forward; `logits_to_keep` limits the tokens to the last ones.

    Returns:
        Logits `[B, N, V]` as the model gives them where they are few, or where they are no plain function of
        its output layer: a warning says so, once. Else what they can be made of.
    """
    inside = transformers_model(model)
    find = getattr(inside, "get_output_embeddings", None)
    linear: Any = None if find is None else find()
    tokens = len(input_ids) * min(input_ids.shape[1], keywords.get("logits_to_keep") or math.inf)
    if tokens * _vocabulary(inside, linear) > CHUNK:
        finish = _known_finish(model, inside, linear, input_ids, keywords)
        if finish is not None:
            with _other_input(linear, lambda states: states[:1, :1]) as held:
                model(input_ids=input_ids, **keywords)
            ((states, dtype),) = held
            bias = None if linear.bias is None else linear.bias.to(dtype)
            return HeldPredictions(states, linear.weight.to(dtype), bias, finish)
    return model(input_ids=input_ids, **keywords).logits  # type: ignore[no-any-return]


def token_losses(loss: Callable[..., Tensor], predictions: Predictions, *others: Predictions) -> Tensor:
    """Compute the loss of each token, `[B, N]`; gradients go to the first predictions alone.

    Args:
        loss: (logits `[..., V]`, the others likewise) -> `[...]`, each token by itself.
        predictions: what is trained.
        *others: of the same tokens: their targets `[B, N]`, or a teacher's predictions.
    """
    if isinstance(predictions, Tensor):
        return loss(predictions, *map(_as_tensor, others))
    shape = predictions.states.shape[:-1]
    flat = [_flat(other, len(shape)) for other in others]
    held = _flat(predictions, len(shape))
    # a frozen head's gradient is known before the backward, up to a factor of each token
    ahead = torch.is_grad_enabled() and held.states.requires_grad and not held.weight.requires_grad
    losses: Tensor = _ChunkedLosses.apply(  # type: ignore[no-untyped-call]
        loss, flat, ahead, held.finish, held.states, held.weight, held.bias
    )
    return losses.view(shape)


def logits_in_chunks(predictions: Predictions) -> Iterator[Tensor]:
    """Compute the logits of predictions `[B, N, V]` in parts `[tokens, V]`, row after row."""
    if isinstance(predictions, Tensor):
        yield predictions.flatten(0, 1)
        return
    held = _flat(predictions, 2)
    for part in _parts(held):
        yield held[part].logits()


class _ChunkedLosses(torch.autograd.Function):
    """Losses `[T]` of tokens, from their states `[T, D]` and the head's weight and bias, in chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Callable[..., Tensor],
        others: list[Any],
        ahead: bool,
        finish: Finish,
        states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        held, losses = HeldPredictions(states, weight, bias, finish), []
        gradient = torch.empty_like(states) if ahead else None
        for part in _parts(held):
            chosen = [_as_tensor(other[part]) for other in others]
            if gradient is None:
                losses.append(loss(held[part].logits(), *chosen))
            else:
                values, of_raw = _gradient(loss, held[part], chosen, None)
                losses.append(values)
                gradient[part] = of_raw @ weight
        if gradient is not None:
            ctx.save_for_backward(gradient)
        else:
            ctx.save_for_backward(states, weight, bias)
            ctx.loss, ctx.others, ctx.finish = loss, others, finish
        return torch.cat(losses)

    @staticmethod
    @only_once
    def backward(ctx: Any, of_losses: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: under checkpointing each read takes the tensors away
        if len(saved) == 1:
            (gradient,) = saved
            return None, None, None, None, gradient * of_losses[:, None].to(gradient.dtype), None, None
        states, weight, bias = saved
        held = HeldPredictions(states, weight, bias, ctx.finish)
        trained = zip(("states", "weight", "bias"), ctx.needs_input_grad[4:], strict=True)
        totals = {name: _wide_zeros(getattr(held, name)) for name, needed in trained if needed}
        for part in _parts(held):
            piece, chosen = held[part], [_as_tensor(other[part]) for other in ctx.others]
            of_raw = _gradient(ctx.loss, piece, chosen, of_losses[part])[1]
            if "states" in totals:
                totals["states"][part] = of_raw @ held.weight
            if "weight" in totals:
                _add_product(totals["weight"], of_raw.mT, piece.states.to(of_raw.dtype))
            if "bias" in totals:
                totals["bias"] += of_raw.sum(0)
        grads = [total.to(getattr(held, name).dtype) for name, total in totals.items()]
        return (
            None,
            None,
            None,
            None,
            *(grads.pop(0) if needed else None for needed in ctx.needs_input_grad[4:]),
        )


def _flat(value: Any, dims: int) -> Any:
    """Put the tokens of all rows one behind the other."""
    if isinstance(value, HeldPredictions):
        return replace(value, states=value.states.flatten(0, dims - 1))
    return value.flatten(0, dims - 1)


def _as_tensor(value: Predictions) -> Tensor:
    return value.logits() if isinstance(value, HeldPredictions) else value


def _parts(held: HeldPredictions) -> list[slice]:
    tokens = max(1, CHUNK // len(held.weight))
    return [slice(start, start + tokens) for start in range(0, len(held.states), tokens)]


def _gradient(
    loss: Callable[..., Tensor], held: HeldPredictions, others: list[Tensor], of_losses: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute losses, and the gradient of what the output layer gives; by default of their sum."""
    raw = held.raw().requires_grad_()
    with torch.enable_grad():
        losses = loss(held.finish(raw), *others)
    of_losses = torch.ones_like(losses) if of_losses is None else of_losses
    (gradient,) = torch.autograd.grad(losses, raw, of_losses)
    return losses.detach(), gradient


def _wide_zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices in place, one of 16 bits to a sum of 32."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


_FINISHES: WeakKeyDictionary[nn.Module, Finish | str] = WeakKeyDictionary()
"""Model -> what follows its output layer, or why that cannot be said."""


def _known_finish(
    model: nn.Module, inside: nn.Module, linear: Any, input_ids: Tensor, keywords: dict[str, Any]
) -> Finish | None:
    """What follows the output layer of a model, tried on it once; None where a loss must take its logits."""
    if inside not in _FINISHES:
        own = {name: value for name, value in keywords.items() if name != "logits_to_keep"}
        if own.get("position_ids") is not None:
            own["position_ids"] = own["position_ids"][:1, :TRIED]
        found = _obstacle(model, linear) or _try_finish(inside, linear, input_ids[:1, :TRIED], own)
        _FINISHES[inside] = found
        if isinstance(found, str):
            what = f"{type(inside).__name__}: {found}; losses hold all logits of a batch"
            warnings.warn(what, stacklevel=4)
    known = _FINISHES[inside]
    return None if isinstance(known, str) else known


def _obstacle(model: nn.Module, linear: Any) -> str | None:
    """Why a loss cannot take hold of what the output layer reads."""
    if type(linear) is not nn.Linear:
        return f"its output layer is {'not to be found' if linear is None else f'a {type(linear).__name__}'}"
    if hasattr(linear.weight, "device_mesh") or hasattr(linear, "_hf_hook"):
        return "the weights of its output layer are sharded or offloaded"
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        return "it is compiled as a whole (--compile compiles its layers)"
    return None


@torch.no_grad()
def _try_finish(inside: Any, linear: nn.Linear, ids: Tensor, keywords: dict[str, Any]) -> Finish | str:
    """Find what turns an output layer's values, up to `PROBE`, into its logits; or why none does."""

    def enlarged(states: Tensor) -> Tensor:
        largest = F.linear(states, linear.weight, linear.bias).abs().amax().clamp_min(1e-6)
        return states * (PROBE / largest).to(states.dtype)

    devices = [ids.device] if ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _other_input(linear, enlarged) as held:  # dropout draws from it
        handle = linear.register_forward_hook(lambda module, args, output: held.append((output, None)))
        try:
            logits = inside(input_ids=ids, **keywords).logits
        finally:
            handle.remove()
    if len(held) == 2 and held[0][0].shape[:-1] == ids.shape:
        raw = held[1][0]
        tolerance = 4 * torch.finfo(raw.dtype).eps
        for finish in (_finish_of(inside.config.get_text_config()), Finish()):
            if logits.shape == raw.shape:
                error = (finish(raw).float() - logits.float()).abs().max()
                if float(error) <= tolerance * float(logits.abs().max()):
                    return finish
    return "its logits are not those of its output layer, scaled or capped as its config says"


def _finish_of(config: Any) -> Finish:
    scale, divisor = 1.0, float(getattr(config, DIVISOR, None) or 1)
    for name in MULTIPLIERS:
        scale *= float(getattr(config, name, None) or 1)
    return Finish(scale, divisor, next((cap for name in CAPS if (cap := getattr(config, name, None))), None))


def _vocabulary(inside: Any, linear: Any) -> int:
    return getattr(linear, "out_features", None) or int(
        getattr(inside.config.get_text_config(), "vocab_size", 0)
    )


@contextmanager
def _other_input(linear: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[list[tuple[Tensor, Any]]]:
    """While this lasts, an output layer reads something else; yields what it was to read, and its dtype."""
    held: list[tuple[Tensor, Any]] = []

    def hold(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        kind = args[0].device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else linear.weight.dtype
        held.append((args[0], dtype))
        return (change(args[0]),)

    handle = linear.register_forward_pre_hook(hold)
    try:
        yield held
    finally:
        handle.remove()
