"""The stages of gpu_check.py on the CPU with tiny sizes, Triton interpreting; the reference that they use."""

import functools
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import definitions, gpu_kit
from helpers.fixtures_perplexity import make_folder
from transformers import DynamicCache, LlamaConfig

from hf_linattn.ops.triton import launch

needs_triton = pytest.mark.skipif(
    not launch.available("cuda"), reason="triton is not installed: pip install triton"
)


@needs_triton
@pytest.mark.parametrize(
    "check",
    [
        gpu_kit.check_correct,
        gpu_kit.check_wrong_kernels_are_rows,
        gpu_kit.check_kernels,
        gpu_kit.check_tiles_that_fail,
    ],
    ids=lambda check: check.__name__,
)
def test_kernels_in_the_interpreter(interpreted, tmp_path, check):
    interpreted(check, tmp_path)


@needs_triton
def test_candidates_of_tiles():
    gpu_kit.check_neighbours()


@needs_triton
def test_kernels_are_compiled_in_advance_without_a_device(tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget

    from hf_linattn.ops.triton.plan import Device

    precompile, correct = gpu_kit.module("gpu_stages.precompile"), gpu_kit.module("gpu_stages.correct")
    for name, text in (("TRITON_CACHE_DIR", tmp_path / "cache"), ("TRITON_INTERPRET", 0)):
        monkeypatch.setenv(name, str(text))
    monkeypatch.setenv("PYTHONPATH", str(gpu_kit.FOLDER))
    monkeypatch.setattr(precompile.os, "cpu_count", lambda: 1)
    facts = gpu_kit.module("gpu_stages.autotuned").Facts("NVIDIA H100", (9, 0), {"max_shared_mem": 232448})
    target = GPUTarget("cuda", 90, 32), Device((9, 0), 132), facts
    monkeypatch.setattr(precompile, "_target", lambda: target)
    token = correct.Size("bfloat16", 32, 32, 1, 1, False, True)
    calls = [(correct.compile_size, (size,)) for size in (token, token._replace(dtype="int8"))]
    choosing, kernels = (gpu_kit.module(f"gpu_stages.{name}") for name in ("choosing", "kernels"))
    module = kernels.compile_token, ("window, in a module", kernels.Shape(1, 2, 1, 320, 32))
    calls.append((choosing.compile_check, (*module, 1)))
    context = gpu_kit.module("gpu_stages.work").Context(
        False, "cuda", tmp_path, tmp_path, time.monotonic() + 600
    )
    row = precompile.run(context, calls, 1.0)
    assert (row["calls"], row["done"], row["processes"], row["failed"]) == (3, 3, 1, 1)
    assert list((tmp_path / "cache").rglob("step.cubin"))
    assert list((tmp_path / "cache").rglob("window_step.cubin"))
    assert not list((tmp_path / "cache").rglob("window_outputs.cubin"))  # which the module alone needs


@needs_triton
def test_autotuners_compile_each_configuration_in_one_part(monkeypatch):
    import triton
    from triton.runtime.autotuner import Autotuner

    autotuned, seen = gpu_kit.module("gpu_stages.autotuned"), []
    helpers = SimpleNamespace(check_shared_mem=functools.cache(lambda: None), get_all_max_shared_mem=None)
    helpers.check_shared_mem.__module__ = "hardware_of_fla"
    for name in ("fla.utils", "hardware_of_fla"):
        monkeypatch.setitem(sys.modules, name, helpers)
    for name in ("get_device_name", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, None)
    autotuned.pretend(autotuned.Facts("NVIDIA H100", (9, 0), {"max_shared_mem": 232448}))

    def warmup(x, **keywords):
        seen.append((x, keywords["width"], keywords["num_warps"]))
        raise RuntimeError("ptxas refuses")

    kernel = SimpleNamespace(fn=lambda x: None, warmup=warmup)
    configs = [triton.Config({}, num_warps=warps) for warps in (1, 2, 4)]
    tuner, run = Autotuner(kernel, ["x", "width"], configs, ["width"], None, None), Autotuner.run
    for part in range(2):
        with autotuned.compiling(part, 2):
            for x in (3, 5):
                tuner.run(x, width=8, grid=(1,), warmup=False)
    assert seen == [(3, 8, 1), (3, 8, 4), (5, 8, 2), (3, 8, 2), (5, 8, 1), (5, 8, 4)]
    assert Autotuner.run is run
    assert torch.cuda.get_device_capability(0) == (9, 0)
    assert helpers.get_all_max_shared_mem()[None] == 232448


@needs_triton
def test_main_cases_come_first(tmp_path, monkeypatch):
    kernels, models = (gpu_kit.module(f"gpu_stages.{name}") for name in ("kernels", "models"))
    monkeypatch.setattr(kernels.timing, "prepare", lambda device: None)
    context = gpu_kit.module("gpu_stages.work").Context(False, "cuda", tmp_path, tmp_path)
    found = [case.case for case in kernels.cases(context)]
    assert len({str(case) for case in found}) == len(found)
    assert len(found) == 1 + len(kernels.FORMS) * 11 + len(kernels.DECODING) * 4 + len(kernels.tiles.PROBLEMS)
    names = [case["case"] for case in found]
    forms, decoding = len(kernels.FORMS), len(kernels.DECODING)
    assert names[: 1 + forms + 2 * decoding] == ["machine", *kernels.FORMS, *[*kernels.DECODING] * 2]
    assert [case["length"] for case in found[1 + forms + 2 * decoding :]][: 2 * (forms - 2)] == [
        *[2048] * 2 * (forms - 2)
    ]
    tiles = names.index("tiles")
    assert set(names[tiles:]) == {"tiles"}
    assert set(names[tiles - 20 : tiles]) == set(kernels.THEIRS)
    # what is compiled in advance stands in the order in which it is needed: fla behind ours
    calls = [call for case in kernels.cases(context) for call in case.compiles]
    names = [call[0].__name__ for call in calls[:5]]
    assert names == [*["compile_row"] * 3, "compile_check", "compile_theirs"]

    found = [case.case for case in models.cases(context)]
    assert len({str(case) for case in found}) == len(found)
    main = [("softmax", "none"), ("elu1", "on"), ("window+gated", "on")]
    assert [(case["patch"], case["kernels"]) for case in found[:9:3]] == main
    assert [case["length"] for case in found[:27]] == [1024] * 9 + [8192] * 9 + [32768] * 9
    assert [case["patch"] for case in found[27:36]] == ["h2o"] * 9
    assert [case["model"] for case in found[:55]] == ["135M"] * 54 + ["1B"]


def test_models_are_kept_while_they_are_needed(tmp_path):
    models = gpu_kit.module("gpu_stages.models")
    context = gpu_kit.module("gpu_stages.work").Context(True, "cpu", tmp_path, tmp_path)
    models._held.clear()
    first = models._model(context, "tiny", "softmax")
    for patch in ("elu1", "gated"):
        models._model(context, "tiny", patch)
    assert models._model(context, "tiny", "softmax") is first
    models._model(context, "tiny", "window")
    assert len(models._held) == models.HELD
    assert models._model(context, "tiny", "softmax") is not first
    models._held.clear()


def test_patches(tmp_path):
    rows = gpu_kit.dry_run("patches", tmp_path)
    assert len(rows) == 2
    assert all(row["ok"] and 0 < row["worst"] < row["allowed"] for row in rows), rows


def test_patches_that_all_fail_are_on_the_page():
    page = gpu_kit.module("gpu_stages.page")
    row = {"case": {"patch": "elu1", "dtype": "float32"}, "ok": False, "error": "RuntimeError: no"}
    assert page._patches([row])[1].splitlines()[-1] == "| float32 | 0 | - | - | - | 1 |"


def test_a_patch_that_differs_is_a_row(tmp_path, monkeypatch):
    patches = gpu_kit.module("gpu_stages.patches")
    run = patches._run

    def lying(model, ids):
        found = run(model, ids)
        return found if model.dtype == torch.float64 else found | {"decoded": found["decoded"] * 1.001}

    monkeypatch.setattr(patches, "_run", lying)
    for row in gpu_kit.dry_run("patches", tmp_path):
        assert not row["ok"]
        assert "decoded is 1.00e-03 away from float64" in row["error"]


def test_models(tmp_path):
    rows = gpu_kit.dry_run("models", tmp_path)
    assert len(rows) == 9
    assert {row["case"]["patch"] for row in rows} == {"softmax", "elu1", "h2o"}
    assert all(row["ok"] and row["tokens_per_second"] > 0 for row in rows), rows


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """A folder with a tiny model and a text, as a kit has them."""
    folder = tmp_path_factory.mktemp("kit")
    make_folder(folder / "model")
    (folder / "text").mkdir()
    (folder / "text" / "book.md").write_text("It was a dark and stormy night. " * 8, encoding="utf-8")
    return folder


def test_length(kit, tmp_path):
    (row,) = gpu_kit.dry_run("length", tmp_path, kit)
    assert row["ok"], row
    assert row["apart"] == 0
    assert row["perplexity_kernels"] > 1


def test_train(kit, tmp_path):
    (row,) = gpu_kit.dry_run("train", tmp_path, kit)
    assert row["ok"], row
    assert (row["steps"], row["most_apart"]) == (3, 0)


def test_forms_that_differ_are_failures(kit, tmp_path, monkeypatch):
    length, train = gpu_kit.module("gpu_stages.length"), gpu_kit.module("gpu_stages.train")
    found = {"0": 20.0, "1": 20.1}
    monkeypatch.setattr(
        length, "_measure", lambda wish, *_: {"perplexity": found[wish], "tokens": 60, "seconds": 1.0}
    )
    (row,) = gpu_kit.dry_run("length", tmp_path, kit)
    assert "5.0e-03 nats a token apart" in row["error"] or "4.99e-03" in row["error"]
    losses = {"0": [3.0, 2.0, 1.0], "1": [3.0, 2.1, 1.1]}
    monkeypatch.setattr(train, "_run", lambda context, patch, wish: {"losses": losses[wish], "seconds": 1.0})
    (row,) = gpu_kit.dry_run("train", tmp_path, kit)
    assert not row["ok"]
    assert "differ by 0.0667 nats" in row["error"]


def test_without_a_model_there_is_one_clear_row(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_LINATTN_DATA", raising=False)
    (row,) = gpu_kit.dry_run("length", tmp_path, tmp_path)
    assert "make gpu-kit" in row["error"]


@pytest.mark.parametrize(
    ("kind", "eps", "causal", "links", "group"),
    [
        ("elu1", 0.0, True, False, 2),
        ("relu", 0.1, True, True, 1),
        ("none", 0.0, True, True, 2),
        ("relu", 0.1, False, False, 2),
    ],
)
def test_the_reference_is_the_definition(kind, eps, causal, links, group, monkeypatch):
    reference = gpu_kit.module("gpu_stages.reference")
    monkeypatch.setattr(reference, "SPAN", 8)
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = new(2, 2 * group, 21, 5), new(2, 2, 21, 5), new(2, 2, 21, 3)
    if kind == "none":
        q, k = q.abs(), k.abs()
    valid = torch.rand(2, 21, generator=generator) > 0.3
    S, z = new(2, 2, 5, 3), new(2, 2, 5).abs() + 1
    decay = -new(2, 2, 21).abs() if links else None
    documents = (torch.arange(21) >= torch.tensor([[7], [8]])).long() if links else None
    got = reference.linear(
        *(q, k, v),
        **{"kind": kind, "eps": eps, "causal": causal, "valid": valid, "state": (S, z)},
        **{"log_decay": decay, "documents": documents},
    )
    maps = [definitions.feature_map(x, kind, query, eps) for x, query in ((q, True), (k, False))]
    want = definitions.linear(
        *(*maps, v),
        **{"causal": causal, "normalise": True, "hidden": ~valid, "S": S, "z": z},
        **{"log_decay": decay, "documents": documents},
    )
    for name, a, b in zip(("output", "total", "S", "z"), got, want, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_models_get_their_cache_by_the_name_that_they_have_for_it():
    class Named(torch.nn.Module):
        config = LlamaConfig(num_hidden_layers=1)

        def forward(self, input_ids, cache=None, use_cache=None, logits_to_keep=0):
            seen.append(cache)

    seen = []
    gpu_kit.module("gpu_stages.models")._prefill(Named(), torch.zeros(1, 4, dtype=torch.long))()
    assert isinstance(seen[0], DynamicCache)


def test_what_the_device_computes_is_counted_by_kernels_alone(monkeypatch):
    timing = gpu_kit.module("gpu_stages.timing")
    of = timing.DeviceType
    events = [
        SimpleNamespace(device_type=kind, self_device_time_total=microseconds)
        for kind, microseconds in ((of.CPU, 900.0), (of.CUDA, 600.0), (of.CUDA, 300.0))
    ]

    class Profile:
        def __init__(self, activities):
            assert activities == [timing.ProfilerActivity.CUDA]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def key_averages(self):
            return events

    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "profile", Profile)
    assert timing.busy(lambda: calls.append(1), "cuda") == {"device_ms": 0.9}
    assert calls == [1]
    assert timing.busy(calls.clear, "cpu") == {}

    def refuses(activities):
        raise RuntimeError("")

    monkeypatch.setattr(timing, "profile", refuses)
    assert timing.busy(calls.clear, "cuda") == {"device": "RuntimeError: "}
