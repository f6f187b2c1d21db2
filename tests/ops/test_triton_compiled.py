"""The Triton kernels compile for GPUs that are not there: no spilled registers, enough shared memory.

Forward with a state and several segments, backward and one step, with the tiles that a launch would choose.
"""

import json
import os
import pickle
import re
import subprocess
import sys

import pytest
from helpers.paths import ROOT
from helpers.selection import rest_full

from hf_linattn.ops.triton import audit, launch, machine_code, window_rest
from hf_linattn.ops.triton.sample_calls import CALLS, LINEAR, Shape

pytestmark = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)

SMALL = {"batch": 2, "heads": 2, "kv_heads": 2, "length": 1024, "state": True, "segment": 256}
GROUPED = SMALL | {"heads": 4, "kv_heads": 1}
CASES = {
    "A100, 64": ("sm_80", Shape(D=64, Dv=64, **SMALL)),
    "A100, 96, grouped heads": ("sm_80", Shape(D=96, Dv=96, **GROUPED)),
    "H100, 64, grouped heads": ("sm_90", Shape(D=64, Dv=64, **GROUPED)),
    "H100, 128": ("sm_90", Shape(**SMALL)),
    "H100, 256": ("sm_90", Shape(D=256, Dv=256, **SMALL)),
    "A100, 128, float16": ("sm_80", Shape(dtype="float16", feature_map="relu", **SMALL)),
    "A100, 64, features, decay, grouped heads": (
        "sm_80",
        Shape(D=64, Dv=64, feature_map="none", linked=True, **GROUPED),
    ),
    "H100, 128, decay": ("sm_90", Shape(linked=True, **SMALL)),
    "MI300X, 128, float16": ("gfx942", Shape(dtype="float16", **SMALL)),
}


WITH_WINDOWS = ("H100, 128", "A100, 64, features, decay, grouped heads", "MI300X, 128, float16")
COMPILED = [
    *((name, False) for name in CASES if name not in WITH_WINDOWS[1:]),
    *((name, True) for name in WITH_WINDOWS),
]
ALWAYS = ((WITH_WINDOWS[1], True),)
"""All kernels, in the case with most of what they can; the others are compiled with `-m full`."""


def kernels():
    """Names of all kernels: functions in triton's language whose docstring has a grid."""
    found = set()
    for path in (ROOT / "hf_linattn/ops/triton").glob("*kernels.py"):
        for name, rest in re.findall(r"@(?:triton\.)?jit\ndef (\w+)(.*?)(?=\n@|\Z)", path.read_text(), re.S):
            found |= {name} if "Grid:" in rest else set()
    return found


COMPILE = """
import pickle, sys
from hf_linattn.ops.triton import targets
case, calls = pickle.load(sys.stdin.buffer)
with open(sys.argv[1], "wb") as file:
    pickle.dump(targets.report(*case, calls=calls), file)
"""


@pytest.fixture
def compiler(tmp_path, warm_start, monkeypatch):
    """Compiles a case in a process where triton compiles, whatever the environment says."""
    if "TRITON_INTERPRET" in os.environ:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))

    def report(*case, calls):
        command = [sys.executable, "-c", COMPILE, str(tmp_path / "report")]
        subprocess.run(command, input=pickle.dumps((case, calls)), check=True)
        return pickle.loads((tmp_path / "report").read_bytes())

    return report


@pytest.mark.parametrize(
    ("name", "windows"),
    rest_full(COMPILED, ALWAYS),
)
def test_kernels_fit_the_device(compiler, name, windows):
    found = compiler(*CASES[name], calls=CALLS if windows else LINEAR)
    expected = {
        kernel
        for kernel in kernels()
        if windows or not kernel.startswith(("window", "prompt", "heavy", "gate", "decay", "map"))
    }
    expected |= {"decay_gradients"} if CASES[name][1].linked else set()
    if CASES[name][1].D > window_rest.WIDEST:
        expected -= {"window_and_rest"}
    # which sums up many segments only
    assert {kernel.name for kernel in found.kernels} | {"accumulate"} == expected
    # more memory than programs sum up by themselves
    summed, decays = CASES[name][1].D > 128, CASES[name][1].linked
    assert (found.launches["forward"], found.launches["backward"]) == (2 + summed, 4 + summed + decays)
    for kernel in found.kernels:
        assert kernel.code.spilled <= (8 if name == "H100, 256" else 0), kernel
        assert kernel.resident > 0, kernel
        sums = kernel.name in ("gate_outputs", "gate_gradients", "decay_gradients")
        once = kernel.name in ("gate_outputs", "map_features", "map_gradients")
        token = kernel.name in ("accumulate", "step", "window_push")
        assert bool(kernel.code.products) == (not token and not sums), kernel
        assert kernel.code.loop > 0 or token or once, kernel


def test_the_command_writes_its_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{audit.BEGIN}\nold\n{audit.END}\nafter\n")
    small = [
        "--targets",
        "gfx942",
        "--dtypes",
        "bfloat16",
        "--widths",
        "32",
        "--kernels",
        "step",
        "--jobs",
        "1",
    ]
    assert audit.main([*small, "--write", str(page), "--output-dir", str(tmp_path / "out")]) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "| `step` | 32 | " in text
    assert "old" not in text
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    row = next(row for row in content["rows"] if row["kernel"] == "step")
    assert row["code"]["registers"] > 0
    assert row["work"] > 0
    assert row["target"] == "gfx942"
    assert capsys.readouterr().out in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--targets", "sm_70"], "--targets knows sm_80"),
        (["--widths", "512"], "at most 256"),
        (["--write", "nowhere.md"], "cannot read nowhere.md"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, text):
    assert audit.main(arguments) == 1
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_a_missing_tool_is_one_line(monkeypatch):
    with pytest.raises(Exception, match=r"no_such_tool, which comes with triton's wheels"):
        machine_code._told("no_such_tool", "file")


def test_loops_are_found():
    body = "\n".join(
        [
            "\t/*0000*/ MOV R1, c[0x0] ;",
            ".L_x_1:",
            *["\t/*0010*/ @P0 FADD R2, R2, R3 ;"] * 50,
            "\t/*0020*/ HGMMA.64x64x16.F32.BF16 R4, R5 ;",
            ".L_x_2:",
            *["\t/*0030*/ FMUL R2, R2, R3 ;"] * 60,
            "\t/*0040*/ @P1 BRA `(.L_x_2) ;",
            "\t/*0050*/ @!P0 BRA `(.L_x_1) ;",
            ".L_x_3:",
            "\t/*0060*/ BRA `(.L_x_3) ;",
        ]
    )
    names, spans = machine_code._spans(body, machine_code.SASS)
    assert len(names) == 115
    assert [last - first for first, last in spans] == [113, 61]
    assert [last - first for first, last in machine_code._outermost(spans)] == [113]


def test_the_page_has_the_kernels_that_exist():
    text = (ROOT / "docs/gpu.md").read_text()
    table = text.partition(audit.BEGIN)[2].partition(audit.END)[0]
    names = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    # `accumulate` runs where there are more segments than the page's shape has
    assert names | {"accumulate"} == kernels()
