"""A window with heavy hitters as an operator that torch.compile takes whole, where kernels compute it.

Traced by its steps a text is a graph of as many parts as it has blocks, which takes minutes to compile. The
operator chooses forward, and computes gradients from what it chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hf_linattn.ops import heavy_attention
from hf_linattn.ops.cpp import heavy as cpp_heavy
from hf_linattn.ops.cpp import takes
from hf_linattn.ops.eager.heavy import HeavyText, Options
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.triton import check
from hf_linattn.ops.triton import heavy as triton_heavy
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.ops.types import HeavyChoices, HeavyColumns, HeavyPlaces, HeavyState

Backend = Literal["cpp", "triton"]
DEVICES = ("cpu", "cuda")
NAMES = ("query", "near", "key", "value")
"""Inputs that have gradients."""
FIRST_OPTION = len(NAMES) + len(HeavyPlaces._fields) + len(HeavyState._fields)
"""Place of the first argument behind those that are tensors."""


def backend_of(
    query: Tensor, key: Tensor, value: Tensor, before: HeavyState | None, form: HeavyForm
) -> Backend | None:
    """Decide while a graph is traced which kernels compute a call; None for torch's operations.

    Args:
        query: `[B, H, N, D]`, in the dtype of the model.
        key: `[B, Hkv, N, D]`, likewise.
        value: `[B, Hkv, N, Dv]`, likewise.
        before: what was kept; None for nothing.
        form: what is computed.
    """
    if by_torch_alone():
        return None
    if takes.heavy(query, key, value, before):
        return "cpp"
    there = query.is_cuda and (before is None or before.key.dtype == before.value.dtype == key.dtype)
    fits = there and triton_heavy.fits(query, key, value)
    return "triton" if fits and check.takes_window(query, key, value, form) else None


def forward(
    query: Tensor,
    near: Tensor | None,
    key: Tensor,
    value: Tensor,
    places: HeavyPlaces,
    before: HeavyState | None,
    columns: HeavyColumns,
    scaling: float,
    *,
    backend: Backend,
    learns: bool,
) -> tuple[Tensor, HeavyState]:
    """Attend to sinks, heavy hitters and window, choosing anew whenever a block leaves.

    Args:
        query: `[B, H, N, D]`.
        near: as it meets the sinks, likewise; None for as it is.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        places: of the tokens that are no padding, which may hold anything.
        before: the cache; None for nothing. Stays as it is.
        columns: its sizes.
        scaling: of the scores.
        backend: what `backend_of` says.
        learns: outputs have gradients. Nothing was before then, and visible tokens come first.

    Returns:
        Output `[B, H, N, Dv]`, 0 for padding; and the cache after, without gradients.
    """
    given = query, near, key, value, *places, *(before or (None,) * 4), *columns, scaling, backend, learns
    output, *state = torch.ops.hf_linattn.heavy(*given)[:5]
    return output, HeavyState(*state)


def _choices(key: Tensor, columns: HeavyColumns, learns: bool) -> Tensor:
    """Make room for choices; nobody is told of them where nothing learns."""
    return heavy_attention.room_for_choices(key if learns else key[:, :, :0], columns)


def _forward(*inputs: Any) -> tuple[Tensor, ...]:
    query, near, key, value, seen, new, order, *rest = inputs
    before, (*columns, scaling, backend, learns) = rest[:4], rest[4:]
    sizes, state = HeavyColumns(*columns), None if before[0] is None else HeavyState(*before)
    choices = HeavyChoices(_choices(key, sizes, learns))
    given = query, near, key, value, HeavyPlaces(seen, new, order), state, sizes, scaling
    if backend == "cpp":
        output, after = cpp_heavy.forward(*given, chosen=choices.chosen if learns else None)
    else:
        output, after = triton_heavy.forward(*given, choices=choices if learns else None)
    log_sum = query.new_empty(0, dtype=torch.float32) if choices.log_sum is None else choices.log_sum
    return output, *after, choices.chosen, log_sum


_SIZES = (
    "SymInt size, SymInt heavy, SymInt sinks, SymInt block, float? half_life, SymInt? reach, float scaling, "
    "str backend"
)
_operator = torch.library.custom_op(
    "hf_linattn::heavy",
    _forward,
    mutates_args=(),
    device_types=DEVICES,
    schema=(
        "(Tensor query, Tensor? near, Tensor key, Tensor value, Tensor seen, Tensor new, Tensor? order, "
        f"Tensor? old_key, Tensor? old_value, Tensor? old_weight, Tensor? old_rank, {_SIZES}, bool learns) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)


@_operator.register_fake
def _(query: Tensor, near: Tensor | None, key: Tensor, value: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    *columns, _, backend, learns = inputs[FIRST_OPTION - len(NAMES) :]
    sizes, (batch, heads, length, _), wide = HeavyColumns(*columns), query.shape, value.shape[3]
    output = value.new_empty(batch, length, heads, wide).transpose(1, 2)
    held = batch, key.shape[1], sizes.total
    after = HeavyState(
        key.new_empty(*held, key.shape[3]),
        value.new_empty(*held, wide),
        key.new_empty(held, dtype=torch.float32),
        key.new_empty(held, dtype=torch.int32),
    )
    told = backend == "triton" and learns
    log_sum = query.new_empty((batch, heads, length) if told else 0, dtype=torch.float32)
    return output, *after, _choices(key, sizes, learns), log_sum


def _backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
    """Compute gradients of what there is of NAMES, laid out as the graph of a compiler was told."""
    query, near, key, value, new, output, chosen, log_sum, *columns, scaling, backend = inputs
    text, options = HeavyText(query, near, key, value, None), Options(HeavyColumns(*columns), scaling, None)
    if backend == "triton":
        choices = HeavyChoices(chosen, new, log_sum)
        found: Sequence[Tensor | None] = heavy_attention.by_kernels(text, grad, output, choices, options)
    else:
        found = heavy_attention.by_torch(text, chosen, options, grad)
    given = zip(text, found, strict=False)
    return [x.to(like.dtype).contiguous() for like, x in given if like is not None and x is not None]


_backward_operator = torch.library.custom_op(
    "hf_linattn::heavy_backward",
    _backward,
    mutates_args=(),
    device_types=DEVICES,
    schema=(
        "(Tensor grad, Tensor query, Tensor? near, Tensor key, Tensor value, Tensor new, Tensor output, "
        f"Tensor chosen, Tensor log_sum, {_SIZES}) -> Tensor[]"
    ),
)


@_backward_operator.register_fake
def _(grad: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in inputs[: len(NAMES)] if x is not None]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, near, key, value, _, new, *_ = inputs
    ctx.save_for_backward(query, near, key, value, new, output[0], *output[5:])
    ctx.options = inputs[FIRST_OPTION:-1]
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors[: len(NAMES)]
    others = (None,) * (FIRST_OPTION - len(NAMES) + len(ctx.options) + 1)
    if grad is None:
        return (None,) * (len(NAMES) + len(others))
    found = iter(torch.ops.hf_linattn.heavy_backward(grad, *ctx.saved_tensors, *ctx.options))
    return (*(None if x is None else next(found) for x in tensors), *others)


_operator.register_autograd(_autograd_backward, setup_context=_remember)
