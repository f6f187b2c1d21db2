"""Every example runs, offline, and says what it promises."""

import subprocess
import sys

import pytest
from helpers.fixtures_demo import save_model
from helpers.paths import EXAMPLES
from helpers.selection import rest_full

PROMISES = {
    "patch_and_generate.py": "bit-identical: True",
    "linear_and_sparse.py": "both, last layer softmax ",
    "per_layer_plan.py": "same logits: True",
    "streaming_perplexity.py": " 2,048 tokens read, perplexity so far",
}
ELSEWHERE = {"pretrain_base.py", "distill_encoder.py"}
"""The first needs an hour and made examples/base; the second has tests of its own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def test_every_example_is_tested():
    assert {path.name for path in EXAMPLES.glob("*.py")} == PROMISES.keys() | ELSEWHERE


# its parts, training and measuring, have tests of their own
LONG = "linear_and_sparse.py"


@pytest.mark.parametrize("name", rest_full(sorted(PROMISES), PROMISES.keys() - {LONG}))
@pytest.mark.usefixtures("warm_start")
def test_example_runs(name, model):
    steps = ["2"] if name == "linear_and_sparse.py" else []
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), str(model), *steps]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
    assert len((EXAMPLES / name).read_text().splitlines()) < 40
