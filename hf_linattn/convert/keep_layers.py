"""Which layers stay softmax is measured: on the model that stage transfer leaves, or on the patched one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_linattn import patch_model
from hf_linattn.cli.files import filling, read_json, write_json, writing
from hf_linattn.cli.jobs import Job, run_jobs
from hf_linattn.convert.layer_sizes import row_length
from hf_linattn.convert.presets import QUARTER, context_of
from hf_linattn.convert.resolve import ConversionPlan
from hf_linattn.convert.stages import first_tokens, load_original
from hf_linattn.errors import DataError
from hf_linattn.finetune.model import load_config
from hf_linattn.registry import parse

TOKENS = 8192
"""Tokens of the text that each arrangement of layers is measured on."""

GPU_TOKENS = 4096
"""Tokens of a forward pass on a GPU, which would wait for Python with a row at a time."""

SINKS = 4
"""Of `eval.layers --window`."""
LONGEST = 8192
"""Longest context whose kept layers get a window: it takes its memory from the first token on."""

PATCHED = "patched"
"""Folder of the model with the patch in every layer, while its layers are ranked."""

PASSKEYS = ("--tasks", "passkey", "--samples", "2")
"""Six questions: what they lose in log-probability ranks layers whose answers are still right."""
PASSKEYS_FROM = 512
"""Tokens of a row; shorter ones have no room for them with every tokenizer, and random tokens come again."""

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment of a process that is none of this run's."""


def keep_layers(plan: ConversionPlan, accelerator: Accelerator, data: Any = None) -> dict[str, Any]:
    """Rank the layers by `hf_linattn.eval.layers`, and leave the model whose best layers stay softmax.

    A call of all processes: the first works, once, and goes on where an earlier start ended; the others wait.
    What the other layers have learned in stage transfer stays. Without that stage, passkeys count in
    rows longer than the windows: of patches that say what the model said as soon as they are put in (`h2o`).

    Args:
        plan: of the conversion, whose `kept` is the folder of that model.
        accelerator: of this process.
        data: text as `load_documents` takes it, in the place of --data.

    Returns:
        "layers", the numbers of those that stay softmax, "rank", what decided, and "window", the tokens that
        they see beside the sinks; None for all.

    Raises:
        DataError: the text cannot be read.
        JobError: the layers cannot be ranked.
    """
    assert plan.kept is not None
    chosen = plan.kept.parent / "chosen.json"
    if accelerator.is_main_process and not chosen.exists():
        _rank(plan, plan.kept, accelerator, data)
        results = read_json(plan.kept.parent / "results.json")
        layers = sorted(results["order"][: results["keep"]])
        found = {"layers": layers, "rank": results["rank"], "note": results["note"], "window": _window(plan)}
        write_json(chosen, found)
    accelerator.wait_for_everyone()
    return read_json(chosen)


def _rank(plan: ConversionPlan, kept: Path, accelerator: Accelerator, data: Any) -> None:
    arguments, folder = plan.arguments, kept.parent
    # as the stages compute; the hybrid is written in the dtype of stage transfer's folder all the same
    dtype = "bfloat16" if accelerator.mixed_precision == "bf16" else arguments.dtype
    text = folder / "text.txt"
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(kept, ignore_errors=True)  # of a start that was killed while it wrote
    transferred = plan.stages[0].name == "transfer"
    model = plan.stages[0].folder if transferred else _write_patched(plan, folder / PATCHED)
    length = asked = arguments.block_size if transferred else _long_row(plan)
    if not text.exists():
        _write_text(plan, text, max(TOKENS, 2 * length), data)
    if not transferred and _tokens_of(plan, text) < length:
        length = arguments.block_size
    words = [sys.executable, "-m", "hf_linattn.eval.layers", "--model", str(model)]
    words += ["--original", plan.original, "--data", str(text), "--bos", "no", "--dtype", dtype]
    words += ["--length", str(length), "--max-tokens", str(TOKENS if transferred else length)]
    words += ["--counts", "keep", "--seed", str(arguments.seed), "--output-dir", str(folder)]
    words += ["--save", str(kept)]
    if not transferred:
        words += ["--recall-lengths", str(asked), *(PASSKEYS if asked >= PASSKEYS_FROM else ())]
    if accelerator.device.type != "cpu":
        words += ["--batch-size", str(max(1, GPU_TOKENS // length))]
    if (window := _window(plan)) is not None:
        words += ["--window", str(window)]
    if arguments.keep != QUARTER:  # its default
        words += ["--keep", str(arguments.keep)]
    environment = {**ALONE, "CUDA_VISIBLE_DEVICES": ""} if arguments.cpu else ALONE
    job = Job("layers", words, finished=(kept / "config.json").exists, progress=lambda: _measured(folder))
    run_jobs([job], folder / "logs", at_once=1, environment=environment)
    shutil.rmtree(folder / PATCHED, ignore_errors=True)


def _write_patched(plan: ConversionPlan, folder: Path) -> Path:
    """Write the original with the patch in every layer, unless an earlier start has; returns the folder."""
    if not (folder / "config.json").exists():
        assert plan.patch is not None  # else --model is patched, which is refused
        model = load_original(plan.original, plan.arguments.dtype, plan.objective)
        patch_model(model, plan.patch, options=plan.options, sliding=plan.arguments.sliding)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with filling(folder) as partial:
            model.save_pretrained(partial)
            plan.tokenizer.save_pretrained(partial)
    return folder


def _long_row(plan: ConversionPlan) -> int:
    """Count the tokens of a row in which the windows of the patch lose what stands in front."""
    assert isinstance(plan.arguments.patch, str)  # else layers are not chosen
    options = parse(plan.arguments.patch, plan.arguments.options).options
    sizes = [values["size"] for values in options.values() if "size" in values]
    length = row_length(max(sizes), load_config(plan.original)) if sizes else TOKENS // 4
    return max(length, plan.arguments.block_size)


def _window(plan: ConversionPlan) -> int | None:
    """Count the tokens that kept layers see beside the sinks: the model's context; None for all tokens.

    Behind its context softmax breaks, and with it a model of which a few layers are softmax.
    """
    context = context_of(load_config(plan.original))
    return context - SINKS if context is not None and SINKS < context <= LONGEST else None


def _measured(folder: Path) -> float:
    """Tell what part of the arrangements is measured: none, all, each layer alone, and two to compare."""
    try:
        results = read_json(folder / "results.json")
    except DataError:
        return 0.0  # not begun
    return min(len(results["rows"]) / (len(results["layers"]) + 4), 1.0)


def _write_text(plan: ConversionPlan, path: Path, count: int, data: Any) -> None:
    """Write the first tokens of the text that the stages learn from as plain text."""
    ids = first_tokens(plan, count, data).tolist()
    with writing(path):
        path.write_text(str(plan.tokenizer.decode(ids, skip_special_tokens=True)), encoding="utf-8")


def _tokens_of(plan: ConversionPlan, path: Path) -> int:
    text = path.read_text(encoding="utf-8")
    return len(plan.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
