"""What the conversion command does: a record of the plan, one training run per stage, validation between."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from hf_linattn import describe, patch_model
from hf_linattn.cli.files import read_json, write_json
from hf_linattn.convert.arguments import ConvertArguments
from hf_linattn.convert.attention_transfer import check_weights_comparable
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher
from hf_linattn.convert.keep_layers import keep_layers
from hf_linattn.convert.layer_sizes import size_layers, with_sizes
from hf_linattn.convert.outputs import (
    LABELS,
    OWN_EVAL_TEXT,
    OWN_TEXT,
    VALIDATION,
    ConversionResult,
    write_page,
)
from hf_linattn.convert.resolve import SELF, ConversionPlan, StagePlan, resolve
from hf_linattn.convert.self_generated import write_self_text
from hf_linattn.convert.stages import (
    first_rows,
    load,
    load_original,
    nothing_to_transfer,
    stage_arguments,
    stage_recipe,
)
from hf_linattn.convert.teacher_cache import Rows, fill_cache, vocabulary_digest, weights_digest
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.finetune.card import write_card
from hf_linattn.finetune.model import check_fit
from hf_linattn.finetune.recipe import TrainingRecipe
from hf_linattn.finetune.run import (
    HELD_OUT,
    LoadedRows,
    digest,
    load_data,
    load_held_out,
    make_accelerator,
    remove_blocks,
    run_folder,
    train,
)
from hf_linattn.training.arguments import FREE_TO_CHANGE, HELD_OUT_ROWS
from hf_linattn.training.chat import fit_objective
from hf_linattn.training.divergence import compare_hidden_states
from hf_linattn.training.estimate import MEASURED
from hf_linattn.training.loop import batch_rows, evaluate


def run(arguments: ConvertArguments, command: str, data: Any = None) -> ConversionResult:
    """Run all stages, or those that are left; see `hf_linattn.convert.convert`.

    Args:
        arguments: the options.
        command: for the record.
        data: text as `load_documents` takes it, in the place of `arguments.data`.
    """
    accelerator = make_accelerator(arguments)
    plan = resolve(arguments)
    with plan.folder.held(accelerator.is_main_process):
        return _convert(plan, accelerator, command, data)


def _convert(plan: ConversionPlan, accelerator: Accelerator, command: str, data: Any) -> ConversionResult:
    row = _prepare_folder(plan, accelerator, data) if accelerator.is_main_process else None
    accelerator.wait_for_everyone()
    if (
        plan.sizes_layers and plan.transfers and not plan.arguments.train_projections
    ):  # before layers are measured
        raise nothing_to_transfer(plan.arguments)
    validation = Validation(plan, accelerator)
    if plan.folder.record_path.exists():
        _check_held_out(plan, validation.blocks)
    sizes = size_layers(plan, accelerator, data) if plan.sizes_layers else {}
    plan = with_sizes(plan, sizes.get("sizes", {}))
    rows = _fill_teacher_cache(plan, accelerator, data)
    record = _begin(plan, validation, row, accelerator, command)
    if plan.sizes_layers:
        record["sizes"] = sizes["sizes"]
    parameters, lora, processes = record["parameters"], record["lora"], accelerator.num_processes
    results = []
    for stage in plan.stages:
        if stage.source == str(plan.kept):
            record["kept"] = keep_layers(plan, accelerator, data)
        results.append(
            train(
                stage_arguments(plan, stage, parameters=parameters, lora=lora, processes=processes),
                command,
                accelerator,
                stage_recipe(plan, stage, lora),
                data=data,
                tokenizer=plan.tokenizer,
                objective=stage.objective,
                rows=rows if stage.name == "distill" else None,
            )
        )
        validation.add_stage(stage, results[-1])
        if accelerator.is_main_process:
            losses = {LABELS.get(name, f"after {name}"): loss for name, loss in validation.losses.items()}
            label = (
                "squared error / variance" if validation.objective.losses is None else TrainingRecipe.label
            )
            write_card(stage.folder, plan.original, command, results, losses, label)
    result = ConversionResult(plan.stages[-1].folder, record, validation.losses, results)
    if accelerator.is_main_process:
        write_page(result)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return result


def _prepare_folder(plan: ConversionPlan, accelerator: Accelerator, data: Any) -> Any:
    """See that folder and texts can be used, before anything slow begins; then --overwrite clears the folder.

    Returns:
        The first of the longest rows of a new conversion; None where one is resumed.

    Raises:
        TrainingError: the folder cannot be used; the message says what to do.
        DataError: a text is missing or too short.
    """
    arguments, folder = plan.arguments, plan.folder
    free = FREE_TO_CHANGE - HELD_OUT_ROWS  # they decide validation.json
    settings = {name: value for name, value in asdict(arguments).items() if name not in free}
    folder.check(arguments, settings)
    begins = arguments.overwrite or not folder.record_path.exists()
    longest = max(plan.stages, key=lambda stage: stage.length)
    row = None
    # a text that is too short, and rows that are too long, are refused before anything is written or deleted
    if begins and arguments.data != SELF:
        row = first_rows(plan, longest.objective, 1, data)
    if arguments.overwrite and folder.record_path.exists():
        held_out = None if arguments.eval_data == SELF else load_held_out(arguments, plan.objective)
        model = load_original(plan.original, arguments.dtype, plan.objective)
        check_fit(model, plan.objective, row, held_out)
        _check_patched(plan, _patched(plan, model))
        del model
    if arguments.overwrite:
        folder.clear()
    _write_own_text(plan, accelerator)
    if begins and row is None:
        row = first_rows(plan, longest.objective, 1, data)
    return row


def _check_held_out(plan: ConversionPlan, blocks: Any) -> None:
    """See that a resumed conversion is validated on the rows that it began with.

    Raises:
        TrainingError: they have changed; a record of an older version does not tell.
    """
    known = read_json(plan.folder.record_path).get(HELD_OUT)
    if known is not None and blocks is not None and known != digest(blocks):
        raise TrainingError(
            f"cannot resume the conversion in {plan.folder.path}: the text of --eval-data "
            f"{plan.arguments.eval_data} has changed since; restore it, or choose another directory"
        )


def _patched(plan: ConversionPlan, original: Any) -> Any:
    """Patch the original, or load the model that has its patch already."""
    arguments = plan.arguments
    if plan.patch is None:
        return load(arguments.model, arguments.dtype, plan.objective)
    torch.manual_seed(arguments.seed)
    return patch_model(original, plan.patch, options=plan.options, sliding=arguments.sliding)


def _check_patched(plan: ConversionPlan, model: Any) -> None:
    """See that the stages find in a patched model what they train or compare.

    Raises:
        TrainingError: the patch has nothing to train, or no weights to compare.
        OptionError: layers would be ranked by weights that nothing has trained.
    """
    arguments, rows = plan.arguments, describe(model)
    if plan.transfers and not rows.parameters and not arguments.train_projections:
        raise nothing_to_transfer(arguments)
    if plan.transfers and arguments.target == "weights":
        check_weights_comparable(model)
    if plan.kept is not None and not plan.transfers and rows.parameters:
        raise OptionError(
            f"--keep would rank layers by weights of {plan.arguments.patch} that nothing has trained yet: "
            "give a preset with stage transfer, such as --preset hybrid"
        )


def _write_own_text(plan: ConversionPlan, accelerator: Accelerator) -> None:
    """Write the text of `--data self`, and of `--eval-data self` by another seed."""
    arguments = plan.arguments
    tokens_of = {
        OWN_TEXT: max(stage.tokens for stage in plan.stages) * (arguments.data == SELF),
        OWN_EVAL_TEXT: arguments.eval_blocks * arguments.block_size * (arguments.eval_data == SELF),
    }
    if not any(tokens_of.values()):
        return
    model = load_original(plan.original, arguments.dtype, plan.objective).to(accelerator.device)
    length = max(stage.length for stage in plan.stages)
    for number, (name, tokens) in enumerate(tokens_of.items()):
        seed = 2 * arguments.seed + number
        path = plan.folder.path / name
        write_self_text(model, plan.tokenizer, path, tokens=tokens, length=length, seed=seed)


def _fill_teacher_cache(plan: ConversionPlan, accelerator: Accelerator, data: Any) -> LoadedRows | None:
    """Write the teacher's predictions of all rows that stage distill takes, as far as they are not there.

    Returns:
        The rows; None without a cache, and where they are streamed.

    Raises:
        TrainingError: --cache-teacher is of something else, or they cannot be written.
    """
    arguments = plan.arguments
    stage = next((stage for stage in plan.stages if stage.name == "distill"), None)
    if arguments.cache_teacher is None or stage is None or (stage.folder / "results.json").exists():
        return None
    of_stage = stage_arguments(plan, stage, parameters=0, lora=0, processes=accelerator.num_processes)
    folder = replace(run_folder(of_stage), path=plan.folder.path)  # that of the stage is not there yet
    with accelerator.main_process_first():
        blocks, eval_blocks = load_data(of_stage, stage.objective, data, folder, accelerator)
    taken = of_stage.batch_size * of_stage.grad_accum * accelerator.num_processes * of_stage.max_steps
    row_ids = batch_rows(1, taken, len(blocks), of_stage.seed)
    rows = Rows()
    rows.add(blocks, sorted({*row_ids.tolist(), *range(min(MEASURED, len(blocks)))}))
    if eval_blocks is not None:
        rows.add(eval_blocks, range(len(eval_blocks)))
    key = {
        "teacher": weights_digest(plan.original),
        "tokenizer": vocabulary_digest(plan.tokenizer),
        "block size": stage.length,
        "precision": f"{arguments.dtype}, mixed: {accelerator.mixed_precision}",
    }
    path = Path(arguments.cache_teacher).expanduser()
    try:
        fill_cache(
            path,
            key,
            rows,
            lambda: load_original(plan.original, arguments.dtype, stage.objective),
            accelerator,
            arguments.batch_size,
        )
    finally:
        if accelerator.is_main_process:
            remove_blocks(folder)
    return None if isinstance(blocks, np.memmap) else (blocks, eval_blocks)


class Validation:
    """Losses on the rows of --eval-data: of the original, of the swapped model and after each stage.

    They are nats per predicted token; of models that give hidden states the squared error of the last one
    over its variance.

    Args:
        plan: of the conversion.
        accelerator: of this process.

    Attributes:
        blocks: the rows, `[blocks, N]`; None without --eval-data.
        losses: name of the model -> loss.
        path: of validation.json, which holds them.
    """

    def __init__(self, plan: ConversionPlan, accelerator: Accelerator) -> None:
        self.plan, self.accelerator = plan, accelerator
        self.losses: dict[str, float] = {}
        self.blocks = load_held_out(replace(plan.arguments, eval_data=plan.eval_text), plan.objective)
        self.objective = fit_objective(plan.objective, self.blocks)
        self.path = plan.folder.path / VALIDATION
        self._teacher: Any = None

    def add(self, name: str, model: Any) -> None:
        """Measure the loss of a model, where there are rows for it.

        Raises:
            TrainingError: it is not finite.
        """
        if self.blocks is None:
            return
        objective, device = self.objective, self.accelerator.device
        losses = objective.losses
        if losses is None:
            last = replace(objective, comparison=compare_hidden_states(objective.keywords, last=True))
            if self._teacher is None:
                self._teacher = load_original(self.plan.original, self.plan.arguments.dtype, objective)
            teacher = frozen_teacher(self._teacher.to(device), last.comparison)
            losses = DistillationLoss(teacher, objective=last)
        model.to(device).eval()
        batch_size = self.plan.arguments.batch_size
        batch = (losses, objective.prepare, objective.count_targets)
        loss = evaluate(self.accelerator, model, self.blocks, batch_size, *batch)
        if self._teacher is not None:
            self._teacher.to("cpu")  # leaves the device to the stages
        if not math.isfinite(loss):
            source = self.plan.arguments.model
            raise TrainingError(f"the validation loss of {source} is {loss}: nothing can be learned from it")
        self.losses[name] = loss

    def add_stage(self, stage: StagePlan, results: dict[str, Any]) -> None:
        """Take or measure the loss of the model that a stage has left, unless it is known, and write it."""
        if self.blocks is None or stage.name in self.losses:
            return
        if self._was_measured_by_the_loop(stage, results):
            self.losses[stage.name] = results["eval_loss"]
        else:
            dtype = self.plan.arguments.dtype
            self.add(stage.name, load(str(stage.folder), dtype, self.plan.objective))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            write_json(self.path, self.losses)
        self.accelerator.wait_for_everyone()

    def _was_measured_by_the_loop(self, stage: StagePlan, results: dict[str, Any]) -> bool:
        """Whether the run's last validation is this one: the same loss, rows, weights and arithmetic."""
        arguments, done = self.plan.arguments, results["arguments"]
        rows = {"eval_data": self.plan.eval_text, "block_size": arguments.block_size}
        rows |= {"eval_split": arguments.eval_split, "eval_blocks": arguments.eval_blocks}
        return (
            stage.name == "finetune"  # the others compare with the original
            and all(done[name] == value for name, value in rows.items())  # a resumed run may change some
            and not done["lora"]  # merging rounds the weights
            and results["distributed"] != "FSDP"
            and self.accelerator.mixed_precision == "no"
            and self.accelerator.state.dynamo_plugin.backend == DynamoBackend.NO
        )


def _begin(
    plan: ConversionPlan, validation: Validation, row: Any, accelerator: Accelerator, command: str
) -> dict[str, Any]:
    """Read plan.json, or load the model, validate it before and after the swap, and write plan.json.

    `row` is the first of the longest ones, in the first process, and says whether the model takes them.
    """
    path, arguments = plan.folder.record_path, plan.arguments
    if path.exists():
        validation.losses = read_json(validation.path)
        return read_json(path)
    model = load_original(plan.original, arguments.dtype, plan.objective)
    check_fit(model, plan.objective, row, validation.blocks)
    validation.add("original", model)
    model = _patched(plan, model)
    _check_patched(plan, model)  # before anything is written
    validation.add("swapped", model)
    layers = describe(model)
    hybrid = plan.kept is not None or any(row.time != "O(n)" and not row.keeps_nothing for row in layers)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    record = {
        "command": command,
        "arguments": asdict(arguments),
        "stages": [stage.name for stage in plan.stages],
        "parameters": parameters,
        "hybrid": hybrid,
        "lora": arguments.lora_rank(parameters, hybrid),
        "objective": plan.objective.name,
    }
    if validation.blocks is not None:
        record[HELD_OUT] = digest(validation.blocks)
    accelerator.wait_for_everyone()  # nobody may find the file while others still look for it
    if accelerator.is_main_process:
        write_json(validation.path, validation.losses)
        write_json(path, record)
    accelerator.wait_for_everyone()
    return record
