"""Wheels with the C++ kernels compiled: `HF_LINATTN_PREBUILT=1 python -m build --wheel --no-isolation`.

Without the variable a wheel is for any machine. With it the kernels are compiled for this kind of machine
(`hf_linattn/ops/cpp/prebuilt.py`), which needs a compiler, and torch and transformers beside setuptools.
`tools/wheel.py` builds such a wheel and tries it; the rest of the project's facts stand in pyproject.toml.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ASKED = os.environ.get("HF_LINATTN_PREBUILT") == "1"


class BuildKernels(build_py):
    """Copies the package, and compiles its kernels into the copy."""

    def run(self) -> None:
        """Copy and compile."""
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib, "hf_linattn", "ops", "cpp", "lib")
        shutil.rmtree(folder, ignore_errors=True)  # of a build before
        if ASKED:
            sys.path.insert(0, str(Path(__file__).parent))
            from hf_linattn.ops.cpp import prebuilt

            prebuilt.make(folder)


class Wheel(bdist_wheel):
    """Tags the wheel: any Python, for the kernels are called by ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return Python, ABI and platform."""
        return ("py3", "none", super().get_tag()[2])


class Binary(Distribution):
    """Says whether there is anything compiled."""

    def has_ext_modules(self) -> bool:
        """Tell."""
        return ASKED


setup(distclass=Binary, cmdclass={"build_py": BuildKernels, "bdist_wheel": Wheel})
