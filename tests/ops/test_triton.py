"""The Triton kernels, interpreted: no GPU is needed. `test_triton_compiled.py` compiles them for GPUs."""

import subprocess
import sys

import pytest
from helpers import triton_checks as checks
from helpers.selection import rest_full
from helpers.triton_checks import Case
from helpers.triton_model_checks import check_a_model

from hf_linattn.ops.triton import launch

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

CASES = {
    "plain": Case(),
    "grouped, wide values, state, mask, strides": Case(
        batch=2, heads=4, D=24, Dv=40, state=True, masked=True, strided=True, length=50
    ),
    "relu, output alone": Case(feature_map="relu", batch=2, kv_heads=1, masked=True, d_after=False),
    "relu and eps": Case(feature_map="relu", eps=0.25, masked=True, state=True, kv_heads=1),
    "relu, numerators": Case(feature_map="relu", normalise=False, D=48, state=True, kv_heads=1, segment=0),
    "features": Case(feature_map="none", Dv=24, state=True),
    "features, numerators": Case(feature_map="none", normalise=False, heads=1, kv_heads=1),
    "columns over several programs": Case(heads=1, kv_heads=1, D=72, Dv=80, length=40, state=True),
    "one token": Case(length=1, state=True, heads=4),
    "two tokens": Case(length=2, kv_heads=1),
    "a whole chunk": Case(length=32, state=True),
    "whole chunks": Case(length=64, D=24, Dv=40, heads=4, kv_heads=2),
    "whole chunks, padding": Case(length=64, masked=True, state=True, feature_map="relu", batch=2),
    "whole chunks, bfloat16": Case(length=96, dtype="bfloat16", tolerance=1e-2, kv_heads=1),
    "whole chunks that decay": Case(length=64, decay=0.1, documents=(5, 32), state=True, tolerance=1e-5),
    "global, whole chunks": Case(causal=False, length=32, keys=64, kv_heads=1),
    "global, whole queries": Case(causal=False, length=32, keys=50, kv_heads=1),
    "more segments than one step of the scan": Case(length=290, heads=1, kv_heads=1, state=True),
    "queries far below zero": Case(mean=-120.0),
    "float16": Case(dtype="float16", tolerance=1e-3, state=True),
    "float16, tiny and huge": Case(dtype="float16", tolerance=2e-3, mean=-14.0, scale=300.0),
    "bfloat16": Case(dtype="bfloat16", tolerance=1e-2, masked=True),
    "decay": Case(decay=0.1, length=70, tolerance=1e-5),
    "decay, state, groups, mask": Case(
        decay=0.5, heads=4, length=40, state=True, masked=True, D=16, Dv=24, tolerance=1e-5
    ),
    "decay, segments": Case(decay=0.02, length=290, kv_heads=1, state=True, tolerance=2e-5),
    "decay that forgets at once": Case(decay=60.0, length=70, state=True, tolerance=1e-4),
    "features that decay": Case(feature_map="none", decay=0.1, D=72, heads=1, kv_heads=1, tolerance=1e-5),
    "documents": Case(documents=(5, 6, 31, 32, 50), batch=2, length=70, masked=True),
    "documents, state, relu": Case(
        documents=(40, 64), batch=2, length=70, state=True, feature_map="relu", eps=0.1, kv_heads=1
    ),
    "documents that decay": Case(
        documents=(10, 33, 34), decay=0.2, batch=2, length=70, state=True, kv_heads=1, tolerance=1e-5
    ),
    "numerators that decay": Case(
        normalise=False, decay=0.2, feature_map="none", state=True, documents=(45,), tolerance=1e-5
    ),
    "one token that decays": Case(length=1, state=True, heads=4, decay=0.5, documents=(0,)),
    "decay, bfloat16": Case(dtype="bfloat16", tolerance=1.5e-2, decay=0.1, documents=(20,), length=70),
    "decay, float16": Case(dtype="float16", tolerance=3e-3, decay=0.1, state=True, length=70),
    "global": Case(causal=False, heads=4, masked=True, strided=True),
    "global, more keys, state": Case(causal=False, length=20, keys=50, state=True, D=24),
    "global, fewer keys": Case(causal=False, length=50, keys=20, feature_map="relu", normalise=False),
    "global, one query": Case(causal=False, length=1, keys=33, kv_heads=1, d_after=False),
}


REST = (
    *("plain", "float16", "decay", "decay, segments", "features that decay", "documents", "decay, float16"),
    *("relu and eps", "features, numerators", "queries far below zero", "bfloat16"),
)
"""Everything in these is in a case beside others too: with `-m full`."""


@pytest.mark.parametrize("name", rest_full(CASES, [name for name in CASES if name not in REST]))
def test_forward_and_backward_match_the_definition(interpreted, name):
    interpreted(checks.check, CASES[name])


@pytest.mark.parametrize(
    "case",
    [Case(masked=True, kv_heads=1), Case(feature_map="relu", normalise=False, decay=0.2)],
)
def test_decode_goes_on_where_prefill_ended(interpreted, case):
    interpreted(checks.check_decode, case._replace(length=45))


@pytest.mark.parametrize(
    "check",
    [
        checks.check_rows_without_keys,
        checks.check_blocks_of_128_columns,
        checks.check_pairs_of_bfloat16,
        checks.check_same_bits,
        checks.check_segments_in_parts,
        checks.check_one_shape_in_several_layouts,
        checks.check_no_tokens,
        checks.check_nan_is_not_swallowed,
        checks.check_addresses_behind_two_to_the_31,
        checks.check_refusals,
        checks.check_the_operator,
        checks.check_what_a_training_step_launches,
        checks.check_a_token_is_written_over,
        checks.check_the_operator_over_all_keys,
    ],
    ids=lambda check: check.__name__,
)
def test_property(interpreted, check):
    interpreted(check)


@pytest.mark.parametrize(
    ("spec", "dtype", "tolerance", "packed", "options"),
    rest_full(
        [
            ("relu", "float32", 1e-4, False, None),
            ("gated", "float32", 1e-4, True, None),
            ("window+gated", "float32", 1e-4, False, {"size": 5, "sinks": 3}),
            ("window+gated", "bfloat16", 0.05, False, {"size": 5, "feature_map": "hedgehog"}),
            ("window+hedgehog", "float32", 1e-4, False, {"size": 7, "mix": "learned"}),
            ("window", "bfloat16", 0.05, False, {"size": 6, "sinks": 2}),
            ("hedgehog", "bfloat16", 0.05, False, None),
            ("decay", "bfloat16", 0.05, False, None),
            ("performer", "float16", 0.02, True, None),
        ],
        [
            ("window+gated", "float32", 1e-4, False, {"size": 5, "sinks": 3}),
            ("hedgehog", "bfloat16", 0.05, False, None),
            ("performer", "float16", 0.02, True, None),
        ],
    ),
)
def test_a_patched_model_computes_the_same(interpreted, spec, dtype, tolerance, packed, options):
    interpreted(check_a_model, spec, dtype, tolerance, packed, options)


def test_triton_is_not_imported_before_it_is_needed(warm_start):
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import hf_linattn\n"
        "from hf_linattn.ops.triton import launch\n"
        "assert not launch.available('cuda') and not launch.available('cpu')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
