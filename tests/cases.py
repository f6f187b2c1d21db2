"""Every patch with the options under which the suites run it: sizes that matter in some hundred tokens."""

import formulas_linear
import formulas_scores
import formulas_sparse
import formulas_state
from oracle import Case

CASES = {
    "softmax": Case("softmax"),
    "elu1": Case("elu1"),
    "elu1+logn": Case("elu1+logn"),
    "softmax1": Case("softmax1"),
    "logn": Case("logn"),
    "softmax1+logn": Case("softmax1+logn"),
    **formulas_linear.CASES,
    **formulas_state.CASES,
    **formulas_scores.CASES,
    **formulas_sparse.CASES,
}
