"""Experiment trackers: what a run writes to train.csv also goes to TensorBoard, W&B or Trackio."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from hf_linattn.cli.files import writing
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.patching.loading import first_line

LOGS = "logs"
"""The folder of a run's tracker: its id, and what TensorBoard reads."""

PROJECT = "hf_linattn"


def require_tracker(name: str | None) -> None:
    """See that a tracker is installed, which accelerate would pass over in silence.

    Raises:
        OptionError: it is not.
    """
    if name is not None and name not in map(str, get_available_trackers()):
        raise OptionError(f"--log-with {name}: {name} is not installed: pip install {name}")


@contextmanager
def tracking(
    accelerator: Accelerator, folder: Path, settings: Mapping[str, Any], step: int
) -> Iterator[None]:
    """Let the tracker that the accelerator was made with follow one run; a resumed run goes on in its own.

    Args:
        accelerator: of this process; rows come to the tracker by its `log`.
        folder: of the run; its last two names, and an id, are the run's.
        settings: of the run, for the record.
        step: the last one that is done.

    Raises:
        TrainingError: the tracker cannot start.
    """
    if not accelerator.log_with or not accelerator.is_main_process:
        yield
        return
    logs = folder / LOGS
    with writing(logs):
        logs.mkdir(exist_ok=True)
        number = logs / "id"
        if not number.exists():
            number.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    run = number.read_text(encoding="utf-8")
    name = "-".join([*folder.resolve().parts[-2:], run])
    accelerator.project_configuration.logging_dir = str(logs)
    tracker = str(accelerator.log_with[0])
    plain = {k: v if isinstance(v, int | float | str) else json.dumps(v) for k, v in settings.items()}
    start = {
        "tensorboard": {"purge_step": step + 1 if step else None},
        "wandb": {"name": name, "id": run, "resume": "allow", "dir": str(folder)},
        "trackio": {"name": name, "resume": "allow"},
    }
    try:
        accelerator.init_trackers(PROJECT, plain, start)
    except _errors(tracker) as error:
        raise TrainingError(f"--log-with {tracker} cannot start: {first_line(error)}") from error
    try:
        yield
    finally:
        for each in accelerator.trackers:
            each.finish()
        accelerator.trackers = []


def _errors(tracker: str) -> tuple[type[Exception], ...]:
    own = (import_module("wandb").Error,) if tracker == "wandb" else ()
    return (*own, OSError, ValueError, RuntimeError)
