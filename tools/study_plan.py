"""What docs/results.md measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from study_bases import Base

Json = dict[str, Any]

BLOCK, BATCH = 512, 8
STEPS = 245
"""Of 8 x 512 tokens, 1,003,520 in all: what `hf_linattn.convert --preset quick` adds up to."""
SEEDS = (0, 1, 2)
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
        return SEEDS if self.main and base.name == "books" else SEEDS[:1]


ALONE = ("--stages", "distill", "--distill-tokens", "1000000")
"""All tokens in the distillation: for maps that have nothing to transfer."""
ALL_WEIGHTS = ("--lora", "0")
FINETUNED_LAST = ("--finetune-tokens", "400000", "--finetune-lr", "3e-4")
AT_A_LOW_RATE = ("--distill-tokens", "400000", "--distill-lr", "3e-4")
NEAR_AND_FAR = {"shortest": 4, "half_life": 256}
WINDOW_AND_FAR = {**WINDOW, "feature_map": "hedgehog", "shortest": 64, "half_life": 1024}
"""A gated state whose heads begin where the window ends."""
LEARNED = {"kappa": "learned"}
ROPE = ("linear:8", "dynamic:8", "yarn:8", "yarn:64")

LENGTHS: tuple[Row, ...] = (
    Row("original", "none", told="original, not trained further"),
    Row("control", "finetune", main=True, told="control: the original, fine-tuned"),
    Row("elu1", "convert", "elu1", extra=ALONE, main=True),
    Row("hedgehog", "convert", "hedgehog", main=True),
    Row("window-hedgehog", "convert", "window+hedgehog", WINDOW, ALL_WEIGHTS, main=True),
    Row("softmax1", "finetune", "softmax1", main=True),
    Row("logn", "finetune", "logn", main=True),
    Row("taylor", "convert", "taylor", extra=ALONE),
    Row("taylor2", "convert", "taylor2"),
    Row("t2r", "convert", "t2r"),
    Row("performer", "convert", "performer", extra=ALONE),
    Row("gated", "convert", "gated"),
    Row("gated-hedgehog", "convert", "gated", {"feature_map": "hedgehog", **NEAR_AND_FAR}, main=True),
    Row(
        "window-gated-hedgehog",
        "convert",
        "window+gated",
        WINDOW_AND_FAR,
        ALL_WEIGHTS,
    ),
    Row("gated-taylor2", "convert", "gated", {"feature_map": "taylor2", **NEAR_AND_FAR}),
    Row(
        "gated-taylor2-front",
        "convert",
        "gated",
        {"feature_map": "taylor2", **NEAR_AND_FAR, "front": True},
        ALL_WEIGHTS,
    ),
    Row("zero", "convert", "zero", extra=ALONE, told="`zero`: no attention at all (floor)"),
    Row("random", "convert", "t2r", {"frozen": True}, extra=ALONE, told="`t2r` (frozen): random map (floor)"),
    Row("logn-config", "finetune", "logn", {"train_length": "config"}),
    Row("logn-clip", "finetune", "logn", {"clip": True}),
    Row("logn-learned", "finetune", "logn", LEARNED),
    Row("logn-untrained", "none", "logn"),
    Row("softmax1-untrained", "none", "softmax1"),
    *(Row(f"{kind.replace(':', '')}", "none", rope=kind) for kind in ROPE),
    *(Row(f"{kind.replace(':', '')}-logn", "none", "logn", {"clip": True}, rope=kind) for kind in ROPE),
    Row("window", "none", "window", {"size": 512}),
    Row("window-sinks", "none", "window", {"size": 508, "sinks": 4}),
)

STAGES: tuple[Row, ...] = (
    Row("hedgehog", "convert", "hedgehog", main=True, told="transfer 0.2 M, distill 0.8 M (as above)"),
    Row("hedgehog-distill", "convert", "hedgehog", extra=ALONE, told="distill 1 M"),
    Row(
        "hedgehog-long-transfer",
        "convert",
        "hedgehog",
        extra=("--transfer-tokens", "500000", "--distill-tokens", "500000"),
        told="transfer 0.5 M, distill 0.5 M",
    ),
    Row(
        "hedgehog-transfer",
        "convert",
        "hedgehog",
        extra=("--stages", "transfer", "--transfer-tokens", "1000000"),
        told="transfer 1 M alone",
    ),
    Row(
        "hedgehog-transfer-finetune",
        "convert",
        "hedgehog",
        extra=("--distill-tokens", "0", "--finetune-tokens", "800000", "--finetune-lr", "1e-3"),
        told="transfer 0.2 M, fine-tune 0.8 M",
    ),
    Row(
        "hedgehog-finetune", "finetune", "hedgehog", extra=("--lr", "1e-3"), told="fine-tune 1 M (no teacher)"
    ),
    Row("nope-hedgehog", "convert", "nope+hedgehog", told="`nope+hedgehog`: as the first, without RoPE"),
    Row(
        "hedgehog-2048",
        "convert",
        "hedgehog",
        extra=(
            *("--distill-tokens", "400000", "--finetune-tokens", "400000"),
            *("--finetune-length", "2048", "--finetune-lr", "1e-3"),
        ),
        told="transfer 0.2 M, distill 0.4 M, fine-tune 0.4 M on rows of 2,048",
    ),
    Row("hedgehog-lora", "convert", "hedgehog", extra=("--lora", "16"), told="as the first, LoRA of rank 16"),
    Row(
        "window-hedgehog",
        "convert",
        "window+hedgehog",
        WINDOW,
        ALL_WEIGHTS,
        main=True,
        told="`window+hedgehog` (64), all weights",
    ),
    Row(
        "window-hedgehog-lora",
        "convert",
        "window+hedgehog",
        WINDOW,
        ("--lora", "16"),
        told="`window+hedgehog` (64), LoRA of rank 16",
    ),
    Row(
        "window-hedgehog-lora-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            "--lora",
            "16",
            "--distill-tokens",
            "400000",
            "--finetune-tokens",
            "400000",
            "--finetune-lr",
            "1.5e-3",
        ),
        told="`window+hedgehog` (64), LoRA of rank 16, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-hedgehog-lora-64",
        "convert",
        "window+hedgehog",
        WINDOW,
        (
            *("--lora", "64", "--distill-tokens", "200000"),
            *("--finetune-tokens", "600000", "--finetune-lr", "1.5e-3"),
        ),
        told="`window+hedgehog` (64), LoRA of rank 64, fine-tuned in the last 0.6 M",
    ),
    Row(
        "window-hedgehog-drop",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, "--drop-window", "0.5"),
        told="`window+hedgehog` (64), all weights, window dropped in half of the steps",
    ),
    Row(
        "window-hedgehog-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+hedgehog` (64), all weights, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-gated-hedgehog-finetune",
        "convert",
        "window+gated",
        WINDOW_AND_FAR,
        (*ALL_WEIGHTS, "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+gated` (64, hedgehog), all weights, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-hedgehog-rate",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, "--patch-rate", "10", "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+hedgehog` (64), fine-tuned likewise, its own parameters at ten times the rate",
    ),
    *(
        Row(
            f"window-{patch}-low",
            "convert",
            f"window+{patch}",
            WINDOW,
            (*ALL_WEIGHTS, "--patch-rate", "30", *AT_A_LOW_RATE, *FINETUNED_LAST),
            told=f"`window+{patch}` (64), fine-tuned likewise, at a rate of 3e-4, "
            "its own parameters at 30 times that",
        )
        for patch in ("hedgehog", "taylor2")
    ),
    Row(
        "window-gated-taylor2-finetune",
        "convert",
        "window+gated",
        {**WINDOW_AND_FAR, "feature_map": "taylor2"},
        (*ALL_WEIGHTS, "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+gated` (64, taylor2), all weights, fine-tuned in the last 0.4 M",
    ),
    Row(
        "window-gated-hedgehog-drop",
        "convert",
        "window+gated",
        {**WINDOW, "feature_map": "hedgehog", **NEAR_AND_FAR},
        (*ALL_WEIGHTS, "--drop-window", "0.5", "--distill-tokens", "400000", *FINETUNED_LAST),
        told="`window+gated` (64, hedgehog, half-lives from 4), window dropped in half of the distillation, "
        "fine-tuned in the last 0.4 M",
    ),
    Row("window-64", "finetune", "window", WINDOW, told="`window` (64) alone, fine-tuned 1 M"),
    Row(
        "window-hedgehog-transfer-finetune",
        "convert",
        "window+hedgehog",
        WINDOW,
        (*ALL_WEIGHTS, "--distill-tokens", "0", "--finetune-tokens", "800000", "--finetune-lr", "3e-4"),
        told="`window+hedgehog` (64), all weights, transfer 0.2 M, fine-tune 0.8 M",
    ),
    Row("control-1e-4", "finetune", extra=("--lr", "1e-4"), told="control at a rate of 1e-4 (others: 3e-4)"),
    Row("control-1e-3", "finetune", extra=("--lr", "1e-3"), told="control at a rate of 1e-3"),
)

DIAGNOSED = (
    "original",
    "control",
    "softmax1-untrained",
    "softmax1",
    "logn-untrained",
    "logn",
    "logn-learned",
)
"""Rows whose attention is looked at."""

KEPT: tuple[Row, ...] = (LENGTHS[0], LENGTHS[1], Row("hedgehog", "convert", "hedgehog", main=True))
"""What the hybrids of `study_kept` stand beside: all layers softmax, and none."""

LONG: tuple[Row, ...] = (
    LENGTHS[0],
    Row("control", "finetune", extra=("--max-steps", "2442"), told="control: the original, fine-tuned"),
    Row(
        "gated-taylor2",
        "convert",
        "gated",
        {"feature_map": "taylor2", **NEAR_AND_FAR},
        extra=(
            *("--transfer-tokens", "500000", "--distill-tokens", "7000000"),
            *("--finetune-tokens", "2500000", "--finetune-lr", "3e-4"),
        ),
    ),
)
"""Of 10 M tokens: the best map, and its control."""

FROM_SCRATCH = ("--max-steps", "980", "--lr", "3e-3")
SCRATCH: tuple[Row, ...] = (
    Row("original", "none", told="new weights"),
    Row("control", "finetune", extra=FROM_SCRATCH, told="softmax"),
    Row("softmax1", "finetune", "softmax1", extra=FROM_SCRATCH),
)

TABLES = {"lengths": LENGTHS, "stages": STAGES, "kept": KEPT, "long": LONG, "scratch": SCRATCH}


def rows_of(base: Base, tables: Iterable[str]) -> list[Row]:
    """The rows of these tables for a base, each once."""
    found: dict[str, Row] = {}
    for table in (table for table in base.tables if table in tables):
        for row in TABLES[table]:
            if not base.mains_only or row.main or row.name == "original":
                found.setdefault(row.name, row)
    return list(found.values())


def steps_of(row: Row) -> int:
    """Updates of the weights."""
    given = dict(zip(row.extra[::2], row.extra[1::2], strict=True))
    tokens = sum(int(value) for name, value in given.items() if name.endswith("-tokens"))
    return int(given.get("--max-steps", max(STEPS, tokens // (BATCH * BLOCK))))


def last_stage(row: Row) -> str:
    """The stage whose folder is the result."""
    if "transfer" in row.extra:
        return "transfer"
    return "finetune" if "--finetune-tokens" in row.extra else "distill"
