"""The stages of a conversion, as recipes of training runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_linattn import from_pretrained, is_patched, unpatch_model
from hf_linattn.convert.arguments import ConvertArguments, learning_rate_for
from hf_linattn.convert.attention_transfer import AttentionTransfer, Target
from hf_linattn.convert.calibration import calibrate, can_calibrate
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher, teacher_inside
from hf_linattn.convert.resolve import ConversionPlan, StagePlan
from hf_linattn.convert.teacher_cache import CachedTeacher
from hf_linattn.data import streams, token_ids
from hf_linattn.errors import TrainingError
from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.finetune.model import choose_trained, switch_off_dropout
from hf_linattn.finetune.recipe import TrainingRecipe, TrainingRun
from hf_linattn.patching.contexts import hybrids
from hf_linattn.patching.loading import explain_missing
from hf_linattn.registry import parse
from hf_linattn.training.arguments import TrainingArguments
from hf_linattn.training.estimate import check_weights_fit
from hf_linattn.training.fsdp import shard_frozen
from hf_linattn.training.objectives import Objective

PROJECTIONS_RATE = 0.1
"""Learning rate of copied projections, as a part of the maps'."""


def nothing_to_transfer(arguments: ConvertArguments | FinetuneArguments) -> TrainingError:
    """Make the error for a patch that has no parameters of its own."""
    patch = arguments.patch or f"that of {arguments.model}"
    stages = arguments.chosen_stages() if isinstance(arguments, ConvertArguments) else []
    others = ",".join(name for name in stages if name != "transfer") or "distill"
    return TrainingError(
        f"stage transfer trains the parameters of the patch, and {patch} has none. Give "
        "--learn-front (a learned layer in front of its map), --train-projections, or leave the "
        f"stage out (--stages {others})"
    )


class Transfer(TrainingRecipe):
    """Stage `transfer`: see `hf_linattn.convert.attention_transfer`."""

    compiles = False  # its hooks run attentions inside of layers

    def __init__(self, target: Target, projections: bool, calibrate_tokens: int = 0) -> None:
        super().__init__()
        self.settings = {"stage": "transfer", "target": target, "train_projections": projections}
        self.settings |= {"calibrate_tokens": calibrate_tokens} if calibrate_tokens else {}
        self.calibrate_tokens = calibrate_tokens
        self.target: Target = target
        self.projections = projections
        self.label = (
            "squared error / variance" if target == "output" else "divergence of weights (nats per query)"
        )

    def build(self, base: PreTrainedModel, run: TrainingRun) -> nn.Module:
        """Make the module that compares the patch with the model's own attention, layer by layer.

        Raises:
            TrainingError: the patch has no parameters.
        """
        objective, device = run.objective, run.accelerator.device
        self.calibration = calibrated(base, run, self.calibrate_tokens)
        transfer = AttentionTransfer(
            base, self.target, projections=self.projections, keywords=objective.keywords
        ).to(device)
        row = torch.from_numpy(token_ids(run.blocks[:1])).to(device, dtype=torch.int64)
        if not transfer.freeze_unused(row):
            raise nothing_to_transfer(run.arguments)
        self.losses = lambda module, batch: module(objective.input_ids(batch))
        self.prepare = objective.prepare
        self.module, self.row = transfer, row
        return transfer

    def rate(self, name: str) -> float:
        """Give copies of projections, which were trained before, a lower rate than maps."""
        return PROJECTIONS_RATE if name.startswith("copies.") else 1.0

    def export(self, module: Any) -> Any:
        """Put what was learned into the model."""
        return module.finish()

    @torch.no_grad()
    def results(self) -> dict[str, Any]:
        """Measure the error of each layer, on the first row of the text."""
        self.module(self.row)
        own = {"calibration": self.calibration} if self.calibration else {}
        return {"layer_losses": self.module.layer_losses, **own}


class Distill(TrainingRecipe):
    """Stage `distill`: see `hf_linattn.convert.distillation`.

    Args:
        teacher: folder or Hub name of the original; None where it is the model itself without patch and LoRA.
        drop_window: see `DistillationLoss`.
        patch_rate: see `TrainingRecipe`.
        ce_weight: see `DistillationLoss`.
        calibrate_tokens: to calibrate the patch with, before; 0 where a stage has done so.
        cache: folder of the teacher's predictions, which are read in the place of running it; None runs it.
    """

    def __init__(
        self,
        teacher: str | None,
        drop_window: float,
        patch_rate: float = 1.0,
        ce_weight: float = 0.0,
        calibrate_tokens: int = 0,
        cache: str | None = None,
    ) -> None:
        super().__init__(patch_rate)
        self.settings |= {"stage": "distill", "teacher": teacher, "drop_window": drop_window}
        self.teacher, self.drop_window, self.ce_weight = teacher, drop_window, ce_weight
        if ce_weight:
            self.settings["ce_weight"] = ce_weight
        self.settings |= {"calibrate_tokens": calibrate_tokens} if calibrate_tokens else {}
        self.calibrate_tokens = calibrate_tokens
        self.settings |= {"cache_teacher": cache} if cache is not None else {}
        self.cache = cache

    def build(self, base: PreTrainedModel, run: TrainingRun) -> nn.Module:
        """Let all weights of the model train, or LoRA; the losses compare it with the teacher."""
        arguments, objective = run.arguments, run.objective
        calibrated(base, run, self.calibrate_tokens)
        module = choose_trained(base, arguments, objective)
        predict: Callable[[Tensor], Any]
        which = ""
        if self.cache is not None:
            predict = cache = CachedTeacher(Path(self.cache).expanduser())
            which = f", its top {cache.top} predictions"
        elif self.teacher is None:
            predict = teacher_inside(module, objective.comparison)
        else:
            teacher = shard_frozen(run.accelerator, load_original(self.teacher, arguments.dtype, objective))
            predict = frozen_teacher(teacher, objective.comparison)
        loss = DistillationLoss(predict, self.drop_window, arguments.seed, objective, self.ce_weight)
        self.losses, self.prepare, self.count_targets = loss, loss.prepare, objective.count_targets
        text = f" + {self.ce_weight:g} x loss on the text" if self.ce_weight else ""
        self.label = f"divergence from the original{which}{text} ({objective.comparison.unit})"
        poolers = objective.name == "states"  # behind the hidden states, untrained
        self.skips = poolers or bool(self.drop_window and hybrids(module))  # how window and rest are mixed
        return module


def calibrated(model: PreTrainedModel, run: TrainingRun, tokens: int) -> dict[str, float]:
    """Calibrate a patch on the first rows of the text, at most `tokens`; see `calibration.calibrate`.

    Raises:
        TrainingError: there is less text.
    """
    if not tokens:
        return {}
    rows = token_ids(run.blocks[: max(1, tokens // run.blocks.shape[1])])
    if rows.size < tokens - run.blocks.shape[1]:
        raise TrainingError(
            f"the patch is calibrated on --calibrate-tokens {tokens}, and the text has {rows.size}: give "
            "more text or fewer tokens, or leave it out (--calibrate-tokens 0)"
        )
    device = run.accelerator.device
    model.to(device)
    return calibrate(model, torch.from_numpy(rows).to(device, dtype=torch.int64), run.objective.keywords)


def load_original(name: str, dtype: str, objective: Objective) -> Any:
    """Load a model as it was before any patch, without dropout, in evaluation mode.

    Raises:
        TrainingError: there is no such model.
    """
    model = load(name, dtype, objective).eval()
    switch_off_dropout(model)
    return unpatch_model(model) if is_patched(model) else model


def load(name: str, dtype: str, objective: Objective) -> Any:
    """Load a model, patched or not, from a folder or Hub name; the objective tells its class.

    Raises:
        TrainingError: there is no such model.
    """
    check_weights_fit(name, getattr(torch, dtype))
    with explain_missing(f"cannot load {name}", TrainingError):
        return from_pretrained(name, auto_class=objective.auto_class, dtype=getattr(torch, dtype))


def first_tokens(plan: ConversionPlan, count: int, data: Any) -> Tensor:
    """Read the first tokens, about so many, of the text that the stages learn from, whatever form it has.

    Args:
        plan: of the conversion.
        count: of tokens, as far as there are so many.
        data: text as `load_documents` takes it, in the place of --data.

    Returns:
        One behind the other, int64 `[tokens]`.

    Raises:
        DataError: the text cannot be read, or has no row.
    """
    rows = first_rows(plan, plan.objective, 2 + count // plan.arguments.block_size, data)
    return torch.from_numpy(token_ids(rows).ravel().astype("int64"))


def first_rows(plan: ConversionPlan, objective: Objective, count: int, data: Any) -> Any:
    """Read the first rows of that text, as an objective has them; see `first_tokens`."""
    arguments = plan.arguments
    source = plan.text if data is None else data
    return objective.load_blocks(
        source,
        column=arguments.text_column,
        split=arguments.data_split,
        stream=arguments.streaming or streams(source),
        limit=count,
    )


def stage_arguments(
    plan: ConversionPlan, stage: StagePlan, *, parameters: int, lora: int, processes: int
) -> FinetuneArguments:
    """Give the options of one stage's run: those of the conversion, and what is the stage's own.

    Args:
        plan: of the conversion.
        stage: one of its stages.
        parameters: of the patched model.
        lora: rank of LoRA behind stage transfer; 0 trains all weights.
        processes: that share the work.
    """
    arguments = plan.arguments
    patches = stage is plan.stages[0] and stage.source != str(plan.kept)  # that is patched
    lora = 0 if stage.name == "transfer" else lora
    rows = arguments.batch_size * arguments.grad_accum * processes
    distilled = any(other.name == "distill" for other in plan.stages)
    rate_of = stage.name if distilled or stage.name == "transfer" else "distill"
    shared = {item.name: getattr(arguments, item.name) for item in fields(TrainingArguments)}
    own = {
        "model": stage.source,
        "data": plan.text,
        "eval_data": plan.eval_text,
        "output_dir": str(stage.folder),
        "patch": plan.patch if patches else None,
        "options": plan.options if patches and plan.patch is not None else None,
        "objective": "auto" if stage.objective.name == "states" else stage.objective.name,
        "tokenizer": arguments.tokenizer or arguments.model,
        "block_size": stage.length,
        "resume": True,
        "overwrite": False,
    }
    return FinetuneArguments(
        **{**shared, **own},
        max_steps=math.ceil(stage.tokens / (stage.length * rows)),
        lr=learning_rate_for(rate_of, parameters, lora, arguments.ce_weight)
        if stage.rate is None
        else stage.rate,
        lora=lora,
    )


def stage_recipe(plan: ConversionPlan, stage: StagePlan, lora: int) -> TrainingRecipe:
    """Make the recipe of one stage; `lora` is as for `stage_arguments`."""
    arguments = plan.arguments
    fresh = stage is plan.stages[0] and _can_be_calibrated(arguments.patch)
    calibrate_tokens = arguments.calibrate_tokens if fresh else 0
    if stage.name == "transfer":
        return Transfer(arguments.target, arguments.train_projections, calibrate_tokens)
    if stage.name == "finetune":
        return TrainingRecipe(arguments.patch_rate)
    # without patch and LoRA the model is its own teacher, unless stage transfer has changed its weights too
    changed = arguments.train_projections and plan.transfers
    is_teacher = lora and not changed and arguments.teacher is None and arguments.patch is not None
    teacher = None if is_teacher else plan.original
    return Distill(
        teacher,
        arguments.drop_window,
        arguments.patch_rate,
        arguments.ce_weight,
        calibrate_tokens,
        arguments.cache_teacher,
    )


def _can_be_calibrated(patch: str | dict[str, Any] | None) -> bool:
    """Tell whether a patch, or that of any layer, has weights to calibrate; None is what the model has."""
    if patch is None:
        return False
    entries = [patch] if isinstance(patch, str) else patch.values()
    specs = [entry[0] if isinstance(entry, list | tuple) else entry for entry in entries]
    return any(can_calibrate(part) for spec in specs if spec is not None for part in parse(spec).parts)
