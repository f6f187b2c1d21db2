"""Distillation: a patched model learns to predict as the original does, token by token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_linattn.branches import hybrids, use_branches
from hf_linattn.bypass import bypassed


def token_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher || student) of every token's prediction, in nats: logits `[B, N, V]` -> `[B, N]`."""
    given, wanted = F.log_softmax(student.float(), -1), F.log_softmax(teacher.float(), -1)
    return F.kl_div(given, wanted, reduction="none", log_target=True).sum(-1)


def frozen_teacher(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Logits of another model, which is frozen here."""
    model.eval().requires_grad_(False)
    return lambda input_ids: model(input_ids=input_ids, use_cache=False).logits


def teacher_inside(model: Any) -> Callable[[Tensor], Tensor]:
    """Logits of the same weights without patch and without LoRA: no second copy of the model.

    Args:
        model: patched, with LoRA (a `peft` model), whose own weights are frozen.
    """

    def logits(input_ids: Tensor) -> Tensor:
        training = model.training
        model.eval()
        try:
            with model.disable_adapter(), bypassed(model):
                output: Tensor = model(input_ids=input_ids, use_cache=False).logits
        finally:
            model.train(training)
        return output

    return logits


class DistillationLoss:
    """Loss function and preparation for the training loop.

    Args:
        teacher: token ids `[B, N]` -> logits `[B, N, V]`, on the same device.
        drop_window: probability that a step trains the linear branch of hybrids alone, without their window.
        seed: of that choice, which is the same in all processes.
    """

    def __init__(self, teacher: Callable[[Tensor], Tensor], drop_window: float = 0.0, seed: int = 0) -> None:
        self.teacher, self.drop_window, self.seed = teacher, drop_window, seed
        self.step = 0

    def prepare(self, blocks: NDArray[np.int32], numbers: NDArray[np.int64], step: int) -> NDArray[np.int32]:
        """Remember the step; 0 is the validation."""
        self.step = step
        return blocks

    def __call__(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """Mean divergence of each row: `[B, N]` -> `[B]`."""
        with torch.no_grad():
            wanted = self.teacher(input_ids)
        with use_branches(model, "linear") if self._drops(model) else nullcontext():
            given = model(input_ids=input_ids, use_cache=False).logits
        return token_divergence(given, wanted).mean(1)

    def _drops(self, model: nn.Module) -> bool:
        if not self.drop_window or not self.step or not hybrids(model):
            return False
        return bool(np.random.default_rng([self.seed, self.step]).random() < self.drop_window)
