"""The commands that both demos run, as jobs: measure perplexity, let models write, make the page."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_linattn.cli.files import read_json
from hf_linattn.cli.jobs import Job, last_step
from hf_linattn.demo.data import DemoData
from hf_linattn.errors import DataError

PAGE = "page"
"""Stands for a row among the commands of the page itself."""


@dataclass
class Steps:
    """The jobs of one output folder.

    Attributes:
        folder: the output folder.
        data: the texts.
        seed: of all commands.
        jobs: in the order in which they were added.
        commands: row of the page -> its commands as a user would type them.
    """

    folder: Path
    data: DemoData
    seed: int
    jobs: list[Job] = field(default_factory=list)
    commands: dict[str, list[str]] = field(default_factory=dict)

    def add(self, row: str, words: Sequence[str], **job: Any) -> None:
        """Add a command, which begins with "python" or "accelerate launch"; `job` are fields of `Job`."""
        launched = words[0] == "accelerate"
        start = [sys.executable, *(["-m", "accelerate.commands.launch"] if launched else [])]
        self.commands.setdefault(row, []).append(shlex.join(words))
        self.jobs.append(Job(command=[*start, *words[2 if launched else 1 :]], **job))

    def perplexity(
        self, row: str, model: str, *, tokens: int, words: Sequence[str] = (), after: tuple[str, ...] = ()
    ) -> None:
        """Measure a model at all lengths, `tokens` of the text at each; further `words` of the command."""
        lengths, folder = self.data.lengths, self.folder / "perplexity" / row
        stride = max(1, min(384, lengths[0] * 3 // 4))
        command = ["python", "-m", "hf_linattn.eval.perplexity", "--model", model, *words]
        command += ["--data", self.data.held_out, "--lengths", ",".join(map(str, lengths))]
        command += ["--stride", str(stride), "--max-tokens", str(max(tokens, stride))]
        command += [*(["--join"] if self.data.join else []), "--dtype", "float32", "--seed", str(self.seed)]

        def read() -> dict[str, Any]:
            try:
                return read_json(folder / "results.json")
            except DataError:
                return {"complete": False, "rows": []}

        self.add(
            row,
            [*command, "--output-dir", str(folder)],
            name=f"perplexity {row}",
            finished=lambda: bool(read()["complete"]),
            progress=lambda: sum(line["length"] for line in read()["rows"]) / sum(lengths),
            weight=60.0,
            after=after,
        )

    def sample(self, models: Sequence[str], *, tokens: int, after: tuple[str, ...]) -> None:
        """Let models continue the prompts."""
        words = ["python", "-m", "hf_linattn.eval.generation", "--model", *models]
        for prompt in self.data.prompts:
            words += ["--prompt-file", prompt]
        words += ["--new-tokens", str(tokens), "--seed", str(self.seed), "--dtype", "float32", "--greedy"]
        words += ["--output", str(self.samples)]
        self.add(PAGE, words, name="sample", finished=self.samples.exists, weight=10.0, after=after)

    def report(self, notes: Sequence[str], *words: str) -> None:
        """Make the page of everything, always anew; further `words` of the command."""
        page = self.folder / "report.html"
        command = ["python", "-m", "hf_linattn.eval.report", str(self.folder / "runs")]
        command += [str(self.folder / "perplexity"), "--samples", str(self.samples), *words]
        command += ["--commands", str(self.folder / "commands.json")]
        for note in notes:
            command += ["--note", note]
        command += ["--results", str(self.folder / "results.json"), "--output", str(page)]
        after = tuple(job.name for job in self.jobs)
        self.add(PAGE, command, name="report", finished=_since_now(page), weight=5.0, after=after)

    @property
    def samples(self) -> Path:
        """The file with what the models wrote."""
        return self.folder / "samples.json"


def conversion(folder: Path, stages: Sequence[str], steps: float) -> dict[str, Any]:
    """Return the fields of a `Job` that tell how far a run of the convert command is.

    Args:
        folder: its output.
        stages: those that it runs.
        steps: of all of them together.
    """

    def finished() -> bool:
        return (folder / stages[-1] / "results.json").exists() and (folder / "report.html").exists()

    def progress() -> float:
        return sum(last_step(folder / stage / "train.csv") for stage in stages) / steps

    return {"finished": finished, "progress": progress}


def _since_now(path: Path) -> Callable[[], bool]:
    """Return a test whether the file has been written after this call."""
    before = path.stat().st_mtime_ns if path.exists() else None
    return lambda: path.exists() and path.stat().st_mtime_ns != before
