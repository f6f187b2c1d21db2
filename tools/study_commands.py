"""The commands that make each figure of docs/results.md."""

from __future__ import annotations

import json

from study_place import Place
from study_row import BATCH, BLOCK, RECALL_LENGTHS, STEPS, Row, last_stage

EVERY = {"--eval-every": "50", "--checkpoint-every": "50"}


def training_words(place: Place, row: Row, seed: int) -> list[str]:
    """The command that trains a row."""
    words = ["python", "-m", f"hf_linattn.{row.how}", "--model", str(place.model)]
    if row.patch is not None:
        words += ["--patch", row.patch if isinstance(row.patch, str) else json.dumps(row.patch)]
    if row.options:
        words += ["--options", json.dumps(row.options)]
    words += ["--data", str(place.text("train")), "--block-size", str(BLOCK)]
    usual = {"--batch-size": str(BATCH)}
    usual |= {"--max-steps": str(STEPS), "--lr": "3e-4"} if row.how == "finetune" else {}
    words += [word for pair in usual.items() if pair[0] not in row.extra for word in pair]
    words += [*row.extra, "--eval-data", str(place.text("held_out")), "--eval-blocks", "32"]
    words += [word for pair in EVERY.items() if pair[0] not in row.extra for word in pair]
    words += ["--seed", str(seed), "--cpu", "--resume"]
    return [*words, "--output-dir", str(place.trained(row, seed))]


def model_words(place: Place, row: Row, seed: int) -> list[str]:
    """How a measurement names a row's model: a folder, or the original and what to do to it."""
    if row.how == "finetune":
        return ["--model", str(place.trained(row, seed))]
    if row.how == "convert":
        return ["--model", str(place.trained(row, seed) / last_stage(row))]
    return ["--model", str(place.model)]


def perplexity_words(place: Place, row: Row, seed: int) -> list[str]:
    """The command that measures a row's perplexity at all lengths."""
    words = ["python", "-m", "hf_linattn.eval.perplexity", *model_words(place, row, seed)]
    if row.how == "none":
        words += ["--patch", str(row.patch)] if row.patch else []
        words += ["--options", json.dumps(row.options)] if row.options else []
        words += ["--rope-scaling", row.rope] if row.rope else []
    words += ["--data", str(place.text("held_out")), "--lengths", place.base.lengths, "--stride", "full"]
    words += ["--max-tokens", str(place.base.scored), "--bos", "no", "--dtype", "float32"]
    return [*words, "--output-dir", str(place.measured("perplexity", row, seed))]


def generation_words(place: Place, row: Row, seed: int) -> list[str]:
    """The command that compares a row's continuations with the original's."""
    words = ["python", "-m", "hf_linattn.eval.generation", "--original", str(place.model)]
    words += [*model_words(place, row, seed), "--data", str(place.text("held_out")), "--bos", "no"]
    words += ["--count", "24", "--prompt-tokens", "128", "--new-tokens", "128", "--dtype", "float32"]
    return [*words, "--output-dir", str(place.measured("generation", row, seed))]


def recall_words(place: Place, row: Row, seed: int) -> list[str]:
    """The command that measures a row's recall beside the original's."""
    words = ["python", "-m", "hf_linattn.eval.recall", "--model", str(place.model)]
    words += model_words(place, row, seed)[1:] if row.how != "none" else []
    if row.how == "none" and (row.patch or row.rope):
        options = "".join(f":{name}={json.dumps(value)}" for name, value in row.options.items())
        words += ["--patch", (row.patch or "softmax") + options + (f"@{row.rope}" if row.rope else "")]
    words += ["--tasks", "induction,key_value", "--lengths", RECALL_LENGTHS, "--samples", "4"]
    return [
        *words,
        "--bos",
        "no",
        "--dtype",
        "float32",
        "--output-dir",
        str(place.measured("recall", row, seed)),
    ]


def diagnose_words(place: Place, row: Row, seed: int) -> list[str]:
    """The command that looks at a row's attention and activations."""
    words = ["python", "-m", "hf_linattn.eval.diagnose", *model_words(place, row, seed)]
    if row.how == "none" and row.patch:
        words += ["--patch", str(row.patch)]
    words += [
        "--data",
        str(place.text("held_out")),
        "--bos",
        "window",
        "--length",
        str(2 * place.base.length),
    ]
    return [*words, "--windows", "4", "--output-dir", str(place.measured("diagnose", row, seed))]


def branches_words(place: Place, row: Row, seed: int) -> list[str]:
    """The command that measures each branch of a hybrid."""
    words = ["python", "-m", "hf_linattn.eval.branches", *model_words(place, row, seed)]
    words += ["--data", str(place.text("held_out")), "--lengths", str(place.base.length)]
    words += ["--branches", "both,window,rest,linear,none", "--bos", "no", "--dtype", "float32"]
    words += ["--max-tokens", str(place.base.scored)]
    return [*words, "--output-dir", str(place.measured("branches", row, seed))]
