"""Make a virtual environment and install this project with all that its tests need. Run by the Makefile.

    python3 tools/install.py .venv

PyTorch comes first, because its ordinary build for Linux brings gigabytes of GPU libraries: where no GPU is
seen, the CPU build is taken from PyTorch's own index, or from the usual one if that index does not answer.
Only the standard library is used, and nothing newer than Python 3.6 is written here, so that an old Python
gets a clear answer.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""The version that the project is tested with; TORCH=... takes another."""

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST = (3, 10)
ROOT = Path(__file__).resolve().parent.parent


def main(folder):
    """Install into the folder, unless the same has been installed there before."""
    if sys.version_info < OLDEST:
        have, need = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST))
        fail(f"Python {have} is too old, {need} or newer is needed: make PYTHON=/path/to/python3 ...")
    stamp = folder / ".installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + TORCH.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        stamp.touch()  # only the date of pyproject.toml has changed
        return
    print(f"installing into {folder}; this takes some minutes the first time", flush=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    if not python.exists() or not works(python, "import pip"):
        make_environment(folder, python)
    if not works(python, "import torch"):
        install_torch(python)
    if not pip(python, "-e", f"{ROOT}[dev]"):
        fail("pip could not install the project; see its messages above")
    compile_modules(python, folder)
    stamp.write_text(wanted)


def make_environment(folder, python):
    """A virtual environment with pip, also where the system's Python lacks the means for one."""
    import venv

    try:
        venv.EnvBuilder(with_pip=True, clear=folder.exists()).create(str(folder))
        return
    except (subprocess.CalledProcessError, ImportError, OSError) as error:
        reason = error
    # Debian and Ubuntu keep ensurepip in a package of its own; an installed pip can stand in for it
    venv.EnvBuilder(with_pip=False, clear=True).create(str(folder))
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "pip"]
    if subprocess.call(command) != 0:
        fail(f"cannot make a virtual environment ({reason}); on Debian or Ubuntu: apt install python3-venv")


def install_torch(python):
    """PyTorch: the CPU build where no GPU is seen."""
    if platform.system() != "Darwin" and not sees_gpu():
        print(f"no GPU seen: looking for the CPU build of {TORCH}", flush=True)
        if pip(python, "--timeout", "10", "--retries", "0", "--index-url", CPU_INDEX, *TORCH.split()):
            return
        print(f"{CPU_INDEX} does not help; taking the usual index", flush=True)
    if not pip(python, *TORCH.split()):
        fail(f"pip could not install {TORCH}; TORCH='torch>=2.9,<3' make ... tries another version")


def sees_gpu():
    """Whether NVIDIA's driver lists a GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        listed = subprocess.run(
            [program, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and b"GPU" in listed.stdout


def works(python, code):
    """Whether this Python runs the code without error."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.call([str(python), "-c", code], **quiet) == 0


def pip(python, *arguments):
    """Run pip install in the environment; whether it succeeded."""
    options = ["--disable-pip-version-check", "--no-compile", "-q"]
    return subprocess.call([str(python), "-m", "pip", "install", *options, *arguments]) == 0


def compile_modules(python, folder):
    """Compile to bytecode on all processors, where pip takes one; but the tests of others."""
    command = [str(python), "-m", "compileall", "-qq", "-j", "0", "-x", r"[\\/]tests[\\/]", str(folder)]
    subprocess.call(command)  # what does not compile says so when it is imported


def fail(message):
    """End with one line."""
    sys.exit("error: " + message)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        fail("usage: python3 tools/install.py FOLDER")
    main(Path(sys.argv[1]))
