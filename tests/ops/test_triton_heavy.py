"""The Triton kernel of a window with heavy hitters, interpreted, against torch's operations in float64."""

import pytest
from helpers import triton_heavy_checks as checks
from helpers.heavy_checks import MANY, OPTIONS, SMALL, Case, check_case

from hf_linattn.ops.triton import launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

WIDE = {"size": 48, "heavy": 10, "sinks": 2}
CASES = {
    "inside the window": Case(cuts=(11,), Dv=24),
    "several choices, grouped heads, turned sinks": Case(heads=3, positions="cache", half_life=20.0),
    "chunks, never fading": Case(cuts=(5, 22, 13), half_life=None),
    "left padding in chunks, turned sinks": Case(cuts=(27, 13), hidden="left", positions="cache"),
    "holes": Case(hidden="holes", half_life=20.0),
    "what is too far back goes first": Case(cuts=(57, 13), options=OPTIONS | {"reach": 21}, half_life=None),
    "no sinks, blocks of one token": Case(cuts=(19,), options=SMALL),
    "more than a tile": Case(cuts=(75,), options=MANY, half_life=20.0),
    "a prompt goes on": Case(cuts=(43, 30), heads=3, positions="cache", half_life=20.0),
    "a prompt goes on behind padding": Case(cuts=(30, 37), hidden="holes", positions="cache"),
    "nothing but padding first": Case(cuts=(18, 40), hidden="long", half_life=20.0),
    "steps of several tiles": Case(cuts=(75, 20), heads=8, options=WIDE, half_life=20.0),
    "blocks of several tiles": Case(cuts=(345,), options={"size": 272, "heavy": 5, "sinks": 1}),
    "tokens one by one": Case(cuts=(30, *[1] * 8), heads=3, positions="cache", half_life=20.0),
    "one by one, padding": Case(cuts=(26, *[1] * 7), hidden="holes"),
    "bfloat16": Case(cuts=(25, 15), dtype="bfloat16", tolerance=1e-2, positions="cache"),
}


@pytest.mark.parametrize("name", CASES)
def test_all_steps_are_those_of_torch(interpreted, name):
    interpreted(check_case, CASES[name])


LEARN = {
    "inside the window": Case(cuts=(11,), Dv=24),
    "several choices, grouped heads, turned sinks": Case(heads=3, positions="cache", half_life=20.0),
    "several key heads, holes": Case(kv_heads=2, hidden="holes"),
    "left padding, turned sinks": Case(hidden="left", positions="cache"),
    "no sinks, blocks of one token": Case(cuts=(19,), options=SMALL),
    "more than a tile, not full": Case(cuts=(37,), options=MANY),
    "steps of several tiles": Case(cuts=(80,), heads=8, options=WIDE, positions="cache"),
}


@pytest.mark.parametrize("name", LEARN)
def test_gradients_are_those_of_walking(interpreted, name):
    interpreted(checks.check_gradients, LEARN[name])


@pytest.mark.parametrize(
    "check",
    [
        checks.check_a_model_says_the_same,
        checks.check_a_model_learns_the_same,
        checks.check_the_same_bits,
        checks.check_what_stays_with_torch,
        checks.check_the_check,
        checks.check_the_check_of_gradients,
    ],
    ids=lambda check: check.__name__,
)
def test_property(interpreted, tmp_path, check):
    interpreted(check, tmp_path)
