"""Measure a subject of docs/patches/: perplexity, fine-tuning, perplexity, by the package's commands."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_linattn.cli.jobs import Job
from hf_linattn.errors import DataError

from .plan import CONTROL, ORIGINAL, Settings, Subject, key_of, load_result, save_json

STORY = re.compile(r"\n\s*(?=Once upon a time)")
"""Where a story ends. The texts have no other mark between stories; each gets a BOS token before it."""

TEXTS = {"train": "train_sample.txt", "held_out": "val.txt"}


def prepare_texts(data: Path, work: Path) -> None:
    """Write one table of stories per text into the work folder.

    Raises:
        DataError: a text is missing.
    """
    for name, source in TEXTS.items():
        if not (data / source).is_file():
            raise DataError(f"{data} has no {source}: --data is a folder with {' and '.join(TEXTS.values())}")
        target = work / f"{name}.jsonl"
        if not target.exists():
            stories = STORY.split((data / source).read_text(encoding="utf-8"))
            rows = (json.dumps({"text": story.strip()}) + "\n" for story in stories if story.strip())
            work.mkdir(parents=True, exist_ok=True)
            temporary = target.with_suffix(".tmp")
            temporary.write_text("".join(rows), encoding="utf-8")
            temporary.replace(target)


def finetune_words(subject: Subject, settings: Settings, model: str, train: str, output: str) -> list[str]:
    """Return the arguments of `hf_linattn.finetune`."""
    words = ["--model", model, *_patch_words(subject), "--data", train, "--output-dir", output]
    words += ["--block-size", str(settings.block_size), "--batch-size", str(settings.batch_size)]
    words += ["--max-steps", str(settings.steps), "--lr", f"{settings.lr:g}", "--seed", str(settings.seed)]
    return [*words, "--checkpoint-every", "50", "--cpu", "--resume"]


def perplexity_words(settings: Settings, model: str, held_out: str, output: str) -> list[str]:
    """Return the arguments of `hf_linattn.eval.perplexity`, but for the patch."""
    words = ["--model", model, "--data", held_out, "--join", "--lengths", str(settings.length)]
    words += ["--stride", "full", "--max-tokens", str(settings.max_tokens), "--dtype", "float32"]
    return [*words, "--seed", str(settings.seed), "--output-dir", output]


def _patch_words(subject: Subject) -> list[str]:
    if subject.patch is None:
        return []
    options = ["--options", json.dumps(subject.options)] if subject.options else []
    return ["--patch", subject.patch, *options]


def measure(subject: Subject, settings: Settings, model: str, data: str, work: Path) -> None:
    """Write `result.json` to the subject's folder: the figures, or the error that prevented them."""
    folder, key = work / "subjects" / subject.name, key_of(subject, settings, model, data)
    if not (folder / "key.json").exists() or json.loads((folder / "key.json").read_text("utf-8")) != key:
        shutil.rmtree(folder, ignore_errors=True)
        save_json(folder / "key.json", key)
    try:
        result = _measured(subject, settings, model, work, folder)
    except Exception as error:  # one broken patch must not keep the others from being measured
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    save_json(folder / "result.json", {"key": key, **result})


def _measured(subject: Subject, settings: Settings, model: str, work: Path, folder: Path) -> dict[str, Any]:
    # imported here: the page alone needs none of it
    from transformers.utils import logging

    from hf_linattn.eval.common.results import versions
    from hf_linattn.finetune import FinetuneArguments, finetune
    from hf_linattn.finetune.arguments import build_parser

    logging.disable_progress_bar()
    held_out = str(work / "held_out.jsonl")
    result: dict[str, Any] = {"versions": versions(), "model": _facts(subject, settings, model)}
    if subject.name != CONTROL:
        words = perplexity_words(settings, model, held_out, str(folder / "before"))
        result["before"] = _perplexity([*words, *_patch_words(subject)])
    if subject.name != ORIGINAL:
        tuned = str(folder / "tuned")
        words = finetune_words(subject, settings, model, str(work / "train.jsonl"), tuned)
        trained = finetune(FinetuneArguments(**vars(build_parser().parse_args(words))))
        result["tokens"] = trained["tokens"]
        result["seconds"] = round(trained["seconds"], 1)
        result["after"] = _perplexity(perplexity_words(settings, tuned, held_out, str(folder / "after")))
    return result


def _perplexity(words: Sequence[str]) -> dict[str, Any]:
    from hf_linattn.eval.perplexity import PerplexityArguments, perplexity
    from hf_linattn.eval.perplexity.__main__ import build_parser

    command = shlex.join(["python", "-m", "hf_linattn.eval.perplexity", *words])
    arguments = PerplexityArguments(**vars(build_parser().parse_args(list(words))))
    results = perplexity(arguments, command)
    row = results["rows"][0]
    return {name: row[name] for name in ("perplexity", "stderr", "tokens", "windows")}


def _facts(subject: Subject, settings: Settings, model: str) -> dict[str, Any]:
    """Return what `describe` says: layers, and per layer parameters added and bytes of state."""
    from accelerate.utils import set_seed

    from hf_linattn import describe, from_pretrained, patch_model

    set_seed(settings.seed)
    patched = from_pretrained(model)
    parameters = sum(p.numel() for p in patched.parameters())
    if subject.patch is not None:
        patch_model(patched, subject.patch, options=subject.options)
    names = ("parameters", "state_bytes", "bytes_per_token", "window")
    layers = [{name: getattr(row, name) for name in names} for row in describe(patched)]
    return {"class": type(patched).__name__, "parameters": parameters, "layers": layers}


def jobs_for(wanted: Sequence[Subject], settings: Settings, work: Path, words: Sequence[str]) -> list[Job]:
    """Return one job per subject; `words` start this tool with the same settings."""
    return [
        Job(
            name=subject.name,
            command=[sys.executable, *words, "--measure", subject.name],
            finished=(work / "subjects" / subject.name / "result.json").exists,
            progress=_progress(work / "subjects" / subject.name / "tuned" / "train.csv", settings.steps),
            weight=5.0 if subject.name == ORIGINAL else 60.0,
        )
        for subject in wanted
    ]


def _progress(path: Path, steps: int) -> Callable[[], float]:
    def progress() -> float:
        try:
            return int(path.read_text(encoding="utf-8").splitlines()[-1].split(",")[0]) / steps
        except (OSError, ValueError, IndexError):  # not begun, or read while it is written
            return 0.0

    return progress


def forget(work: Path, subject: Subject, key: dict[str, Any], again: bool) -> None:
    """Remove a result that is an error, of another key, or not wanted any more."""
    result = load_result(work, subject.name)
    if again:
        shutil.rmtree(work / "subjects" / subject.name, ignore_errors=True)
    elif result is not None and (result["key"] != key or "error" in result):
        (work / "subjects" / subject.name / "result.json").unlink()
