"""Jobs: order, skipping, failure, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hf_linattn.cli.jobs import Job, JobError, last_step, run_jobs

WRITE = "import sys, pathlib, time; pathlib.Path(sys.argv[1]).write_text(str(time.monotonic()))"

SLEEPER = (
    "import os, sys, time, pathlib; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
)
LAUNCHER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-S", "-c", {SLEEPER!r}, sys.argv[1] + ".pid"])
"""
BREAKS_LATER = """
import sys, time, pathlib
while not pathlib.Path(sys.argv[1]).with_name("slow.pid").exists():
    time.sleep(0.01)
print("working")
sys.exit("it broke")
"""


def job(tmp_path, name, code=WRITE, after=()):
    path = tmp_path / name
    return Job(name, [sys.executable, "-S", "-c", code, str(path)], path.exists, after=after)


def test_how_far_a_training_is(tmp_path):
    log = tmp_path / "train.csv"
    assert last_step(log) == 0
    for lines, step in (("", 0), ("1,3\n2,2\n", 2), ("1,3\nx", 0)):
        log.write_text(f"step,loss\n{lines}")
        assert last_step(log) == step


def test_jobs_run_in_order_and_only_once(tmp_path):
    jobs = [job(tmp_path, "a"), job(tmp_path, "b", after=("a",)), job(tmp_path, "c", after=("a", "b"))]
    run_jobs(jobs, tmp_path / "logs", 3, {})
    times = [float((tmp_path / name).read_text()) for name in "abc"]
    assert times == sorted(times)
    (tmp_path / "b").unlink()
    run_jobs(jobs, tmp_path / "logs", 3, {})
    assert float((tmp_path / "a").read_text()) == times[0]
    assert float((tmp_path / "b").read_text()) > times[2]


def test_environment_reaches_the_job(tmp_path):
    code = "import os, sys, pathlib; pathlib.Path(sys.argv[1]).write_text(os.environ['ANSWER'])"
    run_jobs([job(tmp_path, "a", code)], tmp_path / "logs", 1, {"ANSWER": "42"})
    assert (tmp_path / "a").read_text() == "42"


def test_failure_shows_the_log_and_stops_the_others(tmp_path):
    jobs = [
        job(tmp_path, "slow", LAUNCHER),
        job(tmp_path, "bad", BREAKS_LATER),
        job(tmp_path, "later", after=("bad",)),
    ]
    with pytest.raises(JobError, match=r"bad failed \(exit status 1\)[\s\S]*working[\s\S]*it broke"):
        run_jobs(jobs, tmp_path / "logs", 2, {})
    assert not (tmp_path / "later").exists()
    assert gone(int((tmp_path / "slow.pid").read_text()))


def gone(pid):
    for _ in range(500):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_success_without_its_file_is_a_failure(tmp_path):
    with pytest.raises(JobError, match="ended without its result"):
        run_jobs([job(tmp_path, "a", "pass")], tmp_path / "logs", 1, {})


def test_sigterm_stops_everything(tmp_path):
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    before = signal.getsignal(signal.SIGTERM)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_jobs([job(tmp_path, "a", code)], tmp_path / "logs", 1, {})
    assert time.monotonic() - start < 30
    assert signal.getsignal(signal.SIGTERM) == before


def test_second_start_waits_for_jobs_a_killed_one_left(tmp_path, capsys):
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "logs").mkdir()
    orphan = job(
        tmp_path,
        "a",
        "import sys, time, pathlib; time.sleep(1); pathlib.Path(sys.argv[1]).write_text('orphan')",
    )
    with (tmp_path / "logs" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(orphan.command, pass_fds=(lock.fileno(),))
    # our handle is closed, as a killed start's would be; the orphan still holds its own
    run_jobs([replace(orphan, command=["false"])], tmp_path / "logs", 1, {})
    process.wait()
    assert (tmp_path / "a").read_text() == "orphan"
    assert "waiting for an earlier start" in capsys.readouterr().err
