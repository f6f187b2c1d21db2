"""List the commands of the demo: fine-tune, measure, sample, report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linattn.cli.jobs import Job, last_step
from hf_linattn.demo.data import DemoData

ORIGINAL, CONTROL = "unpatched", "control"
HELD_OUT = "Every model read the same text, and no document that it was measured on was trained on."
EVAL_BLOCKS = 16
VALIDATIONS = 5


@dataclass(frozen=True)
class Plan:
    """What the demo does: where, which model and patches (name -> options), which text, and all settings."""

    folder: Path
    model: str
    patches: dict[str, dict[str, Any]]
    data: DemoData
    block_size: int
    cpu: bool
    settings: dict[str, Any]

    def run_folder(self, name: str) -> Path:
        """Return where the fine-tuned model of a run is."""
        return self.folder / "runs" / name


def make_jobs(plan: Plan) -> tuple[list[Job], dict[str, list[str]]]:
    """Return all jobs in a good order, and by run the commands as a user would type them."""
    trained = {CONTROL: None, **{name: name for name in plan.patches}}
    commands: dict[str, list[str]] = {ORIGINAL: [], **{name: [] for name in trained}, "page": []}
    jobs: list[Job] = []

    def add(run: str, words: list[str], job: dict[str, Any]) -> None:
        program = words[0]
        module = {"accelerate": "accelerate.commands.launch"}.get(program)
        start = [sys.executable, "-m", module] if module else [sys.executable]
        commands[run].append(shlex.join(words))
        jobs.append(Job(command=[*start, *words[2 if module else 1 :]], **job))

    for name, patch in trained.items():
        add(name, _finetune_words(plan, name, patch), _finetune_job(plan, name))
    for name in (ORIGINAL, *trained):
        add(name, _perplexity_words(plan, name), _perplexity_job(plan, name))
    everything = tuple(job.name for job in jobs)
    samples = plan.folder / "samples.json"
    fine_tuned = tuple(name for name in everything if name.startswith("fine-tune"))
    words = _sample_words(plan, [plan.model, *(str(plan.run_folder(name)) for name in trained)], samples)
    add("page", words, {"name": "sample", "finished": samples.exists, "weight": 10.0, "after": fine_tuned})
    report = {"name": "report", "weight": 5.0, "after": (*everything, "sample")}
    add("page", _report_words(plan, samples), {**report, "finished": _since_now(plan.folder / "report.html")})
    return jobs, commands


def _since_now(path: Path) -> Callable[[], bool]:
    """Return a test whether the file has been written after this call: the page is always made anew."""
    before = path.stat().st_mtime_ns if path.exists() else None
    return lambda: path.exists() and path.stat().st_mtime_ns != before


def _finetune_words(plan: Plan, name: str, patch: str | None) -> list[str]:
    settings, steps = plan.settings, plan.settings["max_steps"]
    words = ["accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    words += ["--dynamo_backend", "no", *(["--cpu"] if plan.cpu else []), "-m", "hf_linattn.finetune"]
    words += ["--model", plan.model]
    if patch is not None:
        words += ["--patch", patch]
        if plan.patches[patch]:
            words += ["--options", json.dumps(plan.patches[patch])]
    words += ["--data", plan.data.train, "--eval-data", plan.data.held_out]
    words += ["--block-size", str(plan.block_size), "--batch-size", str(settings["batch_size"])]
    words += ["--max-steps", str(steps), "--lr", str(settings["lr"]), "--seed", str(settings["seed"])]
    words += ["--eval-every", str(-(-steps // VALIDATIONS)), "--eval-blocks", str(EVAL_BLOCKS)]
    words += ["--checkpoint-every", str(-(-steps // VALIDATIONS)), *(["--cpu"] if plan.cpu else [])]
    return [*words, "--output-dir", str(plan.run_folder(name)), "--resume"]


def _finetune_job(plan: Plan, name: str) -> dict[str, Any]:
    folder, steps = plan.run_folder(name), plan.settings["max_steps"]
    return {
        "name": f"fine-tune {name}",
        "finished": (folder / "results.json").exists,
        "progress": lambda: last_step(folder / "train.csv") / float(steps),
        "weight": 60.0,
    }


def _perplexity_words(plan: Plan, name: str) -> list[str]:
    lengths, settings = plan.data.lengths, plan.settings
    source = plan.model if name == ORIGINAL else str(plan.run_folder(name))
    stride = max(1, min(384, lengths[0] * 3 // 4))
    words = ["python", "-m", "hf_linattn.eval.perplexity", "--model", source, "--data", plan.data.held_out]
    words += ["--lengths", ",".join(map(str, lengths)), "--stride", str(stride)]
    words += [
        "--max-tokens",
        str(max(settings["eval_tokens"], stride)),
        *(["--join"] if plan.data.join else []),
    ]
    words += ["--dtype", "float32", "--seed", str(settings["seed"])]
    return [*words, "--output-dir", str(plan.folder / "perplexity" / name)]


def _perplexity_job(plan: Plan, name: str) -> dict[str, Any]:
    path, lengths = plan.folder / "perplexity" / name / "results.json", plan.data.lengths

    def read() -> dict[str, Any]:
        try:
            results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            results = {"complete": False, "rows": []}
        return results

    return {
        "name": f"perplexity {name}",
        "finished": lambda: bool(read()["complete"]),
        "progress": lambda: sum(row["length"] for row in read()["rows"]) / sum(lengths),
        "weight": 60.0,
        "after": () if name == ORIGINAL else (f"fine-tune {name}",),
    }


def _sample_words(plan: Plan, models: list[str], output: Path) -> list[str]:
    words = ["python", "-m", "hf_linattn.eval.generation", "--model", *models]
    for prompt in plan.data.prompts:
        words += ["--prompt-file", prompt]
    words += ["--new-tokens", str(plan.settings["new_tokens"]), "--seed", str(plan.settings["seed"])]
    return [*words, "--dtype", "float32", "--greedy", "--output", str(output)]


def _report_words(plan: Plan, samples: Path) -> list[str]:
    words = ["python", "-m", "hf_linattn.eval.report"]
    words += [str(plan.folder / "runs"), str(plan.folder / "perplexity"), "--samples", str(samples)]
    words += ["--commands", str(plan.folder / "commands.json")]
    for note in (*plan.data.notes, *([] if plan.settings["eval_data"] else [HELD_OUT])):
        words += ["--note", note]
    words += ["--results", str(plan.folder / "results.json")]
    return [*words, "--output", str(plan.folder / "report.html")]
