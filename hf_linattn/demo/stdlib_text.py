"""The source text of the Python standard library: a corpus that every machine with Python has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

HELD_OUT = (
    "argparse.py",
    "tarfile.py",
    "typing.py",
    "subprocess.py",
    "doctest.py",
    "mailbox.py",
    "ipaddress.py",
    "statistics.py",
)
"""Files no model of this project was trained on; each longer than 8,192 tokens, in every Python from 3.10 to
3.13."""

SKIPPED_FOLDERS = frozenset(
    (
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "encodings",
        "pydoc_data",
        "_bundled",
    )
)


def stdlib_files(*, held_out: bool) -> list[Path]:
    """Sorted source files of the running interpreter's standard library.

    Args:
        held_out: True gives the files kept for evaluation, False all others. Tests, generated tables
            (`encodings`, `pydoc_data`) and build settings with local paths (`_sysconfigdata*`) belong to
            neither.

    Raises:
        FileNotFoundError: this Python was installed without the sources of its standard library.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    if held_out:
        files = [root / name for name in HELD_OUT if (root / name).is_file()]
    else:
        files = [
            path
            for path in sorted(root.rglob("*.py"))
            if not SKIPPED_FOLDERS.intersection(path.relative_to(root).parts)
            and not path.name.startswith("_sysconfigdata")
            and path.relative_to(root).as_posix() not in HELD_OUT
        ]
    if not files:
        raise FileNotFoundError(f"no standard-library sources in {root}: install Python with its .py files")
    return files
