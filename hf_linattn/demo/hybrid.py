"""The hybrid of the demo: a window and a state that forgets, made by the convert command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "hybrid"
"""What stands for it among the patches, and the name of its run."""

PATCH = "window+gated"
OPTIONS: dict[str, Any] = {"size": 192, "feature_map": "hedgehog", "shortest": 64, "half_life": 256}
"""Those of the demo's model: in code names stand far back, and half-lives longer than its rows of 512 tokens
teach make it drift beyond them."""
TRANSFER_SHARE = 0.1
"""Part of the tokens that stage transfer reads; stage distill reads the rest."""
STAGES = ("transfer", "distill")


@dataclass(frozen=True)
class Conversion:
    """One run of the convert command.

    Attributes:
        model: folder or hub name.
        folder: for the output.
        train, held_out: texts.
        tokens: of both stages together.
        batch_size: rows of `block_size` tokens per step.
        options: of the patch, beside `OPTIONS`.
        settings: further words of the command.
        validations: how often a stage is validated.
    """

    model: str
    folder: Path
    train: str
    held_out: str
    tokens: int
    block_size: int
    batch_size: int
    eval_blocks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Sequence[str] = ()
    validations: int = 4

    @property
    def result(self) -> Path:
        """Folder of the converted model."""
        return self.folder / STAGES[-1]

    @property
    def steps(self) -> tuple[int, int]:
        """Steps of each stage."""
        step = self.block_size * self.batch_size
        whole = max(2, -(-self.tokens // step))
        transfer = max(1, round(TRANSFER_SHARE * whole))
        return transfer, whole - transfer

    @property
    def words(self) -> list[str]:
        """The command, as a user types it behind `python -m` or `accelerate launch -m`."""
        steps, step = self.steps, self.block_size * self.batch_size
        words = ["hf_linattn.convert", "--model", self.model, "--patch", PATCH]
        words += ["--options", json.dumps({**OPTIONS, **self.options})]
        words += ["--data", self.train, "--eval-data", self.held_out, "--eval-blocks", str(self.eval_blocks)]
        words += ["--block-size", str(self.block_size), "--batch-size", str(self.batch_size)]
        for stage, count in zip(STAGES, steps, strict=True):
            words += [f"--{stage}-tokens", str(count * step)]
        # more and smaller steps, whose squared gradients AdamW remembers for longer (docs/convert.md)
        words += ["--finetune-tokens", "0", "--drop-window", "0", "--adam-beta2", "0.999", *self.settings]
        every = str(-(-steps[-1] // self.validations))
        words += ["--eval-every", every, "--checkpoint-every", every]
        return [*words, "--output-dir", str(self.folder), "--resume"]
