"""Commands in two processes on one machine, as users launch them."""

import os
import subprocess
import sys

from helpers.fixtures_finetune import free_port

PYTHON = sys.executable
ALIKE = ("--mixed_precision", "no", "--dynamo_backend", "no")
ACCELERATE = ("accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", *ALIKE)
SHARDED = (*ACCELERATE, "--use_fsdp", "--fsdp_version", "2")
TORCHRUN = ("torch.distributed.run", "--nproc_per_node", "2")


def in_two_processes(*words, launcher=(*ACCELERATE, "--cpu"), cwd=None, python=None):
    """What a script, or `-m MODULE`, writes to stdout when it is launched with these words.

    `python` runs it, see helpers/warm.py; that of tests with `warm_start` if None.
    """
    port = "--master_port" if launcher is TORCHRUN else "--main_process_port"
    python = python or sys.executable
    # a process on the CPU asks its parent how many there are, and a warm one has another parent
    started = PYTHON if "--cpu" in launcher else python
    command = [started, "-m", *launcher, port, free_port(), *map(str, words)]
    environment = {
        **os.environ,
        "PYTHON_EXEC": python,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
