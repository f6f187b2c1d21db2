"""List the commands of the demo: fine-tune, measure, sample, report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_linattn.cli.jobs import Job, last_step
from hf_linattn.demo import hybrid
from hf_linattn.demo.data import DemoData
from hf_linattn.demo.steps import Steps, conversion

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
                *("--lora", "0", "--patch-rate", "10", "--ce-weight", "0"),
                *("--distill-lr", str(settings["lr"] / 2), "--seed", str(settings["seed"])),
                *(["--cpu"] if self.cpu else []),
            ],
        )


def make_jobs(plan: Plan) -> tuple[list[Job], dict[str, list[str]]]:
    """Return all jobs in a good order, and by run the commands as a user would type them."""
    settings, trained = plan.settings, (CONTROL, *plan.patches)
    steps = Steps(plan.folder, plan.data, settings["seed"])
    # the one that takes longest begins first
    for name in sorted(trained, key=lambda name: name != hybrid.NAME):
        own = plan.conversion.words if name == hybrid.NAME else _finetune_words(plan, name)
        steps.add(name, [*_launch(plan), *own], **_training_job(plan, name))
    tokens = settings["eval_tokens"]
    steps.perplexity(ORIGINAL, plan.model, tokens=tokens)
    for name in trained:
        after = (_training_job(plan, name)["name"],)
        steps.perplexity(name, plan.trained(name), tokens=tokens, after=after)
    after = tuple(_training_job(plan, name)["name"] for name in trained)
    steps.sample([plan.model, *map(plan.trained, trained)], tokens=settings["new_tokens"], after=after)
    steps.report([*plan.data.notes, *([] if settings["eval_data"] else [HELD_OUT])])
    return steps.jobs, steps.commands


def _launch(plan: Plan) -> list[str]:
    words = ["accelerate", "launch", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no"]
    return [*words, "--dynamo_backend", "no", *(["--cpu"] if plan.cpu else []), "-m"]


def _finetune_words(plan: Plan, name: str) -> list[str]:
    settings, steps = plan.settings, plan.settings["max_steps"]
    words = ["hf_linattn.finetune", "--model", plan.model]
    if name in plan.patches:
        words += ["--patch", name]
        if plan.patches[name]:
            words += ["--options", json.dumps(plan.patches[name])]
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
            **conversion(run.folder, hybrid.STAGES, sum(run.steps)),
            "weight": 110.0,
        }
    return {
        "name": f"fine-tune {name}",
        "finished": (folder / "results.json").exists,
        "progress": lambda: last_step(folder / "train.csv") / float(steps),
        "weight": 60.0,
    }
