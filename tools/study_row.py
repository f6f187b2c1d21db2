"""A line of the tables in docs/results.md, and what many of them share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from study_bases import Base

Json = dict[str, Any]

BLOCK, BATCH = 512, 8
STEPS = 245
"""Of 8 x 512 tokens, 1,003,520 in all: what `hf_linattn.convert --preset quick` adds up to."""
SEEDS = (0, 1, 2)
SEEDED = ("books", "scratch")
"""Bases whose main rows have all seeds; of the others' one."""
RECALL_LENGTHS = "128,...,4096"
WINDOW = {"size": 64}


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        name: of its folders.
        how: not trained, fine-tuned on the text, or converted.
        patch, options: as `patch_model` takes them; None leaves the model as it is.
        extra: more words for the training command.
        rope: KIND:FACTOR of scaled RoPE.
        main: three seeds in place of one.
        told: what the page says in place of patch and options.
    """

    name: str
    how: Literal["none", "finetune", "convert"]
    patch: str | dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    rope: str | None = None
    main: bool = False
    told: str = ""

    def seeds(self, base: Base) -> tuple[int, ...]:
        """Seeds it is measured with."""
        return SEEDS if self.main and base.name in SEEDED else SEEDS[:1]


ALONE = ("--stages", "distill", "--distill-tokens", "1000000")
"""All tokens in the distillation: for maps that have nothing to transfer."""
ALL_WEIGHTS = ("--lora", "0")
MUON = ("--optimizer", "muon")
OFTEN = ("--batch-size", "2", "--eval-every", "400", "--checkpoint-every", "200")
"""Four times as many steps with the same tokens."""
BOTH_AT_ONCE = ("--ce-weight", "1", "--distill-lr", "5e-4")
"""The divergence and the text in the same steps."""
LONG_MEMORY = ("--adam-beta2", "0.999")
"""Of AdamW, for steps of few rows."""
PATCH_FASTER = ("--patch-rate", "10")
SHORT_TRANSFER = ("--transfer-tokens", "100000", "--distill-tokens", "900000")
SELDOM_DROPPED = ("--drop-window", "0.1")
HYBRID_BOTH_AT_ONCE = (*ALL_WEIGHTS, *OFTEN, *PATCH_FASTER, *BOTH_AT_ONCE)
FINETUNED_LAST = ("--finetune-tokens", "400000", "--finetune-lr", "3e-4")
TUNED = (*ALL_WEIGHTS, "--distill-tokens", "400000", *FINETUNED_LAST)
AT_A_LOW_RATE = ("--distill-tokens", "400000", "--distill-lr", "3e-4")
NEAR_AND_FAR = {"shortest": 4, "half_life": 256}
WINDOW_NEAR_AND_FAR = {**WINDOW, "feature_map": "hedgehog", **NEAR_AND_FAR}
TAYLOR2_BEHIND_A_LAYER = {"feature_map": "taylor2", **NEAR_AND_FAR, "front": True}
"""The best linear map of the first table."""
WINDOW_AND_FAR = {**WINDOW, "feature_map": "hedgehog", "shortest": 64, "half_life": 1024}
"""A gated state whose heads begin where the window ends."""


def steps_of(row: Row) -> int:
    """Updates of the weights."""
    given = dict(zip(row.extra[::2], row.extra[1::2], strict=True))
    tokens = sum(int(value) for name, value in given.items() if name.endswith("-tokens"))
    rows = int(given.get("--batch-size", BATCH))
    return int(given.get("--max-steps", max(STEPS * BATCH, tokens // BLOCK) // rows))


def last_stage(row: Row) -> str:
    """The stage whose folder is the result."""
    if "transfer" in row.extra:
        return "transfer"
    return "finetune" if "--finetune-tokens" in row.extra else "distill"
