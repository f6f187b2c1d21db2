"""Which cases of a product every run has; the others are run by `-m full`."""

import pytest


def rest_full(cases, always):
    """Cases as pytest's parameters: `always`, some of them, in every run and the others with `-m full`."""
    cases, always = list(cases), list(always)
    assert all(case in cases for case in always), "a case that is always run is none of the cases"
    assert always, "something must always be run"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=() if case in always else pytest.mark.full
        )
        for case in cases
    ]
