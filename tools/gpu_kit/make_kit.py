"""Build a folder that checks and measures the package on a machine with a GPU and without a network.

    python tools/gpu_kit/make_kit.py build/gpu-kit

It holds `gpu_check.py` with its stages, the package's own wheel, wheels of what an image with torch, triton,
transformers, pyarrow and matplotlib lacks (Python 3.12, Linux, x86-64), books-1m and novels. The data come
from HF_LINATTN_DATA.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MOST = 60_000_000
"""Bytes of the whole folder."""
LACKING = ("datasets", "dill", "multiprocess", "xxhash", "accelerate", "psutil", "einops", "tqdm", "fla-core")
"""Distributions that are carried; the package's extras and the wheel of datasets say which versions."""
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_12")
TARGET = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
TEXTS = ("eval/*.md", "train/Middlemarch.md")
"""More than a million tokens of books-1m's tokenizer."""


class Refused(Exception):
    """Raised with one line for the user."""


def main(folder: Path, data: str | None) -> None:
    """Build the folder, and put it in its place when it is whole.

    Raises:
        Refused: what is needed is not there, or the folder is something else.
    """
    if not data or not Path(data, "models", "books-1m").is_dir():
        raise Refused("HF_LINATTN_DATA names no folder with models/books-1m and text/books")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())) and not is_kit(folder):
        raise Refused(f"{folder} is there and is no kit: name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as partial:
        new = Path(partial, "kit")
        fill(new, Path(data))
        size = size_of(new)
        if size > MOST:
            raise Refused(f"the kit has {size / 1e6:.1f} MB, more than {MOST / 1e6:.0f}: carry less")
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    print(f"{folder}: {size / 1e6:.1f} MB")
    print(f"there: python {folder.name}/gpu_check.py all --output-dir OUT")


def is_kit(folder: Path) -> bool:
    """Tell whether a folder was built by this program."""
    return (folder / "gpu_check.py").exists() and (folder / "wheels").is_dir()


def size_of(folder: Path) -> int:
    """Sum up the bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fill(new: Path, data: Path) -> None:
    """Write all parts of the kit."""
    copy(HERE / "gpu_check.py", new)
    for path in sorted((HERE / "gpu_stages").glob("*.py")):
        copy(path, new / "gpu_stages")
    for path in sorted((data / "models" / "books-1m").iterdir()):
        copy(path, new / "model")
    for pattern in TEXTS:
        for path in sorted((data / "text" / "books").glob(pattern)):
            copy(path, new / "text")
    wheels = new / "wheels"
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # of a build before, with files that are gone
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT))
    wanted = versions((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    download(wheels, [wanted["datasets"]])
    (of_datasets,) = wheels.glob("datasets-*.whl")
    wanted = needs(of_datasets) | wanted
    download(wheels, [wanted.get(name, name) for name in LACKING if name != "datasets"])


def copy(path: Path, folder: Path) -> None:
    """Copy a file, readable and writable for who builds again."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, folder / path.name)


def versions(text: str) -> dict[str, str]:
    """Read name -> requirement out of pyproject.toml's lists, the last one of each name."""
    found = re.findall(r'"([a-z][a-z0-9-]*)((?:[<>=!~]=?[^",;]+,?)+)', text)
    return {name: name + version for name, version in found}


def needs(wheel: Path) -> dict[str, str]:
    """Read name -> requirement out of a wheel's metadata, extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (x for x in archive.namelist() if x.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    plain = [text for text in wanted if "extra ==" not in text and "[" not in text]
    return {re.split(r"[<>=!~ ;]", text)[0]: text.partition(";")[0].replace(" ", "") for text in plain}


def download(wheels: Path, wanted: list[str]) -> None:
    """Fetch wheels for the target machine, whatever this machine is."""
    tags = [word for tag in PLATFORMS for word in ("--platform", f"{tag}_x86_64")]
    pip("download", *TARGET, *tags, "-d", str(wheels), *wanted)


def pip(*words: str) -> None:
    """Run pip.

    Raises:
        Refused: it fails; with the end of what it said.
    """
    command = [sys.executable, "-m", "pip", words[0], "-q", "--disable-pip-version-check", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise Refused(f"pip {words[0]} failed: {' '.join(lines)[-400:]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/gpu_kit/make_kit.py FOLDER")
    try:
        main(Path(sys.argv[1]), os.environ.get("HF_LINATTN_DATA"))
    except Refused as error:
        sys.exit(f"error: {error}")
