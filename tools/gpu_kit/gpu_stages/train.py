"""Stage `train`: books-1m is fine-tuned in bfloat16 by accelerate, with kernels and without."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from .length import data
from .work import Case, Context, Row, kernels

STEPS = 50
ALLOWED = 0.02
"""Difference of the losses, in nats, averaged over the steps: both round to bfloat16, each in its way."""


def cases(context: Context) -> list[Case]:
    """List the patches."""
    patches = ("elu1",) if context.dry else ("elu1", "window+elu1", "gated", "hedgehog")
    return [Case({"patch": patch}, partial(_row, context, patch)) for patch in patches]


def _row(context: Context, patch: str) -> Row:
    without, with_kernels = (_run(context, patch, wish) for wish in ("0", "1"))
    apart = [abs(a - b) for a, b in zip(without["losses"], with_kernels["losses"], strict=True)]
    mean = sum(apart) / len(apart)
    row: Row = {"apart": mean, "most_apart": max(apart), "steps": len(apart)}
    row |= {f"{name}_torch": value for name, value in without.items()}
    row |= {f"{name}_kernels": value for name, value in with_kernels.items()}
    if not mean <= ALLOWED:
        row["error"] = f"losses with kernels and without differ by {mean:.3g} nats, {ALLOWED:g} is allowed"
    return row


def _run(context: Context, patch: str, wish: str) -> dict[str, Any]:
    """Run the package's own command; return the losses of its steps and their seconds."""
    model, text = data(context)
    with tempfile.TemporaryDirectory() as folder, kernels(wish):
        words = ["--model", model, "--data", text, "--patch", patch, "--output-dir", f"{folder}/out"]
        words += ["--max-steps", str(3 if context.dry else STEPS), "--lr", "1e-3"]
        words += [
            "--block-size",
            "16" if context.dry else "2048",
            "--batch-size",
            "2" if context.dry else "8",
        ]
        start = time.perf_counter()
        if context.dry:
            from hf_linattn.finetune.__main__ import main

            status = main([*words, "--cpu"])
            said = ""
        else:
            launch = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
            launch += ["--mixed_precision", "bf16", "--dynamo_backend", "no", "-m", "hf_linattn.finetune"]
            words += ["--mixed-precision", "bf16"]
            limit = max(context.remaining() - 10, 10)
            done = subprocess.run(
                [sys.executable, *launch, *words],
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
                env=dict(os.environ),
            )
            status, said = done.returncode, done.stdout + done.stderr
        if status:
            raise RuntimeError(f"hf_linattn.finetune ended with status {status}: {said[-350:]}")
        with Path(folder, "out", "train.csv").open(newline="", encoding="utf-8") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
        return {"losses": losses, "seconds": time.perf_counter() - start}
