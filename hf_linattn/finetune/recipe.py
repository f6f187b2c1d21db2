"""How a training run trains: what it loads, which parameters move by which loss, and what it leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.finetune.model import choose_trained, load_model
from hf_linattn.patching.interface import PATCH_PART
from hf_linattn.training.loop import LossFunction, Preparation, TargetCount
from hf_linattn.training.objectives import Objective


@dataclass(frozen=True)
class TrainingRun:
    """The run that a recipe is built for.

    Attributes:
        arguments: its options.
        objective: what is learned.
        blocks: training rows, `[blocks, N]`.
        accelerator: of this process.
    """

    arguments: FinetuneArguments
    objective: Objective
    blocks: NDArray[np.int32]
    accelerator: Accelerator


class TrainingRecipe:
    """Fine-tuning on the text itself; other recipes override parts.

    Args:
        patch_rate: factor of the learning rate for the patch's parameters.

    Attributes:
        settings: what decides the trained weights besides the arguments; a resumed run must have the same.
        label: of the loss in pictures.
        losses, prepare, count_targets: for the training loop; set by `build`.
        skips: whether some steps leave trained parameters without a gradient; set by `build`.
        compiles: whether --compile has a meaning for it.
    """

    settings: dict[str, Any]
    label = "loss (nats per token)"
    losses: LossFunction
    prepare: Preparation | None = None
    count_targets: TargetCount | None = None
    skips = False
    compiles = True

    def __init__(self, patch_rate: float = 1.0) -> None:
        self.patch_rate = patch_rate
        self.settings = {} if patch_rate == 1 else {"patch_rate": patch_rate}

    def load(self, arguments: FinetuneArguments, objective: Objective) -> PreTrainedModel:
        """Load the model and patch it."""
        return load_model(arguments, objective)

    def build(self, base: PreTrainedModel, run: TrainingRun) -> nn.Module:
        """Make of a loaded model the module to train, all parameters of it that require gradients."""
        objective = run.objective
        assert objective.losses is not None  # where nothing is predicted, a recipe with a teacher stands here
        self.losses, self.prepare = objective.losses, objective.prepare
        self.count_targets = objective.count_targets
        return choose_trained(base, run.arguments, objective)

    def rate(self, name: str) -> float:
        """Tell the factor of the learning rate for the parameter of this name."""
        return self.patch_rate if PATCH_PART in name else 1.0

    def export(self, module: Any) -> Any:
        """Give the model to save, from what went through the loop."""
        return module

    def results(self) -> dict[str, Any]:
        """Give what goes into results.json in addition to what every run writes there."""
        return {}
