"""A `python` that has imported torch and transformers already, for tests that start whole commands.

The imports take most of the time of a small command. A server imports them once and forks for every command;
`python` in the server's folder is a small script that hands over its arguments, environment and open files,
passes signals on and ends as the fork does. This package is not among the imports: a command loads it as
always. An environment that changes what the imports would do, or an option of Python that is not known here,
starts the real interpreter.

    python warm.py FOLDER       is the server; it ends when its standard input does
"""

import atexit
import contextlib
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from pathlib import Path

IMPORTS = ("accelerate", "datasets", "evaluate", "matplotlib.pyplot", "transformers.modeling_utils")
READ_BY_IMPORTS = (
    *("CUDA_", "HF_", "HOME", "LD_", "MKL_", "MPL", "PYTHON", "TORCH_", "TRANSFORMERS_"),
    "TRITON_INTERPRET",  # torch itself sets others as it compiles
)
OTHERS = ("HF_LINATTN_", "HF_XET_", "PYTHON_EXEC", "PYTHONPATH")  # not by them; lm_eval sets one of HF_XET_
READY = "ready"

SCRIPT = """#!{python} -SE
import json, os, signal, socket, sys
words, options = sys.argv[1:], []
if os.path.basename(sys.argv[0]) == "accelerate":
    words = ["-m", "accelerate.commands.accelerate_cli", *words]
while words[:1] == ["-W"]:
    options, words = [*options, words[1]], words[2:]
known = words and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
child = 0
if known:
    what = [os.path.join(os.path.dirname(__file__), "python"), words, options, dict(os.environ), os.getcwd()]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect({path!r})
    socket.send_fds(connection, [b"!"], [0, 1, 2])
    connection.sendall(json.dumps(what).encode("utf-8", "surrogateescape") + b"\\n")
    answers = connection.makefile("rb")
    child = int(answers.readline())
if not child:
    os.execv({python!r}, [{python!r}, *[x for o in options for x in ("-W", o)], *words])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: os.kill(child, number))
status = int(answers.readline())
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def read_by_imports(environment):
    """Variables that the imports look at, or may look at."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_BY_IMPORTS) and not name.startswith(OTHERS)
    }


def serve(folder):
    """Answer until the standard input ends; return in a fork what its command is."""
    path = str(folder / "socket")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    text = SCRIPT.format(python=sys.executable, path=path)
    for name in ("python", "accelerate"):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    print(READY, flush=True)
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return keep(connection)
        connection.close()


def keep(connection):
    """Fork once more; wait for the command, kill it when who asked for it is gone.

    Answers with the command's process, or 0 for the real interpreter, and then with its exit status.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    answers = connection.makefile("rwb", buffering=0)
    command = json.loads(answers.readline().decode("utf-8", "surrogateescape"))
    environment = command[3]
    if read_by_imports(environment) != read_by_imports(os.environ):
        answers.write(b"0\n")
        os._exit(0)
    child = os.fork()
    if child == 0:
        connection.close()
        answers.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        return command
    for file in (0, 1, 2, *files):
        os.close(file)
    answers.write(b"%d\n" % child)

    def watch():
        with contextlib.suppress(OSError):
            connection.recv(1)
        os.kill(child, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        answers.write(b"%d\n" % status)
    os._exit(0)


def become(plain, python, words, options, environment, folder):
    """Run a command in this process as `python` would; `plain` filters of warnings are its own."""
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable, sys.warnoptions[:] = python, options
    of_libraries = warnings.filters[: len(warnings.filters) - plain]
    warnings._processoptions(options)
    new = len(warnings.filters) - plain - len(of_libraries)
    warnings.filters[: new + len(of_libraries)] = of_libraries + warnings.filters[:new]
    random.seed()
    np.random.seed()  # noqa: NPY002  the generator that libraries share
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count())))
    kind, *rest = words
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if kind == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [kind, *rest], str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def end(status):
    """End as the interpreter does, but leave the memory alone: clearing what was imported takes seconds."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    plain = len(warnings.filters)
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # pages of what was imported stay shared
    command = serve(Path(sys.argv[1]))
    try:
        become(plain, *command)
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        end(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)
