"""The model card of an output folder, README.md: what the model is, how it was made, measured, and loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from hf_linattn.cli.files import read_json, replacing
from hf_linattn.patching.interface import NAME

CARD, ADAPTER = "README.md", "adapter"

_TASKS = {"causal": "text-generation", "mlm": "fill-mask", "states": "feature-extraction"}
_HEARD_AND_SEEN = {"vision_config": "image-text-to-text", "audio_config": "audio-text-to-text"}


def write_card(
    folder: Path,
    base: str,
    command: str,
    runs: Sequence[Mapping[str, Any]],
    losses: Mapping[str, float],
    label: str,
) -> None:
    """Write the card of a trained model beside its weights, with metadata that the Hub accepts.

    Its `base_model` and `datasets` are names on the Hub: that of a local folder is the one which the folder's
    own card names, and is left out where it names none.

    Args:
        folder: of the model, with its config.json.
        base: folder or Hub name of the model that it comes from.
        command: that made it.
        runs: what the results.json of each run holds, in their order; the last one left this model.
        losses: name of a model -> its validation loss; may be empty.
        label: what the losses are; "loss ..." ones are exponents of a perplexity.

    Raises:
        TrainingError: it cannot be written.
    """
    config = read_json(folder / "config.json")
    groups = config.get(NAME, {}).get("patches", [])
    task = _TASKS.get(runs[-1]["objective"])
    if task == "text-generation":
        task = next((other for part, other in _HEARD_AND_SEEN.items() if part in config), task)
    patches = sorted({part for group in groups for part in group["patch"].split("+")})
    data = runs[-1]["arguments"]["data"]
    above = _card_of(base)
    metadata = ModelCardData(
        base_model=_hub_name(base) or above.get("base_model"),
        datasets=[name] if (name := _hub_name(data.partition(":")[0])) else None,
        library_name="transformers",
        license=above.get("license"),
        pipeline_tag=task,
        tags=["hf_linattn", *patches],
    )
    parts = [
        f"---\n{metadata.to_yaml()}\n---",
        f"# {folder.resolve().name}",
        _origin(base, groups),
        "## Load it",
        _loading(folder, groups),
        "## Training",
        _training(runs),
        f"```text\n{command}\n```",
        "## Measured",
        _measured(losses, label, runs[-1]),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in runs[-1]["versions"].items()) + ".",
    ]
    _write(folder, parts)
    if (folder / ADAPTER).is_dir():  # where peft has put a form to fill in
        metadata.library_name, metadata.tags = "peft", [*(metadata.tags or []), "lora"]
        head = f"---\n{metadata.to_yaml()}\n---"
        _write(folder / ADAPTER, [head, f"# LoRA of {folder.resolve().name}", _of_adapter(base, groups)])


def _write(folder: Path, parts: Sequence[str]) -> None:
    with replacing(folder / CARD) as partial:
        partial.write_text(str(ModelCard("\n\n".join(parts) + "\n")), encoding="utf-8")


def _of_adapter(base: str, groups: Sequence[Mapping[str, Any]]) -> str:
    """Say that the folder above has these weights merged, and what they alone are to be put on."""
    merged = "The folder above holds the model with these weights merged into it: load that one."
    if not groups:
        return f"{merged} They alone go on `{base}` by `peft.PeftModel.from_pretrained`."
    return (
        f"{merged} They alone go on a patched model; peft would put them on `{base}` as it is, "
        "and they were not trained on that. Patch it first, by `hf_linattn.patch_model`, then call "
        f"`peft.PeftModel.from_pretrained`.\n\n{_origin(base, groups)}"
    )


def _card_of(base: str) -> dict[str, Any]:
    """Read the metadata of a folder's own card; nothing where there is none that can be read."""
    path = Path(base).expanduser() / CARD
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, OSError):
        return {}
    return found


def _hub_name(source: str) -> str | None:
    """Tell the name on the Hub of a source that is no local file or folder."""
    name = str(Path(source).parent) if source.endswith(".gguf") else source
    if Path(source).expanduser().exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _origin(base: str, groups: Sequence[Mapping[str, Any]]) -> str:
    if not groups:
        return f"`{base}`, trained with hf_linattn, its attention as it was."
    rows = [
        f"| `{group['patch']}` | {_code(group['options'])} | {len(group['modules'])} |" for group in groups
    ]
    table = "\n".join(["| attention | options | modules |", "|---|---|---|", *rows])
    return f"`{base}` with another attention, put in place by hf_linattn:\n\n{table}"


def _code(options: Mapping[str, Any]) -> str:
    shown = {name: values for name, values in options.items() if values}
    return f"`{json.dumps(shown)}`" if shown else "defaults"


def _loading(folder: Path, groups: Sequence[Any]) -> str:
    name = folder.resolve().name
    first = "from hf_linattn import from_pretrained  # of the package hf-linattn\n" if groups else ""
    call = "from_pretrained" if groups else "AutoModelForCausalLM.from_pretrained"
    classes = "AutoTokenizer" if groups else "AutoModelForCausalLM, AutoTokenizer"
    return (
        f"```python\n{first}from transformers import {classes}\n\n"
        f'model = {call}("{name}")  # this folder, or its name on the Hub\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")\n```'
    )


def _training(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        f"| {Path(run['arguments']['output_dir']).name} | {run['tokens']:,} | {run['steps']:,} "
        f"| {run['global_batch']} x {run['arguments']['block_size']} | {run['arguments']['lr']:.2g} "
        f"| {run['trained_parameters']:,} of {run['parameters']:,} |"
        for run in runs
    ]
    head = "| run | tokens | steps | rows x tokens a step | peak rate | parameters trained |"
    last = runs[-1]
    return "\n".join(
        [f"Data: `{last['arguments']['data']}`; {last['documents']}.", "", head, "|---" * 6 + "|", *rows]
    )


def _measured(losses: Mapping[str, float], label: str, run: Mapping[str, Any]) -> str:
    if not losses:
        return "No text was given for validation."
    arguments = run["arguments"]
    counts = label.startswith("loss")
    rows = [
        f"| {name} | {loss:.4f} |" + (f" {math.exp(loss):.4g} |" if counts else "")
        for name, loss in losses.items()
    ]
    head = f"| model | {label} |" + (" perplexity |" if counts else "")
    where = f"The first {arguments['eval_blocks']} rows, at most, of `{arguments['eval_data']}`:"
    return "\n".join([where, "", head, "|---" * (3 if counts else 2) + "|", *rows])
