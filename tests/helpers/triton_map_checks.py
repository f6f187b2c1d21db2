"""What the Triton kernels of learned maps must do, run in Triton's interpreter against float64 definitions.

Plain functions, called in a process of their own as those of `triton_checks`.
"""

from typing import NamedTuple

import pytest
import torch

from hf_linattn.ops import softmax_map as maps
from hf_linattn.ops.triton import check, launch, plan, softmax_map, softmax_map_selftest
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.selftest import Key
from hf_linattn.ops.triton.softmax_map_selftest import MapForm

from .triton_checks import close
from .triton_selftest_checks import CPU, Folder, OnGpu
from .triton_window_checks import Lying


class Case(NamedTuple):
    """x, W and the least feature."""

    batch: int = 1
    heads: int = 2
    length: int = 70
    D: int = 16
    half: int = 16
    dtype: str = "float32"
    weights: str = "float32"
    made: str = "float32"
    size: float = 1.0
    floor: float = 0.02
    strided: bool = False
    tolerance: float = 2e-6


def inputs_of(case):
    """Draw x as projections leave it, and W."""
    torch.manual_seed(0)
    x = case.size * torch.randn(case.batch, case.length, case.heads, case.D)
    x = x.to(getattr(torch, case.dtype))
    x = torch.cat([x, x], -1)[..., : case.D] if case.strided else x
    weight = torch.randn(case.heads, case.half, case.D) / case.D**0.5
    return x.transpose(1, 2), weight.to(getattr(torch, case.weights))


def definition(x, weight, floor):
    """[softmax(W x), softmax(-W x)] above a floor."""
    logits = torch.einsum("bhnd,hfd->bhnf", x, weight)
    features = torch.cat([logits.softmax(-1), (-logits).softmax(-1)], -1)
    return torch.nn.functional.threshold(features, floor, floor)


def check_case(case):
    """Features, their gradients, and what the operator makes of them."""
    x, weight = inputs_of(case)
    exact = [part.double().requires_grad_() for part in (x, weight)]
    want = definition(*exact, case.floor)
    made = getattr(torch, case.made)
    got = softmax_map.forward(x, weight, case.floor, made)
    assert got.dtype is made
    assert got.transpose(1, 2).is_contiguous()
    close(got, want.detach(), case.tolerance, "features")
    assert float(got.min()) >= case.floor * (1 - 2.0**-7)  # bfloat16
    # either side of the floor is right
    grad = torch.randn(want.shape).masked_fill((want.detach() / case.floor - 1).abs() < 0.02, 0.0).to(made)
    expected = torch.autograd.grad(want, exact, grad.double())
    found = softmax_map.backward(grad, x, weight, case.floor)
    assert found[0].dtype is x.dtype
    for name, a, b in zip(("x", "W"), found, expected, strict=True):
        close(a, b, 4 * case.tolerance, f"gradient of {name}")
    given = [part.detach().requires_grad_() for part in (x, weight)]
    through = maps.features(*given, case.floor, made, "triton")
    assert torch.equal(through, got)
    for a, b, part in zip(torch.autograd.grad(through, given, grad), found, given, strict=True):
        assert torch.equal(a, b.to(part.dtype))


def check_gradients_of_gradients():
    """They are those of torch's own operations."""
    x, weight = inputs_of(Case(length=9, D=8, half=4))
    results = []
    for compute in (lambda *given: maps.features(*given, 0.02, torch.float32, "triton"), definition):
        given = [part.detach().clone().requires_grad_() for part in (x, weight)]
        more = () if compute is not definition else (0.02,)
        loss = compute(*given, *more).square().sum()
        first = torch.autograd.grad(loss, given, create_graph=True)
        results.append(torch.autograd.grad(sum(part.square().sum() for part in first), given))
    for a, b in zip(*results, strict=True):
        close(a, b.double(), 1e-5, "second derivative")


def check_nothing_to_do():
    """No tokens, no rows; NaN stays in its row."""
    weight = torch.randn(2, 4, 8)
    for shape in ((1, 2, 0, 8), (0, 2, 5, 8)):
        x = torch.zeros(shape)
        features = softmax_map.forward(x, weight, 0.0, torch.float32)
        assert features.shape == (*shape[:3], 8)
        d_x, d_weight = softmax_map.backward(features, x, weight, 0.0)
        assert d_x.shape == shape
        assert not d_weight.any()
    x = torch.randn(1, 2, 9, 8)
    x[0, 0, 3] = float("nan")
    bad = softmax_map.forward(x, weight, 1e-12, torch.float32).isnan().any(-1)
    assert bad.nonzero().tolist() == [[0, 0, 3]]


def key_of(dtype=torch.float32, D=16, half=16, weights=False):
    operand = plan.operand_of((dtype,))
    return Key(CPU, dtype, dtype, D, half, 1, operand, MapForm(weights))


def check_the_check(path):
    """True kernels pass in every dtype; others are found, said once and remembered."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert softmax_map_selftest.disagreement(key_of(dtype, 24, 12), softmax_map, 70) is None
    about = key_of(torch.bfloat16, weights=True)
    assert softmax_map_selftest.disagreement(about, softmax_map, 70) is None

    def without_floor(x, weight, floor, dtype):
        return softmax_map.forward(x, weight, 0.0, dtype)

    def wrong(place):
        def call(*given):
            found = list(softmax_map.backward(*given))
            found[place] = found[place] * 1.01
            return tuple(found)

        return call

    lies = [("output", Lying(softmax_map, forward=without_floor))]
    lies += [(name, Lying(softmax_map, backward=wrong(i))) for i, name in enumerate(("d_x", "d_weight"))]
    for index, (what, lying) in enumerate(lies):
        with Folder(path / str(index)):
            checks = Checks(launch, 60, maps=lying)
            with pytest.warns(UserWarning, match=f"softmax map.* disagree with float64: .*{what}.*report"):
                assert not checks.takes(key_of())
            assert not checks.takes(key_of())


def check_the_choice():
    """Tokens on a GPU are asked for, others and wide ones are not."""
    with pytest.MonkeyPatch.context() as patch:
        asked = []
        patch.setattr(check.CHECKS, "takes", lambda key, *sizes, **how: asked.append(key) or True)
        patch.setattr(check, "Tensor", OnGpu)
        x, weight = torch.zeros(1, 2, 8, 16).bfloat16().as_subclass(OnGpu), torch.zeros(2, 8, 16)
        assert maps.kernels_take(x, weight.bfloat16())
        assert maps.kernels_take(x, weight)
        assert not maps.kernels_take(x.float(), weight)
        assert not maps.kernels_take(x.half(), weight)
        assert not maps.kernels_take(x, torch.zeros(2, 256, 16))
        assert [(key.D, key.Dv, key.form) for key in asked] == [(16, 8, MapForm()), (16, 8, MapForm(True))]
