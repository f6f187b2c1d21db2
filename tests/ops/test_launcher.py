"""Kernels that triton has compiled are launched without its binder: the same kernel, the same arguments."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.paths import ROOT

from hf_linattn.ops.triton import launch, launcher
from hf_linattn.ops.triton.plan import Walk
from hf_linattn.ops.triton.tiles import Tile

needs_triton = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)
TILE = Tile(chunk=64, block=64, warps=4, stages=2)


class Compiled:
    """What triton returns: called as its own launch does, or under a grid."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.direct, self.told = [], []

    def run(self, *arguments):
        self.direct.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.told.append((grid, *arguments))


class Kernel:
    """A kernel of three tensors, of numbers and of constants, mixed as ours are."""

    arg_names = ("Q", "STATE", "strides", "length", "OUT", "BLOCK")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in arg_names)

    def __init__(self):
        self.fn, self.compiled = object(), []

    def run(self, *arguments, **options):
        self.compiled.append((arguments, options, Compiled()))
        return self.compiled[-1][-1]


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launcher, "_launches", {})
    return Kernel()


@pytest.fixture
def triton(monkeypatch):
    """Triton's driver and settings, as a version that is known has them."""
    of_device = SimpleNamespace(get_current_stream=lambda device: f"stream {device}")
    hooks = {f"launch_{name}_hook": SimpleNamespace(calls=[]) for name in ("enter", "exit")}
    found = [SimpleNamespace(active=of_device), SimpleNamespace(**hooks), True]
    monkeypatch.setattr(launcher, "_triton", lambda: found)
    return found


def arguments(**changed):
    q = torch.zeros(4, 8, dtype=torch.bfloat16)
    given = {"Q": q, "STATE": None, "strides": (8, 1), "length": 4, "OUT": torch.zeros(4), "BLOCK": 64}
    return given | {"unknown": 1} | changed


def test_the_second_launch_goes_straight_to_the_driver(kernel, triton):
    first, second = arguments(), arguments()
    launcher.run_kernel(kernel, (3, 2), TILE, first, 1)
    ((given, options, compiled),) = kernel.compiled
    assert given == tuple(first[name] for name in kernel.arg_names)
    want = {"grid": (3, 2), "warmup": False, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert options == want
    launcher.run_kernel(kernel, (5,), TILE, second, 1)
    assert len(kernel.compiled) == 1
    (found,) = compiled.direct
    assert found[:9] == (5, 1, 1, "stream 1", "function", "metadata", None, None, None)
    assert all(x is second[name] for x, name in zip(found[9:], kernel.arg_names, strict=True))


@pytest.mark.parametrize(
    "changed",
    [
        {"length": 5},
        {"strides": (16, 1)},
        {"BLOCK": 32},
        {"STATE": torch.zeros(2)},
        {"OUT": torch.zeros(4, dtype=torch.float16)},
        {"OUT": torch.zeros(5)[1:]},
        {"Q": None},
    ],
    ids=str,
)
def test_other_arguments_are_compiled_for(kernel, triton, changed):
    launcher.run_kernel(kernel, (1,), TILE, arguments(), 0)
    launcher.run_kernel(kernel, (1,), TILE, arguments(**changed), 0)
    assert len(kernel.compiled) == 2
    launcher.run_kernel(kernel, (1,), TILE, arguments(), 0)
    launcher.run_kernel(kernel, (1,), TILE, arguments(**changed), 0)
    assert [len(compiled.direct) for *_, compiled in kernel.compiled] == [1, 1]


def test_unaligned_tensors_differ_by_dtype(kernel, triton):
    for dtype in (torch.float32, torch.float16, torch.float32):
        launcher.run_kernel(kernel, (1,), TILE, arguments(OUT=torch.zeros(5, dtype=dtype)[1:]), 0)
    assert len(kernel.compiled) == 2


def test_devices_warps_and_stages_are_told_apart(kernel, triton):
    for device, tile in ((0, TILE), (1, TILE), (0, TILE._replace(warps=8)), (0, TILE._replace(stages=3))):
        launcher.run_kernel(kernel, (1,), tile, arguments(), device)
    assert len(kernel.compiled) == 4


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_told_of_every_launch(kernel, triton, name):
    if name.endswith("exit_hook"):
        getattr(triton[1], name).calls.append(print)
    else:
        setattr(triton[1], name, print)
    for _ in range(2):
        launcher.run_kernel(kernel, (3,), TILE, arguments(), 0)
    compiled = kernel.compiled[0][-1]
    assert not compiled.direct
    assert [call[0] for call in compiled.told] == [(3, 1, 1)]


def test_a_newer_triton_launches_by_its_own_means(kernel, triton):
    triton[2] = False
    for _ in range(2):
        launcher.run_kernel(kernel, (3,), TILE, arguments(), 0)
    compiled = kernel.compiled[0][-1]
    assert not compiled.direct
    assert len(compiled.told) == 1


def test_what_calls_share_comes_from_their_walk(kernel, triton):
    walks = [Walk({"length": 4, "BLOCK": block, "strides": (8, 1)}, 1, TILE, {}) for block in (64, 32)]
    own = {"Q": torch.zeros(4, 8), "STATE": None, "OUT": torch.zeros(4), "length": 7}
    for walk in (*walks, *walks):
        launcher.run_kernel(kernel, (1,), TILE, dict(own), 0, walk)
    assert [given[5] for given, *_ in kernel.compiled] == [64, 32]
    for (given, _, compiled), block in zip(kernel.compiled, (64, 32), strict=True):
        (found,) = compiled.direct
        assert found[9:] == given == (own["Q"], None, (8, 1), 7, own["OUT"], block)


def test_other_names_are_refused(kernel, triton):
    """What was shared once must not be given in a later call alone: it would not be read."""
    walk = Walk(arguments(Q=None), 1, TILE, {})
    launcher.run_kernel(kernel, (1,), TILE, {"OUT": torch.zeros(4)}, 0, walk)
    with pytest.raises(AssertionError):
        launcher.run_kernel(kernel, (1,), TILE, {"OUT": torch.zeros(4), "length": 5}, 0, walk)


def test_tensors_are_in_capitals(kernel, triton):
    with pytest.raises(AssertionError):
        launcher.run_kernel(kernel, (1,), TILE, arguments(length=torch.ones(1)), 0)


def test_not_every_length_is_remembered(kernel, triton, monkeypatch):
    monkeypatch.setattr(launcher, "MOST", 4)
    for length in range(10):
        launcher.run_kernel(kernel, (1,), TILE, arguments(length=length), 0)
        assert len(launcher._launches[kernel.fn].compiled) <= 4


def alone(program, *arguments, **environment):
    """Run a program in a process where triton does not interpret; return what it prints."""
    command = [sys.executable, "-c", program, *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "0"} | environment
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.splitlines()


ALL = """
import torch
from hf_linattn.ops.triton import launcher, problem, sample_calls, targets
from hf_linattn.ops.triton.sample_calls import Shape

class Compiled:
    function = packed_metadata = None
    def run(self, *given):
        x, y, z, stream, *_ = given
        assert (*grid, 1, 1)[:3] == (x, y, z), given
        assert all(a is b for a, b in zip(given[9:], wanted, strict=True)), kernel

def launch(self, of, programs, tile, own, walk=None):
    global kernel, grid, wanted
    arguments = launcher.all_arguments(own, walk)
    kernel, grid, wanted = of, programs, [arguments[name] for name in of.arg_names]
    seen.append(of.fn)
    launcher.run_kernel(of, programs, tile, own, 0, walk)

def compile_kernel(of, *about):
    compiled.append(of.fn)
    return Compiled()

launcher.compile_kernel, problem.Launches.launch = compile_kernel, launch
shapes = [
    Shape(heads=2, kv_heads=2, length=512, segment=256),
    Shape(heads=4, kv_heads=1, length=512, segment=256, feature_map="none", linked=True, state=True),
]
with targets._target("sm_90"), torch.no_grad():
    for shape in shapes:
        for call in sample_calls.calls(shape, "cpu").values():
            seen, compiled = [], []
            call()
            first = list(seen)
            call()
            assert seen == 2 * first and len(compiled) == len(first), (seen, compiled)
            print(*(x.__name__ for x in first))
"""


@needs_triton
def test_every_kernel_gets_its_arguments_in_order():
    found = set(" ".join(alone(ALL)).split())
    assert {"outputs", "query_gradients", "step", "window_step", "window_push", "prompt_choices"} <= found


TWICE = """
import ctypes, sys
from pathlib import Path

import torch
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils

from hf_linattn.ops.triton import launcher, problem, sample_calls, targets
from hf_linattn.ops.triton.sample_calls import Shape

SIZES = {"*": 8, "i64": 8, "i32": 4, "u32": 4, "fp32": 4, "u1": 1, "i1": 1}
driver = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
notes = Path(sys.argv[2])
driver.noted_into(str(notes).encode())
targets.NoDevice.utils = property(lambda self: CudaUtils())
targets.NoDevice.launcher_cls = CudaLauncher

def leaves(kind):
    if isinstance(kind, tuple | list):
        return [leaf for part in kind for leaf in leaves(part)]
    return [] if kind == "constexpr" else [SIZES[kind[0] if kind[0] == "*" else kind]]

def launch(self, kernel, grid, tile, own, walk=None):
    about = kernel, grid, tile, launcher.all_arguments(own, walk)
    compiled = launcher.compile_kernel(*about, warmup=True)
    sizes = leaves(list(compiled.src.signature.values())) + [8, 8]  # and two of triton's own
    driver.noted_parameters((ctypes.c_int * len(sizes))(*sizes), len(sizes))
    before = len(notes.read_text().splitlines())
    launcher.compile_kernel(*about)
    for _ in range(2):
        launcher.run_kernel(kernel, grid, tile, own, 0, walk)
    triton, first, second = notes.read_text().splitlines()[before:]
    assert triton == first == second, (kernel.__name__, triton, second)
    print(kernel.__name__, len(sizes))

problem.Launches.launch = launch
assert launcher._triton()[2]
with targets._target("sm_90"), torch.no_grad():
    calls = sample_calls.calls(Shape(heads=4, kv_heads=2, length=512, segment=256, D=64, Dv=64), "cpu")
    for name in ("forward", "backward", "token", "window backward", "window token"):
        calls[name]()
"""


@needs_triton
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler, as triton's launcher needs")
def test_the_driver_gets_what_triton_would_hand_it(tmp_path):
    """By triton's own launcher in C, on a driver that notes the bytes of every parameter."""
    include = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/include"
    library, source = tmp_path / "libcuda.so.1", ROOT / "tests/helpers/cuda_driver.c"
    build = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-I", str(include), "-o", str(library)]
    subprocess.run([*build, str(source)], check=True)
    (tmp_path / "notes").touch()
    found = alone(
        TWICE,
        *(str(library), str(tmp_path / "notes")),
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
        TRITON_LIBCUDA_PATH=str(tmp_path),
    )
    assert len(found) == 11, found
    assert all(int(line.split()[1]) > 10 for line in found), found


@needs_triton
def test_the_installed_triton_is_known():
    _, runtime, direct = launcher._triton()
    assert direct, "compare CompiledKernel.run and JITFunction.run with `launcher`, then raise KNOWN"
    assert runtime.launch_enter_hook.calls == runtime.launch_exit_hook.calls == []
