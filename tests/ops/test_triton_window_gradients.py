"""Window, sinks and what has left as one function of autograd on a GPU, interpreted, against float64."""

import pytest
from helpers import triton_window_gradient_checks as checks
from helpers.triton_window_gradient_checks import Case

from hf_linattn.ops.triton import launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

CASES = {
    "elu1": Case(),
    "gates, grouped heads, sinks": Case(decay="gate", heads=4, sinks=3, Dv=24),
    "decay, relu, padding": Case(decay="given", kind="relu", batch=2, hidden=11),
    "gates, padding, turned sinks": Case(decay="gate", batch=2, hidden=7, sinks=2, turned=True),
    "one token has left": Case(length=10, decay="gate"),
    "bfloat16": Case(dtype="bfloat16", decay="gate", sinks=3, tolerance=1e-2),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_match_the_definition(interpreted, name):
    interpreted(checks.check_case, CASES[name])


def test_gradients_of_gradients(interpreted):
    interpreted(checks.check_gradients_of_gradients)


@pytest.mark.parametrize(("sinks", "length", "first"), [(3, 20, 3), (7, 6, 0)])
def test_a_model_without_padding(interpreted, sinks, length, first):
    interpreted(checks.check_a_model, sinks, length, first)
