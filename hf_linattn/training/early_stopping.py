"""Early stopping: when a run no longer gets better, and the weights of its best validation."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from hf_linattn.training.checkpoint import Checkpoint
from hf_linattn.training.fsdp import reshard


class EarlyStop:
    """The validations of a run. With patience, the weights of the best one are on the disk.

    Args:
        model: what trains, on this process.
        output_dir: of the run.
        patience: validations without a lower loss that end it; 0 never does, and keeps no weights.
        losses: of the validations before it was resumed.
        write: False in the processes that only help to gather sharded tensors.
    """

    def __init__(
        self, model: nn.Module, output_dir: Path, patience: int, losses: list[float], *, write: bool
    ) -> None:
        self.model, self.patience, self.losses, self.write = model, patience, losses, write
        self._file = Checkpoint(output_dir, "best")
        # It may be ahead of a resumed run, which then comes by the same weights again.
        self._best = (self._file.progress() or {}) if patience else {}

    def note(self, loss: float, step: int, *, sharded: bool) -> None:
        """Note the validation after a step, and save the weights where it is the best one."""
        self.losses.append(loss)
        if self.patience and (not self._best or loss < self._best["loss"]):
            if sharded:
                reshard(self.model)
            self._best = {"loss": loss, "step": step}
            self._file.save(self.model, None, self._best, write=self.write)

    def reached(self) -> bool:
        """Tell whether the last `patience` validations were no better than one before them."""
        patience, losses = self.patience, self.losses
        return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])

    def restore(self, step: int) -> tuple[int, float | None]:
        """Put the best weights back, where there are any other than those of `step`, the last one.

        Returns:
            The step whose weights the model now has, and their validation loss, None without validations.
        """
        if not self._best:
            return step, self.losses[-1] if self.losses else None
        if self._best["step"] != step:
            self._file.load(self.model, None)
        return self._best["step"], self._best["loss"]
