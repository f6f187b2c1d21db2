"""What the check of the Triton kernels must do, in a process whose triton interprets."""

import json
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.ops import dispatch
from hf_linattn.ops.triton import check, launch, plan, verdict_files
from hf_linattn.ops.triton.check import Checks
from hf_linattn.ops.triton.selftest import Form

LENGTH = 70
CPU = torch.device("cpu")
FUNCTIONS = ("forward_and_segments", "backward", "decode", "global_forward", "global_backward")


def key_of(dtype=torch.float32, D=16, Dv=16, grouped=False, kind="elu1", *form):
    return check._key(CPU, dtype, dtype, D, Dv, grouped, kind, *form)


def backend(**lies):
    """The kernels, some functions in place of theirs; a `forward` tells nothing of its segments."""
    if "forward" in lies:
        forward = lies.pop("forward")
        lies["forward_and_segments"] = lambda *arguments, **options: (forward(*arguments, **options), None)
    return SimpleNamespace(**{name: lies.get(name, getattr(launch, name)) for name in FUNCTIONS})


def failing(error):
    def call(*arguments, **options):
        raise error

    return Checks(backend(forward=call), LENGTH)


def wrong(name, which, change):
    """A function of the kernels one of whose results is changed."""

    def call(*arguments, **options):
        results = list(getattr(launch, name)(*arguments, **options))
        results[which] = change(results[which])
        return type(results)(results)

    return call


def forgetting(*arguments, **options):
    """The forward, and nothing in the states before its segments."""
    results, segments = launch.forward_and_segments(*arguments, **options)
    segments.slots.states.zero_()
    return results, segments


class Folder:
    """A cache folder of its own, and the environment as it was, afterwards."""

    def __init__(self, path, wish=None):
        self.patch, self.path, self.wish = pytest.MonkeyPatch(), path, wish

    def __enter__(self):
        self.patch.setenv("XDG_CACHE_HOME", str(self.path))
        self.patch.delenv(check.TRITON, raising=False)
        if self.wish is not None:
            self.patch.setenv(check.TRITON, self.wish)
        return self

    def __exit__(self, *error):
        self.patch.undo()

    @property
    def files(self):
        return sorted((self.path / "hf_linattn").glob("*")) if self.path.is_dir() else []


def check_true_kernels_pass(path, dtype, kind, *form):
    """Once run, then known: in memory, and by the next process."""
    key = key_of(getattr(torch, dtype), 16, 24, True, kind, *form)
    with Folder(path) as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        checks = Checks(launch, LENGTH)
        assert checks.takes(key)
        assert "checked on cpu" in checks.summary()[0]
        [file] = folder.files
        assert json.loads(file.read_text()) == {key.name: None}
        for again in (checks, failing(AssertionError("run again"))):
            again.kernels = backend(forward=failing)
            assert again.takes(key)


def check_lies_are_found(path):
    """Each result that is a little wrong is noticed, said once, and remembered."""

    def in_one(x):
        x = x.clone()
        x[..., -1, -1, -1] *= 1.01
        return x

    def in_whole_chunks(x):
        return x * 1.01 if x.shape[2] % 64 == 0 else x

    lies = {
        "output of texts without a rest": backend(forward=wrong("forward", 0, in_whole_chunks)),
        "output": backend(forward=wrong("forward", 0, in_one)),
        "total": backend(forward=wrong("forward", 1, lambda x: x * 1.001)),
        "S": backend(forward=wrong("forward", 2, in_one)),
        "d_query": backend(backward=wrong("backward", 0, in_one)),
        "d_query of the states before segments": backend(forward_and_segments=forgetting),
        "d_key": backend(backward=wrong("backward", 1, lambda x: x.roll(1, 2))),
        "d_value": backend(
            backward=wrong("backward", 2, lambda x: x.masked_fill(x == x[..., :1], torch.nan))
        ),
        "one decoded token": backend(decode=wrong("decode", 1, in_one)),
    }
    for index, (what, kernels) in enumerate(lies.items()):
        what = what.partition(" of ")[0]
        with Folder(path / str(index)) as folder:
            checks, key = Checks(kernels, LENGTH), key_of()
            with pytest.warns(UserWarning, match=f"disagree with float64: .*{what}.*report") as caught:
                assert not checks.takes(key)
            assert len(caught) == 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert not checks.takes(key)
                assert not Checks(launch, LENGTH).takes(key)  # the next process
            assert what in json.loads(folder.files[0].read_text())[key.name]
            assert checks.summary()[0].startswith(f"{key.name}: torch: they disagree")
            if what in ("output", "d_query"):  # another form is checked by itself
                assert not checks.takes(key_of(kind="none"))


def check_bf16_lies_are_found(path):
    """A segment left out and a mask one token off are more than the rounding of bfloat16."""

    def shifted(query, key, value, *rest, **options):
        return launch.forward(query, key.roll(1, 2), value.roll(1, 2), *rest, **options)

    def left_out(query, key, value, valid, *rest, **options):
        seen = torch.ones(1, key.shape[2], dtype=torch.bool) if valid is None else valid.clone()
        seen[:, 32:64] = False
        return launch.forward(query, key, value, seen, *rest, **options)

    for index, kernels in enumerate((backend(forward=shifted), backend(forward=left_out))):
        with Folder(path / str(index)), pytest.warns(UserWarning, match="disagree"):
            assert not Checks(kernels, 300).takes(key_of(torch.bfloat16))


def check_failures(path):
    """What does not compile is remembered, what passes is not written; strict raises."""
    key = key_of()
    lasting = (RuntimeError("PassManager::run failed"), ValueError(), AttributeError("tl"))
    passing = (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("Failed to find C compiler. Please specify via CC"),
        PermissionError("no"),
    )
    for index, error in enumerate(lasting + passing):
        with Folder(path / str(index)) as folder:
            checks = failing(error)
            with pytest.warns(UserWarning, match=f"did not run .{type(error).__name__}"):
                assert not checks.takes(key)
            assert bool(folder.files) == (error in lasting)
            assert not checks.takes(key)
        with Folder(path / str(index), "1"), pytest.raises(UnsupportedCallError, match="insists on Triton"):
            checks.takes(key)
    with Folder(path, "0"):
        assert not checks.takes(key)
        assert checks.summary() == ["torch: HF_LINATTN_TRITON=0"]
    with Folder(path, "yes"), pytest.raises(OptionError, match="HF_LINATTN_TRITON='yes'"):
        checks.takes(key)


def check_folders_that_fail(path):
    """A cache that cannot be made, read or written, full or not there: nothing is raised."""
    blocked = path / "file"
    blocked.write_text("")
    full = pytest.MonkeyPatch()
    key = key_of()
    check.selftest.disagreement, before = (lambda *about: None), check.selftest.disagreement
    with Folder(blocked), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checks(launch, LENGTH).takes(key)
    with Folder(path / "full") as folder:

        def no_space(*arguments, **options):
            raise OSError(28, "No space left on device")

        full.setattr(verdict_files.json, "dump", no_space)
        assert Checks(launch, LENGTH).takes(key)
        full.undo()
        assert not folder.files
        for text in ("[1]", "{", json.dumps({key.name: 3}), "\0"):
            check._file(CPU).write_text(text)
            assert Checks(launch, LENGTH).takes(key)
    full.setattr(check.Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with Folder("") as folder:
        folder.patch.delenv("XDG_CACHE_HOME")
        assert Checks(launch, LENGTH).takes(key)
    full.undo()
    check.selftest.disagreement = before


def check_two_at_once(path):
    """Two processes write side by side, and threads of one wait for one check."""
    calls = []

    def counted(*arguments, **options):
        calls.append(1)
        return launch.forward(*arguments, **options)

    with Folder(path) as folder:
        checks, key = Checks(backend(forward=counted), LENGTH), key_of()
        found = []
        threads = [threading.Thread(target=lambda: found.append(checks.takes(key))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [True] * 4
        assert len(calls) == 3  # without a state, in whole chunks, and with one
        other = Checks(launch, LENGTH)
        assert other.takes(key_of(Dv=24))
        assert set(json.loads(folder.files[0].read_text())) == {key.name, key_of(Dv=24).name}
        names = [f"n{index}" for index in range(20)]
        file = folder.files[0]
        writers = [threading.Thread(target=verdict_files.write, args=(file, name, None)) for name in names]
        for thread in writers:
            thread.start()
        for thread in writers:
            thread.join()
        assert None in json.loads(file.read_text()).values()  # whole, whoever came last
        assert [file] == folder.files


def check_nothing_of_the_caller_changes(path):
    """Generators, gradient mode, hooks, default dtype and modes stay; and a check does not check itself."""
    seen = []

    def watching(query, *arguments, **options):
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), query.dtype))
        assert not checks.takes(key_of(Dv=24))  # what is called inside gets torch operations
        return launch.forward(query, *arguments, **options)

    with Folder(path):
        checks, packed = Checks(backend(forward=watching), LENGTH), []
        before = torch.get_rng_state()
        torch.set_default_dtype(torch.float64)
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x),
                torch.device("meta"),
                torch.autocast("cpu", torch.bfloat16),
                torch.inference_mode(),
            ):
                assert checks.takes(key_of())
                assert torch.is_inference_mode_enabled()
            assert torch.is_grad_enabled()
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(before, torch.get_rng_state())
        assert seen == [(False, False, torch.float32)] * 3
        assert not packed


def check_what_is_refused(path):
    """Old triton, a device without bfloat16, heads too wide, a grid too long: one line, torch operations."""
    patch = pytest.MonkeyPatch()
    cases = {
        "at most 256, not 300": (key_of(D=300), 1, 1),
        "at most 16,776,960 tokens": (key_of(), 2**24, 1),
        "rows times heads": (key_of(D=256), 1, 2**24),
        "not torch.float64": (key_of(torch.float64), 1, 1),
    }
    with Folder(path) as folder:
        checks = failing(AssertionError("never run"))
        for text, (key, tokens, rows) in cases.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert not checks.takes(key, tokens, rows)
                assert not checks.takes(key, tokens, rows)
            assert [text in str(warning.message) for warning in caught] == [True] * ("float64" not in text)
            assert any(text in line for line in checks.summary())
            folder.patch.setenv(check.TRITON, "1")
            with pytest.raises(UnsupportedCallError, match=text.split(",")[0]):
                checks.takes(key, tokens, rows)
            folder.patch.delenv(check.TRITON)
        patch.setattr(check, "triton_too_old", lambda: "triton 3.1.0 is older than 3.5")
        patch.setattr(launch, "available", lambda device: True)
        patch.delattr(plan.importlib.import_module("triton"), "knobs")  # which it has not yet
        with pytest.warns(UserWarning, match="triton 3.1.0 is older"):
            assert not checks.takes(key_of())
        patch.undo()
        patch.setattr(plan, "device_of", lambda device: plan.Device((7, 5), 40))
        with pytest.warns(UserWarning, match="no bfloat16 .compute capability 7"):
            assert not checks.takes(key_of(torch.bfloat16)._replace(operand="bf16"))
        patch.undo()


def check_graphs(path):
    """While a graph is traced or captured nothing runs; what was checked before is used there."""
    x = torch.zeros(1, 2, 8, 16)
    patch = pytest.MonkeyPatch()
    with Folder(path):
        checks = Checks(launch, LENGTH)
        patch.setattr(check, "CHECKS", checks)

        def call(x):
            return x + 1 if check.takes(x, x, x, Form("elu1")) else x - 1

        def compiled(x):
            return torch.compile(call, backend="eager", fullgraph=True)(x)

        assert compiled(x)[0, 0, 0, 0] == -1
        assert not checks.verdicts
        patch.setattr(check, "_capturing", lambda device: True)
        assert call(x)[0, 0, 0, 0] == -1
        with Folder(path, "1"), pytest.raises(UnsupportedCallError, match="run the model once before"):
            call(x)
        patch.setattr(check, "_capturing", lambda device: False)
        assert call(x)[0, 0, 0, 0] == 1
        torch._dynamo.reset()
        assert compiled(x)[0, 0, 0, 0] == 1
        checks.verdicts.clear()  # another process: the file says it
        torch._dynamo.reset()
        assert compiled(x)[0, 0, 0, 0] == 1
    patch.undo()


def check_the_choice(path):
    """`dispatch` asks on a GPU, and nobody else does."""
    patch = pytest.MonkeyPatch()
    asked = []
    patch.setattr(check.CHECKS, "takes", lambda key, *sizes, **how: asked.append((key, *sizes)) or True)
    x = torch.zeros(1, 2, 8, 16)
    gpu = x.as_subclass(OnGpu)
    for kind, features, D in (("elu1", None, 16), ("none", 32, 32)):
        asked.clear()
        patch.setattr(check, "Tensor", OnGpu)
        assert dispatch.choose_backend(gpu, gpu, gpu, kind, features=features) == "triton"
        assert dispatch.choose_backend(x, x, x, kind, features=features) == "eager"
        [(key, *sizes)] = asked
        assert (key.D, key.Dv, key.form.kind, *sizes) == (D, 16, kind, 8, 2)
    patch.undo()
    assert dispatch.choose_backend(gpu, gpu, gpu, "elu1") == "vectorised"  # not a plain tensor


class OnGpu(torch.Tensor):
    """A tensor that says it is elsewhere."""

    is_cuda = True
    is_cpu = False
