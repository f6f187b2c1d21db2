"""What docs/results.md measures."""

from __future__ import annotations

from collections.abc import Iterable

from study_bases import Base
from study_row import (
    ALL_WEIGHTS,
    ALONE,
    LONG_MEMORY,
    NEAR_AND_FAR,
    PATCH_FASTER,
    TAYLOR2_BEHIND_A_LAYER,
    WINDOW,
    WINDOW_AND_FAR,
    Row,
)
from study_stages import STAGES

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
        TAYLOR2_BEHIND_A_LAYER,
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

SELDOM = ("--eval-every", "400", "--checkpoint-every", "200")
LONGER = (
    *(*ALL_WEIGHTS, *PATCH_FASTER, "--batch-size", "4", *SELDOM, "--transfer-tokens", "300000"),
    *("--ce-weight", "1", "--distill-lr", "7e-4", "--finetune-lr", "2.5e-4"),
)
LONG_HYBRID = (*LONGER, "--distill-tokens", "2700000", "--finetune-tokens", "7000000")
LONG_KEPT: tuple[Row, ...] = (
    LENGTHS[0],
    Row("control", "finetune", extra=("--max-steps", "2442"), told="control: the original, fine-tuned"),
    Row(
        "kept-5-nope-logn",
        "convert",
        {"0,1,2,3,4": ["window+gated", WINDOW_AND_FAR], "5": "nope+logn"},
        extra=LONG_HYBRID,
        told="softmax in 5, without RoPE but with log-n, `window+gated` (hedgehog) elsewhere",
    ),
)
"""Of 10 M tokens: one layer of six softmax, and its control."""
LONG: tuple[Row, ...] = (
    *LONG_KEPT,
    Row(
        "gated-taylor2-front",
        "convert",
        "gated",
        TAYLOR2_BEHIND_A_LAYER,
        extra=(
            *("--transfer-tokens", "500000", "--distill-tokens", "7000000"),
            *("--finetune-tokens", "2500000", "--finetune-lr", "3e-4"),
        ),
    ),
    Row(
        "gated-taylor2-front-both",
        "convert",
        "gated",
        TAYLOR2_BEHIND_A_LAYER,
        (
            *(*ALL_WEIGHTS, "--batch-size", "4", *SELDOM, "--transfer-tokens", "500000"),
            *("--distill-tokens", "7000000", "--ce-weight", "1", "--distill-lr", "7e-4"),
            *("--finetune-tokens", "2500000", "--finetune-length", "2048", "--finetune-lr", "3e-4"),
        ),
        told="`gated` (taylor2, a layer in front), divergence and text at once, steps of 4 rows; the last "
        "2.5 M tokens of text alone in rows of 2,048",
    ),
    Row(
        "window-gated-hedgehog",
        "convert",
        "window+gated",
        WINDOW_AND_FAR,
        LONG_HYBRID,
    ),
    Row(
        "window-gated-hedgehog-memory",
        "convert",
        "window+gated",
        WINDOW_AND_FAR,
        (*LONG_HYBRID, *LONG_MEMORY),
        told="`window+gated` (64, hedgehog), likewise, AdamW's beta2 0.999 (others: 0.95)",
    ),
    Row(
        "window-gated-taylor2",
        "convert",
        "window+gated",
        {**WINDOW, **TAYLOR2_BEHIND_A_LAYER},
        (
            *(*LONGER, "--distill-tokens", "4700000", "--drop-window", "0.05"),
            *("--finetune-tokens", "5000000"),
        ),
        told="`window+gated` (64, taylor2, a layer in front, half-lives from 4), window dropped in a "
        "twentieth of the distillation",
    ),
)
"""The best map and the best hybrid beside them."""

FROM_SCRATCH = ("--max-steps", "980", "--lr", "3e-3")
SCRATCH: tuple[Row, ...] = (
    Row("original", "none", told="new weights"),
    Row("control", "finetune", extra=FROM_SCRATCH, main=True, told="softmax"),
    Row("softmax1", "finetune", "softmax1", extra=FROM_SCRATCH, main=True),
)

TABLES = {
    "lengths": LENGTHS,
    "stages": STAGES,
    "kept": KEPT,
    "long": LONG,
    "recall-long": LONG_KEPT,
    "scratch": SCRATCH,
}


def rows_of(base: Base, tables: Iterable[str]) -> list[Row]:
    """The rows of these tables for a base, each once."""
    found: dict[str, Row] = {}
    for table in (table for table in base.tables if table in tables):
        for row in TABLES[table]:
            if not base.mains_only or row.main or row.name == "original":
                found.setdefault(row.name, row)
    return list(found.values())
