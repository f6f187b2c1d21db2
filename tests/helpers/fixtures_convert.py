"""Arguments of a small conversion in three stages."""

from __future__ import annotations

STAGES = ("transfer", "distill", "finetune")


TOKENS = 6 * 4 * 32


BASE = (
    *("--model", "model", "--data", "train.txt", "--block-size", "32", "--batch-size", "4", "--cpu"),
    *("--no-dropout", "--eval-data", "eval.txt", "--eval-every", "3", "--eval-blocks", "4"),
    *("--preset", "plain"),
)
