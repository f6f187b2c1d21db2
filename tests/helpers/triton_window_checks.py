"""What the Triton kernels of windows must do, run in Triton's interpreter against float64 definitions.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

import warnings
from typing import NamedTuple

import pytest
import torch

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import window_attention
from hf_linattn.ops.triton import check, launch, token_selftest, window, window_selftest, window_token
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.token_selftest import TokenForm
from hf_linattn.ops.triton.window import Sinks
from hf_linattn.ops.triton.window_selftest import WindowForm
from hf_linattn.ops.types import Elu1Sums, ScaledSums, Window

from . import definitions
from .triton_checks import close
from .triton_selftest_checks import CPU, Folder, OnGpu


class Case(NamedTuple):
    """A window; `missing` columns before the first key, `alone` queries without other sums."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    length: int = 50
    D: int = 16
    Dv: int = 16
    span: int = 9
    missing: int = 0
    sinks: int = 0
    turned: bool = False
    ranked: bool = False
    others: bool = False
    shifted: bool = False
    alone: int = 0
    hidden: int = 0
    dtype: str = "float32"
    tolerance: float = 2e-6


class Inputs(NamedTuple):
    """Leaves in float64 and what they make."""

    leaves: list
    window: Window
    sinks: Sinks | None
    others: ScaledSums | None


def inputs_of(case):
    """Random ones; the first `hidden` columns and some others are padding."""
    generator = torch.Generator().manual_seed(len(repr(case)))

    def new(*shape):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.to(getattr(torch, case.dtype)).double().requires_grad_()

    batch, kv_heads, keys = case.batch, case.kv_heads, case.length + case.span - case.missing
    leaves = [new(batch, case.heads, case.length, case.D)]
    leaves += [new(batch, kv_heads, keys, width) for width in (case.D, case.Dv)]
    valid = torch.ones(batch, keys, dtype=torch.bool)
    if case.hidden:
        valid = torch.rand(batch, keys, generator=generator) > 0.3
        valid[0, : case.hidden] = False
    query, key, value = leaves[0], *(x * valid[:, None, :, None] for x in leaves[1:])
    sinks = others = None
    if case.sinks:
        own = [new(batch, case.heads, case.length, case.D)] if case.turned else []
        own += [new(batch, kv_heads, case.sinks, width) for width in (case.D, case.Dv)]
        leaves += own
        there = torch.ones(batch, case.sinks, dtype=torch.bool)
        there[0, -1] = not case.ranked
        ranks = torch.arange(case.length).expand(batch, -1) // 3 - 1 if case.ranked else None
        sinks = Sinks(own[0] if case.turned else None, *own[-2:], there, ranks)
    if case.others:
        behind = batch, case.heads, case.length - case.alone
        total = torch.rand(behind, generator=generator, dtype=torch.float64) * 20
        total = (total * (torch.rand(behind, generator=generator) > 0.2)).float().double().requires_grad_()
        values = torch.randn(*behind, case.Dv, generator=generator).double().requires_grad_()
        log_scale = torch.randn(behind, generator=generator).double().requires_grad_()
        leaves += [values, total, log_scale]
        if case.shifted:  # no gradient: what the map divided by divides away
            del leaves[-1]
            log_scale = query.detach()[:, :, case.alone :].amax(-1).clamp(max=0)
        others = ScaledSums(values * (total > 0)[..., None], total, log_scale)
    return Inputs(leaves, Window(query, key, value, valid, case.span, 0.3), sinks, others)


def definition(given):
    """All pairs at once, with torch's gradients."""
    seen, sinks, others = given.window, given.sinks, given.others
    heads, length = seen.query.shape[1:3]
    ahead = torch.arange(seen.key.shape[2]) + seen.n_missing - torch.arange(length)[:, None]
    visible = ((ahead > 0) & (ahead <= seen.span) & seen.valid[:, None, None]).expand(-1, heads, -1, -1)
    scores, value = seen.query @ definitions.repeated(seen.key, heads).mT, seen.value
    if sinks is not None:
        met = seen.query if sinks.query is None else sinks.query
        scores = torch.cat([scores, met @ definitions.repeated(sinks.key, heads).mT], -1)
        there = sinks.valid[:, None, None].expand(-1, heads, length, -1)
        if sinks.ranks is not None:
            there = there & (torch.arange(sinks.valid.shape[1]) <= sinks.ranks[:, None, :, None])
        visible, value = torch.cat([visible, there], -1), torch.cat([value, sinks.value], 2)
    if others is not None:
        alone = length - others.total.shape[2]
        pad = torch.nn.functional.pad
        others = ScaledSums(pad(others.values, (0, 0, alone, 0)), *(pad(x, (alone, 0)) for x in others[1:]))
    return definitions.softmax((scores * seen.scaling).masked_fill(~visible, float("-inf")), value, others)


def narrow(given, case):
    """The same for kernels: tokens in their dtype, sums in float32, laid out as models do."""
    dtype = getattr(torch, case.dtype)

    def token(x):
        return None if x is None else x.detach().to(dtype).transpose(1, 2).contiguous().transpose(1, 2)

    seen = given.window._replace(
        **{name: token(getattr(given.window, name)) for name in ("query", "key", "value")}
    )
    sinks, others = given.sinks, given.others
    if sinks is not None:
        sinks = Sinks(*map(token, sinks[:3]), *sinks[3:])
    if others is not None:
        others = ScaledSums(*(x.detach().float() for x in others))
    return seen, sinks, Elu1Sums(*others[:2]) if case.shifted else others


def check_case(case):
    """Forward and backward."""
    given = inputs_of(case)
    want, here = definition(given), narrow(given, case)
    output, lse = window.forward(*here)
    assert output.dtype is here[0].value.dtype
    assert output.transpose(1, 2).is_contiguous()
    close(output, want.detach(), case.tolerance, "output")
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(3)).to(here[0].value.dtype)
    inner = [*given.window[:3], *(x for x in (given.sinks or ())[:3] if x is not None), *(given.others or ())]
    inner = [x for x in inner if x.requires_grad]
    expected = torch.autograd.grad((want * weight.double()).sum(), inner)
    found = window.backward(weight, *here, output, lse)
    got = [x for x in (*found[:6], *(found.others or ())) if x is not None]
    valid = given.window.valid[:, None, :, None]
    for place, (a, b) in enumerate(zip(got, expected, strict=True)):
        counted = valid if place in (1, 2) else True  # what hides a key multiplies its gradient by 0
        assert torch.isfinite(a).all()
        close(a * counted, b * counted, 3 * case.tolerance, f"gradient {place}")


def check_rows_that_see_nothing():
    """They give 0, and gradients of nothing."""
    given = inputs_of(Case(batch=2, sinks=2, ranked=True, others=True))
    seen, sinks, others = narrow(given, Case())
    seen.valid[0] = False
    sinks.valid[0] = False
    others.total[0] = 0
    output, lse = window.forward(seen, sinks, others)
    assert not output[0].any()
    assert output[1].all()
    found = window.backward(torch.ones_like(output), seen, sinks, others, output, lse)
    for x in (*found[:3], *found[4:6], *found.others):
        assert torch.isfinite(x).all()
        assert not x[0].any()


def check_nan_and_numbers_far_apart():
    """A NaN that is seen reaches its queries alone; sums of scales near the ends of float32 are joined."""
    given = inputs_of(Case(others=True, sinks=2))
    seen, sinks, others = narrow(given, Case())
    key = seen.key.clone()
    key[0, 0, 30, 3] = torch.nan
    output = window.forward(seen._replace(key=key), sinks, others)[0]
    assert output[0, 0, 21:30].isnan().all()
    assert not output[0, 0, :21].isnan().any()
    assert not output[0, 0, 30:].isnan().any()
    assert not output[0, 1].isnan().any()
    for shift in (-100.0, 100.0):
        far = others._replace(log_scale=others.log_scale + shift)
        shifted = given.others._replace(log_scale=given.others.log_scale + shift)
        output = window.forward(seen, sinks, far)[0]
        close(output, definition(given._replace(others=shifted)).detach(), 1e-4, shift)


def check_same_bits():
    """Twice the same; a slice of a wider tensor is read where it lies."""
    case = Case(heads=4, others=True, sinks=2, turned=True, hidden=5)
    seen, sinks, others = narrow(inputs_of(case), case)
    wide = torch.cat([seen.value, torch.full_like(seen.value, torch.nan)], -1)[..., : case.Dv]
    grad = torch.ones(1, 1, 1, 1).expand(1, 4, case.length, case.Dv)
    runs = []
    for value in (seen.value, wide):
        here = seen._replace(value=value)
        output, lse = window.forward(here, sinks, others)
        found = window.backward(grad, here, sinks, others, output, lse)
        runs.append((output, lse, *found[:6], *found.others))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def check_the_operator():
    """It keeps the rules of torch, with sinks and sums and without."""
    for case in (
        Case(length=9, D=4, Dv=4),
        Case(length=9, D=4, Dv=4, sinks=2, others=True, alone=2),
        Case(length=9, D=4, Dv=4, others=True, shifted=True),
    ):
        seen, sinks, others = narrow(inputs_of(case), case)
        tensors = [*seen[:4], *(sinks or (None,) * 5), *(*(others or ()), None, None, None)[:3]]
        tensors = [x.requires_grad_() if x is not None and x.is_floating_point() else x for x in tensors]
        given = (*tensors, seen.span, seen.scaling)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.hf_linattn.window_on_gpu, given, test_utils=tests)


def check_no_tokens():
    """Nothing is launched for nothing."""
    empty = torch.zeros(1, 2, 0, 16)
    seen = Window(empty, empty, empty, torch.ones(1, 0, dtype=torch.bool), 4, 1.0)
    output, lse = window.forward(seen, None, None)
    assert output.shape == (1, 2, 0, 16)
    found = window.backward(output, seen, None, None, output, lse)
    assert found.key.shape == (1, 2, 0, 16)


def key_of(form, dtype=torch.float32, D=16, Dv=16, grouped=True):
    return check._window_key(CPU, dtype, D, Dv, grouped, form)


FORMS = (
    TokenForm(),
    TokenForm(16, "elu1", True, "gate"),
    TokenForm(16, "relu", False, "given", "share"),
    TokenForm(24, "none", True, "", "logit"),
)


def check_true_kernels_pass(dtype, forms):
    """The check takes the kernels of a window, and those of a token, whatever is computed."""
    dtype = getattr(torch, dtype)
    windows = (
        (WindowForm(True, True), WindowForm(False, True, True))
        if dtype == torch.bfloat16
        else (WindowForm(),)
    )
    for form in windows:
        assert window_selftest.disagreement(key_of(form, dtype, grouped=False), window, 40) is None
    for form in forms:
        Dv = 24 if dtype == torch.float32 else 16
        assert token_selftest.disagreement(key_of(form, dtype, Dv=Dv), window_token) is None


class Lying:
    """The kernels, with a function in place of one of theirs."""

    def __init__(self, kernels, **lies):
        self.kernels, self.lies = kernels, lies

    def __getattr__(self, name):
        return self.lies.get(name, getattr(self.kernels, name))


def check_lies_are_found(path):
    """A mask one token off, sinks or sums left out, gradients that are: said once, and remembered."""

    def shifted(seen, sinks, others):
        return window.forward(seen._replace(span=seen.span + 1), sinks, others)

    def without_sinks(seen, sinks, others):
        return window.forward(seen, None, others)

    def without_others(seen, sinks, others):
        return window.forward(seen, sinks, None)

    def wrong(place):
        def call(*given):
            found = list(window.backward(*given))
            x = found[place].clone()
            x[..., -1, -1] *= 1.1
            return window.WindowGrads(*found[:place], x, *found[place + 1 :])

        return call

    def decoded(change):
        def call(query, key, value, valid, ring, scaling, tail, sinks):
            output = window_token.decode(query, key, value, valid, ring, scaling, tail, sinks)
            change(output, ring, tail)
            return output

        return call

    both, form = WindowForm(True, True), FORMS[1]
    lies = [
        ("output", both, Lying(window, forward=shifted), window_token),
        ("output", both, Lying(window, forward=without_sinks), window_token),
        ("output", both, Lying(window, forward=without_others), window_token),
        *(
            (name, both, Lying(window, backward=wrong(place)), window_token)
            for place, name in ((0, "d_query"), (1, "d_key"), (4, "d_sink_key"))
        ),
        ("output", form, window, Lying(window_token, decode=decoded(lambda o, r, t: o.mul_(1.01)))),
        ("S is", form, window, Lying(window_token, decode=decoded(lambda o, r, t: t.S.mul_(1.01)))),
        ("oldest", form, window, Lying(window_token, decode=decoded(lambda o, r, t: r.oldest.add_(1)))),
    ]
    for index, (what, form, windows, tokens) in enumerate(lies):
        with Folder(path / str(index)):
            checks = Checks(launch, 60, windows, tokens)
            with pytest.warns(UserWarning, match=f"disagree with float64: .*{what}.*report"):
                assert not checks.takes(key_of(form, grouped=False))
            assert checks.summary()[0].startswith(f"{key_of(form, grouped=False).name}: torch: they disagree")


def check_the_choice(path):
    """Windows on a GPU are asked for by their form; what the kernels do not take is said, or raised."""
    patch = pytest.MonkeyPatch()
    asked = []
    patch.setattr(check.CHECKS, "takes", lambda key, *sizes, **how: asked.append(key) or True)
    patch.setattr(check, "Tensor", OnGpu)
    x = torch.zeros(1, 2, 8, 16)
    gpu, valid = x.as_subclass(OnGpu), torch.ones(1, 8, dtype=torch.bool)
    seen = Window(gpu, gpu, gpu, valid, 4, 1.0)
    assert window_attention.kernels_take(seen, 3, ScaledSums)
    assert window_attention.kernels_take(seen, 0, Elu1Sums)
    assert window_attention.kernels_take_token(gpu, gpu, gpu, FORMS[1], 0)
    assert [key.form for key in asked] == [WindowForm(True, True), WindowForm(False, True, True), FORMS[1]]
    assert not window_attention.kernels_take(Window(x, x, x, valid, 4, 1.0), 0, None)
    assert not window_attention.kernels_take(seen, window.MOST_SINKS + 1, None)
    assert not window_attention.kernels_take(seen._replace(key=gpu.bfloat16()), 0, None)
    patch.undo()
    with Folder(path) as folder:
        checks = Checks(launch)
        wide = key_of(TokenForm(300, "none"))
        with pytest.warns(UserWarning, match="at most 256, not 300"):
            assert not checks.takes(wide)
        folder.patch.setenv(check.TRITON, "1")
        with pytest.raises(UnsupportedCallError, match="at most 256, not 300"):
            checks.takes(wide)
        folder.patch.setenv(check.TRITON, "0")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not checks.takes(key_of(WindowForm()))
