"""Processes of a training command: those that `accelerate launch` does not start, and what each may print."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise

from hf_linattn.errors import TrainingError


def start_missing_processes(module: str, argv: Sequence[str]) -> None:
    """Give `accelerate launch --cpu --num_processes N -m module ...` its N processes.

    Without mpirun, accelerate (1.15) starts one process on the CPU whatever N is, and leaves only an
    address for the others to meet at. Then this process turns into torchrun with N workers; otherwise
    nothing happens.

    Raises:
        TrainingError: more processes were asked for, but how many cannot be told.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    started = any(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE"))
    if not on_cpu or started or "MASTER_PORT" not in os.environ:
        return
    import psutil  # comes with accelerate, which may be missing

    parent = psutil.Process().parent()
    command = parent.cmdline() if parent is not None else []
    if not any("accelerate" in item for item in command):
        return
    count = _processes_in(command)
    if count is None:
        raise TrainingError(
            "accelerate launch started one process on the CPU although more are configured: say how many "
            f"with --num_processes, or use torchrun --nproc_per_node 2 -m {module} ... --cpu"
        )
    if count > 1:
        place = ["--nproc_per_node", str(count), "--master_port", os.environ["MASTER_PORT"]]
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *place, "-m", module, *argv])


def _processes_in(command: Sequence[str]) -> int | None:
    """N of `--num_processes N` in the command line of accelerate."""
    for item, following in pairwise([*command, ""]):
        name, _, value = item.partition("=")
        if name in ("--num_processes", "--num-processes"):
            number = value or following
            return int(number) if number.isdecimal() else None
    return None


def quiet_libraries(process: int) -> None:
    """Leave the terminal to our own progress bar; let other processes than the first report errors only."""
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    if process > 0:
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        logging.set_verbosity_error()
