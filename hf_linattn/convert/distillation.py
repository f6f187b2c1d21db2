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
from hf_linattn.training.divergence import ComparisonTarget, Text, compare_predictions
from hf_linattn.training.loop import next_tokens
from hf_linattn.training.objectives import CACHELESS, Objective

PREDICTIONS = compare_predictions(CACHELESS)


def frozen_teacher(model: nn.Module, comparison: ComparisonTarget = PREDICTIONS) -> Callable[[Tensor], Any]:
    """Make a teacher of another model, and freeze it; the teacher takes token ids `[B, N]`.

    Args:
        model: the original.
        comparison: what is compared, by default the predictions of the next token.
    """
    model.eval().requires_grad_(False)
    return lambda input_ids: comparison.run(model, input_ids)


def teacher_inside(model: Any, comparison: ComparisonTarget = PREDICTIONS) -> Callable[[Tensor], Any]:
    """Make a teacher of the same weights without patch and LoRA: no second copy of the model.

    Args:
        model: patched, with LoRA (a `peft` model), whose own weights are frozen.
        comparison: what is compared, as for `frozen_teacher`.
    """

    def teach(input_ids: Tensor) -> Any:
        training = model.training
        model.eval()
        try:
            with model.disable_adapter(), bypassed(model):
                return comparison.run(model, input_ids)
        finally:
            model.train(training)

    return teach


class DistillationLoss:
    """Loss function and preparation for the training loop.

    Args:
        teacher: token ids `[B, N]` -> what is compared, such as predictions, on the same device.
        drop_window: probability that a step trains the linear branch of hybrids alone, without their window.
        seed: of that choice, which is the same in all processes.
        objective: what the model predicts; with masked tokens both models see the masks, and every token of a
            row is compared. None: the next token.
        ce_weight: of the objective's own loss on the text, which is added to the divergence.
    """

    def __init__(
        self,
        teacher: Callable[[Tensor], Any],
        drop_window: float = 0.0,
        seed: int = 0,
        objective: Objective | None = None,
        ce_weight: float = 0.0,
    ) -> None:
        self.teacher, self.drop_window, self.seed, self.objective = teacher, drop_window, seed, objective
        self.ce_weight = ce_weight
        self.comparison = PREDICTIONS if objective is None else objective.comparison
        self.step = 0

    def prepare(self, blocks: NDArray[np.int32], row_ids: NDArray[np.int64], step: int) -> NDArray[np.int32]:
        """Remember the step, 0 in validation, and prepare the blocks as the objective does."""
        self.step = step
        prepare = None if self.objective is None else self.objective.prepare
        return blocks if prepare is None else prepare(blocks, row_ids, step)

    def __call__(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Compute the mean loss of each row: `[B, N]`, or what `prepare` made of it, -> `[B]`."""
        input_ids = batch if self.objective is None else self.objective.input_ids(batch)
        with torch.no_grad():
            target = self.teacher(input_ids)
        with use_branches(model, "linear") if self._drops(model) else nullcontext():
            output = self.comparison.run(model, input_ids)
        chosen = None if self.objective is None else self.objective.chosen
        how: dict[str, Any] = {} if chosen is None else {"chosen": chosen(batch)}
        if self.ce_weight:
            targets = next_tokens if self.objective is None else self.objective.targets
            assert targets is not None  # refused before
            how["text"] = Text(targets(batch), self.ce_weight)
        losses: Tensor = self.comparison.divergence(output, target, **how)
        return losses

    def _drops(self, model: nn.Module) -> bool:
        if not self.drop_window or not self.step or not hybrids(model):
            return False
        return bool(np.random.default_rng([self.seed, self.step]).random() < self.drop_window)
