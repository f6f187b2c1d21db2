"""Products of bfloat16 in vectors and on tiles (AVX512-BF16, AMX), which few processors have, emulated.

`helpers/amx.h` computes those instructions by others. A tile that is not set up, or whose sizes do not fit,
ends the process there.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.paths import ROOT
from helpers.selection import rest_full

from hf_linattn.ops.cpp import build

pytestmark = [
    pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here"),
    pytest.mark.skipif(
        "avx512bw" not in build.processor_facts().get("flags", ""), reason="AVX-512 is needed"
    ),
]
HEADER = ROOT / "tests" / "helpers" / "amx.h"
KINDS = {"tiles": "", "vectors": "-DNO_TILES"}


def compiler(kind):
    """Emulate those instructions, too."""
    return f"{build.compiler()[0]} {KINDS[kind]} -include {shlex.quote(str(HEADER))}"


@pytest.mark.parametrize("kind", rest_full(KINDS, ["tiles"]))
def test_kernels_pass_the_tests_of_bfloat16(kind, tmp_path):
    files = sorted(set(Path(__file__).parent.glob("test_cpp_*.py")) - {Path(__file__)})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "bfloat16",
        *map(str, files),
    ]
    ran = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "base")],
        env={**os.environ, "CXX": compiler(kind)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", ran.stdout)[1]) > 70
