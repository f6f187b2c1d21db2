"""What the Triton kernels of gates must do, run in Triton's interpreter against float64 definitions.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

from typing import NamedTuple

import pytest
import torch
from torch.nn import functional

from hf_linattn.ops import gate as gates
from hf_linattn.ops.triton import check, gate, gate_selftest, launch, problem
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.gate_selftest import GateForm
from hf_linattn.ops.types import Gate

from .triton_checks import close
from .triton_selftest_checks import CPU, Folder, OnGpu
from .triton_window_checks import Lying


class Case(NamedTuple):
    """Values and weights; `bias` is that of all heads, where gates are open or shut."""

    batch: int = 1
    kv_heads: int = 2
    length: int = 70
    Dv: int = 16
    dtype: str = "float32"
    weights: str = "float32"
    hidden: int = 0
    bias: float = 0.0
    strided: bool = False
    tolerance: float = 1e-6


def inputs_of(case):
    """Draw values, which of them count, and weights; hidden values hold NaN."""
    torch.manual_seed(0)
    value = torch.randn(case.batch, case.length, case.kv_heads, case.Dv, dtype=torch.float64)
    valid = torch.ones(case.batch, case.length, dtype=torch.bool)
    valid[:, : case.hidden] = False
    value = value.masked_fill(~valid[..., None, None], float("nan")).to(getattr(torch, case.dtype))
    if case.strided:
        value = torch.cat([value, value], -1)[..., : case.Dv]
    weights = getattr(torch, case.weights)
    weight = (torch.randn(case.kv_heads, case.Dv) / case.Dv**0.5).to(weights)
    bias = (case.bias + torch.randn(case.kv_heads)).to(weights)
    return value.transpose(1, 2), valid if case.hidden else None, Gate(weight, bias, 16.0)


def definition(value, valid, weight, bias, temperature):
    """log sigmoid(w_h . v_t + b_h) / 16, 0 where a token does not count."""
    logit = torch.einsum("bhnd,hd->bhn", value, weight) + bias[:, None]
    found = functional.logsigmoid(logit) / temperature
    return found if valid is None else found.masked_fill(~valid[:, None], 0.0)


def check_case(case):
    """Gates, their gradients, and what the operator makes of them."""
    value, valid, weights = inputs_of(case)
    shown = value if valid is None else value.masked_fill(~valid[:, None, :, None], 0.0)
    exact = [x.double().requires_grad_() for x in (shown, *weights[:2])]
    want = definition(exact[0], valid, *exact[1:], weights.temperature)
    got = gate.forward(value, valid, weights)
    assert got.dtype is torch.float32
    close(got, want.detach(), case.tolerance, "gates")
    grad = torch.randn(want.shape)
    expected = torch.autograd.grad((want * grad).sum(), exact)
    found = gate.backward(grad, value, valid, weights)
    assert found[0].dtype is value.dtype
    eps = max(case.tolerance, torch.finfo(value.dtype).eps)
    for name, a, b, most in zip(
        ("values", "weights", "biases"), found, expected, (eps, *(3 * case.tolerance,) * 2), strict=True
    ):
        close(a, b, most, f"gradient of {name}")
    given = [x.detach().requires_grad_() for x in (value, *weights[:2])]
    through = gates.log_gates(given[0], valid, Gate(*given[1:], weights.temperature))
    assert torch.equal(through, got)
    assert all(
        torch.equal(a, b.to(x.dtype))
        for a, b, x in zip(torch.autograd.grad(through, given, grad), found, given, strict=True)
    )


def check_gradients_of_gradients():
    """They are those of torch's own operations."""
    value, valid, weights = inputs_of(Case(length=9, hidden=2))
    results = []
    for compute in (gates.log_gates, lambda v, m, g: definition(v, m, *g)):
        shown = value.nan_to_num(0.0).requires_grad_()
        given = [shown, *(x.detach().clone().requires_grad_() for x in weights[:2])]
        loss = compute(shown, valid, Gate(*given[1:], 16.0)).square().sum()
        first = torch.autograd.grad(loss, given, create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), given))
    for a, b in zip(*results, strict=True):
        close(a, b.double(), 1e-5, "second derivative")


def check_nothing_to_do():
    """No tokens, no rows."""
    weights = Gate(torch.randn(2, 8), torch.zeros(2), 16.0)
    for shape in ((1, 2, 0, 8), (0, 2, 5, 8)):
        value = torch.zeros(shape)
        assert gate.forward(value, None, weights).shape == shape[:3]
        d_value, d_weight, d_bias = gate.backward(torch.zeros(shape[:3]), value, None, weights)
        assert d_value.shape == shape
        assert not d_weight.any()
        assert not d_bias.any()


def check_running_sums():
    """Parts of queries and keys, of more tokens than one step takes, whose sums all but cancel."""
    torch.manual_seed(0)
    of_query = torch.randn(2, 2, 6, 2500) + 100
    of_key = torch.randn(3, 2, 3, 2500) + 400 / 3
    for last in (None, torch.randn(2, 3)):
        along = of_query.double().sum(0).unflatten(1, (3, 2)).sum(2) - of_key.double().sum(0)
        if last is not None:
            along[..., -1] += last
        want = along.flip(-1).cumsum(-1).flip(-1)
        got = gate.decay_gradients(of_query, of_key, last, problem.Launches(of_query))
        assert got.dtype is torch.float32
        size = of_query.double().abs().sum(0).unflatten(1, (3, 2)).sum(2).sum(-1, keepdim=True)
        assert float(((got - want).abs() / size).max()) < 2.0**-22


def key_of(dtype=torch.float32, Dv=16):
    return check._window_key(CPU, dtype, Dv, Dv, False, GateForm())


def check_the_check(path):
    """True kernels pass in every dtype; others are found, said once and remembered."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert gate_selftest.disagreement(key_of(dtype, 24), gate, 70) is None

    def open_to_all(value, valid, weights):
        return gate.forward(value, None, weights)

    def wrong(place):
        def call(*given):
            found = list(gate.backward(*given))
            found[place] = found[place] * 1.001
            return tuple(found)

        return call

    def alone(grad, value, valid, weights, onto):
        return gate.backward(grad, value, valid, weights)

    lies = [("output", Lying(gate, forward=open_to_all)), ("d_value", Lying(gate, backward=alone))]
    lies += [(name, Lying(gate, backward=wrong(i))) for i, name in enumerate(("d_value", "d_weight"))]
    for index, (what, lying) in enumerate(lies):
        with Folder(path / str(index)):
            checks = Checks(launch, 60, gates=lying)
            with pytest.warns(UserWarning, match=f"gates.* disagree with float64: .*{what}.*report"):
                assert not checks.takes(key_of())
            assert not checks.takes(key_of())


def check_the_choice():
    """Values on a GPU are asked for, others are not."""
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(check.CHECKS, "takes", lambda key, *sizes, **how: asked.append(key) or True)
        patch.setattr(check, "Tensor", OnGpu)
        x = torch.zeros(1, 2, 8, 16)
        assert gates.kernels_take(x.as_subclass(OnGpu))
        assert not gates.kernels_take(x)
        assert [key.form for key in asked] == [GateForm()]
