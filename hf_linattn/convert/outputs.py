"""The output folder of a conversion: checked before anything slow begins, and read at the end."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_linattn.cli.arguments import differences
from hf_linattn.cli.files import writing
from hf_linattn.convert.__main__ import STAGES, ConvertArguments
from hf_linattn.errors import OptionError, TrainingError

PLAN, VALIDATION = "plan.json", "validation.json"
FREE_TO_CHANGE = (
    *("output_dir", "resume", "overwrite", "cpu", "eval_data", "eval_split", "eval_every", "eval_blocks"),
    *("checkpoint_every", "batch_size", "grad_accum"),
)
"""What a resumed conversion may give differently; the stages compare whole batches."""


def check_folder(out: Path, arguments: ConvertArguments) -> None:
    """See that the output folder can be used for this conversion, before anything slow begins.

    Raises:
        TrainingError: it cannot; the message says what to do.
    """
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
        now = {name: value for name, value in asdict(arguments).items() if name not in FREE_TO_CHANGE}
        if changed := differences(ConvertArguments, before, now):
            raise TrainingError(
                f"cannot resume the conversion in {out}: it began with other {', '.join(changed)}"
            )
    elif not arguments.overwrite:
        raise TrainingError(
            f"{out} already holds a conversion: give --resume, --overwrite or another directory"
        )
    else:
        with writing(out):
            for name in (*STAGES, VALIDATION, "self.jsonl", "self-eval.jsonl", "report.html", PLAN):
                path = out / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


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
    """Perplexities after each stage, or errors of the hidden states, in words."""
    values: dict[str, float] = json.loads((out / VALIDATION).read_text(encoding="utf-8"))
    plan, lines = json.loads((out / PLAN).read_text(encoding="utf-8")), []
    if values and plan.get("objective") == "states":
        lines = [
            f"{name:10} error of the last hidden states over their variance {loss:8.4f}"
            for name, loss in values.items()
        ]
    elif values:
        what = "perplexity of masked tokens" if plan.get("objective") == "mlm" else "perplexity"
        first = values["original"]
        lines = [
            f"{name:10} {what} {math.exp(loss):10.4g}   {math.exp(loss - first):7.3f} x the original"
            for name, loss in values.items()
        ]
    last = plan["stages"][-1]
    lines.append(f"the model is in {out / last}, everything about it in {out / 'report.html'}")
    return "\n".join(lines) + "\n"
