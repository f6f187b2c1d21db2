"""Files of verdicts on kernels: name -> what is wrong with them, None for nothing."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def read(path: Path | None) -> dict[str, str | None]:
    """Read verdicts, name -> what is wrong; nothing from a file that is missing or broken."""
    try:
        found = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): why for name, why in found.items() if why is None or (isinstance(why, str) and why)}


def write(path: Path | None, name: str, why: str | None) -> None:
    """Add a verdict to those that any process has written; not where the folder cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # whole or not at all: another process may read it now
        handle, new = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(read(path) | {name: why}, file, indent=1)
            Path(new).replace(path)
        except BaseException:
            Path(new).unlink(missing_ok=True)
            raise
    except OSError:  # the next process checks again
        return
