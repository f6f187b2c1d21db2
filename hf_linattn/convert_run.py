"""What the conversion command does: a record of the plan, one training run per stage, validation between."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from transformers import AutoConfig

from hf_linattn import from_pretrained, is_linear, patch_model
from hf_linattn.branches import hybrids
from hf_linattn.checkpointing import write_json, writing
from hf_linattn.convert import PRESETS, STAGES, ConvertArguments, learning_rate_for
from hf_linattn.convert_stages import Distill, Transfer, original
from hf_linattn.data import load_blocks
from hf_linattn.errors import LinattnError, OptionError, TrainingError
from hf_linattn.finetune import FinetuneArguments
from hf_linattn.finetune_model import check_fit, first_line
from hf_linattn.finetune_run import load_tokenizer, make_accelerator, train
from hf_linattn.method import Method
from hf_linattn.objectives import objective
from hf_linattn.registry import find, names_in, parse
from hf_linattn.seam import NAME
from hf_linattn.training import evaluate

PLAN, VALIDATION = "plan.json", "validation.json"
FREE_TO_CHANGE = (
    *("output_dir", "resume", "overwrite", "cpu", "eval_data", "eval_split", "eval_every", "eval_blocks"),
    *("checkpoint_every", "batch_size", "grad_accum"),
)
"""What a resumed conversion may give differently; the stages compare whole batches."""


def run(arguments: ConvertArguments, command: str, data: Any = None) -> Path:
    """All stages; returns the folder of the converted model. See `hf_linattn.convert.convert`.

    Args:
        arguments: the options.
        command: for the record.
        data: text as `load_documents` takes it, in the place of `arguments.data`.
    """
    accelerator = make_accelerator(arguments.mixed_precision, arguments.cpu)
    out = Path(arguments.output_dir).expanduser()
    arguments = _with_patch(arguments)
    if accelerator.is_main_process:
        _check_folder(out, arguments)
    accelerator.wait_for_everyone()
    held_out = _held_out(arguments)
    plan = _plan(out, arguments, accelerator, held_out, command)
    source = arguments.model
    for stage in arguments.chosen_stages():
        told = _stage_arguments(arguments, stage, source, plan, out, accelerator)
        train(told, command, accelerator, _method(arguments, stage, plan), data)
        source = told.output_dir
        _validate(out, stage, source, arguments, accelerator, held_out)
    if accelerator.is_main_process:
        from hf_linattn.convert_page import write_page

        write_page(out)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return Path(source)


def _with_patch(arguments: ConvertArguments) -> ConvertArguments:
    """The patch spelled out: what a patched model has, with a learned layer in front where wanted.

    Raises:
        TrainingError: there is no such model.
        OptionError: a new patch for a patched model, or a front for what takes none.
    """
    try:
        config = AutoConfig.from_pretrained(arguments.model)
    except (OSError, ValueError) as error:
        raise TrainingError(f"cannot load --model {arguments.model}: {first_line(error)}") from error
    if hasattr(config, NAME):
        if arguments.patch is not None or arguments.learn_front or arguments.options:
            raise OptionError(
                f"--model {arguments.model} is patched already, and its patch is what is trained: leave out "
                "--patch, --options and --learn-front, or give the unpatched model"
            )
        return arguments
    patch = "hedgehog" if arguments.patch is None else arguments.patch
    if not arguments.learn_front:
        return replace(arguments, patch=patch)
    if isinstance(patch, str):
        patch, options = fronted(patch)
        return replace(arguments, patch=patch, options={**options, **(arguments.options or {})})
    layers = {}
    for key, given in patch.items():
        spec, own = given if isinstance(given, list | tuple) else (given, {})
        spec, options = fronted(spec) if spec != "softmax" else (spec, {})
        layers[key] = [spec, {**options, **own}]
    return replace(arguments, patch=layers)


def fronted(spec: str) -> tuple[str, dict[str, Any]]:
    """A composition with a learned layer in front of its feature map, and the options that say so.

    >>> fronted("window+elu1")
    ('window+linear', {'linear': {'feature_map': 'elu1', 'front': True}})

    Raises:
        OptionError: it holds no feature map.
    """
    from hf_linattn.attention import LinearAttention

    names = names_in(spec)
    maps = [name for name in names if issubclass(find(name), LinearAttention)]
    if len(maps) != 1:
        raise OptionError(f"--learn-front: {spec!r} has no feature map that a layer could stand in front of")
    options = {"linear": {"feature_map": maps[0], "front": True}}
    composed = "+".join("linear" if name in maps else name for name in names)
    parse(composed, options)
    return composed, options


def _check_folder(out: Path, arguments: ConvertArguments) -> None:
    """See that the output folder can be used for this conversion, before anything slow begins."""
    if out.exists() and Path(arguments.model).exists() and out.samefile(arguments.model):
        raise TrainingError(f"--output-dir {out} is --model itself: choose another directory")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if not (out / PLAN).exists():
        strange = [name for name in (*STAGES, "config.json", "run.json") if (out / name).exists()]
        if strange:
            raise TrainingError(
                f"{out} holds {', '.join(strange)} but no conversion: choose another directory"
            )
    elif arguments.resume:
        before = json.loads((out / PLAN).read_text(encoding="utf-8"))["arguments"]
        now = json.loads(json.dumps(asdict(arguments)))
        changed = [
            f"{name} ({before.get(name)!r} then, {value!r} now)"
            for name, value in now.items()
            if name not in FREE_TO_CHANGE and before.get(name) != value
        ]
        if changed:
            raise TrainingError(
                f"cannot resume the conversion in {out}: it began with other {', '.join(changed)}"
            )
    elif not arguments.overwrite:
        raise TrainingError(
            f"{out} already holds a conversion: give --resume, --overwrite or another directory"
        )
    else:
        with writing(out):
            for name in (*STAGES, VALIDATION, "report.html", PLAN):
                path = out / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


def _held_out(arguments: ConvertArguments) -> NDArray[np.int32] | None:
    """The validation rows."""
    if arguments.eval_data is None:
        return None
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    column, split = arguments.text_column, arguments.eval_split
    blocks = load_blocks(arguments.eval_data, tokenizer, arguments.block_size, column=column, split=split)
    return blocks[: arguments.eval_blocks]


def _plan(
    out: Path,
    arguments: ConvertArguments,
    accelerator: Accelerator,
    held_out: NDArray[np.int32] | None,
    command: str,
) -> dict[str, Any]:
    """What is known before the first stage, from plan.json or from the model; and its first validations."""
    path = out / PLAN
    if path.exists():
        plan: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return plan
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    task = objective("causal", tokenizer, arguments.block_size, arguments.seed)
    model = _load(arguments.teacher or arguments.model, arguments, unpatched=True)
    check_fit(model, task, held_out)
    values = {}
    if held_out is not None:
        values["original"] = _loss(model, arguments, accelerator, held_out)
    if arguments.patch is None:
        model = _load(arguments.model, arguments)
    else:
        torch.manual_seed(arguments.seed)
        patch_model(model, arguments.patch, options=arguments.options, sliding=arguments.sliding)
    if held_out is not None:
        values["swapped"] = _loss(model, arguments, accelerator, held_out)
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
    }
    accelerator.wait_for_everyone()  # nobody may find the file while others still look for it
    if accelerator.is_main_process:
        write_json(out / VALIDATION, values)
        write_json(path, plan)
    accelerator.wait_for_everyone()
    return plan


def _load(name: str, arguments: ConvertArguments, *, unpatched: bool = False) -> Any:
    try:
        if unpatched:
            return original(name, arguments.dtype)
        return from_pretrained(name, dtype=getattr(torch, arguments.dtype))
    except LinattnError:
        raise
    except (OSError, ValueError) as error:
        raise TrainingError(f"cannot load {name}: {first_line(error)}") from error


def _loss(
    model: Any, arguments: ConvertArguments, accelerator: Accelerator, held_out: NDArray[np.int32]
) -> float:
    """Negative log-likelihood in nats per token."""
    model.to(accelerator.device).eval()
    loss = evaluate(accelerator, model, held_out, arguments.batch_size)
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
) -> FinetuneArguments:
    """The options of one stage's run."""
    first = source == arguments.model
    lora = 0 if stage == "transfer" else int(plan["lora"])
    rows = arguments.batch_size * arguments.grad_accum * accelerator.num_processes
    length = arguments.length(stage)
    given = getattr(arguments, f"{stage}_lr")
    names = (
        *("data", "text_column", "data_split", "batch_size", "grad_accum", "eval_data", "eval_split"),
        *("eval_every", "eval_blocks", "patience", "no_dropout", "mixed_precision", "dtype", "seed"),
        *("checkpoint_every", "cpu", "sliding"),
    )
    return FinetuneArguments(
        model=source,
        output_dir=str(out / stage),
        patch=arguments.patch if first else None,
        options=arguments.options if first and arguments.patch is not None else None,
        objective="causal",
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
        return Method()
    apart = arguments.teacher is not None or arguments.patch is None
    projections = arguments.train_projections and "transfer" in arguments.chosen_stages()
    inside = plan["lora"] and not projections and not apart
    return Distill(None if inside else arguments.teacher or arguments.model, arguments.drop_window)


def _validate(
    out: Path,
    stage: str,
    folder: str,
    arguments: ConvertArguments,
    accelerator: Accelerator,
    held_out: NDArray[np.int32] | None,
) -> None:
    """Validation loss of the model that a stage has left, unless it is known."""
    path = out / VALIDATION
    values = json.loads(path.read_text(encoding="utf-8"))
    if held_out is None or stage in values:
        return
    values[stage] = _loss(_load(folder, arguments), arguments, accelerator, held_out)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(path, values)
    accelerator.wait_for_everyone()


def saved_source(model: Any, tokenizer: Any, output_dir: str) -> tuple[str, str | None]:
    """Names of model and tokenizer; objects are saved below the output folder.

    Raises:
        OptionError: a model without a tokenizer.
    """
    if isinstance(model, str) and (tokenizer is None or isinstance(tokenizer, str)):
        return model, tokenizer
    if tokenizer is None:
        raise OptionError("a model given as an object needs its tokenizer: tokenizer=...")
    folder = Path(output_dir).expanduser() / "original"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not isinstance(model, str) and not (folder / "config.json").exists():
            model.save_pretrained(str(folder))
        if not isinstance(tokenizer, str):
            tokenizer.save_pretrained(str(folder))
    return (
        model if isinstance(model, str) else str(folder),
        tokenizer if isinstance(tokenizer, str) else str(folder),
    )


def summary(out: Path) -> str:
    """Perplexities after each stage, in words."""
    values: dict[str, float] = json.loads((out / VALIDATION).read_text(encoding="utf-8"))
    lines = []
    if values:
        first = values["original"]
        lines = [
            f"{name:10} perplexity {math.exp(loss):10.4g}   {math.exp(loss - first):7.3f} x the original"
            for name, loss in values.items()
        ]
    last = json.loads((out / PLAN).read_text(encoding="utf-8"))["stages"][-1]
    lines.append(f"the model is in {out / last}, everything about it in {out / 'report.html'}")
    return "\n".join(lines) + "\n"
