"""What the fine-tuning command does: data, model, training loop and the files it leaves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, broadcast_object_list
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedTokenizerBase

from hf_linattn.cli.arguments import differences
from hf_linattn.cli.files import filling, replacing, write_json, writing
from hf_linattn.cli.main import package_versions
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.finetune.__main__ import FinetuneArguments
from hf_linattn.finetune.method import Method
from hf_linattn.finetune.model import check_fit
from hf_linattn.finetune.plots import save_loss_curve
from hf_linattn.patching.interface import PATCH_PART
from hf_linattn.patching.loading import explain_missing, first_line, load_tokenizer
from hf_linattn.training.checkpoint import Checkpoint
from hf_linattn.training.fsdp import accelerator_options, set_up
from hf_linattn.training.loop import LoopSettings, TrainingLoop
from hf_linattn.training.objectives import Objective, choose, objective

FREE_TO_CHANGE = (
    *("output_dir", "resume", "overwrite", "cpu", "eval_data", "eval_split", "eval_every", "eval_blocks"),
    *("checkpoint_every", "batch_size", "grad_accum"),
)
"""What a resumed run may give differently: none changes the weights (batches are compared as a whole)."""

VALIDATION = {"eval_data", "eval_split", "eval_every", "eval_blocks"}
"""With patience these decide which weights are kept."""

RUN_FILES = (
    *("run.json", "results.json", "train.csv", "loss.png", "checkpoint", "adapter"),
    *("config.json", "model*.safetensors", "model.safetensors.index.json"),
)
"""What a run may leave in its folder, as patterns; the tokenizer's files are simply replaced."""

PACKAGES = ("hf-linattn", "torch", "transformers", "accelerate", "datasets", "peft")


def run(arguments: FinetuneArguments, command: str) -> dict[str, Any]:
    """See `hf_linattn.finetune.finetune`."""
    accelerator = make_accelerator(arguments.mixed_precision, arguments.cpu)
    results = train(arguments, command, accelerator, Method())
    accelerator.end_training()
    return results


def train(
    arguments: FinetuneArguments,
    command: str,
    accelerator: Accelerator,
    method: Method,
    data: Any = None,
    task: Objective | None = None,
) -> dict[str, Any]:
    """One run by any method; see `hf_linattn.finetune.finetune`.

    Args:
        arguments: the options.
        command: for the record.
        accelerator: of this process; several runs may follow each other.
        method: what is trained, and how.
        data: text as `load_documents` takes it, in the place of `arguments.data`.
        task: what is learned; by default what the arguments say.
    """
    folder = Path(arguments.output_dir).expanduser()
    settings = {**_settings(arguments, accelerator), **method.settings}
    if accelerator.is_main_process:
        _check_folder(folder, arguments, settings)
    accelerator.wait_for_everyone()
    if arguments.resume and (folder / "results.json").exists():
        finished: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        return finished
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    task = task or chosen_objective(arguments, tokenizer)
    with accelerator.main_process_first():  # the others find the tokens of tables in the cache
        blocks, eval_blocks = _load_data(arguments, task, data)
    base = method.load(arguments, task)
    check_fit(base, task, blocks, eval_blocks)
    sizes = {
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "patch_parameters": sum(p.numel() for name, p in base.named_parameters() if PATCH_PART in name),
    }
    model = method.trained(base, arguments, task, blocks, accelerator)
    if accelerator.is_main_process:
        _begin(
            folder, {**settings, "data_sha256": hashlib.sha256(blocks.data).hexdigest()}, arguments.overwrite
        )
    accelerator.wait_for_everyone()
    accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=method.skips)
    loop = TrainingLoop(
        accelerator,
        model,
        blocks,
        _loop_settings(arguments),
        folder,
        eval_blocks=eval_blocks,
        losses=method.losses,
        prepare=method.prepare,
        rate=method.rate,
    )
    loop.run()
    results, trained = method.results(), loop.trained_model()  # both of all processes
    box: list[dict[str, Any]] = [{}]
    if loop.log is not None:
        results["label"] = method.label
        box = [{**_results(arguments, command, loop, task, sizes), **results}]
        _save(method.saved(trained), tokenizer, folder)
        with replacing(folder / "loss.png") as partial:
            title = f"{arguments.model}, {arguments.patch or 'no new patch'}"
            save_loss_curve(loop.log.rows, partial, title, method.label)
        # Written last: where it is, the run is complete and its checkpoint no longer needed.
        write_json(folder / "results.json", box[0])
        loop.checkpoint.remove()
    broadcast_object_list(box)
    # The wrapped model must go before its process group: torch 2.13 with gloo hangs the other way round.
    del loop, model, base, trained
    accelerator.free_memory()
    return box[0]


def make_accelerator(mixed_precision: str | None, cpu: bool) -> Accelerator:
    """This process's part of the machine.

    Raises:
        OptionError: a precision that the machine does not have, or a way to share the work that does not fit.
    """
    options = accelerator_options()
    try:
        accelerator = Accelerator(mixed_precision=mixed_precision, cpu=cpu, **options)
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
    return accelerator


def _settings(arguments: FinetuneArguments, accelerator: Accelerator) -> dict[str, Any]:
    """What decides the trained weights; a resumed run must have the same."""
    everything = dataclasses.asdict(arguments)
    free = set(FREE_TO_CHANGE) - (VALIDATION if arguments.patience else set())
    settings = {name: value for name, value in everything.items() if name not in free}
    settings["mixed_precision"] = str(accelerator.mixed_precision)
    settings["global batch"] = arguments.batch_size * arguments.grad_accum * accelerator.num_processes
    return settings


def _check_folder(folder: Path, arguments: FinetuneArguments, settings: dict[str, Any]) -> None:
    """See that the output folder can be used for this run, before anything slow begins.

    Raises:
        TrainingError: it cannot; the message says what to do.
    """
    if folder.exists() and Path(arguments.model).exists() and folder.samefile(arguments.model):
        raise TrainingError(f"--output-dir {folder} is --model itself: choose another directory")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    if not (folder / "run.json").exists():
        strange = [name for name in RUN_FILES if any(folder.glob(name))]
        if strange:
            raise TrainingError(
                f"{folder} holds {', '.join(strange)} but no run of this command: choose another directory"
            )
    elif arguments.resume:
        _check_same_settings(folder, settings)
    elif not arguments.overwrite:
        raise TrainingError(f"{folder} already holds a run: give --resume, --overwrite or another directory")


def _check_same_settings(folder: Path, settings: dict[str, Any]) -> None:
    before = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    if changed := differences(FinetuneArguments, before, settings):
        raise TrainingError(f"cannot resume the run in {folder}: it began with other {', '.join(changed)}")


def _begin(folder: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Record the settings, over an old run when told so; a resumed run must have the same text as before."""
    run_file = folder / "run.json"
    if overwrite and run_file.exists():
        with writing(folder):
            for path in [path for name in RUN_FILES for path in folder.glob(name) if path != run_file]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif run_file.exists():
        _check_same_settings(folder, settings)
        Checkpoint(folder).sweep()
        return
    write_json(run_file, settings)


def chosen_objective(arguments: Any, tokenizer: PreTrainedTokenizerBase) -> Objective:
    """What the run trains for, by its `model`, `objective`, `block_size` and `seed`.

    Raises:
        TrainingError: there is no such model, or it cannot be trained so.
        DataError: the tokenizer cannot mask.
    """
    with explain_missing(f"cannot load --model {arguments.model}", TrainingError):
        config = AutoConfig.from_pretrained(arguments.model)
    name = choose(arguments.objective, config)
    return objective(name, tokenizer, arguments.block_size, arguments.seed)


def _load_data(
    arguments: FinetuneArguments, task: Objective, data: Any
) -> tuple[NDArray[np.int32], NDArray[np.int32] | None]:
    column = arguments.text_column
    blocks = task.load_blocks(
        arguments.data if data is None else data, column=column, split=arguments.data_split
    )
    if arguments.eval_data is None:
        return blocks, None
    held_out = task.load_blocks(arguments.eval_data, column=column, split=arguments.eval_split)
    return blocks, held_out[: arguments.eval_blocks]


def _loop_settings(arguments: FinetuneArguments) -> LoopSettings:
    names = [item.name for item in dataclasses.fields(LoopSettings)]
    return LoopSettings(**{name: getattr(arguments, name) for name in names})


def _save(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the model, with LoRA merged into it, so that `hf_linattn.from_pretrained(folder)` loads it."""
    with filling(folder) as partial:
        if hasattr(model, "merge_and_unload"):
            # Otherwise peft looks the base model's vocabulary up on the Hub.
            model.save_pretrained(str(partial / "adapter"), save_embedding_layers=False)
            model = model.merge_and_unload()
        model.save_pretrained(str(partial))
        tokenizer.save_pretrained(partial)


def _results(
    arguments: FinetuneArguments, command: str, loop: TrainingLoop, task: Objective, sizes: dict[str, int]
) -> dict[str, Any]:
    assert loop.log is not None
    rows = loop.log.rows
    losses = [float(row["eval_loss"]) for row in rows if row["eval_loss"]]
    return {
        "command": command,
        "arguments": dataclasses.asdict(arguments),
        "seed": arguments.seed,
        "versions": package_versions(PACKAGES, missing="not installed"),
        "device": str(loop.accelerator.device),
        "processes": loop.accelerator.num_processes,
        "distributed": loop.accelerator.distributed_type.value,
        "global_batch": loop.global_batch,
        **sizes,
        "trained_parameters": sum(parameter.numel() for parameter in loop.parameters),
        "blocks": len(loop.blocks),
        "objective": task.name,
        "documents": task.description,
        "steps": loop.step,
        "tokens": int(rows[-1]["tokens"]),
        "loss": float(rows[-1]["loss"]),
        "eval_loss_before": losses[0] if losses else None,
        "kept_step": loop.kept[0],
        "eval_loss": loop.kept[1],
        "seconds": round(loop.seconds, 3),
    }
