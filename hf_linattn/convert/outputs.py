"""The output folder of a conversion: what lies in it, its report page, and what it says at the end."""

from __future__ import annotations

import base64
import filecmp
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hf_linattn.cli.files import replacing, writing
from hf_linattn.convert.presets import STAGES
from hf_linattn.errors import OptionError, TrainingError
from hf_linattn.training.folder import RunFolder

RECORD, VALIDATION, PAGE = "plan.json", "validation.json", "report.html"
SIZES = "sizes.json"
"""How many tokens each layer keeps, where that was measured."""
LAYERS = "layers"
"""Folder of what chose the layers that stay softmax."""
SOURCE = "original"
"""Folder of a model that was given as an object."""
OWN_TEXT, OWN_EVAL_TEXT = "self.jsonl", "self-eval.jsonl"
LABELS = {"original": "original", "swapped": "patched, untrained"}


@dataclass(frozen=True)
class ConversionResult:
    """A finished conversion.

    Attributes:
        folder: of the converted model, that of the last stage.
        record: what plan.json holds.
        losses: what validation.json holds; empty without --eval-data.
        stages: what the results.json of every stage holds.
    """

    folder: Path
    record: dict[str, Any]
    losses: dict[str, float]
    stages: list[dict[str, Any]]


def conversion_folder(output_dir: str) -> RunFolder:
    """Describe the output folder of a conversion; see `RunFolder`."""
    return RunFolder(
        Path(output_dir).expanduser(),
        "conversion",
        RECORD,
        contents=(*STAGES, LAYERS, SIZES, VALIDATION, OWN_TEXT, OWN_EVAL_TEXT, PAGE),
        # a conversion that was killed before its record leaves its own text and first validation
        signs=(*STAGES, "config.json", "run.json"),
        settings_key="arguments",
    )


def save_source(
    model: Any, tokenizer: Any, output_dir: str, overwrite: bool = False
) -> tuple[str, str | None]:
    """Save model and tokenizer below the output folder where they are objects; returns their names.

    Args:
        model: folder or Hub name, or a model.
        tokenizer: folder or Hub name, a tokenizer, or None for the model's.
        output_dir: of the conversion.
        overwrite: another model that is there already gives way.

    Raises:
        OptionError: a model as an object without a tokenizer.
        TrainingError: another model is there, or they cannot be written.
    """
    if isinstance(model, str) and (tokenizer is None or isinstance(tokenizer, str)):
        return model, tokenizer
    if tokenizer is None:
        raise OptionError("a model given as an object needs its tokenizer: tokenizer=...")
    folder = Path(output_dir).expanduser() / SOURCE
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not isinstance(model, str) and (folder / "config.json").exists() and not _holds(folder, model):
            if not overwrite:
                raise TrainingError(
                    f"{folder} holds another model, that of a conversion before: choose another output_dir"
                )
            shutil.rmtree(folder)
            folder.mkdir()
        if not isinstance(model, str) and not (folder / "config.json").exists():
            model.save_pretrained(str(folder))
        if not isinstance(tokenizer, str):
            tokenizer.save_pretrained(str(folder))
    return (
        model if isinstance(model, str) else str(folder),
        tokenizer if isinstance(tokenizer, str) else str(folder),
    )


def _holds(folder: Path, model: Any) -> bool:
    """Tell whether a folder holds this very model, as it would be saved now."""
    with tempfile.TemporaryDirectory(dir=folder) as now:
        model.save_pretrained(now)
        files = [file for file in Path(now).iterdir() if file.suffix in (".json", ".safetensors")]
        there = ((file, folder / file.name) for file in files)
        return all(old.exists() and filecmp.cmp(new, old, shallow=False) for new, old in there)


def write_page(result: ConversionResult) -> None:
    """Write report.html: every stage on one page that needs nothing else.

    Raises:
        TrainingError: it cannot be written.
    """
    names, out = result.record["stages"], result.folder.parent
    stages = [
        {"layer_losses": {}, **results, "name": name, "picture": _picture(out / name / "loss.png")}
        for name, results in zip(names, result.stages, strict=True)
    ]
    versions = ", ".join(f"{name} {number}" for name, number in stages[-1]["versions"].items())
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    text = environment.get_template("report.html.j2").render(
        plan=result.record,
        validation=result.losses,
        stages=stages,
        versions=versions,
        labels=LABELS,
        exp=math.exp,
    )
    with replacing(out / PAGE) as partial:
        partial.write_text(text, encoding="utf-8")


def _picture(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode("ascii")


def summary(result: ConversionResult) -> str:
    """Say as text what the perplexity is after each stage, or the error of the hidden states."""
    losses, objective, lines = result.losses, result.record.get("objective"), []
    if losses and objective == "states":
        lines = [
            f"{name:10} error of the last hidden states over their variance {loss:8.4f}"
            for name, loss in losses.items()
        ]
    elif losses:
        what = "perplexity of masked tokens" if objective == "mlm" else "perplexity"
        first = losses["original"]
        lines = [
            f"{name:10} {what} {math.exp(loss):10.4g}   {math.exp(loss - first):7.3f} x the original"
            for name, loss in losses.items()
        ]
    page = result.folder.parent / PAGE
    if kept := result.record.get("kept"):
        numbers = ", ".join(map(str, kept["layers"]))
        seen = f" over {kept['window']} tokens and the first" if kept.get("window") else ""
        lines.append(f"layers that stay softmax{seen}, by {kept['rank']}: {numbers} ({page.parent / LAYERS})")
    if "sizes" in result.record:
        sizes = sorted(result.record["sizes"].values())
        found = f"{sizes[0]} to {sizes[-1]} tokens" if sizes else "the same, as the text is too short to tell"
        lines.append(f"windows, by what each layer loses: {found} ({page.parent / SIZES})")
    lines.append(f"the model is in {result.folder}, everything about it in {page}")
    return "\n".join(lines) + "\n"
