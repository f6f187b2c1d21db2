"""The delta rule by fla's kernels: how they are called, and the check that lets them run.

By a library of that name that computes in torch operations and refuses what fla refuses; and, where fla-core
is installed, by its own kernels in triton's interpreter.
"""

import importlib.util
import json
import sys
import warnings

import pytest
import torch
from helpers import fla_kernels
from helpers.fla_kernels import FakeFla, OnGpu, both, config_of, farthest, inputs_of

from hf_linattn.errors import UnsupportedCallError
from hf_linattn.ops import delta_rule
from hf_linattn.ops.fla import check, selftest
from hf_linattn.ops.triton import check as shared

PARTS = ["", "state, padding", "documents, padding", "head", "head, state, padding", "head, documents, state"]
PARTS += ["channel, state, padding", "channel, documents"]
CPU = torch.device("cpu")
NO_TRITON = importlib.util.find_spec("triton") is None
needs_triton = pytest.mark.skipif(NO_TRITON, reason="triton is not installed")
needs_fla = pytest.mark.skipif(
    NO_TRITON or importlib.util.find_spec("fla") is None,
    reason="fla-core is not installed: pip install fla-core einops",
)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A library that computes rightly, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(shared.TRITON, raising=False)
    yield FakeFla(monkeypatch)
    fla_kernels.forget()


@pytest.fixture
def on_gpu(fake, monkeypatch):
    """What says that it is on a GPU is taken."""
    monkeypatch.setattr(check, "Tensor", OnGpu)
    monkeypatch.setattr(check.DELTA, "takes", lambda key, *sizes: True)
    return fake


def kind_of(parts):
    if "channel" in parts:
        return "kda"
    return "gated_delta_rule" if "head" in parts or "documents" in parts else "delta_rule"


def key_of(dtype=torch.float16, size=16, wide=24, kind="gated_delta_rule", recurrent=False):
    return selftest.Key(CPU, dtype, size, wide, kind, recurrent)


class TestCalls:
    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("parts", PARTS)
    def test_a_few_tokens(self, on_gpu, parts, group):
        for length in (1, 9):
            on_gpu.calls.clear()
            with torch.no_grad():
                assert farthest(*both(parts, length, torch.float32, group, False)) < 1e-5
            assert on_gpu.calls == [f"fused_recurrent_{kind_of(parts)}"]

    @pytest.mark.parametrize("group", [1, 3])
    @pytest.mark.parametrize("parts", PARTS)
    def test_many_tokens_and_gradients(self, on_gpu, parts, group):
        assert farthest(*both(parts, 40, torch.float16, group, True)) < 3e-3
        assert on_gpu.calls == [f"chunk_{kind_of(parts)}"]
        with torch.no_grad():
            assert farthest(*both(parts, 70, torch.bfloat16, group, False)) < 2e-2
        assert on_gpu.calls == [f"chunk_{kind_of(parts)}"] * 2

    def test_the_state_alone(self, on_gpu):
        inputs = inputs_of("head, state", 70, torch.float16)._replace(query=None)
        gpu = type(inputs)(*(None if x is None else x.as_subclass(OnGpu) for x in inputs))
        config, scale = config_of("head"), torch.ones(2)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                output, state = delta_rule.attention(gpu, config, scale, keep=True)
            assert output is None
            want = delta_rule.attention(inputs, config, scale, keep=True)[1]
            assert farthest([state], [want]) < 3e-3
        assert len(on_gpu.calls) == 2

    def test_gradients_of_gradients_are_refused(self, on_gpu):
        inputs = inputs_of("head, state", 70, torch.float16)
        gpu = type(inputs)(*(None if x is None else x.as_subclass(OnGpu) for x in inputs))
        gpu.value.requires_grad_()
        for which in (0, 1):
            loss = delta_rule.attention(gpu, config_of("head"), torch.ones(2), keep=True)[which].sum()
            with pytest.raises(UnsupportedCallError, match=r"gradients of gradients.*HF_LINATTN_TRITON=0"):
                torch.autograd.grad(loss, gpu.value, create_graph=True)

    def test_compiled_code_takes_torch_operations(self, on_gpu):
        inputs = inputs_of("head, state", 70, torch.float16)

        def call(*tensors):
            gpu = type(inputs)(*tensors)
            assert gpu.key.is_cuda
            return delta_rule._by_fla_or_torch(gpu, config_of("head"), torch.ones(2), tracing=True)[0]

        call(*(None if x is None else x.as_subclass(OnGpu) for x in inputs))
        assert not on_gpu.calls


@needs_triton
class TestCheck:
    @pytest.mark.parametrize("kind", ["delta_rule", "gated_delta_rule", "kda"])
    def test_right_kernels_pass(self, fake, kind, tmp_path):
        for recurrent, dtypes in ((True, (torch.float32, torch.bfloat16)), (False, (torch.float16,))):
            for dtype in dtypes:
                key = key_of(dtype, kind=kind, recurrent=recurrent)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert check.DELTA.takes(key)
                calls = len(fake.calls)
                assert calls == 2
                assert check.DELTA.takes(key)
                assert check.DeltaChecks().takes(key)  # the next process
                assert len(fake.calls) == calls
                fake.calls.clear()
                assert f"{key.name}: fla, checked on cpu, interpreted" in shared.summary()
        [file] = (tmp_path / "hf_linattn").glob("*")
        assert set(json.loads(file.read_text()).values()) == {None}

    @pytest.mark.parametrize(
        ("what", "change"),
        {
            "output is": lambda o, s: (torch.cat([o[:, :1], o[:, :-1]], 1), s),
            "output": lambda o, s: (o.index_fill(1, torch.tensor([3]), torch.nan), s),
            "state": lambda o, s: (o, s * 1.1),
            "d_query": lambda o, s: (2 * o - o.detach(), s),
            "d_": lambda o, s: (o, s.detach() + 0 * s),
        }.items(),
    )
    def test_wrong_ones_are_refused(self, fake, what, change):
        key, fake.change = key_of(), change
        with pytest.warns(
            UserWarning, match=f"fla's kernels of the delta rule .{key.name}.* disagree .*{what}.*report"
        ):
            assert not check.DELTA.takes(key)
        fake.change = lambda o, s: (o, s)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not check.DELTA.takes(key)
            assert not check.DeltaChecks().takes(key)  # the next process
        assert what in shared.summary()[0]

    def test_a_result_of_another_shape(self, fake):
        fake.change = lambda output, state: (output[..., :-1], state)
        with pytest.warns(UserWarning, match="output has the shape"):
            assert not check.DELTA.takes(key_of(recurrent=True))

    def test_what_does_not_run(self, fake, monkeypatch):
        fake.error = RuntimeError("PassManager::run failed\nmore")
        with pytest.warns(UserWarning, match="they did not run .RuntimeError: PassManager::run failed"):
            assert not check.DELTA.takes(key_of())
        monkeypatch.setenv(shared.TRITON, "1")
        with pytest.raises(UnsupportedCallError, match=r"insists on fla's kernels .*PassManager"):
            check.DELTA.takes(key_of())

    def test_what_is_not_taken(self, fake, monkeypatch):
        monkeypatch.setattr(selftest, "disagreement", lambda *about: None)
        broken = dict.fromkeys(f"fla.ops.{kind}" for kind in ("kda", "delta_rule", "gated_delta_rule"))
        cases = {
            "older than 0.5.2": lambda: fake.version("0.5.1"),
            "fla-core 0.6.0 cannot be used .ModuleNotFoundError": lambda: [
                fake.version("0.6.0"),
                *(monkeypatch.setitem(sys.modules, *item) for item in broken.items()),
            ],
        }
        kinds = {
            "TF32, which float32 models": (key_of(torch.float32), 1, 1),
            "at most 256, not 300 and 24": (key_of(size=300), 1, 1),
            "at most 2,147,483,647 numbers, not 2,147,483,648": (key_of(), 2**31, 1),
            "at most 65,535 rows times heads, not 65,536": (key_of(), 1, 65536),
        }
        assert check.DELTA.takes(key_of())  # sizes are looked at again where there is a verdict
        for text, about in kinds.items():
            self._refused(monkeypatch, text, *about)
        for text, prepare in cases.items():
            prepare()
            fla_kernels.forget()
            check.DELTA.verdicts.clear()
            self._refused(monkeypatch, text, key_of())

    def _refused(self, monkeypatch, text, *about):
        with pytest.warns(UserWarning, match=text) as caught:
            assert not any(check.DELTA.takes(*about) for _ in range(2))
        assert len(caught) == 1
        with monkeypatch.context() as patch:
            patch.setenv(shared.TRITON, "1")
            with pytest.raises(UnsupportedCallError, match=text):
                check.DELTA.takes(*about)

    def test_without_fla_nothing_is_said_unless_it_was_insisted_on(self, fake, monkeypatch):
        fake.version("")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not check.DELTA.takes(key_of())
            assert not check.DELTA.takes(key_of(torch.float64))
        assert shared.summary() == [f"torch: {check.ABSENT}"]
        monkeypatch.setenv(shared.TRITON, "1")
        with pytest.raises(UnsupportedCallError, match=r"pip install 'hf-linattn.gpu.'"):
            check.DELTA.takes(key_of())

    def test_off_is_off(self, fake, monkeypatch):
        monkeypatch.setenv(shared.TRITON, "0")
        monkeypatch.setattr(check, "Tensor", OnGpu)
        both("head", 9, torch.float16, 1, False)
        assert not fake.calls
        assert shared.summary() == ["torch: HF_LINATTN_TRITON=0"]

    def test_a_call_is_checked_and_computed(self, fake, monkeypatch):
        monkeypatch.setattr(check, "Tensor", OnGpu)
        for _ in range(2):
            got, want = both("head, documents", 70, torch.float16, 3, True)
            assert farthest(got, want) < 3e-3
        assert (
            fake.calls == ["chunk_gated_delta_rule"] * 4
        )  # two of the trial, from the start and behind a state
        assert [key.name for key in check.DELTA.verdicts] == ["float16, 16x24, chunk_gated_delta_rule"]

    def test_nothing_empty_and_no_other_tensors(self, fake):
        inputs = inputs_of("head", 9, torch.float16)
        terms = inputs.query, inputs.key, inputs.value, inputs.gates[..., 0]
        assert not check.takes(*(x[:, :, :0] for x in terms))
        assert not check.takes(*(x.as_subclass(OnGpu) for x in terms))
        assert not fake.calls


@needs_fla
class TestFlaItself:
    """In float16: the interpreter computes no products of bfloat16."""

    @pytest.mark.parametrize("kind", ["delta_rule", "gated_delta_rule", "kda"])
    def test_recurrent_kernels_pass_the_check(self, interpreted, kind):
        for dtype in ("float32", "bfloat16"):
            interpreted(fla_kernels.check_interpreted, kind, True, dtype, 9)

    @pytest.mark.parametrize(
        ("kind", "length"),
        [("delta_rule", 70), ("gated_delta_rule", 70), pytest.param("kda", 20, marks=pytest.mark.full)],
    )
    def test_chunks_pass_the_check(self, interpreted, kind, length):
        interpreted(fla_kernels.check_interpreted, kind, False, "float16", length)

    @pytest.mark.parametrize("parts", PARTS)
    def test_they_are_called_rightly(self, interpreted, parts):
        interpreted(fla_kernels.check_interpreted_mapping, parts, 9, "float32", 3, False, 1e-5)

    def test_so_are_their_chunks(self, interpreted):
        about = "head, documents, state, padding", 70, "float16", 2, True, 3e-3
        interpreted(fla_kernels.check_interpreted_mapping, *about)
