"""What the conversion command does: a record of the plan, one training run per stage, validation between."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray

from hf_linattn import from_pretrained, is_linear, patch_model
from hf_linattn.cli.files import write_json
from hf_linattn.convert.__main__ import PRESETS, ConvertArguments, learning_rate_for
from hf_linattn.convert.distillation import DistillationLoss, frozen_teacher
from hf_linattn.convert.outputs import PLAN, VALIDATION, check_folder
from hf_linattn.convert.resolve import with_patch
from hf_linattn.convert.stages import Distill, Transfer, original
from hf_linattn.convert.task import SELF, chosen_task
from hf_linattn.errors import LinattnError, TrainingError
from hf_linattn.finetune.__main__ import FinetuneArguments
from hf_linattn.finetune.method import Method
from hf_linattn.finetune.model import check_fit
from hf_linattn.finetune.run import make_accelerator, train
from hf_linattn.patching.contexts import hybrids
from hf_linattn.patching.loading import first_line, load_tokenizer
from hf_linattn.training.divergence import hidden_states
from hf_linattn.training.loop import evaluate
from hf_linattn.training.objectives import Objective


def run(arguments: ConvertArguments, command: str, data: Any = None) -> Path:
    """All stages; returns the folder of the converted model. See `hf_linattn.convert.convert`.

    Args:
        arguments: the options.
        command: for the record.
        data: text as `load_documents` takes it, in the place of `arguments.data`.
    """
    accelerator = make_accelerator(arguments.mixed_precision, arguments.cpu)
    out = Path(arguments.output_dir).expanduser()
    arguments = with_patch(arguments)
    if accelerator.is_main_process:
        check_folder(out, arguments)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    task = chosen_task(arguments, tokenizer)
    if accelerator.is_main_process:
        _write_own_text(out, arguments, accelerator, tokenizer, task)
    accelerator.wait_for_everyone()
    held_out = _held_out(out, arguments, task)
    plan = _plan(out, arguments, accelerator, task, held_out, command)
    source = arguments.model
    for stage in arguments.chosen_stages():
        told = _stage_arguments(arguments, stage, source, plan, out, accelerator, task)
        own = task if task.name == "states" else None  # the others depend on the length of a stage's rows
        train(told, command, accelerator, _method(arguments, stage, plan), data, own)
        source = told.output_dir
        _validate(out, stage, source, arguments, accelerator, task, held_out)
    if accelerator.is_main_process:
        from hf_linattn.convert.page import write_page

        write_page(out)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return Path(source)


def _text(out: Path, name: str, *, held_out: bool = False) -> str:
    """What to read for --data or --eval-data."""
    return name if name != SELF else str(out / ("self-eval.jsonl" if held_out else "self.jsonl"))


def _write_own_text(
    out: Path, arguments: ConvertArguments, accelerator: Accelerator, tokenizer: Any, task: Objective
) -> None:
    """The text of `--data self`, and of `--eval-data self` by another seed."""
    wanted = {
        "self.jsonl": max(map(arguments.tokens, arguments.chosen_stages())) * (arguments.data == SELF),
        "self-eval.jsonl": arguments.eval_blocks * arguments.block_size * (arguments.eval_data == SELF),
    }
    if not any(wanted.values()):
        return
    from hf_linattn.convert.self_generated import write_self_text

    model = _load(arguments.teacher or arguments.model, arguments, task, unpatched=True)
    model.to(accelerator.device)
    length = max(map(arguments.length, arguments.chosen_stages()))
    for number, (name, tokens) in enumerate(wanted.items()):
        seed = 2 * arguments.seed + number
        write_self_text(model, tokenizer, out / name, tokens=tokens, length=length, seed=seed)


def _held_out(out: Path, arguments: ConvertArguments, task: Objective) -> NDArray[np.int32] | None:
    """The validation rows."""
    if arguments.eval_data is None:
        return None
    source = _text(out, arguments.eval_data, held_out=True)
    blocks = task.load_blocks(source, column=arguments.text_column, split=arguments.eval_split)
    return blocks[: arguments.eval_blocks]


def _plan(
    out: Path,
    arguments: ConvertArguments,
    accelerator: Accelerator,
    task: Objective,
    held_out: NDArray[np.int32] | None,
    command: str,
) -> dict[str, Any]:
    """What is known before the first stage, from plan.json or from the model; and its first validations."""
    path = out / PLAN
    if path.exists():
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return plan
    model = _load(arguments.teacher or arguments.model, arguments, task, unpatched=True)
    check_fit(model, task, held_out)
    values = {}
    if held_out is not None:
        values["original"] = _loss(model, arguments, accelerator, task, held_out)
    if arguments.patch is None:
        model = _load(arguments.model, arguments, task)
    else:
        torch.manual_seed(arguments.seed)
        patch_model(model, arguments.patch, options=arguments.options, sliding=arguments.sliding)
    if held_out is not None:
        values["swapped"] = _loss(model, arguments, accelerator, task, held_out)
    hybrid = not is_linear(model) or bool(hybrids(model))
    lora = arguments.lora
    if lora is None:
        lora = int(PRESETS[arguments.preset].get("lora", 16 if hybrid else 0))
    plan = {
        "command": command,
        "arguments": asdict(arguments),
        "stages": arguments.chosen_stages(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "hybrid": hybrid,
        "lora": lora,
        "objective": task.name,
    }
    accelerator.wait_for_everyone()  # nobody may find the file while others still look for it
    if accelerator.is_main_process:
        write_json(out / VALIDATION, values)
        write_json(path, plan)
    accelerator.wait_for_everyone()
    return plan


def _load(name: str, arguments: ConvertArguments, task: Objective, *, unpatched: bool = False) -> Any:
    try:
        if unpatched:
            return original(name, arguments.dtype, task)
        return from_pretrained(name, auto_class=task.auto_class, dtype=getattr(torch, arguments.dtype))
    except LinattnError:
        raise
    except (OSError, ValueError) as error:
        raise TrainingError(f"cannot load {name}: {first_line(error)}") from error


def _loss(
    model: Any,
    arguments: ConvertArguments,
    accelerator: Accelerator,
    task: Objective,
    held_out: NDArray[np.int32],
) -> float:
    """Nats per token that is predicted; of hidden states the error of the last over its variance."""
    losses = task.losses
    if losses is None:
        last = replace(task, reading=hidden_states(task.keywords, last=True))
        teacher = _load(arguments.teacher or arguments.model, arguments, task, unpatched=True)
        losses = DistillationLoss(frozen_teacher(teacher.to(accelerator.device), last.reading), task=last)
    model.to(accelerator.device).eval()
    loss = evaluate(accelerator, model, held_out, arguments.batch_size, losses, task.prepare)
    if not math.isfinite(loss):
        raise TrainingError(
            f"the validation loss of {arguments.model} is {loss}: nothing can be learned from it"
        )
    return loss


def _stage_arguments(
    arguments: ConvertArguments,
    stage: str,
    source: str,
    plan: dict[str, Any],
    out: Path,
    accelerator: Accelerator,
    task: Objective,
) -> FinetuneArguments:
    """The options of one stage's run."""
    first = source == arguments.model
    lora = 0 if stage == "transfer" else int(plan["lora"])
    rows = arguments.batch_size * arguments.grad_accum * accelerator.num_processes
    length = arguments.length(stage)
    given = getattr(arguments, f"{stage}_lr")
    names = (
        *("text_column", "data_split", "batch_size", "grad_accum", "optimizer", "eval_split"),
        *("eval_every", "eval_blocks", "patience", "no_dropout", "mixed_precision", "dtype", "seed"),
        *("checkpoint_every", "cpu", "sliding", "min_lr_rate", "adam_beta2"),
    )
    held_out = arguments.eval_data
    return FinetuneArguments(
        model=source,
        data=_text(out, arguments.data),
        eval_data=None if held_out is None else _text(out, held_out, held_out=True),
        output_dir=str(out / stage),
        patch=arguments.patch if first else None,
        options=arguments.options if first and arguments.patch is not None else None,
        objective="auto" if task.name == "states" else task.name,
        tokenizer=arguments.tokenizer or arguments.model,
        block_size=length,
        max_steps=math.ceil(arguments.tokens(stage) / (length * rows)),
        lr=learning_rate_for(stage, plan["parameters"], lora) if given is None else given,
        lora=lora,
        resume=True,
        **{name: getattr(arguments, name) for name in names},
    )


def _method(arguments: ConvertArguments, stage: str, plan: dict[str, Any]) -> Method:
    if stage == "transfer":
        return Transfer(arguments.target, arguments.train_projections)
    if stage == "finetune":
        return Method(arguments.patch_rate)
    apart = arguments.teacher is not None or arguments.patch is None
    projections = arguments.train_projections and "transfer" in arguments.chosen_stages()
    inside = plan["lora"] and not projections and not apart
    teacher = None if inside else arguments.teacher or arguments.model
    return Distill(teacher, arguments.drop_window, arguments.patch_rate, arguments.ce_weight)


def _validate(
    out: Path,
    stage: str,
    folder: str,
    arguments: ConvertArguments,
    accelerator: Accelerator,
    task: Objective,
    held_out: NDArray[np.int32] | None,
) -> None:
    """Validation loss of the model that a stage has left, unless it is known."""
    path = out / VALIDATION
    values = json.loads(path.read_text(encoding="utf-8"))
    if held_out is None or stage in values:
        return
    values[stage] = _loss(_load(folder, arguments, task), arguments, accelerator, task, held_out)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(path, values)
    accelerator.wait_for_everyone()
