"""Stage `correct`: kernels against float64 on the device, every form, dtype and size; the same bits twice."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from hf_linattn.ops import linear_attention
from hf_linattn.ops.triton import (
    check,
    heavy,
    launch,
    plan,
    selftest,
    softmax_map,
    token_selftest,
    window_rest,
)
from hf_linattn.ops.triton.gate_selftest import GateForm
from hf_linattn.ops.triton.heavy_selftest import HeavyForm
from hf_linattn.ops.triton.softmax_map_selftest import MapForm
from hf_linattn.ops.triton.token_selftest import TokenForm
from hf_linattn.ops.triton.window_rest_selftest import RestForm
from hf_linattn.ops.triton.window_selftest import WindowForm
from hf_linattn.ops.types import Inputs, OpConfig

from . import reference
from .work import Case, Context, Row, needs_triton

DTYPES = ("bfloat16", "float16", "float32")
WIDTHS = ((128, 128), (64, 64), (256, 256), (96, 96), (80, 80), (32, 32), (64, 128))
LENGTHS = (1, 63, 64, 300, 1000, 4096)
LONG = 65536
FORMS = (
    ("elu1",),
    ("none", True, True),
    ("none", True, False),
    ("relu",),
    ("elu1", True, True, True),
    ("none", True, True, True, True),
    ("elu1", True, True, False, True),
    ("elu1", False),
    ("relu", False, False),
)
"""Fields of `selftest.Form`: map, causal, normalised, decay, documents."""
WINDOWS = (
    ("window", False, False),
    ("window", True, True),
    ("window", True, True, True),
    ("gate",),
    ("token",),
    ("token", 0, "elu1", True, "gate", ""),
    ("token", 0, "relu", False, "given", "share"),
    ("token", 48, "none", True, "gate", "logit"),
)
"""Which form, and its fields; 0 features with a map are as many as the width."""
RESTS = (
    ("rest", 0, "elu1", True, False),
    ("rest", 0, "elu1", True, True),
    ("rest", 48, "none", False, False),
)
"""Likewise, of bfloat16 and heads that one kernel of a window and the rest takes."""
MAPS = (("map", False), ("map", True))
"""Likewise, of 16 bits; float32 weights beside bfloat16 alone."""
HEAVY = (("heavy", False), ("heavy", True), ("heavy", False, True), ("heavy", True, True))
"""Likewise, of heads that the kernel of a window with heavy hitters takes."""
ALLOWED = {"bfloat16": 1.5e-2, "float16": 3e-3, "float32": 2e-5}
"""Relative error of a whole result, outputs and state; three times as much for gradients."""
SUMMED = 4096
"""Tokens from which on errors of sums in float32 may grow, as the root of their number."""
NAMES = ("output", "total", "S", "z")
GRADIENTS = ("d_query", "d_key", "d_value")


class Size(NamedTuple):
    """One call on random numbers."""

    dtype: str
    D: int
    Dv: int
    group: int
    length: int
    masked: bool
    state: bool
    kind: str = "elu1"
    decay: bool = False

    def as_case(self) -> Row:
        """Name it."""
        return {"case": "size", **self._asdict()}


def cases(context: Context) -> list[Case]:
    """List forms by the package's own check, then sizes, at the widths of most models first."""
    widths, dtypes, kinds = (((16, 16),), DTYPES[2:], FORMS[:1]) if context.dry else (WIDTHS, DTYPES, FORMS)
    forms = [
        (dtype, width, 1 + (place + number) % 2, form)
        for dtype, (place, width), (number, form) in itertools.product(
            dtypes, enumerate(widths), enumerate((*kinds, *(WINDOWS[:1] if context.dry else WINDOWS)))
        )
    ]
    if not context.dry:
        narrow = [width for width in widths if max(width) <= window_rest.WIDEST]
        forms += [("bfloat16", width, group, form) for width in narrow for group in (1, 2) for form in RESTS]
        narrow = [width for width in widths if max(width) <= softmax_map.WIDEST]
        of_maps = ((DTYPES[0], MAPS[0]), (DTYPES[1], MAPS[0]), (DTYPES[0], MAPS[1]))
        forms += [(dtype, width, 1, form) for width in narrow for dtype, form in of_maps]
        narrow = [width for width in widths if max(width) <= heavy.WIDEST]
        forms += [
            (dtype, width, 1 + (place + number) % 2, form)
            for dtype, (place, width), (number, form) in itertools.product(
                dtypes, enumerate(narrow), enumerate(HEAVY)
            )
        ]
    found = []
    for form in forms:
        names = dict(zip(("dtype", "widths", "group", "form"), form, strict=True))
        case = {"case": "form", **names, "widths": list(names["widths"]), "form": list(names["form"])}
        found.append(Case(case, partial(form_row, context, *form), ((compile_form, form),)))
    for size in _sizes(context):
        compiles = ((compile_size, (size,)),) if size.length <= SUMMED else ()
        found.append(Case(size.as_case(), partial(size_row, context, size), compiles))
    return sorted(found, key=_late)


def _late(case: Case) -> bool:
    """Tell the widths that most models have from the others, which are checked after them."""
    widths = case.case["widths"] if "widths" in case.case else [case.case["D"], case.case["Dv"]]
    return tuple(widths) not in WIDTHS[:2]


def _sizes(context: Context) -> list[Size]:
    if context.dry:
        return [Size("float32", 16, 16, 2, 20, True, True), Size("bfloat16", 16, 24, 1, 1, False, True)]
    found = [
        Size(dtype, D, Dv, group, length, more, more)
        for dtype, (D, Dv), length, group, more in itertools.product(
            DTYPES, WIDTHS, LENGTHS, (1, 4), (False, True)
        )
        if (D, Dv) in WIDTHS[:3] or (group == 4) == more
    ]
    found += [
        Size(dtype, D, D, 4, LONG, False, True, kind, decay)
        for dtype, D, (kind, decay) in itertools.product(
            DTYPES[:1] + DTYPES[2:], (64, 128), (("elu1", False), ("none", True))
        )
    ]
    return found


def key_of(
    dtype: str, widths: tuple[int, int], group: int, form: tuple[Any, ...], device: str
) -> selftest.Key:
    """Make what the package's own check calls a trial."""
    of = value = getattr(torch, dtype)
    kinds = {"window": WindowForm, "token": TokenForm, "rest": RestForm, "heavy": HeavyForm}
    kinds |= {"gate": GateForm, "map": MapForm}
    if form[0] in kinds:
        about: Any = kinds[form[0]](*form[1:])
        if form[0] in ("token", "rest") and not about.features and about.kind != "none":
            about = about._replace(features=widths[0])
        where = torch.device(device)
        return selftest.Key(where, of, of, *widths, group, plan.operand_of((of,)), about)
    how = selftest.Form(*form)
    if how.kind == "none":
        of = check.features_dtype(of)
    return selftest.Key(torch.device(device), of, value, *widths, group, plan.operand_of((of, value)), how)


def form_row(context: Context, dtype: str, widths: tuple[int, int], group: int, form: tuple[Any, ...]) -> Row:
    """Run the package's check of one form; every number within what rounding explains."""
    needs_triton(context)
    key = key_of(dtype, widths, group, form, context.device)
    wrong = disagreement(key, context.dry)
    return {"operand": key.operand} | ({"error": wrong} if wrong else {})


def disagreement(key: selftest.Key, dry: bool) -> str | None:
    """Run the check that the package has for this form; return what differs, None where all agrees."""
    return check.Checks(length=20 if dry else selftest.LENGTH).disagreement(key)


def compile_form(dtype: str, widths: tuple[int, int], group: int, form: tuple[Any, ...]) -> None:
    """Compile what `form_row` launches, in a process without a device."""
    compile_key(key_of(dtype, widths, group, form, "meta"))


def compile_key(key: Any) -> None:
    """Compile one of the package's checks, likewise."""
    same = mock.patch.object(token_selftest, "same", return_value=True)
    with mock.patch.object(selftest, "compare", return_value=None), same:
        disagreement(key, dry=False)


def inputs_of(size: Size, device: str) -> Inputs:
    """Draw numbers, laid out as models lay them out."""
    torch.manual_seed(size.length + size.D)
    batch, kv_heads, dtype = (1 if size.length > SUMMED else 2), 2, getattr(torch, size.dtype)

    def tokens(heads: int, width: int) -> Tensor:
        x = torch.randn(batch, size.length, heads, width, device=device)
        x = x.abs() if size.kind == "none" and width == size.D else x
        return x.to(dtype).transpose(1, 2).requires_grad_()

    query, key, value = (
        tokens(kv_heads * size.group, size.D),
        tokens(kv_heads, size.D),
        tokens(kv_heads, size.Dv),
    )
    valid = torch.rand(batch, size.length, device=device) > 0.3 if size.masked else None
    S = z = decay = None
    if size.state:
        S = torch.randn(batch, kv_heads, size.D, size.Dv, device=device)
        z = 5 * torch.rand(batch, kv_heads, size.D, device=device)
    if size.decay:
        decay = -0.01 * torch.rand(batch, kv_heads, size.length, device=device)
    return Inputs(query, key, value, valid, S, z, decay)


def run_size(size: Size, device: str) -> tuple[tuple[Any, ...], tuple[Tensor, ...], Inputs, Tensor]:
    """Run forward and backward, or one token; return results, gradients, inputs, the output's gradient."""
    inputs, config = inputs_of(size, device), OpConfig(size.kind)
    if size.length == 1 and inputs.S is not None and inputs.z is not None:
        with torch.no_grad():
            S, z = inputs.S.clone(), inputs.z.clone()
            output, total = launch.step(inputs._replace(S=S, z=z), config)
        return (output, total, S, z), (), inputs, output
    outputs = linear_attention.attention(inputs, config, True, "triton")
    d_output = torch.randn(outputs.output.shape, device=device).to(outputs.output.dtype)
    grads = torch.autograd.grad(outputs.output, inputs[:3], d_output)
    return tuple(x.detach() for x in outputs if x is not None), grads, inputs, d_output


def compile_size(size: Size) -> None:
    """Compile what `size_row` launches, in a process without a device."""
    run_size(size, "meta")


def size_row(context: Context, size: Size) -> Row:
    """Compare one call with float64, and with itself."""
    needs_triton(context)
    first, again = run_size(size, context.device), run_size(size, context.device)
    got, grads, inputs, d_output = first
    bits = all(torch.equal(a, b) for a, b in zip((*got, *grads), (*again[0], *again[1]), strict=True))
    exact = [x.detach().double().requires_grad_() for x in inputs[:3]]
    state = None if inputs.S is None or inputs.z is None else (inputs.S.double(), inputs.z.double())
    decay = None if inputs.log_decay is None else inputs.log_decay.double()
    with torch.set_grad_enabled(bool(grads)):
        want = reference.linear(*exact, kind=size.kind, valid=inputs.valid, state=state, log_decay=decay)
    found = dict(zip(NAMES, zip(got, want, strict=True), strict=True))
    if grads:
        found |= dict(
            zip(
                GRADIENTS,
                zip(grads, torch.autograd.grad(want[0], exact, d_output.double()), strict=True),
                strict=True,
            )
        )
    # the output of the first token is its value: gradients of its query and key are 0 but for rounding
    least = float(d_output.double().norm()) if grads and size.length == 1 and not size.state else 0.0
    errors = {
        name: error(a, b.detach(), least if name in ("d_query", "d_key") else 0.0)
        for name, (a, b) in found.items()
    }
    allowed = ALLOWED[size.dtype] * max(1.0, size.length / SUMMED) ** 0.5
    bad = [name for name, x in errors.items() if not x <= allowed * (3 if name.startswith("d_") else 1)]
    row: Row = {"errors": errors, "worst": max(errors.values()), "allowed": allowed, "same_bits": bits}
    if bad:
        row["error"] = ", ".join(f"{name} is {errors[name]:.2e} away from float64" for name in bad)
    elif not bits:
        row["error"] = "two runs of the same call differ in their bits"
    return row


def error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """Return the relative error of a whole result; infinite where it is NaN or of another shape.

    It is relative to `least` where the result is smaller.
    """
    if got.shape != want.shape:
        return float("inf")
    found = float((got.double() - want).norm() / want.norm().clamp_min(max(least, 1e-30)))
    return found if found == found else float("inf")
