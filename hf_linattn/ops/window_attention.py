"""Softmax over a sliding window through the fused kernel of the CPU, joined with sums over other tokens.

Or by the kernels in C++, `cpp.window`, which do all of this tile by tile, where they were asked for; on GPUs
by those in Triton, `by_kernels`, which take the sinks too.

A block of queries sees one run of keys, so blocks become rows of the kernel: overlapping views of the keys,
no copies. It gives o = sum_W exp(s_j) v_j / Z and lse = log Z. Sums over other tokens, e^l sum_j f_j v_j and
e^l sum_j f_j, join by

    lse' = log(Z + e^l sum_j f_j),  o' = o exp(lse - lse') + exp(l - lse') sum_j f_j v_j

and with p'_j = exp(s_j - lse') the window's gradients are those of ordinary attention,
ds_j = p'_j (do . v_j - do . o'), from the backward kernel given o' and lse' for output and log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_linattn.ops.cpp import takes
from hf_linattn.ops.cpp import window as cpp_window
from hf_linattn.ops.eager import linear
from hf_linattn.ops.eager import window as window_blocks
from hf_linattn.ops.fused_blocks import FusedBlocks
from hf_linattn.ops.second_order import gradients
from hf_linattn.ops.softmax import capped, scores_of
from hf_linattn.ops.softmax_sink import BACKWARD, FORWARD, dense, fits
from hf_linattn.ops.tracing import by_torch_alone
from hf_linattn.ops.triton import check, heavy, launch, window_operator, window_rest
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.ops.triton.token_selftest import TokenForm
from hf_linattn.ops.triton.window import MOST_SINKS, Sinks
from hf_linattn.ops.triton.window_rest_selftest import RestForm
from hf_linattn.ops.triton.window_selftest import WindowForm
from hf_linattn.ops.types import (
    Elu1Sums,
    HeavyState,
    OtherSums,
    ScaledSums,
    Window,
    WindowSinks,
    accumulator_dtype,
)

SHORTEST = 64
"""Queries in float32 from which on the kernels in C++ take less time than torch's: measured."""
ARGUMENTS = 9
"""Of the operator; its seven tensors with output and log-sum-exp are as many."""


def kernels_take(window: Window, sinks: int, others: type[OtherSums] | None) -> bool:
    """Tell whether Triton kernels compute a window: on a GPU, checked there.

    Args:
        window: in the dtype of the model.
        sinks: how many are seen beside it.
        others: of what kind the sums over other tokens are, which share the normaliser; None for none.

    Raises:
        UnsupportedCallError: `HF_LINATTN_TRITON` insists on kernels, and they cannot.
    """
    if not window.query.is_cuda or by_torch_alone() or sinks > MOST_SINKS:
        return False
    form = WindowForm(bool(sinks), others is not None, others is Elu1Sums)
    return check.takes_window(*window[:3], form)


def one_kernel_takes(window: Window, form: RestForm, left: int, sinks: int) -> bool:
    """Tell whether a Triton kernel computes a window and the rest at once, without gradients.

    Args:
        window: in the dtype of the model.
        form: what is computed.
        left: tokens that have left the window.
        sinks: how many are seen beside it.

    Raises:
        UnsupportedCallError: `HF_LINATTN_TRITON` insists on kernels, and they cannot.
    """
    if not window.query.is_cuda or sinks > MOST_SINKS or torch.compiler.is_compiling() or by_torch_alone():
        return False
    pays = window_rest.pays(window, form.features, left)
    return pays and check.takes_window(*window[:3], form)


def kernels_take_token(query: Tensor, key: Tensor, value: Tensor, form: TokenForm, sinks: int) -> bool:
    """Tell whether Triton kernels compute a decoded token behind a window: on a GPU, checked there.

    Args:
        query: `[B, H, 1, D]`, in the dtype of the model.
        key: `[B, Hkv, 1, D]`, likewise.
        value: `[B, Hkv, 1, Dv]`, likewise.
        form: what is computed.
        sinks: how many there are.

    Raises:
        UnsupportedCallError: `HF_LINATTN_TRITON` insists on kernels, and they cannot.
    """
    if not query.is_cuda or sinks > MOST_SINKS or by_torch_alone():
        return False
    return check.takes_window(query, key, value, form)


def one_kernel_takes_heavy(query: Tensor, key: Tensor, value: Tensor, form: HeavyForm) -> bool:
    """Tell whether a Triton kernel computes many tokens of a window with heavy hitters, without gradients.

    Args:
        query: `[B, H, N, D]`, in the dtype of the model.
        key: `[B, Hkv, N, D]`, likewise.
        value: `[B, Hkv, N, Dv]`, likewise.
        form: what is computed.

    Raises:
        UnsupportedCallError: `HF_LINATTN_TRITON` insists on kernels, and they cannot.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or by_torch_alone():
        return False
    there = query.is_cuda or launch.available(query.device)
    return there and heavy.fits(query, key, value) and check.takes_window(query, key, value, form)


def native_takes_heavy(query: Tensor, key: Tensor, value: Tensor, before: HeavyState | None) -> bool:
    """Tell whether the kernels in C++ compute a window with heavy hitters, which have no backward.

    Args:
        query: `[B, H, N, D]`, in the dtype of the model.
        key: `[B, Hkv, N, D]`, likewise.
        value: `[B, Hkv, N, Dv]`, likewise.
        before: what was kept; None for nothing.
    """
    if torch.compiler.is_compiling() or by_torch_alone():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, *(before or ()))):
        return False
    return takes.heavy(query, key, value, before)


def by_kernels(window: Window, sinks: Sinks | None, other: OtherSums | None) -> Tensor:
    """Attend to a window, to sinks and to other tokens together, as `kernels_take` allowed: `[B, H, N, Dv]`.

    Args:
        window: in the dtype of the model.
        sinks: likewise; None for none.
        other: None for none.
    """
    return window_operator.attention(window, sinks, other)


def native_takes(window: Window, other: ScaledSums | None) -> bool:
    """Tell whether the kernels in C++ compute a window, by `native`."""
    if torch.compiler.is_compiling() or not fits(window.query, window.key, window.value, None, 0.0):
        return False
    return takes.window(window, other)


def native_is_faster(query: Tensor) -> bool:
    """Tell whether they take less time than torch's own kernel for a text inside the window."""
    return query.dtype != torch.float32 or query.shape[2] >= SHORTEST


def native(window: Window, other: ScaledSums | None, sinks: WindowSinks | None = None) -> Tensor:
    """Attend as `attention` does by the kernels in C++, where `native_takes`.

    Args:
        window: queries, and what they see.
        other: sums over other tokens, of all queries or of the last ones, before which there are no others;
            None for none.
        sinks: tokens beside the window; None for none.
    """
    if not torch.is_grad_enabled():
        return cpp_window.forward(window, other, sinks)[0]
    beside = () if sinks is None else sinks[:4] + (sinks.turn or (None, None))
    output: Tensor = _Attention.apply(*_arguments(window, other), *beside)  # type: ignore[no-untyped-call]
    return output


def _arguments(window: Window, other: ScaledSums | None) -> tuple[Any, ...]:
    """Give what the operator takes."""
    return *window[:4], *(other or (None, None, None)), window.span, window.scaling


def attention(window: Window, other: ScaledSums | None, softcap: float | None = None) -> Tensor:
    """Attend to a window and to other tokens together: `[B, H, N, Dv]`; 0 where nothing is seen.

    Tensors of 16 bits go to the kernels in C++ as they are, to torch's in float32; the output is in their
    dtype. With a cap c of the scores, c tanh(s / c), torch's operations compute it.
    """
    sums, dtype = accumulator_dtype(*window[:3]), window.query.dtype
    fused = softcap is None and fits(window.query, window.key, window.value, None, 0.0)
    wide_already = all(x.dtype == sums for x in window[:3])
    if not wide_already and not (fused and takes.window(window, other)):
        query, key, value = (x.to(sums) for x in window[:3])
        wide = window._replace(query=query, key=key, value=value)
        return attention(wide, other, softcap).to(dtype)
    if not fused:
        return window_blocks.attention(window, other, softcap)
    arguments = _arguments(window, other)
    if torch.compiler.is_compiling():
        return torch.ops.hf_linattn.softmax_of_window(*arguments)[0]  # type: ignore[no-any-return]
    output: Tensor = _Attention.apply(*arguments)  # type: ignore[no-untyped-call]
    return output


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    scaling: float,
    other: ScaledSums | None,
    softcap: float | None = None,
) -> Tensor:
    """Attend with a single query to all keys that count and to other tokens: `[B, H, 1, Dv]`; no gradients.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, Hkv, N, D]`.
        value: `[B, Hkv, N, Dv]`.
        valid: boolean `[B, N]`, True at keys that count; None for all.
        scaling: of the scores.
        other: sums over other tokens; None for none.
        softcap: c of scores c tanh(s / c); None for scores as they are.
    """
    if softcap is not None or torch.compiler.is_compiling() or not fits(query, key, value, None, 0.0):
        scores = capped(scores_of(query, key, scaling), softcap, None)
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None], float("-inf"))
        return window_blocks.normalised_sums(window_blocks.softmax_sums(scores, value), other)
    output: Tensor
    if valid is None or valid.all():
        output, lse = FORWARD(query, key, value, 0.0, False, scale=scaling)
        return output if other is None else _joined_full(output, lse, *other)
    mask = torch.zeros(valid.shape, dtype=query.dtype, device=query.device)
    mask = mask.masked_fill_(~valid, float("-inf"))[:, None, None]
    has_keys = valid.any(1)[:, None, None]
    output, lse = FORWARD(query, key, value, 0.0, False, attn_mask=mask, scale=scaling)
    if other is not None:
        return _join(output, lse, has_keys, *other)[0]
    return output.masked_fill_(~has_keys.unsqueeze(-1), 0.0)


def _joined_full(output: Tensor, lse: Tensor, values: Tensor, total: Tensor, log_scale: Tensor) -> Tensor:
    """Join as `_join` does, where every query sees keys of the window and nobody wants the log-sum-exp."""
    weight = (log_scale + total.log()).sub_(lse).sigmoid_()
    joined: Tensor = output.lerp_(linear.normalised(values, total), weight.unsqueeze(-1))
    return joined


def _parts(*inputs: Any) -> tuple[Window, ScaledSums | None]:
    """Take the operator's arguments apart."""
    query, key, value, valid, *sums, span, scaling = inputs
    return Window(query, key, value, valid, span, scaling), None if sums[0] is None else ScaledSums(*sums)


def _forward(
    window: Window, other: ScaledSums | None, sinks: WindowSinks | None = None
) -> tuple[Tensor, Tensor]:
    """Compute o', and lse' `[B, H, N]`, 0 where nothing is seen."""
    if takes.window(window, other):
        return cpp_window.forward(window, other, sinks)
    query, _, value, _, span, scaling = window
    blocks = FusedBlocks(window)
    (batch, heads, length), padded = query.shape[:3], blocks.count * blocks.size
    output = query.new_empty(batch, padded, heads, value.shape[-1]).transpose(1, 2)
    lse = query.new_empty(batch, heads, padded, dtype=torch.promote_types(query.dtype, torch.float32))
    for rows, part, columns in blocks.calls():
        block_output, block_lse = FORWARD(
            *blocks.inputs(rows, part, columns),
            0.0,
            False,
            attn_mask=blocks.mask(rows, columns, query.dtype),
            scale=scaling,
        )
        blocks.queries(output, rows, part).copy_(block_output)
        blocks.queries(lse, rows, part).copy_(block_lse)
    output, lse = output[:, :, :length], lse[:, :, :length]
    if other is None:
        return output, lse
    count = F.pad(window.valid.cumsum(1), (1 + window.n_missing, 0))
    has_window = (count[:, 1 + span :] > count[:, 1 : 1 + length])[:, None]
    return _join(output, lse, has_window, *other)


def _join(
    output: Tensor, lse: Tensor, has_window: Tensor, values: Tensor, total: Tensor, log_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Join a window with other sums: its output, written over, and the log-sum-exp of both.

    Args:
        output: of the window, `[B, H, N, Dv]`.
        lse: its log-sum-exp, `[B, H, N]`.
        has_window: boolean `[B, 1, N]`, where the window has any key.
        values: of the other sums, as `ScaledSums`.
        total: likewise.
        log_scale: likewise.
    """
    has_others, other_lse = total > 0, log_scale + total.log()
    joined = torch.logaddexp(lse.masked_fill(~has_window, float("-inf")), other_lse)
    joined = joined.masked_fill_(~(has_window | has_others), 0.0)
    factor = (lse - joined).exp_().masked_fill_(~has_window, 0.0)
    output.mul_(factor.unsqueeze(-1))
    output.addcmul_(values, _factor(has_others, log_scale, joined).unsqueeze(-1))
    return output, joined


def _factor(has_others: Tensor, log_scale: Tensor, lse: Tensor) -> Tensor:
    """Compute exp(l - lse'), by which the other sums enter the output; 0 where there are none."""
    return torch.where(has_others, log_scale - lse, float("-inf")).exp()


def _backward(
    grad: Tensor,
    window: Window,
    other: ScaledSums | None,
    output: Tensor,
    lse: Tensor,
    sinks: WindowSinks | None = None,
) -> list[Tensor]:
    """Compute gradients of query, key and value, of the three tensors of the other sums, of the sinks.

    Args:
        grad: gradient of the output, `[B, H, N, Dv]`.
        window: as the forward took it.
        other: likewise.
        output: o' of the forward.
        lse: lse' of the forward.
        sinks: as the forward took them.
    """
    if takes.window(window, other):
        return cpp_window.backward(grad, window, other, output, lse, sinks)
    query, blocks = window.query, FusedBlocks(window)
    outputs, lses, grads = (blocks.over_queries(x) for x in (output, lse, grad))
    d_query = torch.empty_like(blocks.query)
    d_key, d_value = (x.new_zeros(x.shape) for x in (blocks.key, blocks.value))
    for rows, part, columns in blocks.calls():
        d_query_block, d_key_block, d_value_block = BACKWARD(
            blocks.queries(grads, rows, part),
            *blocks.inputs(rows, part, columns),
            blocks.queries(outputs, rows, part),
            blocks.queries(lses, rows, part).contiguous(),
            0.0,
            False,
            attn_mask=blocks.mask(rows, columns, query.dtype),
            scale=window.scaling,
        )
        blocks.queries(d_query, rows, part).copy_(d_query_block)
        blocks.add_keys(d_key, d_key_block, rows, columns)
        blocks.add_keys(d_value, d_value_block, rows, columns)
    d_query = d_query[:, :, : query.shape[2]]
    d_window = [d_query, blocks.without_padding(d_key), blocks.without_padding(d_value)]
    if other is None:
        return d_window
    values, total, log_scale = other
    factor = _factor(total > 0, log_scale, lse)
    grad_dot_output = (grad * output).sum(-1)
    d_log_scale = factor * ((grad * values).sum(-1) - grad_dot_output * total)
    return [*d_window, grad * factor.unsqueeze(-1), -grad_dot_output * factor, d_log_scale]


def _backward_of(grad: Tensor, *inputs: Any) -> list[Tensor]:
    """Call `_backward` with the operator's arguments."""
    *tensors, output, lse, span, scaling = inputs
    return _backward(grad, *_parts(*tensors, span, scaling), output, lse)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.options = inputs[7:]


def _grads(gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    """Bring gradients to the order of the operator's arguments."""
    other = gradients[3:] or (None, None, None)
    return (*gradients[:3], None, *other, None, None)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        inputs, beside = inputs[:ARGUMENTS], inputs[ARGUMENTS:]
        output, lse = _forward(*_parts(*inputs), _sinks(beside))
        ctx.save_for_backward(*inputs[:7], output, lse, *beside)
        ctx.options = inputs[7:]
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: under checkpointing each read takes the tensors away
        (*tensors, output, lse), beside = saved[:ARGUMENTS], saved[ARGUMENTS:]
        if torch.is_grad_enabled():  # as under create_graph=True
            inputs = *tensors, *ctx.options, *beside
            return tuple(gradients(_plain, inputs, [grad]))
        results = _backward(grad, *_parts(*tensors, *ctx.options), output, lse, _sinks(beside))
        if not beside:
            return _grads(results)
        d_beside = (x.to(like.dtype) for x, like in zip(results[-2:], beside, strict=False))
        return (*_grads(results[:-2]), *d_beside, *(None,) * (len(beside) - 2))


def _plain(*inputs: Any) -> list[Tensor]:
    window, other = _parts(*inputs[:ARGUMENTS])
    return [window_blocks.plain(window, other, _sinks(inputs[ARGUMENTS:]))]


def _sinks(beside: tuple[Any, ...]) -> WindowSinks | None:
    """Put the tensors of sinks together; none for none."""
    if not beside:
        return None
    key, value, valid, ranks, cos, sin = beside
    return WindowSinks(key, value, valid, ranks, None if cos is None else (cos, sin))


_operator = torch.library.custom_op(
    "hf_linattn::softmax_of_window",
    dense(lambda *inputs: _forward(*_parts(*inputs))),
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor valid, Tensor? values, Tensor? total, "
        "Tensor? log_scale, int span, float scaling) -> (Tensor, Tensor)"
    ),
)
_backward_operator = torch.library.custom_op(
    "hf_linattn::softmax_of_window_backward",
    lambda *inputs: [x.contiguous() for x in _backward_of(*inputs)],
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor valid, Tensor? values, Tensor? total, "
        "Tensor? log_scale, Tensor output, Tensor lse, int span, float scaling) -> Tensor[]"
    ),
)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    sums = torch.promote_types(query.dtype, torch.float32)
    shape = query.shape[:3]
    return query.new_empty(*shape, value.shape[-1]), query.new_empty(shape, dtype=sums)


@_backward_operator.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, valid: Tensor, *others: Any) -> list[Tensor]:
    like = (query, key, value, *(x for x in others[:3] if x is not None))
    return [x.new_empty(x.shape) for x in like]


def _autograd_backward(ctx: Any, grad: Tensor, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _grads(torch.ops.hf_linattn.softmax_of_window_backward(grad, *ctx.saved_tensors, *ctx.options))


_operator.register_autograd(_autograd_backward, setup_context=_remember)
