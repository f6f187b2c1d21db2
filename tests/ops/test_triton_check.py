"""The check that lets the Triton kernels run by default, by interpreted kernels and by kernels that lie."""

from types import SimpleNamespace

import pytest
import torch
from helpers import triton_selftest_checks as checks

from hf_linattn.ops.triton import check, launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)


@pytest.mark.parametrize(
    "form",
    [
        ("float32", "elu1", True, True, True, True),
        pytest.param(("bfloat16", "none", True, True), marks=pytest.mark.full),
        ("float16", "relu", False, False),
    ],
    ids=str,
)
def test_true_kernels_pass(interpreted, tmp_path, form):
    interpreted(checks.check_true_kernels_pass, tmp_path, *form)


@pytest.mark.parametrize(
    "check",
    [
        checks.check_lies_are_found,
        checks.check_bf16_lies_are_found,
        checks.check_failures,
        checks.check_folders_that_fail,
        checks.check_two_at_once,
        checks.check_nothing_of_the_caller_changes,
        checks.check_what_is_refused,
        checks.check_graphs,
        checks.check_the_choice,
    ],
    ids=lambda check: check.__name__,
)
def test_property(interpreted, tmp_path, check):
    interpreted(check, tmp_path)


def test_a_device_is_checked_by_both_ways_of_launching(monkeypatch):
    """The first round compiles kernels and is launched by triton, the second as all calls to come."""
    monkeypatch.setattr(check, "_apart", lambda run, device: run())
    for answers, expected in (
        ([None, None], (None, True)),
        (["first", None], ("they disagree with float64: first", True)),
        ([None, "second"], ("they disagree with float64: second", True)),
    ):
        left = list(answers)
        trials = check.Checks(None)
        monkeypatch.setattr(trials, "disagreement", lambda key, left=left: left.pop(0))
        assert trials._run(SimpleNamespace(device=torch.device("cuda", 0))) == expected
        assert len(left) == (1 if answers[0] else 0)
    left, on_cpu = [None], check.Checks(None)
    monkeypatch.setattr(on_cpu, "disagreement", lambda key: left.pop())
    assert on_cpu._run(SimpleNamespace(device=torch.device("cpu"))) == (None, True)
