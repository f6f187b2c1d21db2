"""The stages of a conversion as methods of a training run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from hf_linattn import from_pretrained, is_patched, unpatch_model
from hf_linattn.convert.attention_transfer import AttentionTransfer, Target
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher, teacher_inside
from hf_linattn.errors import TrainingError
from hf_linattn.finetune.method import Method
from hf_linattn.finetune.model import choose_trained, switch_off_dropout
from hf_linattn.patching.contexts import hybrids
from hf_linattn.patching.interface import PATCH_PART
from hf_linattn.training.fsdp import shard_frozen
from hf_linattn.training.objectives import Objective

if TYPE_CHECKING:
    from hf_linattn.finetune.__main__ import FinetuneArguments

PROJECTIONS_RATE = 0.1
"""Learning rate of copied projections, as a part of the maps'."""


class Transfer(Method):
    """Stage `transfer`: see `hf_linattn.convert.attention_transfer`."""

    def __init__(self, target: Target, projections: bool) -> None:
        super().__init__()
        self.settings = {"stage": "transfer", "target": target, "train_projections": projections}
        self.target: Target = target
        self.projections = projections
        self.label = (
            "squared error / variance" if target == "output" else "divergence of weights (nats per query)"
        )

    def trained(
        self,
        base: PreTrainedModel,
        arguments: FinetuneArguments,
        task: Objective,
        blocks: NDArray[np.int32],
        accelerator: Accelerator,
    ) -> nn.Module:
        """The patch beside the model's own attention.

        Raises:
            TrainingError: the patch has no parameters.
        """
        transfer = AttentionTransfer(
            base, self.target, projections=self.projections, keywords=task.keywords
        ).to(accelerator.device)
        row = torch.from_numpy(blocks[:1]).to(accelerator.device, dtype=torch.int64)
        if not transfer.freeze_unused(row):
            raise TrainingError(
                "stage transfer trains the parameters of the patch, and "
                f"{arguments.patch or 'that of ' + arguments.model} has none. Give --learn-front (a learned "
                "layer in front of its map), --train-projections, or leave the stage out (--stages distill)"
            )
        self.losses, self.prepare = lambda module, batch: module(task.seen(batch)), task.prepare
        self.module, self.row = transfer, row
        return transfer

    def rate(self, name: str) -> float:
        """Projections were trained before, maps were not."""
        return PROJECTIONS_RATE if name.startswith("copies.") else 1.0

    def saved(self, module: Any) -> Any:
        """The model with what was learned."""
        return module.finish()

    @torch.no_grad()
    def results(self) -> dict[str, Any]:
        """The error of each layer, on the first row of the text."""
        self.module(self.row)
        return {"layer_losses": self.module.layer_losses}


class Distill(Method):
    """Stage `distill`: see `hf_linattn.convert.distillation`.

    Args:
        teacher: folder or Hub name of the original; None where it is the model itself without patch and LoRA.
        drop_window: see `DistillationLoss`.
        patch_rate: see `Method`.
        ce_weight: see `DistillationLoss`.
    """

    def __init__(
        self, teacher: str | None, drop_window: float, patch_rate: float = 1.0, ce_weight: float = 0.0
    ) -> None:
        super().__init__(patch_rate)
        self.settings |= {"stage": "distill", "teacher": teacher, "drop_window": drop_window}
        self.teacher, self.drop_window, self.ce_weight = teacher, drop_window, ce_weight
        if ce_weight:
            self.settings["ce_weight"] = ce_weight

    def trained(
        self,
        base: PreTrainedModel,
        arguments: FinetuneArguments,
        task: Objective,
        blocks: NDArray[np.int32],
        accelerator: Accelerator,
    ) -> nn.Module:
        """All weights, or LoRA; and the teacher beside or inside."""
        module = choose_trained(base, arguments, task)
        if self.teacher is None:
            wanted = teacher_inside(module, task.reading)
        else:
            teacher = shard_frozen(accelerator, original(self.teacher, arguments.dtype, task))
            wanted = frozen_teacher(teacher, task.reading)
        loss = DistillationLoss(wanted, self.drop_window, arguments.seed, task, self.ce_weight)
        self.losses, self.prepare = loss, loss.prepare
        text = f" + {self.ce_weight:g} x loss on the text" if self.ce_weight else ""
        self.label = f"divergence from the original{text} ({task.reading.unit})"
        poolers = task.name == "states"  # behind the hidden states, untrained
        self.skips = poolers or bool(self.drop_window and hybrids(module))  # how window and rest are mixed
        return module


def original(name: str, dtype: str, task: Objective) -> Any:
    """The model as it was before any patch, without dropout."""
    model = from_pretrained(name, auto_class=task.auto_class, dtype=getattr(torch, dtype)).eval()
    switch_off_dropout(model)
    return unpatch_model(model) if is_patched(model) else model


def patch_parameters(model: nn.Module) -> int:
    """Number of parameters that belong to patches."""
    return sum(p.numel() for name, p in model.named_parameters() if PATCH_PART in name)
