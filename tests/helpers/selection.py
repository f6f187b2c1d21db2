"""Which cases of a product every run has; the others are run by `-m full`."""

import pytest


def chessboard(rows, columns):
    """Pairs as pytest's parameters, every second one in every run: each row and each column is in some."""
    fields = [(row, column, i + j) for i, row in enumerate(rows) for j, column in enumerate(columns)]
    return rest_full([field[:2] for field in fields], [field[:2] for field in fields if field[2] % 2 == 0])


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
