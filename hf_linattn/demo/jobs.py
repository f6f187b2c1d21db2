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
from hf_linattn.demo import hybrid
from hf_linattn.demo.data import DemoData

ORIGINAL, CONTROL = "unpatched", "control"
HELD_OUT = "Every model read the same text, and no document that it was measured on was trained on."
EVAL_BLOCKS = 16
VALIDATIONS = 5


@dataclass(frozen=True)
class Plan:
    """What the demo does: where, which model and patches (name -> options), which text, and all settings.

    `hybrid.NAME` among the patches is converted, the others are fine-tuned.
    """

    folder: Path
    model: str
    patches: dict[str, dict[str, Any]]
    data: DemoData
    block_size: int
    cpu: bool
    settings: dict[str, Any]

    def run_folder(self, name: str) -> Path:
        """Return where a run writes."""
        return self.folder / "runs" / name

    def trained(self, name: str) -> str:
        """Return where the trained model of a run is."""
        return str(self.conversion.result if name == hybrid.NAME else self.run_folder(name))

    @property
    def conversion(self) -> hybrid.Conversion:
        """The hybrid: as many tokens as the other runs read, in steps of a quarter of the rows."""
        settings = self.settings
        return hybrid.Conversion(
            self.model,
            self.run_folder(hybrid.NAME),
            self.data.train,
            self.data.held_out,
            tokens=settings["max_steps"] * settings["batch_size"] * self.block_size,
            block_size=self.block_size,
            batch_size=max(1, settings["batch_size"] // 4),
            eval_blocks=EVAL_BLOCKS,
            options=self.patches[hybrid.NAME],
            settings=[
                *("--lora", "0", "--patch-rate", "10", "--ce-weight", "1"),
                *("--distill-lr", str(settings["lr"] / 2), "--seed", str(settings["seed"])),
                *(["--cpu"] if self.cpu else []),
            ],
        )


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

    # the one that takes longest begins first
    for name in sorted(trained, key=lambda name: name != hybrid.NAME):
        words = [*_launch(plan), *plan.conversion.words] if name == hybrid.NAME else None
        add(name, words or _finetune_words(plan, name, trained[name]), _training_job(plan, name))
    for name in (ORIGINAL, *trained):
        add(name, _perplexity_words(plan, name), _perplexity_job(plan, name))
    everything = tuple(job.name for job in jobs)
    samples = plan.folder / "samples.json"
    fine_tuned = tuple(_training_job(plan, name)["name"] for name in trained)
    words = _sample_words(plan, [plan.model, *map(plan.trained, trained)], samples)
    add("page", words, {"name": "sample", "finished": samples.exists, "weight": 10.0, "after": fine_tuned})
    report = {"name": "report", "weight": 5.0, "after": (*everything, "sample")}
    add("page", _report_words(plan, samples), {**report, "finished": _since_now(plan.folder / "report.html")})
    return jobs, commands


def _since_now(path: Path) -> Callable[[], bool]:
    """Return a test whether the file has been written after this call: the page is always made anew."""
    before = path.stat().st_mtime_ns if path.exists() else None
    return lambda: path.exists() and path.stat().st_mtime_ns != before


def _launch(plan: Plan) -> list[str]:
    words = ["accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    return [*words, "--dynamo_backend", "no", *(["--cpu"] if plan.cpu else []), "-m"]


def _finetune_words(plan: Plan, name: str, patch: str | None) -> list[str]:
    settings, steps = plan.settings, plan.settings["max_steps"]
    words = [*_launch(plan), "hf_linattn.finetune", "--model", plan.model]
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


def _training_job(plan: Plan, name: str) -> dict[str, Any]:
    folder, steps = plan.run_folder(name), plan.settings["max_steps"]
    if name == hybrid.NAME:
        run = plan.conversion
        return {
            "name": f"convert {name}",
            "finished": run.finished,
            "progress": run.progress,
            "weight": 110.0,
        }
    return {
        "name": f"fine-tune {name}",
        "finished": (folder / "results.json").exists,
        "progress": lambda: last_step(folder / "train.csv") / float(steps),
        "weight": 60.0,
    }


def _perplexity_words(plan: Plan, name: str) -> list[str]:
    lengths, settings = plan.data.lengths, plan.settings
    source = plan.model if name == ORIGINAL else plan.trained(name)
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
        "after": () if name == ORIGINAL else (_training_job(plan, name)["name"],),
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
