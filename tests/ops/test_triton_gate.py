"""The Triton kernels of gates and of gradients of decays, interpreted, against float64."""

import pytest
from helpers import triton_gate_checks as checks
from helpers.triton_gate_checks import Case

from hf_linattn.ops.triton import launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

CASES = {
    "plain": Case(),
    "padding that holds NaN": Case(batch=2, hidden=30, Dv=24),
    "one token": Case(length=1, batch=3),
    "more than a segment": Case(length=600, kv_heads=1, Dv=8),
    "all but open": Case(bias=9.0, tolerance=2e-6),
    "open": Case(bias=60.0, tolerance=1e-5),
    "shut": Case(bias=-80.0),
    "strided": Case(strided=True, batch=2),
    "bfloat16": Case(dtype="bfloat16", weights="bfloat16", hidden=5),
    "float16": Case(dtype="float16", Dv=40),
}


@pytest.mark.parametrize("name", CASES)
def test_gates_match_the_definition(interpreted, name):
    interpreted(checks.check_case, CASES[name])


@pytest.mark.parametrize(
    "check",
    [
        checks.check_gradients_of_gradients,
        checks.check_nothing_to_do,
        checks.check_running_sums,
        checks.check_the_choice,
    ],
    ids=lambda check: check.__name__,
)
def test_property(interpreted, check):
    interpreted(check)


def test_the_check(interpreted, tmp_path):
    interpreted(checks.check_the_check, tmp_path)
