"""Commands run side by side, each once: what is finished is skipped, what fails stops the rest.

A job is a subprocess with a log of its own. Whether it is finished is read from the files it leaves, so a
second start after a Ctrl-C or a kill goes on where the first one ended.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_linattn.errors import LinattnError

LOG_LINES = 15
"""Lines of a failed job's log that are shown."""

ENOUGH = 0.03
"""Part of the work after which the time left is told."""

GRACE = 10.0
"""Seconds between asking a job to end and killing it."""


class JobError(LinattnError, RuntimeError):
    """A job failed; the message holds the end of its log."""


@dataclass(frozen=True)
class Job:
    """One command.

    Attributes:
        name: unique; shown while it runs, and with "-" for " " the name of its log.
        command: the words of the command line.
        finished: whether an earlier start has done it; asked again when the command has ended.
        progress: the part of it that is done, 0 to 1.
        weight: its share of the whole, roughly in seconds.
        after: names of the jobs that must be finished first.
    """

    name: str
    command: Sequence[str]
    finished: Callable[[], bool]
    progress: Callable[[], float] = lambda: 0.0
    weight: float = 1.0
    after: tuple[str, ...] = ()


def last_step(log: Path) -> int:
    """Read the last step of a train.csv; 0 where training has not begun, or a line is being written."""
    try:
        with log.open(encoding="utf-8", newline="") as file:
            return int(list(csv.DictReader(file))[-1]["step"])
    except (OSError, LookupError, ValueError):
        return 0


@dataclass(frozen=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    started: float


def run_jobs(jobs: Sequence[Job], logs: Path, at_once: int, environment: Mapping[str, str]) -> None:
    """Run all jobs in order, `at_once` at a time, each as soon as those it comes after are finished.

    Args:
        jobs: the jobs; one may only come after jobs before it in the list.
        logs: folder for the logs.
        at_once: processes side by side.
        environment: added to the environment of this process.

    Raises:
        JobError: a job failed; the others have been stopped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    done = {job.name for job in jobs if job.finished()}
    waiting = [job for job in jobs if job.name not in done]
    running: list[_Running] = []
    with _only_one(logs / "lock") as lock, _signals_raise(), _bar(jobs, done) as show:
        # whoever held the lock may have finished jobs meanwhile
        done |= {job.name for job in waiting if job.finished()}
        waiting = [job for job in waiting if job.name not in done]
        try:
            while waiting or running:
                for job in [job for job in waiting if done.issuperset(job.after)][: at_once - len(running)]:
                    waiting.remove(job)
                    running.append(_start(job, logs, environment, lock))
                show(done, [item.job for item in running])
                time.sleep(0.2)
                for item in [item for item in running if item.process.poll() is not None]:
                    running.remove(item)
                    _check(item)
                    done.add(item.job.name)
                    tqdm.write(f"{item.job.name}: {time.monotonic() - item.started:.0f} s", file=sys.stderr)
            show(done, [])
        finally:
            _stop(running)


def _start(job: Job, logs: Path, environment: Mapping[str, str], lock: int | None) -> _Running:
    path = logs / f"{job.name.replace(' ', '-')}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # a group of its own, so that what a launcher starts ends with it
            pass_fds=() if lock is None else (lock,),  # keeps the lock if we are killed and it lives on
        )
    return _Running(job, process, path, time.monotonic())


def _check(item: _Running) -> None:
    status = item.process.returncode
    if status == 0 and item.job.finished():
        return
    text = item.log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line for line in text.splitlines() if line.strip()][-LOG_LINES:]
    how = f"exit status {status}" if status else "it ended without its result"
    end = "\n".join(f"  | {line[:300]}" for line in lines)
    raise JobError(f"{item.job.name} failed ({how}); the end of {item.log}:\n{end}")


def _stop(running: Sequence[_Running]) -> None:
    """End all jobs with everything that they started."""
    for item in running:
        _signal(item.process, signal.SIGTERM)
    end = time.monotonic() + GRACE
    for item in running:
        with suppress(subprocess.TimeoutExpired):
            item.process.wait(max(0.0, end - time.monotonic()))
        # even when the first process has gone: what it started may have stayed
        _signal(item.process, signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        item.process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if sys.platform == "win32":
            process.terminate()
        else:
            os.killpg(process.pid, number)


@contextmanager
def _only_one(path: Path) -> Iterator[int | None]:
    """Wait until no other start works in this folder, nor a job that a killed one has left behind."""
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write(f"waiting for an earlier start to end its jobs in {path.parent}\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the jobs as Ctrl-C does."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    names = ("SIGTERM", "SIGHUP") if in_main else ()
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    earlier = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _bar(jobs: Sequence[Job], done: set[str]) -> Iterator[Callable[[set[str], list[Job]], None]]:
    """Show one bar for everything, on stderr, with the time left and the names of what runs."""
    total, before = (sum(job.weight for job in some) for some in (jobs, [j for j in jobs if j.name in done]))
    form = "{percentage:3.0f}% |{bar}| {elapsed}{postfix}"
    interval, started = (0.5 if sys.stderr.isatty() else 10.0), time.monotonic()
    with tqdm(total=total, bar_format=form, mininterval=interval, file=sys.stderr) as bar:

        def show(done: set[str], running: list[Job]) -> None:
            reached = sum(job.weight for job in jobs if job.name in done)
            reached += sum(job.weight * min(max(job.progress(), 0.0), 1.0) for job in running)
            bar.n = max(bar.n, round(reached, 3))
            # at the rate of this start: what an earlier one has done took no time now
            rate = (bar.n - before) / max(time.monotonic() - started, 1e-3)
            known = bar.n - before > ENOUGH * total and bar.n < total
            left = [f"about {tqdm.format_interval((total - bar.n) / rate)} left"] if known else []
            bar.set_postfix_str("; ".join([*left, *(job.name for job in running)]), refresh=False)
            bar.update(0)
            if interval < 1:
                bar.refresh()

        show(done, [])
        yield show
