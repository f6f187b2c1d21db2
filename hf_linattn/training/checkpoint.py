"""The checkpoint and the log of a training run, which survive a kill at any moment.

Everything is written under another name, flushed to the disk and renamed; so a reader, and a run that
starts again, sees the old file or the new one, never a part. The checkpoint holds only what cannot be had
again: trainable parameters, the optimiser's state and the step. It is a safetensors file: no pickle.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_linattn.cli.files import flush_to_disk, replacing, writing
from hf_linattn.errors import TrainingError
from hf_linattn.training.fsdp import distribute_like, full_tensor

CSV_COLUMNS = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "eval_loss")

AGAIN = "restore the file, or begin again with --overwrite"


class Checkpoint:
    """A checkpoint of a run, `checkpoint/state.safetensors`, replaced as training goes on."""

    def __init__(self, output_dir: Path, name: str = "state") -> None:
        self.path = output_dir / "checkpoint" / f"{name}.safetensors"

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        progress: Mapping[str, Any],
        *,
        write: bool = True,
    ) -> None:
        """Replace the checkpoint by the present state.

        Args:
            model: whose trainable parameters and buffers are saved.
            optimizer: of those parameters; None saves the weights alone.
            progress: JSON.
            write: False in the processes that only help to gather sharded tensors.

        Raises:
            TrainingError: it cannot be written; the previous checkpoint is still there.
        """
        tensors = {f"model.{name}": tensor for name, tensor in _changing_tensors(model).items()}
        states = {} if optimizer is None else optimizer.state
        for name, parameter in _trainable(model).items():
            for key, value in states.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = value
        for name, tensor in tensors.items():
            if write:
                tensors[name] = _gathered(tensor)
            else:
                full_tensor(tensor.detach())
        if not write:
            return
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as partial:
            save_file(tensors, partial, metadata={"progress": json.dumps(progress)})

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any] | None:
        """Put the saved state into model and optimiser and return its progress; None when nothing is saved.

        Raises:
            TrainingError: the file is damaged or belongs to another model.
        """
        progress = self.progress()
        if progress is None:
            return None
        with self._reading() as file:
            saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        current, parameters = _changing_tensors(model), _trainable(model)
        shapes = {f"model.{name}": tensor.shape for name, tensor in current.items()}
        states = {name: tensor for name, tensor in saved.items() if name.startswith("optimizer.")}
        if shapes != {name: tensor.shape for name, tensor in saved.items() if name not in states} or any(
            (known := parameters.get(name.split(".", 2)[-1])) is None or tensor.shape not in ((), known.shape)
            for name, tensor in states.items()
        ):
            raise TrainingError(f"the checkpoint {self.path} holds other parameters than this model trains")
        if optimizer is not None and not states:
            raise TrainingError(f"the checkpoint {self.path} holds no state of the optimizer: {AGAIN}")
        for name, tensor in saved.items():
            kind, _, rest = name.partition(".")
            if kind == "model":
                with torch.no_grad():
                    current[rest].copy_(distribute_like(tensor, current[rest]))
            elif optimizer is not None:
                key, _, parameter = rest.partition(".")
                # AdamW counts its steps on the CPU
                target = tensor if key == "step" else distribute_like(tensor, parameters[parameter])
                optimizer.state[parameters[parameter]][key] = target
        return progress

    def progress(self) -> dict[str, Any] | None:
        """Read the progress that was saved with the tensors; None when nothing is saved.

        Raises:
            TrainingError: the file is damaged.
        """
        if not self.path.exists():
            return None
        with self._reading() as file:
            progress: dict[str, Any] = json.loads((file.metadata() or {}).get("progress", ""))
        return progress

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError, ValueError) as error:
            raise TrainingError(f"cannot read the checkpoint {self.path}: {error}") from error

    def sweep(self) -> None:
        """Delete what a kill left of unfinished checkpoints."""
        for path in self.path.parent.glob("*.partial"):
            path.unlink()

    def remove(self) -> None:
        """Delete the checkpoint."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def _gathered(tensor: Tensor) -> Tensor:
    """All of a tensor; what was sharded over devices goes to the CPU, since no device need hold all."""
    local = tensor.detach()
    full = full_tensor(local)
    return (full if full is local else full.cpu()).contiguous()


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _changing_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters and the buffers that belong to the saved model."""
    saved_names = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved_names}
    return {**buffers, **_trainable(model)}


class TrainLog:
    """`train.csv`: one row per step, none missing and none twice however often the run was killed.

    A row is handed to the operating system as soon as its step is done. `sync` before a checkpoint makes sure
    that the log is never behind it; a resumed run cuts the rows after its checkpoint and writes them again.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        """Keep the rows up to `last_step`, that of the checkpoint; 0 starts a new log.

        Raises:
            TrainingError: a row is missing, or the log cannot be written.
        """
        self.path = path
        self.rows: list[dict[str, str]] = []
        if last_step > 0:
            self.rows = [row for row in _complete_rows(path) if int(row["step"]) <= last_step]
            missing = {*range(1, last_step + 1)} - {int(row["step"]) for row in self.rows}
            if missing:  # no kill does this: the log is synced before the checkpoint
                raise TrainingError(
                    f"{path} lacks step {min(missing)}, and the checkpoint beside it is of step {last_step}: "
                    f"{AGAIN}"
                )
        with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)

    def append(self, **values: float | None) -> None:
        """Add a row; None leaves a cell empty."""
        row = {name: "" if values.get(name) is None else repr(values[name]) for name in CSV_COLUMNS}
        self.rows.append(row)
        with writing(self.path), self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n").writerow(row)

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        with writing(self.path):
            flush_to_disk(self.path)


def _complete_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a log; the last line may be cut off, but then it is later than the checkpoint."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))
    return [row for row in rows if (row.get("step") or "").isdecimal() and row.get("tokens")]
