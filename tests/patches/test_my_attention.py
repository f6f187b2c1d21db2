"""The example of a patch in a package of its own: installed, found, and its own tests pass."""

import os
import subprocess
import sys

import pytest
from helpers.paths import EXAMPLES

import hf_linattn


def run(*command, **environment):
    env = {**os.environ, **environment}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("warm_start")
def test_installed_it_is_found_and_its_tests_pass(tmp_path):
    copy, target = tmp_path / "copy", tmp_path / "target"
    copy.mkdir()
    for path in (EXAMPLES / "my_attention").iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    run("-m", "pip", "install", "-q", *options, "--target", str(target), str(copy))
    where = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = "import hf_linattn, sys; print(*hf_linattn.available_patches())"
    assert "sparsemax" in run("-c", code, PYTHONPATH=where).split()
    said = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(copy), PYTHONPATH=where)
    assert "4 passed" in said
    assert "sparsemax" not in hf_linattn.available_patches()  # not here, where it is not installed


@pytest.mark.usefixtures("warm_start")
def test_a_package_that_does_not_load_is_named(tmp_path):
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hf_linattn.patches]\nbroken = no_such_module\n")
    code = (
        "import hf_linattn\n"
        "try: hf_linattn.available_patches()\n"
        "except hf_linattn.LinattnError as error: print(error)"
    )
    assert "'broken' (no_such_module)" in run("-c", code, PYTHONPATH=str(tmp_path))
