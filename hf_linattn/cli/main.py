"""How a command starts, reports and ends: its processes, what they print, versions, exit status."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from hf_linattn.cli.versions import check_versions, installed
from hf_linattn.errors import LinattnError, ProcessLostError, TrainingError

RESUMABLE = "the same command with --resume goes on from the last checkpoint, without one from the start"
"""What to say of a command that was interrupted, where it has checkpoints."""


def exit_status(
    work: Callable[[], None], *, interrupted: str, extra: str = "eval", process: int = 0, alike: bool = False
) -> int:
    """Do a command's work; the exit status is 0 done, 1 failed, 130 interrupted.

    Args:
        work: everything behind the parsing of arguments, with the imports that take time.
        interrupted: what the user should know after Ctrl-C.
        extra: the extra that installs what the command needs.
        process: the rank of this process.
        alike: every process fails in the same way, so that one line is enough.
    """
    try:
        check_versions(extra)
        work()
    except LinattnError as error:
        message = " ".join(str(error).split())
        alike = alike and not isinstance(error, ProcessLostError)  # the first may be the one that is lost
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        message = f"{package} is not installed; pip install 'hf-linattn[{extra}]'"
    except (RuntimeError, MemoryError) as error:
        if not _is_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        more = f": {asked[1]} more cannot be had" if asked else ""
        message = f"out of memory{more}. Take fewer rows at a time, shorter ones, bfloat16 or a smaller model"
    except KeyboardInterrupt:
        if process == 0:
            sys.stderr.write(f"\ninterrupted; {interrupted}\n")
        return 130
    else:
        return 0
    if process == 0 or not alike:
        where = f" (process {process})" if process else ""
        sys.stderr.write(f"error{where}: {message}\n")
    return 1


def _is_memory(error: Exception) -> bool:
    """Tell whether memory ran out, of a device or of the computer; torch is not imported to ask."""
    kind = type(error).__name__
    return kind in ("OutOfMemoryError", "MemoryError") or "DefaultCPUAllocator" in str(error)


def start_missing_processes(module: str, argv: Sequence[str]) -> None:
    """Give `accelerate launch --cpu --num_processes N -m module ...` its N processes.

    accelerate (1.15, the newest tried) hands N to mpirun alone: without `--mpirun_hostfile` it starts
    one process on the CPU whatever N is, and leaves only an address for the others to meet at. A run that
    should use N processes would silently use one. N itself stands in no environment variable, so it is read
    from the command line of the parent; then this process turns into torchrun with N workers. In every other
    case nothing happens.

    Args:
        module: the command, as `python -m` takes it.
        argv: its arguments.

    Raises:
        TrainingError: more processes were asked for, but how many is unknown.
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
    """Read N of `--num_processes N` in the command line of accelerate."""
    for item, following in pairwise([*command, ""]):
        name, _, value = item.partition("=")
        if name in ("--num_processes", "--num-processes"):
            number = value or following
            return int(number) if number.isdecimal() else None
    return None


def quiet_libraries(process: int, *, data_bars: bool = True) -> None:
    """Leave the terminal to our own progress bar; let other processes than the first report errors only.

    Args:
        process: the rank of this process.
        data_bars: the first process shows the bars of `datasets`, of loading and tokenizing.
    """
    import datasets
    from transformers.utils import logging

    logging.disable_progress_bar()
    if process > 0 or not data_bars:
        datasets.disable_progress_bars()
    if process > 0:
        datasets.logging.set_verbosity_error()
        logging.set_verbosity_error()


def package_versions(packages: Iterable[str], *, missing: str | None = None) -> dict[str, str]:
    """Map distributions to their versions.

    Args:
        packages: names as pip knows them.
        missing: what stands for one that is not installed; with None it is left out.
    """
    found = {name: installed(name) or missing for name in packages}
    return {name: version for name, version in found.items() if version is not None}
