"""The Triton kernels compile for GPUs that are not there: no spilled registers, enough shared memory.

Forward with a state and several segments, backward and one step, with the tiles that a launch would choose.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from helpers import triton_compiler

from hf_linattn.ops.triton import launch as triton_linear

pytestmark = pytest.mark.skipif(
    not triton_linear.available("cuda"), reason="triton is not installed: pip install triton"
)

KERNELS = {
    "accumulate",
    "gradient_rows",
    "key_gradients",
    "outputs",
    "query_gradients",
    "segment_states",
    "step",
    "value_gradients",
}
# KiB that one program may ask for: CUDA C++ Programming Guide, specifications per compute capability
SHARED = {(8, 0): 163, (9, 0): 227}
CASES = {
    "A100, 64": ((8, 0), (64, 64, "bfloat16", 2, 2, "elu1", False)),
    "A100, 96, grouped heads": ((8, 0), (96, 96, "bfloat16", 4, 1, "elu1", False)),
    "H100, 64, grouped heads": ((9, 0), (64, 64, "bfloat16", 4, 1, "elu1", False)),
    "H100, 128": ((9, 0), (128, 128, "bfloat16", 2, 2, "elu1", False)),
    "H100, 256": ((9, 0), (256, 256, "bfloat16", 2, 2, "elu1", False)),
    "A100, 128, float16": ((8, 0), (128, 128, "float16", 2, 2, "relu", False)),
    "A100, 64, features, decay, grouped heads": ((8, 0), (64, 64, "bfloat16", 4, 1, "none", True)),
    "H100, 128, decay": ((9, 0), (128, 128, "bfloat16", 2, 2, "elu1", True)),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """Compiles a case in a process where triton compiles, whatever the environment says."""
    changes = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, text in changes.items():
                patch.setenv(name, text)
            pool.submit(os.getpid).result()  # the process starts here, with these
        yield lambda *arguments: pool.submit(triton_compiler.compiled, *arguments).result()


@pytest.mark.parametrize("name", CASES)
def test_kernels_fit_the_device(compiler, name):
    capability, case = CASES[name]
    found = compiler(case, capability)
    assert {kernel.name for kernel in found} == KERNELS
    for kernel in found:
        assert kernel.spilled == 0, kernel
        assert kernel.registers * kernel.warps * 32 <= 65536, kernel
        assert kernel.shared <= SHARED[capability] * 1024, kernel
        assert kernel.tensor_cores == (kernel.name not in ("accumulate", "step")), kernel
