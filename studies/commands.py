"""The commands that train a row and measure it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml
from plan import BATCH, BLOCK, HERE, RANKED, SEEDS, STEPS, Experiment, Workspace

MEASURES: dict[str, str] = yaml.safe_load((HERE / "measures.yaml").read_text(encoding="utf-8"))
PLAIN = {"--preset": "plain"}
EVERY = {"--eval-every": "50", "--checkpoint-every": "50"}


def training(workspace: Workspace, row: Experiment, seed: int) -> list[str]:
    """Return the command that trains a row."""
    words = ["python", "-m", f"hf_linattn.{row.training}", "--model", str(workspace.model), *_patch(row)]
    words += ["--data", str(workspace.text("train")), "--block-size", str(BLOCK)]
    defaults = {"--batch-size": str(BATCH)}
    defaults |= {"--max-steps": str(STEPS), "--lr": "3e-4"} if row.training == "finetune" else PLAIN
    words += [*_unless_set(defaults, row), *row.arguments]
    words += ["--eval-data", str(workspace.text("held_out")), "--eval-blocks", "32", *_unless_set(EVERY, row)]
    words += ["--seed", str(seed), "--cpu", "--resume"]
    return [*words, "--output-dir", str(workspace.trained(row, seed))]


def _unless_set(options: Mapping[str, str], row: Experiment) -> list[str]:
    return [word for name, value in options.items() if name not in row.arguments for word in (name, value)]


def measurements(workspace: Workspace, row: Experiment, seed: int) -> Iterator[tuple[str, list[str]]]:
    """Yield what is measured of a row, and by which command."""
    asked = {
        "perplexity": True,
        "generation": row.training != "none" and seed == SEEDS[0],
        "recall": row.name != "original",
        "diagnose": row.diagnose,
        "branches": isinstance(row.patch, str) and row.patch.startswith("window+"),
    }
    untrained = row.training == "none"
    entry = _entry(row)
    values = {
        "{model}": [str(workspace.result(row, seed))],
        "{trained}": [] if untrained else [str(workspace.result(row, seed))],
        "{patch}": _patch(row) if untrained else [],
        "{entry}": ["--patch", entry] if untrained and entry else [],
    }
    for measure in asked:
        if asked[measure] and measure in workspace.base.measures:
            output = workspace.work / workspace.key(measure, row, seed)
            yield measure, _filled(measure, workspace, values, output)


def layers(workspace: Workspace) -> list[str]:
    """Return the command that ranks the layers of the transferred model by every rank."""
    values = {"{model}": [str(workspace.trained(RANKED, SEEDS[0]) / "transfer")]}
    return _filled("layers", workspace, values, workspace.work / workspace.layers)


def _filled(measure: str, workspace: Workspace, values: Mapping[str, list[str]], output: Path) -> list[str]:
    known = {"{base}": [str(workspace.model)], "{held_out}": [str(workspace.text("held_out"))], **values}
    words = [each for word in MEASURES[measure].split() for each in known.get(word, [word])]
    command = "perplexity" if measure == "branches" else measure
    return ["python", "-m", f"hf_linattn.eval.{command}", *words, "--output-dir", str(output)]


def _patch(row: Experiment) -> list[str]:
    words: list[str] = []
    if row.patch is not None:
        words += ["--patch", row.patch if isinstance(row.patch, str) else json.dumps(row.patch)]
    if row.options:
        words += ["--options", json.dumps(row.options)]
    return words + (["--rope-scaling", row.rope_scaling] if row.rope_scaling else [])


def _entry(row: Experiment) -> str:
    """Write NAME:OPTION=VALUE@ROPE; "" for the model as it is."""
    if not (row.patch or row.rope_scaling):
        return ""
    options = "".join(f":{name}={json.dumps(value)}" for name, value in row.options.items())
    return f"{row.patch or 'softmax'}{options}" + (f"@{row.rope_scaling}" if row.rope_scaling else "")
