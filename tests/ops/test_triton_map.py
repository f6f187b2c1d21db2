"""The Triton kernels of learned maps, interpreted, against float64."""

import pytest
from helpers import triton_map_checks as checks
from helpers.triton_map_checks import Case

from hf_linattn.ops.triton import launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

CASES = {
    "plain": Case(),
    "odd sizes, strided": Case(batch=2, D=24, half=10, strided=True),
    "one token": Case(length=1, batch=3),
    "more than a segment": Case(length=300, heads=1, D=8, half=4),
    "large logits": Case(size=20.0, floor=1e-12, tolerance=2e-5),
    "bfloat16": Case(dtype="bfloat16", weights="bfloat16", made="bfloat16", tolerance=1e-2),
    "bfloat16, float32 weights": Case(dtype="bfloat16", made="bfloat16", tolerance=1e-2),
    "bfloat16, float32 features": Case(dtype="bfloat16", weights="bfloat16", tolerance=1e-2),
    "float16": Case(dtype="float16", weights="float16", tolerance=1e-3),
}


@pytest.mark.parametrize("name", CASES)
def test_features_match_the_definition(interpreted, name):
    interpreted(checks.check_case, CASES[name])


@pytest.mark.parametrize(
    "check",
    [checks.check_gradients_of_gradients, checks.check_nothing_to_do, checks.check_the_choice],
    ids=lambda check: check.__name__,
)
def test_property(interpreted, check):
    interpreted(check)


def test_the_check(interpreted, tmp_path):
    interpreted(checks.check_the_check, tmp_path)
