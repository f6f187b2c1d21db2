"""Convert SmolLM2-135M-Instruct in many ways, beside a control on the same tokens, and measure what is left.

python -m studies.smollm2 --data $HF_LINATTN_DATA --work-dir W
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from hf_linattn.cli.arguments import positive_int
from hf_linattn.cli.jobs import Job, last_step, run_jobs
from hf_linattn.cli.main import exit_status
from hf_linattn.cli.processor import multiplies_bf16
from hf_linattn.convert.presets import NAMED, PRESETS, default_preset
from hf_linattn.demo import smollm2
from hf_linattn.patching.loading import load_tokenizer

from .texts import prepare

HERE = Path(__file__).resolve().parent
Json = dict[str, Any]
BLOCK, BATCH = 512, 2
PARAMETERS = 135_000_000
TOKENS = 1_000_000
GPU_BATCH = 8
"""Rows of a step on a GPU: with 2 it would wait for Python most of the time."""
TASK_BATCH, GPU_TASK_BATCH = 8, 64
"""Requests of the harness that are read together."""
FINETUNE = ["--lora", "16", "--lr", "5.9e-4", "--adam-beta2", "0.999"]
"""What presets of hf_linattn.convert do with a model of this size."""
VALIDATION = ["--eval-blocks", "12", "--eval-every", "1000"]
SECONDS = {"all_tasks": 1500, "tasks": 400, "recall": 400, "novels": 300, "peps": 300}
EPILOG = """\
The model is unpacked to W/model, or linked there before. Every figure is made by a command, each its own
process with a log in W/logs; --list prints them. Stopped at any moment, the same command goes on. Rows of
1,000,000 tokens take 1 to 2 hours each on one thread with AMX; --tokens makes shorter ones, in folders of
their own. What multiplies bfloat16 trains and measures in it, other processors in float32 and for longer. On
a GPU steps are of 8 rows in place of 2 (--batch-size): compare rows with a control of the same steps.
`python -m studies.smollm2.page` writes docs/smollm2.md's table.
"""


@dataclass(frozen=True)
class Machine:
    """What the commands run on.

    Attributes:
        gpu: whether they use one.
        batch: rows of a step.
        bf16: whether they train and measure in bfloat16.
    """

    gpu: bool = False
    batch: int = BATCH
    bf16: bool = True

    @staticmethod
    def found(device: str | None = None, batch: int | None = None) -> Machine:
        """Look at this one; `device` is cpu or cuda, None for a GPU if there is one."""
        gpu = torch.cuda.is_available() if device is None else device == "cuda"
        return Machine(gpu, batch or (GPU_BATCH if gpu else BATCH), multiplies_bf16(cpu=not gpu))

    @property
    def training(self) -> list[str]:
        """Words for the commands that train; killed they lose some minutes."""
        words = ["--block-size", str(BLOCK), "--batch-size", str(self.batch), *VALIDATION]
        words += ["--checkpoint-every", "250" if self.gpu else "100"]
        words += ["--mixed-precision", "bf16" if self.bf16 else "no"]
        return words if self.gpu else [*words, "--cpu"]

    @property
    def measuring(self) -> dict[str, str]:
        """Values of words in measures.yaml."""
        batch = GPU_TASK_BATCH if self.gpu else TASK_BATCH
        return {"dtype": "bfloat16" if self.bf16 else "float32", "batch": str(batch)}


@dataclass(frozen=True)
class Row:
    """A row of rows.yaml; its file says what each key means."""

    name: str
    training: str
    measures: list[Any]
    patch: str | Json | None = None
    options: Json = field(default_factory=dict)
    arguments: str = ""
    share: int = 1
    of: str | None = None

    def slot(self, tokens: int) -> str:
        """Return the name of its folders."""
        untrained = self.training == "none" or (self.training == "swap" and self.of is None)
        return self.name if untrained else f"{self.name}-{self.share * tokens}"

    @property
    def asked(self) -> list[str]:
        """What is measured, each once."""
        flat = (name for item in self.measures for name in (item if isinstance(item, list) else [item]))
        return list(dict.fromkeys(flat))


def _read(name: str) -> Json:
    content: Json = yaml.safe_load((HERE / name).read_text(encoding="utf-8"))
    return content


ROWS = {content["name"]: Row(**content) for content in _read("rows.yaml")["rows"]}
MEASURES: dict[str, str] = _read("measures.yaml")


def training(row: Row, tokens: int, work: Path, texts: dict[str, Path], machine: Machine) -> list[str]:
    """Return the command that trains a row."""
    swap = row.training == "swap"
    words = ["python", *([str(HERE / "swap.py")] if swap else ["-m", f"hf_linattn.{row.training}"])]
    model = result(ROWS[row.of], tokens, work) if row.of else work / "model"
    words += ["--model", str(model), "--output-dir", str(work / "runs" / row.slot(tokens))]
    if row.patch is not None:
        words += ["--patch", row.patch if isinstance(row.patch, str) else json.dumps(row.patch)]
    words += ["--options", json.dumps(row.options)] if row.options else []
    if swap:
        return words
    words += [
        *machine.training,
        "--resume",
        "--data",
        str(texts["train"]),
        "--eval-data",
        str(texts["novel"]),
    ]
    if row.training == "finetune":
        words += ["--max-steps", str(row.share * tokens // (BLOCK * machine.batch)), *FINETUNE]
    else:
        words += ["--tokens", str(row.share * tokens)]
    return [*words, *shlex.split(row.arguments)]


def result(row: Row, tokens: int, work: Path) -> Path:
    """Return the folder of the model that is measured."""
    folder = work / "runs" / row.slot(tokens)
    if row.training != "convert":
        return work / "model" if row.training == "none" else folder
    words = shlex.split(row.arguments)
    said = dict(itertools.pairwise(words))
    name = said.get("--preset", "hybrid")
    shares = PRESETS[default_preset(PARAMETERS) if name in NAMED else name].shares
    stages = said["--stages"].split(",") if "--stages" in said else [name for name in shares if shares[name]]
    return folder / stages[-1]


def measuring(
    name: str, model: Path, base: Path, texts: dict[str, Path], output: Path, machine: Machine
) -> list[str]:
    """Return the command that makes a measurement."""
    named = {**texts, "model": model, "base": base, **machine.measuring}
    values = {f"{{{key}}}": str(value) for key, value in named.items()}
    command, *words = [values.get(word, word) for word in MEASURES[name].split()]
    script = HERE / command
    start = ["python", str(script)] if script.suffix == ".py" else ["python", "-m", _module(command)]
    where = ["--output", str(output / "results.json")] if name == "answer" else ["--output-dir", str(output)]
    return [*start, *words, *where]


def _module(command: str) -> str:
    return f"hf_linattn.{command}" if command == "bench" else f"hf_linattn.eval.{command}"


def complete(folder: Path) -> bool:
    """Tell whether a measurement has ended."""
    try:
        content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(content.get("complete", True)) if isinstance(content, dict) else True


def jobs(args: argparse.Namespace, texts: dict[str, Path]) -> Iterator[Job]:
    """Yield training and measurements of each row."""
    work, machine = args.work_dir.resolve(), Machine.found(args.device, args.batch_size)
    for row in (ROWS[name] for name in args.rows or ROWS):
        slot, model = row.slot(args.tokens), result(row, args.tokens, work)
        wanted = [name for name in row.asked if not args.measures or name in args.measures]
        after: tuple[str, ...] = ()
        if row.of is not None and row.of in (args.rows or ROWS):
            after = (f"train {ROWS[row.of].slot(args.tokens)}",)
        if row.training != "none":
            swap = row.training == "swap"
            steps = 1 if swap else row.share * args.tokens / (BLOCK * machine.batch)
            yield Job(
                f"train {slot}",
                _started(training(row, args.tokens, work, texts, machine)),
                _exists(model / ("config.json" if swap else "results.json")),
                _progress(work / "runs" / slot, steps),
                weight=4.5 * steps,
                after=after,
            )
            after = (f"train {slot}",)
        for name in wanted:
            folder = work / name / slot
            yield Job(
                f"{name} {slot}",
                _started(measuring(name, model, work / "model", texts, folder, machine)),
                _complete(folder),
                weight=SECONDS.get(name, 60),
                after=after,
            )


def _started(words: list[str]) -> list[str]:
    return [sys.executable, *words[1:]]


def _exists(path: Path) -> Callable[[], bool]:
    return path.exists


def _complete(folder: Path) -> Callable[[], bool]:
    return lambda: complete(folder)


def _progress(folder: Path, steps: float) -> Callable[[], float]:
    return lambda: min(sum(map(last_step, folder.glob("**/train.csv"))) / steps, 1.0)


def main(argv: list[str] | None = None) -> int:
    """Run the study; the exit status is 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(
        description="Convert SmolLM2-135M-Instruct in many ways, with a control, and measure what is left.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with text/ and tasks/")
    add("--work-dir", type=Path, required=True, help="folder for models and results; resumes there")
    add("--tokens", type=positive_int, default=TOKENS, help="of a row (default: %(default)s)")
    add("--rows", nargs="+", choices=ROWS, help="only these (default: all)")
    add("--measures", nargs="+", choices=MEASURES, help="only these (default: those of each row)")
    add("--jobs", type=positive_int, default=2, help="processes side by side (default: %(default)s)")
    add("--device", choices=("cpu", "cuda"), help="where (default: on a GPU if there is one)")
    batch_help = f"rows of a step (default: {BATCH}, on a GPU {GPU_BATCH})"
    add("--batch-size", type=positive_int, help=batch_help)
    add("--list", action="store_true", help="print the commands and whether they are done, and stop")
    args = parser.parse_args(argv)

    def work() -> None:
        model = smollm2.make(args.work_dir.resolve() / "model")
        texts = prepare(args.data, args.work_dir.resolve(), load_tokenizer(str(model)))
        planned = [*jobs(args, texts)]
        if args.list:
            for job in planned:
                print(f"{'done' if job.finished() else 'open'}  {shlex.join(job.command[1:])}")
            return
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        run_jobs(planned, args.work_dir / "logs", args.jobs, environment)

    return exit_status(work, interrupted="the same command goes on", extra="all")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
