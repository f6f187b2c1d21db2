"""The C++ kernels, against the formula in float64 and beside torch's operations in models."""

import itertools
import platform
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as functional
from helpers import tiny_models
from helpers.linear_inputs import (
    CONFIGS,
    SHAPES,
    definition,
    every_input,
    fewer_queries,
    forgetful,
    random_inputs,
)
from helpers.random_inputs import relative_error
from helpers.selection import rest_full

from hf_linattn import patch_model
from hf_linattn.errors import OptionError, UnsupportedCallError
from hf_linattn.eval.bench.timing import Clock, Timed, measure
from hf_linattn.ops import dispatch, linear_attention, window_attention
from hf_linattn.ops.cpp import build, layout, linear, takes
from hf_linattn.ops.types import OpConfig, Window

BFLOAT16 = torch.bfloat16, 2e-2
"""With how far off it may be."""
pytestmark = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C++ compiler here")


def single(inputs, dtype=torch.float32):
    """The same numbers in single precision, and in double as they were rounded."""
    found = {}
    for name, x in inputs._asdict().items():
        if x is not None and x.is_floating_point():
            x = x.detach().to(dtype if name in ("query", "key", "value") else torch.float32).requires_grad_()
        found[name] = x
    fewer = inputs._replace(**found)
    more = {
        name: x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x
        for name, x in found.items()
    }
    return fewer, inputs._replace(**more)


def everything(outputs, weights, inputs):
    """Outputs, and gradients of all that has some."""
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    loss = sum((x * w.to(x.dtype)).sum() for x, w in zip(outputs, weights, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def compare(inputs, config, dtype=torch.float32, tolerance=1e-5):
    fewer, more = single(inputs, dtype)
    assert dispatch.kernel_backend(fewer) == "cpp"
    got = linear_attention.attention(fewer, config, keep=config.causal)
    want = definition(more, config)
    got, want = (got, want) if config.causal else (got[:2], want[:2])
    torch.manual_seed(0)
    weights = [torch.randn_like(x) for x in want]
    if config.kind == "relu":
        tolerance *= 10  # a row whose features are all EPS is divided by some 1e-6
    pairs = zip(everything(got, weights, fewer), everything(want, weights, more), strict=True)
    for place, (a, b) in enumerate(pairs):
        assert a.shape == b.shape
        b = b.nan_to_num(0)
        assert (a - b).abs().max() < tolerance * b.abs().max().clamp_min(10), place


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.kind}-{'output' if config.normalise else 'sums'}"
)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2, 3, 1, 40, 20, 37), (1, 2, 2, 1, 16, 16)], ids=str)
def test_outputs_and_gradients_are_the_formula(config, shape, compiled):
    for given in every_input(shape, config):
        compare(given, config)


@pytest.mark.parametrize("kind", ["elu1", "none"])
def test_more_heads_than_go_through_the_tokens_together(kind, compiled):
    """Five of which four have room, in each row, with a state before them and gradients of the one after."""
    for shape in ((2, 5, 5, 130, 128, 128), (1, 10, 5, 70, 128, 120)):
        compare(random_inputs(shape, OpConfig(kind), state=True, hidden=True), OpConfig(kind))
    decays = random_inputs((1, 5, 5, 130, 128, 128), OpConfig(kind), decay=True, packed=True)
    compare(decays, OpConfig(kind))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), BFLOAT16], ids=str)
@pytest.mark.parametrize("linked", [False, True])
def test_more_chunks_than_states_are_kept_of(linked, dtype, tolerance, compiled, monkeypatch):
    """Of states of 256 x 250 a backward keeps 79 or 80."""
    monkeypatch.setattr(dispatch, "CHUNK", 2)
    shape, config = (1, 2, 1, 401, 256, 250), OpConfig("elu1")
    given = random_inputs(shape, config, state=linked, decay=linked, packed=linked, hidden=True)
    compare(given, config, dtype, tolerance)


@pytest.mark.parametrize(("state", "packed"), [*itertools.product((False, True), repeat=2)])
def test_chunks_that_forget_all_and_chunks_that_forget_little_follow_each_other(state, packed, compiled):
    compare(forgetful(state, packed), OpConfig("elu1"))


@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: f"{config.kind}-{'output' if config.normalise else 'sums'}"
)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2, 3, 1, 40, 20, 37)], ids=str)
def test_over_all_keys_too(config, shape, compiled):
    config = config._replace(causal=False)
    for hidden, dense, few in itertools.product((False, True), repeat=3):
        given = random_inputs(shape, config, hidden=hidden, dense=dense)
        compare(fewer_queries(given, 21) if few else given, config)


@pytest.mark.parametrize("asked", ["0", "1"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_backward_goes_where_its_forward_went(asked, causal, compiled, monkeypatch):
    """Also where the variable is changed between them."""
    inputs = torch.randn(3, 1, 2, 9, 8, requires_grad=True)
    gradients = []
    for later in (asked, "10"[int(asked)]):
        monkeypatch.setenv(build.CPP, asked)
        given = linear_attention.Inputs(*inputs)
        output = linear_attention.attention(given, OpConfig("elu1", causal=causal), False).output
        monkeypatch.setenv(build.CPP, later)
        gradients.append(torch.autograd.grad(output.square().sum(), inputs)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str)
def test_half_precision_is_summed_in_float32(dtype, tolerance, compiled):
    config = OpConfig("elu1")
    compare(random_inputs((2, 4, 2, 300, 24, 16), config, state=True), config, dtype, tolerance)
    query, key, value = (torch.randn(1, 2, 300, 16).to(dtype) for _ in range(3))
    inputs = linear_attention.Inputs(query, key, value)
    exact = definition(linear_attention.Inputs(*(x.double() for x in inputs[:3])), config)
    assert relative_error(linear_attention.attention(inputs, config, True).total.double(), exact[1]) < 1e-5


@pytest.mark.parametrize("kind", ["elu1", "none"])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (2, 3, 1, 40, 20, 37), (1, 2, 2, 100, 64, 64)], ids=str)
def test_products_of_bfloat16_are_the_formula(kind, shape, compiled):
    config = OpConfig(kind)
    for given in every_input(shape, config):
        compare(given, config, torch.bfloat16, 2e-2)
    inputs = single(random_inputs(shape, config, state=True), torch.bfloat16)
    outputs = linear_attention.attention(inputs[0], config, keep=True)
    want = definition(inputs[1], config)
    assert outputs.S.dtype == outputs.z.dtype == torch.float32
    assert relative_error(outputs.S.double(), want[2]) < 2**-8
    assert relative_error(outputs.z.double(), want[3]) < 1e-5


def test_gradients_in_bfloat16_are_as_near_as_those_of_torch(compiled):
    """That is, of the same sums by torch's operations in it; the features' lengths are ragged too."""
    for shape in ((1, 2, 1, 301, 24), (1, 2, 2, 64, 64), (1, 1, 1, 63, 128)):
        rows, heads, shared, length, size = shape
        grad = torch.randn(rows, heads, length, size).bfloat16()
        given = [torch.randn(rows, count, length, size).bfloat16() for count in (heads, shared, shared)]

        def gradients(call, dtype, given=given, grad=grad):
            leaves = [x.to(dtype).requires_grad_() for x in given]
            return torch.autograd.grad(call(linear_attention.Inputs(*leaves)), leaves, grad.to(dtype))

        def ours(inputs):
            return linear_attention.attention(inputs, OpConfig("elu1"), False).output

        def formula(inputs):
            query, key, value = inputs[:3]
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
            scores = ((functional.elu(query) + 1) @ (functional.elu(key) + 1).mT).tril()
            return scores / scores.sum(-1, keepdim=True) @ value

        found = gradients(ours, torch.bfloat16)
        rough = gradients(formula, torch.bfloat16)
        exact = gradients(formula, torch.float64)
        for a, b, want in zip(found, rough, exact, strict=True):
            assert (a - want).norm() < (b - want).norm()


@pytest.mark.full
def test_compilers_without_a_type_for_half_precision_round_alike(compiled, monkeypatch, tmp_path):
    """Such as GCC 11 on x86 and GCC 12 on ARM; values of every size, beyond the smallest and the greatest.

    And without products of bfloat16, as most processors: what comes in it is summed in float32.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    narrow = " -mno-avx512bf16" if platform.machine() == "x86_64" else ""
    monkeypatch.setenv("CXX", f"{build.compiler()[0]} -DLINATTN_NO_HALF{narrow}")
    without = build.compiled.__wrapped__()
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    value = every[every.isfinite()][: 62 * 1024].view(1, 1, -1, 16)
    query, key = torch.randn(2, 1, 1, value.shape[2], 8).half()
    inputs = linear_attention.Inputs(query, key, value * 1.5)  # some of it infinite
    want = linear_attention.attention(inputs, OpConfig("elu1"), False).output
    monkeypatch.setattr(build, "library", lambda: without)
    got = linear_attention.attention(inputs, OpConfig("elu1"), False).output
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    assert not linear.rounds()
    compare(random_inputs((2, 4, 2, 150, 24, 16), OpConfig("elu1"), state=True), OpConfig("elu1"), *BFLOAT16)
    short = linear_attention.Inputs(*(x.bfloat16() for x in (query, key, torch.randn(value.shape))))
    got = linear_attention.attention(short, OpConfig("elu1"), False).output
    want = linear_attention.attention(short._replace(value=short.value.float()), OpConfig("elu1"), False)
    assert torch.equal(got, want.output.bfloat16())
    tokens = [x[:, :, :200] for x in short[:3]]
    window = Window(*tokens[:2], tokens[2][..., :8], torch.ones(1, 200, dtype=torch.bool), 30, 0.3)
    wide = window._replace(**{name: getattr(window, name).float() for name in ("query", "key", "value")})
    got, want = (window_attention.attention(x, None) for x in (window, wide))
    assert torch.equal(got, want.bfloat16())


@pytest.mark.parametrize("says", rest_full(["refuses", "links nothing"], ["links nothing"]))
def test_a_compiler_without_openmp_says_what_that_means(says, compiled, monkeypatch, tmp_path):
    name = shutil.which(build.compiler()[0])
    script = tmp_path / "compiler"
    missing = tmp_path / "missing.cpp"
    missing.write_text('extern "C" void nowhere(); extern "C" void calls() { nowhere(); }\n')
    instead = "exit 1" if says == "refuses" else f'exec {name} "$@" {missing}'
    script.write_text(f'#!/bin/sh\ncase "$*" in *-fopenmp*) {instead};; esac\nexec {name} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setattr(build, "FLAGS", [flag for flag in build.FLAGS if flag != "-O3"])  # sooner ready
    with pytest.warns(UserWarning, match=r"no OpenMP, so the kernels in C\+\+ use one thread.*libomp"):
        alone = build.compiled.__wrapped__()
    monkeypatch.setattr(build, "library", lambda: alone)
    compare(random_inputs(SHAPES["short"], CONFIGS[0]), CONFIGS[0])


def test_what_they_do_not_take_goes_to_torch(compiled):
    double = random_inputs((1, 2, 2, 8, 4, 4), OpConfig("elu1"))
    assert dispatch.kernel_backend(double) == "eager"
    fewer, _ = single(double)
    assert not takes.linear(fewer.query, fewer.key[:, :, :0], fewer.value)


@torch.no_grad()
def test_a_token_of_64_bits_is_decoded_as_without_them(compiled):
    model, ids = patch_model(tiny_models.llama(), "elu1"), tiny_models.tokens(1, 6)
    cache = model(ids[:, :4]).past_key_values
    before = [layer.state.S.data_ptr() for layer in cache.layers]
    model(ids[:, 4:5], past_key_values=cache)
    assert [layer.state.S.data_ptr() for layer in cache.layers] == before


@pytest.mark.parametrize("patch", ["elu1", "gated", "hedgehog"])
def test_a_single_token_is_learned_from(patch, compiled, monkeypatch):
    model, ids = patch_model(tiny_models.llama(dtype=torch.float32), patch), tiny_models.tokens(3, 1)
    backward, called = linear.backward, []
    monkeypatch.setattr(linear, "backward", lambda *given: called.append(1) or backward(*given))
    found = []
    for asked in "10":
        monkeypatch.setenv(build.CPP, asked)
        model.zero_grad()
        model(ids).logits.square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert len(called) == model.config.num_hidden_layers
    largest = max(p.abs().max() for p in found[1].values())
    for name, want in found[1].items():
        assert (found[0][name] - want).abs().max() < 1e-6 * largest, name


def test_nan_is_not_hidden(compiled):
    query, key, value = torch.randn(3, 1, 1, 40, 8)
    query[0, 0, 7, 3] = torch.nan
    key[0, 0, 30, 2] = torch.nan
    output = linear_attention.attention(
        linear_attention.Inputs(query, key, value), OpConfig("elu1"), False
    ).output
    assert output.isnan().any(-1)[0, 0].tolist() == [row == 7 or row >= 30 for row in range(40)]


def test_a_query_far_below_zero_does_not_underflow(compiled):
    query, key, value = torch.randn(3, 1, 2, 70, 8)
    inputs = linear_attention.Inputs(query - 200, key, value)
    want = definition(linear_attention.Inputs(*(x.double() for x in inputs[:3])), OpConfig("elu1"))[0]
    assert (
        relative_error(linear_attention.attention(inputs, OpConfig("elu1"), False).output.double(), want)
        < 1e-5
    )


@pytest.mark.parametrize("kind", ["none", "elu1"])
def test_totals_below_the_smallest_normal_number_divide_to_something_finite(kind, compiled):
    query, key, value = (
        torch.full((1, 1, 9, 8), 1e-20),
        torch.full((1, 1, 9, 8), 1e-20),
        torch.ones(1, 1, 9, 8),
    )
    if kind == "elu1":
        query, key = torch.full_like(query, -3.0), torch.full_like(key, -86.0)
    output = linear_attention.attention(
        linear_attention.Inputs(query, key, value), OpConfig(kind), False
    ).output
    assert output.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2])
def test_twice_is_bit_for_bit_the_same(threads, compiled):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        query, key, value = torch.randn(3, 2, 4, 300, 16)
        inputs = linear_attention.Inputs(query, key, value)
        one, two = (linear_attention.attention(inputs, OpConfig("elu1"), True) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_they_are_faster_than_torch_operations(compiled, monkeypatch):
    inputs = linear_attention.Inputs(*torch.randn(3, 1, 8, 512, 64))

    def by(asked):
        def call():
            monkeypatch.setenv(build.CPP, asked)
            return linear_attention.attention(inputs, OpConfig("elu1"), False).output

        return call

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found, _ = measure([Timed("torch", by("0")), Timed("C++", by("1"))], Clock(), rounds=3)
    finally:
        torch.set_num_threads(before)
    assert found["C++"].speed > 1  # 1.7 to 2 were measured


def test_no_field_of_a_struct_can_be_left_out():
    with pytest.raises(TypeError, match="token"):
        layout.Array.pack(data=0, dtype=0, batch=0, head=0)
    with pytest.raises(TypeError, match="tokens"):
        layout.Array.pack(data=0, dtype=0, batch=0, head=0, token=0, tokens=0)


def test_without_a_compiler_one_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv(build.CPP, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedCallError, match=r"no compiler \(no-such-compiler\).*unset HF_LINATTN_CPP"):
        build.compiled.__wrapped__()
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_one_clear_error(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UnsupportedCallError, match=r"cannot be written.*XDG_CACHE_HOME"):
        build.compiled.__wrapped__()


def test_a_damaged_library_is_one_clear_error(compiled, folder, monkeypatch, tmp_path):
    build.compiled.__wrapped__()
    (built,) = folder.rglob("*.so")
    (tmp_path / "hf_linattn").mkdir()
    (tmp_path / "hf_linattn" / built.name).write_bytes(built.read_bytes()[:100])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UnsupportedCallError, match=r"cannot be loaded.*delete it"):
        build.compiled.__wrapped__()


@pytest.mark.parametrize("value", ["yes", "true", "2"])
def test_only_0_and_1_are_understood(value, monkeypatch):
    monkeypatch.setenv(build.CPP, value)
    with pytest.raises(OptionError, match=f"HF_LINATTN_CPP='{value}': 1 .* 0"):
        linear_attention.attention(
            linear_attention.Inputs(*torch.randn(3, 1, 2, 9, 8)), OpConfig("elu1"), False
        )


def test_a_compiler_that_fails_is_heard(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'import sys; sys.exit(\"out of order\")'")
    with pytest.raises(UnsupportedCallError, match="out of order"):
        build.compiled.__wrapped__()
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.usefixtures("warm_start")
def test_a_second_process_finds_the_library_compiled(compiled, folder):
    build.compiled.__wrapped__()
    made = {path: path.stat().st_mtime_ns for path in folder.rglob("*.so")}
    code = "from hf_linattn.ops.cpp.build import library; library()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.so")} == made
    assert len(made) == 1
