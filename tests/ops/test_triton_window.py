"""The Triton kernels of windows, interpreted, against all pairs in float64."""

import pytest
from helpers import triton_rest_checks as rest
from helpers import triton_window_checks as checks
from helpers.triton_window_checks import FORMS, Case

from hf_linattn.ops.triton import launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

CASES = {
    "plain": Case(missing=9),
    "grouped, wide values, padding": Case(batch=2, heads=4, D=24, Dv=40, hidden=20, length=37),
    "more than a tile": Case(length=70, span=45, heads=1, kv_heads=1, missing=20),
    "reach beyond the text": Case(length=20, span=50, kv_heads=1, hidden=9),
    "one query": Case(batch=2, length=1, span=40, sinks=3, others=True),
    "sinks": Case(missing=9, sinks=3, ranked=True, kv_heads=1),
    "sinks, turned queries, sums": Case(
        missing=9, sinks=4, turned=True, ranked=True, others=True, alone=9, heads=4, length=40, hidden=5
    ),
    "many sinks": Case(sinks=20, length=20, Dv=24),
    "sums": Case(others=True, batch=2, hidden=30),
    "sums of elu1": Case(others=True, shifted=True, alone=9, D=24, heads=4, length=40, sinks=3, ranked=True),
    "sums of elu1, bfloat16": Case(
        others=True, shifted=True, dtype="bfloat16", tolerance=1e-2, length=40, missing=9
    ),
    "bfloat16": Case(dtype="bfloat16", tolerance=1e-2, sinks=3, others=True, kv_heads=1, length=40),
    "float16": Case(dtype="float16", tolerance=1e-3, sinks=3, others=True, length=40),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_match_the_definition(interpreted, name):
    interpreted(checks.check_case, CASES[name])


@pytest.mark.parametrize(
    "check",
    [
        checks.check_rows_that_see_nothing,
        checks.check_nan_and_numbers_far_apart,
        checks.check_same_bits,
        checks.check_the_operator,
        checks.check_no_tokens,
    ],
    ids=lambda check: check.__name__,
)
def test_property(interpreted, check):
    interpreted(check)


@pytest.mark.parametrize(
    ("dtype", "forms"),
    [
        pytest.param("float32", FORMS, marks=pytest.mark.full),
        ("bfloat16", FORMS[1:2]),
        ("float16", ()),
    ],
    ids=("float32", "bfloat16", "float16"),
)
def test_the_check_takes_them(interpreted, dtype, forms):
    interpreted(checks.check_true_kernels_pass, dtype, forms)


@pytest.mark.parametrize(
    "check", [checks.check_lies_are_found, checks.check_the_choice], ids=lambda check: check.__name__
)
def test_the_check(interpreted, tmp_path, check):
    interpreted(check, tmp_path)


RESTS = {
    "prompt, padding, grouped heads": rest.Case(batch=2, heads=4, length=40, padded=True, Dv=24),
    "prompt of a window and little more": rest.Case(length=23, span=19),
    "segments, decay, sinks": rest.Case(length=150, kv_heads=1, span=21, decays=True, sinks=3, segment=64),
    "behind a state, turned queries": rest.Case(
        length=33, state=True, padded=True, decays=True, sinks=2, turned=True
    ),
    "features": rest.Case(length=37, kind="none", features=24, heads=4, state=True),
    "relu": rest.Case(length=31, kind="relu", sinks=2, span=20),
    "bfloat16": rest.Case(length=50, dtype="bfloat16", tolerance=1e-2, state=True, decays=True, sinks=2),
}


@pytest.mark.parametrize("name", RESTS)
def test_window_and_rest_match_the_definition(interpreted, name):
    interpreted(rest.check_case, RESTS[name])


@pytest.mark.parametrize(
    "check",
    [
        rest.check_it_equals_the_kernels_apart,
        rest.check_numbers_far_apart,
        rest.check_segments_in_parts,
        rest.check_the_choice,
        rest.check_hybrids_take_it,
    ],
    ids=lambda check: check.__name__,
)
def test_window_and_rest(interpreted, check):
    interpreted(check)


def test_the_check_of_window_and_rest(interpreted, tmp_path):
    interpreted(rest.check_the_check, tmp_path)
