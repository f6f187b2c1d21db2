"""What the fine-tuning command does: data, model, training loop and the files it leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_linattn.cli.files import filling, read_json, replacing, write_json
from hf_linattn.cli.jobs import last_step
from hf_linattn.cli.main import package_versions
from hf_linattn.cli.processor import note_slow
from hf_linattn.data import BlockFile, streams
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.finetune.arguments import FinetuneArguments
from hf_linattn.finetune.card import ADAPTER, CARD, write_card
from hf_linattn.finetune.model import (
    check_fit,
    freeze_beside_text,
    leave_out_attention_dropout,
    load_config,
)
from hf_linattn.finetune.recipe import TrainingRecipe, TrainingRun
from hf_linattn.parallel import Shard, lost_processes
from hf_linattn.patching.interface import PATCH_PART
from hf_linattn.patching.loading import first_line, load_tokenizer, processor_files
from hf_linattn.patching.splitting import split_rows
from hf_linattn.registry import parse
from hf_linattn.training.arguments import FREE_TO_CHANGE, HELD_OUT_ROWS, TrainingArguments
from hf_linattn.training.chat import fit_objective
from hf_linattn.training.checkpoint import Checkpoint
from hf_linattn.training.estimate import announce
from hf_linattn.training.folder import RunFolder
from hf_linattn.training.fsdp import accelerator_options, is_sharding, set_up
from hf_linattn.training.layers import compile_layers, recompute_layers
from hf_linattn.training.loop import LoopSettings, TrainingLoop, split_token_losses
from hf_linattn.training.objectives import Objective, build_objective, choose_objective
from hf_linattn.training.tracking import LOGS, require_tracker, tracking

VALIDATION = HELD_OUT_ROWS | {"eval_every"}
"""With patience these decide which weights are kept."""

RUN_FILES = (
    *("run.json", "results.json", "train.csv", "loss.png", "checkpoint", "adapter", LOGS, "wandb", CARD),
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
)
"""What a run may leave in its folder, as patterns; the tokenizer's files are simply replaced."""

HELD_OUT = "eval_sha256"
"""Entry of a record: digest of the rows of validation, where it has some; losses on others do not compare."""

BLOCKS = "blocks.bin"
"""Rows of a text that is streamed, while the run goes on."""

LoadedRows = tuple[NDArray[np.int32], NDArray[np.int32] | None]
"""Rows for training and for validation, `[blocks, N]`."""

PACKAGES = ("hf-linattn", "torch", "transformers", "accelerate", "datasets", "peft")


def run(arguments: FinetuneArguments, command: str) -> dict[str, Any]:
    """Fine-tune as the arguments say; see `hf_linattn.finetune.finetune`."""
    accelerator = make_accelerator(arguments)
    folder = run_folder(arguments)
    with (
        folder.held(accelerator.is_main_process),
        folder.leaving_nothing(BLOCKS),
        lost_processes(accelerator.process_index, accelerator.num_processes),
    ):
        results = train(arguments, command, accelerator, TrainingRecipe())
    accelerator.end_training()
    return results


def train(
    arguments: FinetuneArguments,
    command: str,
    accelerator: Accelerator,
    recipe: TrainingRecipe,
    *,
    data: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    objective: Objective | None = None,
    rows: LoadedRows | None = None,
) -> dict[str, Any]:
    """Run one training by any recipe, or what is left of it, and return what `results.json` holds.

    Args:
        arguments: the options.
        command: for the record.
        accelerator: of this process; several runs may follow each other.
        recipe: what is trained, and how.
        data: text as `load_documents` takes it, in the place of `arguments.data`.
        tokenizer: by default that of the arguments.
        objective: what is learned; by default what the arguments say.
        rows: of `load_data`, where they are known.

    Raises:
        DataError, TrainingError, OptionError: see `hf_linattn.finetune.finetune`.
    """
    if arguments.compile and is_sharding(accelerator):
        raise OptionError("--compile is not supported under FSDP: leave it out")
    _check_sharing(arguments, accelerator)
    folder = run_folder(arguments)
    path = folder.path
    settings = {**_settings(arguments, accelerator), **recipe.settings}
    if accelerator.is_main_process:
        folder.check(arguments, settings)
    accelerator.wait_for_everyone()
    if arguments.resume and (path / "results.json").exists():
        finished = read_json(path / "results.json")
        if accelerator.is_main_process:  # it may have been killed before it did so itself
            _remove_leftovers(folder)
        if accelerator.is_main_process and arguments.eval_data not in (
            None,
            finished.get("arguments", {}).get("eval_data"),
        ):
            sys.stderr.write(
                f"{path} is finished, and --eval-data comes too late: nothing more is measured\n"
            )
        return finished
    if isinstance(arguments.patch, str):
        parse(arguments.patch, arguments.options)  # a wrong name is refused before a text is read
    tokenizer = tokenizer or load_tokenizer(arguments.tokenizer or arguments.model)
    objective = objective or _objective(arguments, tokenizer)
    with accelerator.main_process_first():  # the others find the tokens of tables in the cache
        blocks, eval_blocks = rows or load_data(arguments, objective, data, folder, accelerator)
    objective = fit_objective(objective, blocks, eval_blocks)
    base = recipe.load(arguments, objective)
    check_fit(base, objective, blocks, eval_blocks)
    left_out, frozen = leave_out_attention_dropout(base), freeze_beside_text(base)
    if accelerator.is_main_process:
        sys.stderr.write(frozen if arguments.no_dropout else left_out + frozen)
    sizes = _sizes(base)
    model = recipe.build(base, TrainingRun(arguments, objective, blocks, accelerator))
    if arguments.gradient_checkpointing:
        recompute_layers(model, switches=not arguments.compile)
    loop_settings = _loop_settings(arguments)
    done = last_step(path / "train.csv") if arguments.resume else 0
    shard, losses = None, recipe.losses
    if arguments.context_parallel > 1:
        _check_split(objective)
        model.to(accelerator.device)
        shard = Shard.of(arguments.context_parallel)
        losses = partial(split_token_losses, shard)
    with nullcontext() if shard is None else split_rows(model, shard):
        announce(accelerator, model, blocks, loop_settings, losses, recipe.prepare, done)
        if arguments.compile and recipe.compiles:
            compile_layers(model)
        if accelerator.is_main_process:
            settings["data_sha256"] = digest(blocks)
            _begin(folder, settings, eval_blocks, arguments.overwrite)
        accelerator.wait_for_everyone()
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=recipe.skips)
        loop = TrainingLoop(
            accelerator,
            model,
            blocks,
            loop_settings,
            path,
            eval_blocks=eval_blocks,
            losses=losses,
            prepare=recipe.prepare,
            count_targets=recipe.count_targets,
            rate=recipe.rate,
            split=shard,
        )
        with tracking(accelerator, path, settings, loop.step):
            loop.run()
    facts = {**sizes, "objective": objective.name, "documents": objective.description}
    results = _finish(arguments, command, loop, recipe, tokenizer, facts)
    # The wrapped model must go before its process group: torch 2.13 with gloo hangs the other way round.
    del loop, model, base
    accelerator.free_memory()
    return results


def _check_sharing(arguments: FinetuneArguments, accelerator: Accelerator) -> None:
    """Refuse --context-parallel where the processes do not fit it.

    Raises:
        OptionError: naming how many there are.
    """
    size, processes = arguments.context_parallel, accelerator.num_processes
    if processes % size:
        raise OptionError(
            f"--context-parallel {size} needs a multiple of {size} processes, and there "
            f"{'is 1' if processes == 1 else f'are {processes}'}: start them with accelerate launch "
            f"--num_processes {size}"
        )
    if size > 1 and is_sharding(accelerator):
        raise OptionError("--context-parallel is not supported under FSDP: launch without --use_fsdp")
    if size > 1 and arguments.compile:
        raise OptionError("--compile is not supported with --context-parallel: leave it out")


def _check_split(objective: Objective) -> None:
    """Refuse what is not learned token by token from those before.

    Raises:
        OptionError: masked tokens, or chat.
    """
    if objective.name != "causal" or objective.prepare is not None or objective.count_targets is not None:
        what = "chat" if objective.name == "causal" else f"the objective {objective.name}"
        raise OptionError(
            f"--context-parallel splits rows of plain text for next-token prediction, and this is {what}: "
            "leave it out"
        )


def _finish(
    arguments: FinetuneArguments,
    command: str,
    loop: TrainingLoop,
    recipe: TrainingRecipe,
    tokenizer: PreTrainedTokenizerBase,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Write the model, the curve and the results. A call of all processes, which get the results."""
    path = Path(arguments.output_dir).expanduser()
    of_recipe, trained = recipe.results(), loop.trained_model()  # both are calls of all processes
    if loop.split is not None:
        sent = loop.split.total(loop.sent_in_step) * loop.replicas
        facts = {**facts, "context_parallel": {"processes": loop.sharing, "bytes_per_step": sent}}
    box: list[dict[str, Any]] = [{}]
    if loop.log is not None:
        done = {**_results(arguments, command, loop, facts), **of_recipe, "label": recipe.label}
        box = [done]
        _save(recipe.export(trained), tokenizer, path, arguments.model)
        losses = {"before": done["eval_loss_before"], "trained": done["eval_loss"]}
        known = {name: loss for name, loss in losses.items() if loss is not None and arguments.eval_data}
        write_card(path, arguments.model, command, [done], known, recipe.label)
        with replacing(path / "loss.png") as partial:
            title = f"{arguments.model}, {arguments.patch or 'no new patch'}"
            save_loss_curve(loop.log.rows, partial, title, recipe.label)
        # Written last: where it is, the run is complete and its checkpoint no longer needed.
        write_json(path / "results.json", box[0])
        _remove_leftovers(run_folder(arguments))
    broadcast_object_list(box)
    return box[0]


def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """Make the accelerator of this process, on its part of the machine.

    Raises:
        OptionError: a precision or tracker that the machine does not have, or a way to share the work that
            does not fit.
    """
    require_tracker(arguments.log_with)
    options = accelerator_options()
    mixed_precision = arguments.mixed_precision
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=arguments.cpu,
            log_with=arguments.log_with,
            project_dir=arguments.output_dir,
            **options,
        )
    except ValueError as error:
        raise OptionError(f"--mixed-precision {mixed_precision}: {first_line(error)}") from error
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started > accelerator.num_processes:
        raise OptionError(
            f"{started} processes were started, and without a GPU each would train alone: give --cpu behind "
            "the command's name"
        )
    set_up(accelerator, options)
    if accelerator.mixed_precision == "fp16" and accelerator.scaler is None:
        raise OptionError(
            "--mixed-precision fp16 needs a GPU; accelerate would ignore it on the CPU. Use bf16 or no."
        )
    if accelerator.is_main_process:
        dtype, instead = arguments.dtype, "--dtype float32"
        if accelerator.mixed_precision == "bf16":
            dtype, instead = "bfloat16", "--mixed-precision no"
        note_slow(accelerator.device, getattr(torch, dtype), instead)
    return accelerator


def _settings(arguments: FinetuneArguments, accelerator: Accelerator) -> dict[str, Any]:
    """What decides the trained weights; a resumed run must have the same."""
    free = FREE_TO_CHANGE - (VALIDATION if arguments.patience else set())
    settings = {name: value for name, value in dataclasses.asdict(arguments).items() if name not in free}
    settings["mixed_precision"] = str(accelerator.mixed_precision)
    replicas = accelerator.num_processes // arguments.context_parallel
    settings["global batch"] = arguments.batch_size * arguments.grad_accum * replicas
    return settings


def _sizes(model: PreTrainedModel) -> dict[str, int]:
    """Numbers of parameters, of the model and of its patch, as results.json has them."""
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    patch = sum(size for name, size in sizes.items() if PATCH_PART in name)
    return {"parameters": sum(sizes.values()), "patch_parameters": patch}


def _begin(
    folder: RunFolder, settings: dict[str, Any], eval_blocks: NDArray[np.int32] | None, overwrite: bool
) -> None:
    """Record the settings, over an old run with --overwrite; a resumed run must have the same text as before.

    The text of its validation too, as soon as it has one.

    Raises:
        TrainingError: it has another text.
    """
    if overwrite:
        folder.clear()
    held_out = {} if eval_blocks is None else {HELD_OUT: digest(eval_blocks)}
    if not folder.record_path.exists():
        write_json(folder.record_path, {**settings, **held_out})
        return
    folder.check_settings(FinetuneArguments, settings)
    record = read_json(folder.record_path)
    merged = {**held_out, **record}
    if held_out and merged[HELD_OUT] != held_out[HELD_OUT]:
        raise TrainingError(
            f"cannot resume the run in {folder.path}: its validation had other rows; give --eval-data and "
            "--eval-blocks as they were, or leave --eval-data out"
        )
    Checkpoint(folder.path).sweep()
    if merged != record:
        write_json(folder.record_path, merged)


def digest(blocks: NDArray[np.int32]) -> str:
    """Compute the SHA-256 of rows `[blocks, N]`."""
    return hashlib.sha256(blocks.data).hexdigest()


def _remove_leftovers(folder: RunFolder) -> None:
    """Delete what a run no longer needs once it is complete."""
    Checkpoint(folder.path).remove()
    remove_blocks(folder)


def _objective(arguments: FinetuneArguments, tokenizer: PreTrainedTokenizerBase) -> Objective:
    """The objective that the arguments name.

    Raises:
        TrainingError: there is no such model, or it cannot be trained so.
        DataError: the tokenizer cannot mask.
    """
    name = choose_objective(arguments.objective, load_config(arguments.model))
    return build_objective(name, tokenizer, arguments.block_size, arguments.seed)


def run_folder(arguments: FinetuneArguments) -> RunFolder:
    """Name the output folder of a run, and what it may hold."""
    path = Path(arguments.output_dir).expanduser()
    return RunFolder(path, "run", "run.json", contents=RUN_FILES, signs=RUN_FILES)


def load_data(
    arguments: FinetuneArguments, objective: Objective, data: Any, folder: RunFolder, accelerator: Accelerator
) -> LoadedRows:
    """Load the rows of a run for training, and for validation where there is a text: `[blocks, N]` each.

    Streamed rows are written to a file: those that the run takes, no more. A run that goes on has them.

    Args:
        arguments: of the run.
        objective: which tells how text becomes rows.
        data: text in the place of `arguments.data`, or None.
        folder: of the run.
        accelerator: of this process.

    Raises:
        DataError: as `hf_linattn.data.load_blocks`.
    """
    source = arguments.data if data is None else data
    column, streamed = arguments.text_column, {}
    if arguments.streaming or streams(source):
        begun = folder.record_path.exists() and arguments.resume
        file = BlockFile(folder.path / BLOCKS, keep=begun or not accelerator.is_main_process)
        replicas = accelerator.num_processes // arguments.context_parallel
        rows = arguments.batch_size * arguments.grad_accum * replicas
        streamed = {"stream": True, "limit": arguments.max_steps * rows, "file": file}
    blocks = objective.load_blocks(source, column=column, split=arguments.data_split, **streamed)
    return blocks, load_held_out(arguments, objective)


def remove_blocks(folder: RunFolder) -> None:
    """Delete the rows of a text that was streamed."""
    with suppress(PermissionError):  # Windows keeps a file that is mapped
        (folder.path / BLOCKS).unlink(missing_ok=True)


def load_held_out(arguments: TrainingArguments, objective: Objective) -> NDArray[np.int32] | None:
    """Load the rows of --eval-data; None without.

    Raises:
        DataError: as `hf_linattn.data.load_blocks`.
    """
    source = arguments.eval_data
    if source is None:
        return None
    return objective.load_blocks(
        source,
        column=arguments.text_column,
        split=arguments.eval_split,
        stream=arguments.streaming or streams(source),
        limit=arguments.eval_blocks,
    )


def _loop_settings(arguments: FinetuneArguments) -> LoopSettings:
    names = [item.name for item in dataclasses.fields(LoopSettings)]
    return LoopSettings(**{name: getattr(arguments, name) for name in names})


def _save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, source: str) -> None:
    """Write the model, with LoRA merged into it, so that `hf_linattn.from_pretrained(folder)` loads it.

    What else its processor needs comes from the source.
    """
    with filling(folder) as partial:
        if hasattr(model, "merge_and_unload"):
            # Otherwise peft looks the base model's vocabulary up on the Hub.
            model.save_pretrained(str(partial / ADAPTER), save_embedding_layers=False)
            model = model.merge_and_unload()
        model.save_pretrained(str(partial))
        tokenizer.save_pretrained(partial)
        for file in processor_files(source, model.config):
            shutil.copy(file, partial / file.name)


def save_loss_curve(
    rows: Sequence[dict[str, str]], path: Path, title: str, label: str = "loss (nats per token)"
) -> None:
    """Draw training and validation loss over tokens, as a PNG.

    Args:
        rows: as in `train.csv`.
        path: of the file.
        title: above the curves.
        label: of the loss.
    """
    # A Figure of its own instead of pyplot leaves the caller's backend and open figures alone. Imported here
    # since matplotlib takes a second, and a refused run draws nothing.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for column, name, style in (("loss", "training", "-"), ("eval_loss", "validation", "o-")):
        points = [(int(row["tokens"]), float(row[column])) for row in rows if row[column]]
        if points:
            tokens, losses = zip(*points, strict=True)
            axes.plot(tokens, losses, style, label=name, linewidth=1, markersize=3)
    axes.set(xlabel="tokens", ylabel=label, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def _results(
    arguments: FinetuneArguments, command: str, loop: TrainingLoop, facts: dict[str, Any]
) -> dict[str, Any]:
    assert loop.log is not None
    rows = loop.log.rows
    before = [float(row["eval_loss"]) for row in rows if row["step"] == "0"]  # none without validation then
    return {
        "command": command,
        "arguments": dataclasses.asdict(arguments),
        "seed": arguments.seed,
        "versions": package_versions(PACKAGES, missing="not installed"),
        "device": str(loop.accelerator.device),
        "processes": loop.accelerator.num_processes,
        "distributed": loop.accelerator.distributed_type.value,
        "global_batch": loop.global_batch,
        **facts,
        "trained_parameters": sum(parameter.numel() for parameter in loop.parameters),
        "blocks": len(loop.blocks),
        "steps": loop.step,
        "tokens": int(rows[-1]["tokens"]),
        "loss": float(rows[-1]["loss"]),
        "eval_loss_before": before[0] if before else None,
        "kept_step": loop.kept[0],
        # a run resumed without --eval-data knows the losses of earlier steps, and not that of its last
        "eval_loss": loop.kept[1] if loop.eval_blocks is not None else None,
        "seconds": round(loop.seconds, 3),
    }
