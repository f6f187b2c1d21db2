"""Preset `recall`: which layers stay softmax is measured on the model that stage transfer leaves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from hf_linattn.cli.files import read_json, write_json, writing
from hf_linattn.cli.jobs import Job, run_jobs
from hf_linattn.convert.resolve import ConversionPlan
from hf_linattn.convert.stages import first_tokens
from hf_linattn.errors import DataError

TOKENS = 8192
"""Tokens of the text that each arrangement of layers is measured on."""

GPU_TOKENS = 4096
"""Tokens of a forward pass on a GPU, which would wait for Python with a row at a time."""

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
"""Environment of a process that is none of this run's."""


def keep_layers(plan: ConversionPlan, accelerator: Accelerator, data: Any = None) -> dict[str, Any]:
    """Rank the layers by `hf_linattn.eval.layers`, and leave the hybrid whose best layers stay softmax.

    A call of all processes: the first works, once, and goes on where an earlier start ended; the others wait.
    The maps of the layers that stay linear are those that stage transfer has trained.

    Args:
        plan: of the conversion, whose `kept` is the folder of the hybrid.
        accelerator: of this process.
        data: text as `load_documents` takes it, in the place of --data.

    Returns:
        "layers", the numbers of those that stay softmax, and "rank", what decided.

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
        write_json(chosen, {"layers": layers, "rank": results["rank"], "note": results["note"]})
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
    if not text.exists():
        _write_text(plan, text, data)
    words = [sys.executable, "-m", "hf_linattn.eval.layers", "--model", str(folder.parent / "transfer")]
    words += ["--original", plan.original, "--data", str(text), "--bos", "no", "--dtype", dtype]
    words += ["--length", str(arguments.block_size), "--max-tokens", str(TOKENS), "--counts", "keep"]
    words += ["--seed", str(arguments.seed), "--output-dir", str(folder), "--save", str(kept)]
    if accelerator.device.type != "cpu":
        words += ["--batch-size", str(max(1, GPU_TOKENS // arguments.block_size))]
    if arguments.keep is not None:
        words += ["--keep", str(arguments.keep)]
    environment = {**ALONE, "CUDA_VISIBLE_DEVICES": ""} if arguments.cpu else ALONE
    job = Job("layers", words, finished=(kept / "config.json").exists, progress=lambda: _measured(folder))
    run_jobs([job], folder / "logs", at_once=1, environment=environment)


def _measured(folder: Path) -> float:
    """Tell what part of the arrangements is measured: none, all, each layer alone, and two to compare."""
    try:
        results = read_json(folder / "results.json")
    except DataError:
        return 0.0  # not begun
    return min(len(results["rows"]) / (len(results["layers"]) + 4), 1.0)


def _write_text(plan: ConversionPlan, path: Path, data: Any) -> None:
    """Write the first tokens of the text that the stages learn from as plain text."""
    ids = first_tokens(plan, TOKENS, data).tolist()
    with writing(path):
        path.write_text(str(plan.tokenizer.decode(ids, skip_special_tokens=True)), encoding="utf-8")
