"""Runs commands one after the other in the processes of one `accelerate launch`: libraries load once.

    accelerate launch --use_fsdp ... tests/helpers/fsdp_jobs.py jobs.json

Every job is a process of its own beside each launched one, with a group of its own. jobs.json is a list of
objects: `command` (finetune or convert), `argv`, `port`, `environment`, and `kill`, the [part of the output
folder, step] at which process 0 gets SIGKILL, or null. Writes `<job number>.<process>.json`: the exit
status, the part of the trained parameters that a process held in its steps, and the checkpoints left.
"""

# ruff: noqa: F401  libraries are loaded once, for all jobs

import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import peft

from hf_linattn import from_pretrained, registry
from hf_linattn.convert import __main__ as convert
from hf_linattn.convert import run as convert_run
from hf_linattn.finetune import __main__ as finetune
from hf_linattn.finetune import run as finetune_run
from hf_linattn.training import loop

COMMANDS = {"convert": convert, "finetune": finetune}


def watched(part, kill):
    """Note how much of the parameters is here in every step; SIGKILL in process 0 at the given one."""
    before = loop.TrainingLoop._train_step

    def step(self):
        here = sum(getattr(p, "_local_tensor", p).numel() for p in self.parameters)
        part.write_text(str(here / sum(p.numel() for p in self.parameters)))
        if self.log is not None and kill and kill[0] in str(self.log.path) and self.step + 1 == kill[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return before(self)

    loop.TrainingLoop._train_step = step


def no_pictures(set_attribute=setattr):
    """They take longer than the training here."""
    set_attribute(finetune_run, "save_loss_curve", lambda rows, path, *rest: path.write_bytes(b""))
    set_attribute(convert_run, "write_page", lambda result: None)


def run(name, job):
    no_pictures()
    os.environ |= {"MASTER_PORT": job["port"], "TORCHELASTIC_USE_AGENT_STORE": "False"}
    os.environ |= job["environment"]
    log = Path(f"{name}.err").open("w", buffering=1)  # noqa: SIM115  open till the end
    os.dup2(log.fileno(), 2)
    watched(Path(f"{name}.part"), job["kill"])
    return COMMANDS[job["command"]].main(job["argv"])


def wait(child):
    """Exit status, minus the signal for a killed one; who waits for a dead partner is killed too."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too long"


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    from_pretrained(jobs[0]["argv"][jobs[0]["argv"].index("--model") + 1])
    registry.patches()
    gc.freeze()  # collections in the jobs leave alone what they have from here
    for number, job in enumerate(jobs):
        name = f"{number}.{os.environ['RANK']}"
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run(name, job)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        ended = {"exit": wait(child), "part": float(Path(f"{name}.part").read_text())}
        output = Path(job["argv"][job["argv"].index("--output-dir") + 1])
        ended["left"] = sorted(str(path) for path in output.rglob("state.safetensors"))
        Path(f"{name}.json").write_text(json.dumps(ended))
