"""The command around the stages: what it refuses, how it resumes, what it survives; no kernel runs here."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch
from helpers import gpu_kit

gpu_check, work, page = map(gpu_kit.module, ("gpu_check", "gpu_stages.work", "gpu_stages.page"))


@pytest.fixture(autouse=True)
def paths(monkeypatch):
    """The command puts its own folder first, for its processes too."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ["corect"],
            "there is no stage 'corect'; stages are correct, patches, kernels, models, length, train, all",
        ),
        ([], "name a stage"),
        (["correct", "--minutes", "0"], "above 0"),
    ],
)
def test_wrong_usage(words, reason, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main([*words, "--output-dir", str(tmp_path / "out")])
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stages_are_done_once_and_in_order():
    assert gpu_check.chosen(["train", "correct", "train"]) == ["correct", "train"]
    assert gpu_check.chosen(["all"]) == list(gpu_check.STAGES)


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs the command; returns the one line with which it ends before any stage."""
    monkeypatch.setattr(gpu_check, "supervised", lambda *about: pytest.fail("a stage was begun"))

    def run(*words):
        assert gpu_check.main(["correct", *map(str, words)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line

    return run


def test_without_a_device_a_dry_run_is_offered(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused("--output-dir", tmp_path / "out")
    assert "no CUDA device: torch" in line
    assert "--dry-run" in line
    assert not (tmp_path / "out").exists()


def test_folders_of_others_are_refused(refused, tmp_path):
    found = gpu_check.about(True)
    out = tmp_path / "out"
    gpu_check.begin(out, found)
    gpu_check.begin(out, found)
    (out / "run.json").write_text(json.dumps(found | {"device": "NVIDIA H100", "kernels": "older"}))
    line = refused("--dry-run", "--output-dir", out)
    assert "another run (device was NVIDIA H100, is cpu; kernels was older" in line
    assert "choose another --output-dir" in line
    for text in ("{", "[]", '{"format": "something"}'):
        (out / "run.json").write_text(text)
        assert "choose another --output-dir" in refused("--dry-run", "--output-dir", out)
    (out / "run.json").unlink()
    (out / "thesis.tex").write_text("")
    assert "is not empty and holds no run" in refused("--dry-run", "--output-dir", out)
    assert "cannot be used" in refused("--dry-run", "--output-dir", out / "thesis.tex" / "below")


BUSY = """import pathlib; pathlib.Path({!r}).write_text(str(os.getpid())); time.sleep(60)"""
CHILD = """
import json, os, signal, sys, time
sys.path.insert(0, {folder!r})
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
import gpu_check
args = gpu_check.build_parser().parse_args(sys.argv[1:])
path = args.output_dir / (args.stages[0] + ".jsonl")
for name in ("a", "b", "c"):
    if json.dumps({{"case": name}}) in gpu_check.read(path):
        continue
    args.here.write_text(json.dumps({{"case": {{"case": name}}, "began": time.time()}}))
    if name == "b":
        {deed}
    gpu_check.append(path, {{"case": {{"case": name}}, "ok": True}})
    args.here.unlink()
"""


def supervise(tmp_path, deed, minutes=1.0):
    """Supervise a process that does something at its second case."""
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(folder=str(gpu_kit.FOLDER), deed=deed))
    args = SimpleNamespace(output_dir=tmp_path, minutes=minutes, dry_run=False, retry=False, only=None)
    status = gpu_check.supervised("correct", args, [sys.executable, str(child)])
    rows = gpu_check.read(tmp_path / "correct.jsonl")
    return status, {row["case"]["case"]: row for row in rows.values()}


def test_a_process_that_dies_leaves_a_row_and_another_goes_on(tmp_path, capsys):
    status, rows = supervise(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)")
    assert status == 1
    assert {name: row["ok"] for name, row in rows.items()} == {"a": True, "b": False, "c": True}
    assert rows["b"]["error"] == "its process ended with status -11 (a signal)"
    assert "correct: 3 cases, 1 failed" in capsys.readouterr().out


def test_a_process_that_asks_for_a_new_one_gets_it(tmp_path):
    deed = "gpu_check.append(path, {'case': {'case': 'b'}, 'ok': False, 'error': 'lost'}); sys.exit(4)"
    status, rows = supervise(tmp_path, deed)
    assert (status, rows["b"]["error"], rows["c"]["ok"]) == (1, "lost", True)


def test_a_case_that_hangs_is_ended_and_said(tmp_path, monkeypatch, capsys):
    hanging = tmp_path / "hanging"

    class Late(subprocess.Popen):
        """Its time is up when the case hangs, however slow this machine is."""

        def wait(self, timeout=None):
            while timeout is not None and not hanging.exists():
                time.sleep(0.01)
            if timeout is not None:
                raise subprocess.TimeoutExpired("", timeout)
            return super().wait()

    monkeypatch.setattr(gpu_check.subprocess, "Popen", Late)
    began = "args.here.write_text(json.dumps({'case': {'case': 'b'}, 'began': 0}))"
    status, rows = supervise(tmp_path, f"{began}; open({str(hanging)!r}, 'w'); time.sleep(60)")
    assert status == 1
    assert set(rows) == {"a", "b"}
    assert "was ended" in rows["b"]["error"]
    assert "not all cases are done: the same command goes on" in capsys.readouterr().out


def test_a_stage_without_time_left_goes_on_with_the_same_command(tmp_path, capsys):
    status, rows = supervise(tmp_path, "sys.exit(3)")
    assert (status, set(rows)) == (1, {"a"})
    assert supervise(tmp_path, "pass")[0] == 0


def test_a_process_that_cannot_begin_says_so(tmp_path):
    args = SimpleNamespace(output_dir=tmp_path, minutes=1.0, dry_run=True, retry=False, only=None)
    assert gpu_check.supervised("models", args, [sys.executable, "-c", "raise SystemExit(7)"]) == 1
    (row,) = gpu_check.read(tmp_path / "models.jsonl").values()
    assert "ended with status 7 before the first case" in row["error"]


@pytest.mark.parametrize(
    ("tell", "sign"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGTERM)], ids=["Ctrl-C", "terminated"]
)
def test_signals_end_both_processes_and_keep_the_rows(tmp_path, tell, sign):
    """Ctrl-C in a terminal goes to both, what a supervisor sends to the first alone."""
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(folder=str(gpu_kit.FOLDER), deed=BUSY.format(str(tmp_path / "pid"))))
    code = (
        f"import signal, sys; sys.path.insert(0, {str(gpu_kit.FOLDER)!r})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import gpu_check; run = gpu_check.supervised\n"
        f"gpu_check.supervised = lambda stage, args: run(stage, args, [sys.executable, {str(child)!r}])\n"
        "gpu_check.about = lambda dry: {}\n"
        f"sys.exit(gpu_check.main(['correct', '--output-dir', {str(tmp_path / 'out')!r}]))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        path, end = tmp_path / "out" / "correct.jsonl", time.monotonic() + 60
        while not (path.exists() and (tmp_path / "pid").exists()) and time.monotonic() < end:
            time.sleep(0.05)
        tell(process.pid, sign)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("interrupted; rows that were written stay")
    assert len(gpu_check.read(path)) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_rows_behind_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"case": {"n": 1}, "ok": true}\n{"case": {"n": 2}, "o')
    gpu_check.append(path, {"case": {"n": 3}, "ok": True})
    assert [row["case"]["n"] for row in gpu_check.read(path).values()] == [1, 3]


@pytest.fixture
def stage(monkeypatch, tmp_path):
    """A stage of four cases, of which one fails and one does not apply; its calls are counted."""
    calls = []

    def case(name, deed):
        return work.Case({"name": name}, lambda: (calls.append(name), deed())[1])

    def skip():
        raise work.Skip("no fla")

    cases = [
        case("good", lambda: {"ms": 1.0}),
        case("raises", lambda: 1 / 0),
        case("skipped", skip),
        case("wrong", lambda: {"error": "far"}),
    ]
    monkeypatch.setitem(sys.modules, "gpu_stages.fake", SimpleNamespace(cases=lambda context: cases))
    context = work.Context(True, "cpu", tmp_path, tmp_path)
    return SimpleNamespace(calls=calls, cases=cases, context=context, path=tmp_path / "fake.jsonl")


def test_failures_are_rows_and_done_cases_are_not_done_again(stage):
    assert work.do("fake", stage.context) == 0
    rows = {row["case"]["name"]: row for row in gpu_check.read(stage.path).values()}
    assert {name: row["ok"] for name, row in rows.items()} == {
        "good": True,
        "raises": False,
        "skipped": True,
        "wrong": False,
    }
    assert rows["raises"]["error"] == "ZeroDivisionError: division by zero"
    assert "test_gpu_check.py" in rows["raises"]["where"]
    assert rows["skipped"]["skipped"] == "no fla"
    stage.calls.clear()
    assert work.do("fake", stage.context) == 0
    assert stage.calls == []
    assert work.do("fake", stage.context, retry=True) == 0
    assert stage.calls == ["raises", "wrong"]


def test_only_some_cases_are_done(stage):
    assert work.do("fake", stage.context, only=["name=good", "wrong"]) == 0
    assert stage.calls == ["good", "wrong"]
    assert work.do("fake", stage.context, only=["nothing"]) == 0
    assert len(gpu_check.read(stage.path)) == 2


def test_only_goes_to_the_process_of_a_stage(tmp_path):
    code = "import sys; open(sys.argv[1], 'w').write(' '.join(sys.argv[2:]))"
    named = {"output_dir": tmp_path, "minutes": 1.0, "dry_run": True, "retry": False}
    args = SimpleNamespace(**named, only=["h2o", "kind=train length=8192"])
    gpu_check.supervised("models", args, [sys.executable, "-c", code, str(tmp_path / "words")])
    assert (tmp_path / "words").read_text().endswith("--only h2o --only kind=train length=8192")


def test_an_interrupted_stage_goes_on(stage):
    def interrupt():
        raise KeyboardInterrupt

    good = stage.cases[1]
    stage.cases[1] = work.Case(good.case, interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.do("fake", stage.context)
    assert len(gpu_check.read(stage.path)) == 1
    stage.cases[1] = good
    stage.calls.clear()
    assert work.do("fake", stage.context) == 0
    assert stage.calls == ["raises", "skipped", "wrong"]


def test_no_case_is_begun_that_would_not_end_in_time(stage):
    late = work.Context(False, "cpu", stage.context.folder, stage.context.kit, time.monotonic() + 1)
    assert work.do("fake", late) == gpu_check.UNFINISHED
    assert stage.calls == []


def test_what_takes_too_long_is_left_and_others_go_on(stage, monkeypatch):
    def slowly():
        now[0] += 10
        return {}

    def case(name, length):
        deed = (lambda: stage.calls.append(name) or {}) if name == "quick" else slowly
        return work.Case({"case": name, "length": length}, deed)

    now = [0.0]
    monkeypatch.setattr(work.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(work, "_clean", lambda context: None)
    stage.cases[:] = [case("slow", 1), case("slow", 2), case("quick", 1)]
    context = work.Context(False, "cpu", stage.context.folder, stage.context.kit, 25.0)
    assert work.do("fake", context) == gpu_check.UNFINISHED
    assert stage.calls == ["quick"]
    rows = [row["case"] for row in gpu_check.read(stage.path).values()]
    assert rows == [{"case": "slow", "length": 1}, {"case": "quick", "length": 1}]


def test_a_device_that_does_not_answer_is_opened_anew(stage, monkeypatch):
    monkeypatch.setattr(work, "_alive", lambda context: False)
    assert work.do("fake", stage.context) == gpu_check.RESTART
    assert stage.calls == ["good", "raises"]


def test_kernels_are_asked_for_by_environment_and_back(monkeypatch):
    monkeypatch.setenv("HF_LINATTN_TRITON", "0")
    with work.kernels("1"):
        assert os.environ["HF_LINATTN_TRITON"] == "1"
    assert os.environ["HF_LINATTN_TRITON"] == "0"


def wheel(folder, name, version="1.0"):
    """A wheel with one empty module."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")


def test_wheels_that_are_lacking_are_installed_once(tmp_path, monkeypatch):
    wheels, into = tmp_path / "wheels", tmp_path / "into"
    assert gpu_check.unpacked(wheels) == []
    wheels.mkdir()
    wheel(wheels, "torch", "0.1")
    with pytest.raises(gpu_check.Refused, match="the kit is damaged"):
        gpu_check.unpacked(wheels, into)
    wheel(wheels, "hf_linattn", "9.9")
    wheel(wheels, "certainly_lacking")
    assert gpu_check.unpacked(wheels, into) == [str(into)]
    names = {path.name for path in into.glob("*.py")}
    assert names == {"hf_linattn.py", "certainly_lacking.py"}  # torch is there already
    monkeypatch.setattr(gpu_check.subprocess, "run", None)
    assert gpu_check.unpacked(wheels, into) == [str(into)]


def test_wheels_that_pip_refuses(tmp_path):
    (tmp_path / "hf_linattn-1.0-py3-none-any.whl").write_text("nothing")
    with pytest.raises(gpu_check.Refused, match="cannot be installed"):
        gpu_check.unpacked(tmp_path, tmp_path / "into")


ABOUT = {
    **{"format": gpu_check.FORMAT, "dry_run": False, "device": "NVIDIA H100", "kernels": "abc"},
    **{"torch": "2.11", "triton": "3.6", "transformers": "5.17", "hf_linattn": "0.3"},
}
SHAPE = {"batch": 1, "heads": 32, "kv_heads": 8, "length": 8192, "width": 128}
DONE, LOST = {"ok": True}, {"ok": False}


def model(patch, kernels, kind, length, fields):
    """A row of stage `models`."""
    case = {"model": "1B", "patch": patch, "kernels": kernels, "kind": kind, "length": length}
    return {"case": case, **DONE, **fields}


ROWS = {
    "correct": [
        {"case": {"case": "form", "dtype": "bfloat16"}, **DONE},
        {"case": {"case": "size", "dtype": "bfloat16"}, **DONE, "worst": 0.002, "same_bits": True},
        {
            "case": {"case": "size", "dtype": "float16"},
            **{**LOST, "error": "S is far", "worst": 1, "same_bits": True},
        },
    ],
    "kernels": [
        {"case": {"case": "machine"}, **DONE, "tflops": 798.0, "tb_s": 3.0},
        {
            "case": {"case": "ours", **SHAPE},
            **{**DONE, "forward": 0.2, "forward_graph": 0.1, "both": 0.6, "both_graph": 0.5},
        },
        {"case": {"case": "fla, raw", **SHAPE}, **DONE, "skipped": "not there"},
        {"case": {"case": "ours", "token": True, **SHAPE}, **DONE, "bytes": 3_000_000, "token": 0.002},
        {
            "case": {"case": "tiles", "dtype": "bfloat16"},
            **{**DONE, "best": {"outputs": [64, 64, 8, 2]}, "outputs_gain": 1.25},
        },
    ],
    "models": [
        model("softmax", "none", "prefill", 8192, {"ms": 40.0}),
        model("softmax", "none", "decode", 8192, {"ms": 20.0, "ms_graph": 3.0}),
        model("elu1", "on", "decode", 8192, {"ms": 25.0, "ms_graph": 2.0}),
        model("elu1", "on", "prefill", 8192, {"ms": 10.0}),
        model("elu1", "on", "prefill", 1024, {"ms": 9.0}),
        {**model("elu1", "on", "train", 8192, {}), **LOST, "error": "memory"},
    ],
    "length": [
        {
            "case": {"tokens": 65536, "patch": "elu1", "dtype": "bfloat16"},
            **{**DONE, "perplexity_kernels": 100.0, "perplexity_torch": 100.0, "apart": 1e-5},
            **{"seconds_torch": 30.0, "seconds_kernels": 10.0},
        }
    ],
    "train": [
        {
            "case": {"patch": "elu1"},
            **{**DONE, "losses_kernels": [3.0, 2.0], "losses_torch": [3.0, 2.1], "apart": 0.01},
        }
    ],
}


@pytest.fixture
def run_folder(tmp_path):
    """What a run on a device leaves."""
    folder = tmp_path / "out"
    gpu_check.begin(folder, ABOUT)
    for stage, rows in ROWS.items():
        for row in rows:
            gpu_check.append(folder / f"{stage}.jsonl", row)
    return folder


def test_figures_stand_between_markers_and_the_rest_of_the_page_stays(run_folder, tmp_path):
    path = tmp_path / "gpu.md"
    path.write_text(f"# On a GPU\n\n{page.BEGIN}\nfigures of a run before\n{page.END}\n\n## Not covered\n")
    assert gpu_check.main(["--docs", str(path), "--output-dir", str(run_folder)]) == 0
    text = path.read_text()
    assert text.startswith(f"# On a GPU\n\n{page.BEGIN}\n\n## Measured\n")
    assert text.endswith(f"{page.END}\n\n## Not covered\n")
    for line in (
        "`python gpu_check.py correct kernels models length train --output-dir OUT` on one NVIDIA H100",
        "| bfloat16 | 1 | 1 | 2.0e-03 | 1 of 1 | 0 |",
        "| ours | 0.1 | 0.4 | 0.2 / 0.4 | 0 |",
        "| 1 x 32/8 x 8,192 x 128 | ours | 0.002 | 0.002 | 50% |",
        "outputs 1.25",
        "| 1B, ms | prefill 1,024 | prefill 8,192 | a token behind 8,192 | likewise, graph, 8,192 "
        "| training step 8,192 |",
        "| softmax | - | 40 | 20 | 3 | - |",
        "| elu1, kernels | 9 | 10 (4.00) | 25 (0.80) | 2 (1.50) | failed |",
        "| elu1, bfloat16 | 65,536 | 100 | 100 | 1.0e-05 | 3.00 |",
        "| elu1 | 3.000 to 2.000 | 3.000 to 2.100 | 1.0e-02 |",
        "**Failed**, 2 cases:",
        "* correct, dtype float16: S is far",
    ):
        assert line in text
    assert "figures of a run before" not in text
    gpu_check.main(["--docs", str(path), "--output-dir", str(run_folder)])
    assert path.read_text() == text


def test_pages_that_are_not_written(run_folder, tmp_path, capsys):
    path = tmp_path / "new.md"
    words = ["--docs", str(path), "--output-dir"]
    assert gpu_check.main([*words, str(tmp_path / "nowhere")]) == 1
    path.write_text(page.END + page.BEGIN)
    assert gpu_check.main([*words, str(run_folder)]) == 1
    path.write_text("# Page\n")
    assert gpu_check.main([*words, str(run_folder)]) == 0
    assert path.read_text().startswith(f"# Page\n\n{page.BEGIN}\n")
    (run_folder / "run.json").write_text(json.dumps(ABOUT | {"dry_run": True}))
    assert gpu_check.main([*words, str(run_folder)]) == 1
    said = capsys.readouterr().err
    assert [part in said for part in ("no run of", "its markers 1 and 1 times", "has no figures")] == [
        True
    ] * 3
