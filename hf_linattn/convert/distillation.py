"""Distillation: a patched model learns to give what the original gives, token by token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hf_linattn.patching.contexts import bypassed, hybrids, use_branches
from hf_linattn.training.divergence import Reading, predictions
from hf_linattn.training.loop import next_token_nats
from hf_linattn.training.objectives import CACHELESS, Objective

PREDICTIONS = predictions(CACHELESS)


def frozen_teacher(model: nn.Module, reading: Reading = PREDICTIONS) -> Callable[[Tensor], Any]:
    """What another model gives, which is frozen here.

    Args:
        model: the original.
        reading: what is compared, by default the logits of a model that predicts the next token.
    """
    model.eval().requires_grad_(False)
    return lambda input_ids: reading.given(model(input_ids=input_ids, **reading.keywords))


def teacher_inside(model: Any, reading: Reading = PREDICTIONS) -> Callable[[Tensor], Any]:
    """What the same weights give without patch and without LoRA: no second copy of the model.

    Args:
        model: patched, with LoRA (a `peft` model), whose own weights are frozen.
        reading: as for `frozen_teacher`.
    """

    def wanted(input_ids: Tensor) -> Any:
        training = model.training
        model.eval()
        try:
            with model.disable_adapter(), bypassed(model):
                return reading.given(model(input_ids=input_ids, **reading.keywords))
        finally:
            model.train(training)

    return wanted


class DistillationLoss:
    """Loss function and preparation for the training loop.

    Args:
        teacher: token ids `[B, N]` -> what is compared, such as logits `[B, N, V]`, on the same device.
        drop_window: probability that a step trains the linear branch of hybrids alone, without their window.
        seed: of that choice, which is the same in all processes.
        task: what the model predicts; with masked tokens both models see the masks, and every token of a row
            is compared. None: the next token.
        ce_weight: of the task's own loss on the text, which is added to the divergence.
    """

    def __init__(
        self,
        teacher: Callable[[Tensor], Any],
        drop_window: float = 0.0,
        seed: int = 0,
        task: Objective | None = None,
        ce_weight: float = 0.0,
    ) -> None:
        self.teacher, self.drop_window, self.seed, self.task = teacher, drop_window, seed, task
        self.ce_weight = ce_weight
        self.reading = PREDICTIONS if task is None else task.reading
        self.step = 0

    def prepare(self, blocks: NDArray[np.int32], numbers: NDArray[np.int64], step: int) -> NDArray[np.int32]:
        """Remember the step, 0 is the validation; and prepare the blocks as the task wants."""
        self.step = step
        prepare = None if self.task is None else self.task.prepare
        return blocks if prepare is None else prepare(blocks, numbers, step)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean loss of each row: `[B, N]`, or what `prepare` made of it, -> `[B]`."""
        input_ids = batch if self.task is None else self.task.seen(batch)
        with torch.no_grad():
            wanted = self.teacher(input_ids)
        with use_branches(model, "linear") if self._drops(model) else nullcontext():
            output = model(input_ids=input_ids, **self.reading.keywords)
        losses = self.reading.divergence(self.reading.given(output), wanted)
        if self.ce_weight:
            nats = next_token_nats if self.task is None else self.task.nats
            assert nats is not None  # refused before
            given = output.logits
            losses = losses + self.ce_weight * nats(given, batch)
        return losses

    def _drops(self, model: nn.Module) -> bool:
        if not self.drop_window or not self.step or not hybrids(model):
            return False
        return bool(np.random.default_rng([self.seed, self.step]).random() < self.drop_window)
