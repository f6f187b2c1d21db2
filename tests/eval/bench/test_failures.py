"""What the benchmark survives and records: candidates that fail, which form ran, what is not installed."""

import subprocess
import sys

import pytest
import torch
from helpers.fixtures_bench import QUICK, arguments, refused, results_of

from hf_linattn.eval.bench import __main__ as bench
from hf_linattn.eval.bench import candidates, forms, plots, run, timing
from hf_linattn.ops.fla.check import DELTA
from hf_linattn.ops.triton import check, selftest


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They take the most time by far."""
    monkeypatch.setattr(plots, "save_plots", lambda folder, rows: [])
    monkeypatch.setattr(plots, "pictures", lambda rows, group: [])


def failing(monkeypatch, spec, calls):
    """Make the calls of one patch raise after some that work."""
    real, done = candidates._candidate, []

    def candidate(model, name, config, tensors):
        made = real(model, name, config, tensors)
        if name == spec:
            call = made.call

            def fails():
                done.append(1)
                if len(done) > calls:
                    raise RuntimeError("triton: illegal memory access\nmore")
                return call()

            made.call = fails
        return made

    monkeypatch.setattr(candidates, "_candidate", candidate)


@pytest.mark.parametrize("calls", [0, 1, 3], ids=["at once", "while it warms up", "in a round"])
def test_a_candidate_that_fails_is_a_row_and_the_others_are_measured(calls, tmp_path, monkeypatch, capsys):
    failing(monkeypatch, "elu1", calls)
    asked = arguments(tmp_path, "--patches", "elu1,relu", "--kinds", "prefill", lengths="16")
    assert bench.main(asked) == 0
    rows = {row["candidate"]: row for row in results_of(tmp_path)["rows"]}
    assert rows["elu1"]["note"] == "failed: RuntimeError: triton: illegal memory access"
    assert not rows["elu1"]["measured"]
    assert rows["relu"]["speed"] > 0
    assert "failed: RuntimeError" in capsys.readouterr().out
    assert bench.main(asked) == 0  # the row stands


def test_a_candidate_that_cannot_be_made_is_a_row_too(tmp_path, monkeypatch):
    real = candidates._decoding

    def decoding(model, *about):
        if candidates._is_linear(model):
            raise RuntimeError("no state")
        return real(model, *about)

    monkeypatch.setattr(candidates, "_decoding", decoding)
    assert bench.main(arguments(tmp_path, "--kinds", "decode", lengths="16")) == 0
    rows = {row["candidate"]: row for row in results_of(tmp_path)["rows"]}
    assert rows["elu1"]["note"] == "failed: RuntimeError: no state"
    assert rows["sdpa"]["measured"]


@pytest.mark.parametrize("more", [[], ["--peers", "performer"]], ids=["alone", "with peers"])
@pytest.mark.parametrize("length", ["9999999999", "99999999999999999"])
def test_inputs_that_do_not_fit_are_rows_and_shorter_ones_are_measured(length, more, tmp_path, capsys):
    asked = arguments(tmp_path, "--kinds", "prefill", "--budget", "1e30", *more, lengths=f"16,{length}")
    assert bench.main(asked) == 0
    rows = [row for row in results_of(tmp_path)["rows"] if row["length"] > 16]
    assert {row["candidate"] for row in rows} == {"sdpa", "elu1"}
    assert all(row["note"].startswith(("not run: ", "failed: ")) for row in rows)
    assert results_of(tmp_path)["complete"]
    assert "not run: " in capsys.readouterr().out


def test_inputs_of_lengths_that_are_not_run_are_not_drawn(tmp_path, monkeypatch):
    drawn, real = [], candidates.random_inputs

    def random_inputs(config, seed):
        drawn.append(config.length)
        return real(config, seed)

    monkeypatch.setattr(candidates, "random_inputs", random_inputs)
    asked = arguments(tmp_path, "--kinds", "prefill", "--budget", "1e-9", lengths="16,32,100000")
    assert bench.main(asked) == 0
    assert drawn == [16]


def test_errors_pass_where_nobody_asked_for_them():
    def fails():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        timing.measure([timing.Timed("a", fails)], timing.Clock(), rounds=1)


def test_the_form_of_calls_on_an_accelerator_is_recorded(monkeypatch):
    form = selftest.Form("elu1")
    dtype = torch.bfloat16
    keys = [selftest.Key(torch.device("cuda"), dtype, dtype, D, D, 1, "bf16", form) for D in (64, 128)]
    monkeypatch.setattr(check.Checks, "takes", lambda self, key, *rest, **more: key.D == 64)
    with forms.watched() as seen:
        assert forms.text(seen) is None
        assert [check.CHECKS.takes(key, 5, 2, compiling=False) for key in keys[:1]] == [True]
        assert forms.text(seen) == "triton"
        check.CHECKS.takes(keys[1])
        assert forms.text(seen) == "triton and torch operations"
        DELTA.takes(keys[0])
    assert forms.text(seen) == "fla and torch operations"
    assert not any("takes" in vars(checks) for checks in check.ALL)


def test_runs_with_and_without_kernels_are_two(tmp_path, monkeypatch, capsys):
    said = {
        "": "triton and fla where they agree",
        "1": "triton and fla, or an error",
        "0": "torch operations",
    }
    for text, words in said.items():
        monkeypatch.setenv(check.TRITON, text)
        assert forms.wish("cuda").startswith(words)
    asked = arguments(tmp_path, "--kinds", "prefill", lengths="16")
    assert bench.main(asked) == 0
    monkeypatch.setattr(run.forms, "wish", lambda kind: "others")
    refused(asked, "was measured with other kernels", capsys)


def test_dtype_of_the_attention_alone():
    assert [run.default_dtype(device) for device in ("cuda", "cuda:1", "cpu")] == ["bfloat16"] * 2 + [
        "float32"
    ]


@pytest.mark.usefixtures("warm_start")
def test_it_runs_where_training_is_not_installed(tmp_path):
    code = (
        "import sys\n"
        "for name in ('datasets', 'accelerate', 'peft', 'evaluate'): sys.modules[name] = None\n"
        "from hf_linattn.eval.bench import __main__, plots\n"
        "plots.save_plots, plots.pictures = (lambda folder, rows: []), (lambda rows, group: [])\n"
        "sys.exit(__main__.main(sys.argv[1:]))"
    )
    words = [
        *QUICK,
        "--lengths",
        "16",
        "--shapes",
        "1x2x8",
        "--kinds",
        "prefill",
        "--output-dir",
        str(tmp_path),
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert results_of(tmp_path)["complete"]
