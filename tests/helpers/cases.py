"""Every patch with the options under which the suites run it: sizes that matter in some hundred tokens."""

from helpers.formulas import heavy, linear, output, salient, scores, sparse, state
from helpers.oracle import Case

CASES = {
    "softmax": Case("softmax"),
    "elu1": Case("elu1"),
    "elu1+logn": Case("elu1+logn"),
    "softmax1": Case("softmax1"),
    "logn": Case("logn"),
    "softmax1+logn": Case("softmax1+logn"),
    **linear.CASES,
    **state.CASES,
    **salient.CASES,
    **heavy.CASES,
    **scores.CASES,
    **sparse.CASES,
    **output.CASES,
}
